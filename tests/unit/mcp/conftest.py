"""A server in memory that says and gives what a test wants, and counts what it is asked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kdskills.builtin.roots.mcp.listing import McpListing
from kdskills.builtin.roots.mcp.wire import ServerFailed
from kdskills.skills import SkillRoot
from kdskills.turn import SkillsSubsystem


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def skill_md(name: str, body: str = "Do it well.", **fields: str) -> bytes:
    more = "".join(f"{key}: {value}\n" for key, value in fields.items())
    return f"---\nname: {name}\ndescription: About {name}\n{more}---\n\n{body}\n".encode()


@dataclass
class FakeServer:
    """Skills by uri of their folder; what is given may be tampered with apart from what is listed."""

    skills: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tampered: dict[str, bytes] = field(default_factory=dict)
    rows: list[dict[str, Any]] | None = None
    asked: list[str] = field(default_factory=list)
    down: bool = False

    def put(self, base: str, **files: bytes) -> str:
        name = base.rpartition("/")[2]
        self.skills[base] = {
            "SKILL.md": skill_md(name),
            **{key.replace("__", "/"): data for key, data in files.items()},
        }
        return f"{base}/SKILL.md"

    def row(self, base: str) -> dict[str, Any]:
        name = base.rpartition("/")[2]
        resources = [
            {"uri": f"{base}/{path}", "digest": digest(data), "size": len(data)}
            for path, data in self.skills[base].items()
        ]
        frontmatter = {"name": name, "description": f"About {name}"}
        return {"uri": f"{base}/SKILL.md", "frontmatter": frontmatter, "resources": resources}

    def entries(self) -> list[dict[str, Any]]:
        self._asked("list")
        return [self.row(base) for base in self.skills] if self.rows is None else self.rows

    def entry(self, uri: str) -> dict[str, Any]:
        self._asked(f"get {uri}")
        base = uri.removesuffix("/SKILL.md")
        if base not in self.skills:
            raise ServerFailed("no such skill")
        return self.row(base)

    def read(self, uris: tuple[str, ...]) -> list[bytes]:
        return [self._file(uri) for uri in uris]

    def _file(self, uri: str) -> bytes:
        self._asked(f"read {uri}")
        if uri in self.tampered:
            return self.tampered[uri]
        base = next(base for base in self.skills if uri.startswith(f"{base}/"))
        return self.skills[base][uri.removeprefix(f"{base}/")]

    def _asked(self, what: str) -> None:
        self.asked.append(what)
        if self.down:
            raise ServerFailed("it is down")

    @property
    def reads(self) -> list[str]:
        return [what.removeprefix("read ") for what in self.asked if what.startswith("read ")]


@dataclass
class Far:
    """A root over a fake server, its clock, and the subsystem of its skills."""

    server: FakeServer
    listing: McpListing
    subsystem: SkillsSubsystem
    folder: Path
    now: list[float]

    def later(self) -> None:
        """Let the listing grow old, and look again."""
        self.now[0] += 61
        self.subsystem.refresh()


class MakeFar:
    """Makes roots; a second one with the same folder is the next start of the program."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, server: FakeServer, label: str = "acme", **options: Any) -> Far:
        now = [0.0]
        folder = self.folder / label
        options = {"in_background": lambda do: do(), **options}
        listing = McpListing(label, server, folder, clock=lambda: now[0], **options)
        root = SkillRoot(f"mcp://{label}", folder / "nowhere", label, "user", namespace=f"mcp-{label}", listing=listing)
        subsystem = SkillsSubsystem({"custom_skills_root": None}, roots=(root,), index_dir=None, auto_refresh=None)
        return Far(server, listing, subsystem, folder, now)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def far(tmp_path: Path) -> MakeFar:
    return MakeFar(tmp_path)
