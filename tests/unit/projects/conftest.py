"""A Host with a state folder of its own, and archives to upload."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kdskills.app import Host, Settings
from kdskills.app.identity import SCOPES, Identity
from kdskills.app.operations import Context


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """A Host without a bundle."""
    settings = Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index", bundle=None)
    made = Host(settings, entry_points=False)
    yield made
    await made.storage.aclose()


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Path]:
    """Write an archive: `archive("brief", body="…", **{"a.txt": "…"})`."""
    number = itertools.count()

    def write(name: str = "brief", *, body: str = "Read, then write.", lines: str = "", **files: str) -> Path:
        place = tmp_path / f"upload-{next(number)}.zip"
        with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as out:
            text = f"---\nname: {name}\ndescription: Turns long material into one page.\n{lines}---\n{body}\n"
            out.writestr(f"{name}/SKILL.md", text)
            for path, content in files.items():
                out.writestr(f"{name}/{path}", content)
        return place

    return write


@pytest.fixture
def caller() -> Callable[..., Context]:
    """Return the context of a caller with a token: `caller("skills:read", agent="writer")`."""

    def make(*scopes: str, **facts) -> Context:
        told = {"agent": "writer", "project": "acme", "door": "http", "token": "t1"} | facts
        return Context(identity=Identity(scopes=frozenset(scopes) or SCOPES, **told), request_id="r1")

    return make
