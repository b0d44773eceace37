"""Hosts on PostgreSQL or on SQLite."""

from __future__ import annotations

import os
import secrets
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kdskills.app import Host, Settings


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgres"))])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """Settings of a new installation."""
    url = None
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").create(f"projects_{secrets.token_hex(6)}")
    return Settings(state_dir=tmp_path / "state", index_dir=tmp_path / "index", database_url=url, bundle=None)


@pytest.fixture
async def hosts(settings: Settings) -> AsyncIterator[Callable[[], Host]]:
    """Make Hosts of one installation."""
    made: list[Host] = []

    def make() -> Host:
        made.append(Host(settings, entry_points=False))
        return made[-1]

    yield make
    for host in made:
        await host.storage.aclose()


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Path]:
    """Write an archive with a body."""

    def write(body: str = "Read.", name: str = "brief") -> Path:
        place = tmp_path / f"{name}-{abs(hash(body))}.zip"
        with zipfile.ZipFile(place, "w") as out:
            out.writestr(f"{name}/SKILL.md", f"---\nname: {name}\ndescription: Makes pages.\n---\n{body}\n")
            out.writestr(f"{name}/data.bin", os.urandom(200_000) if body.startswith("Big") else b"x")
        return place

    return write
