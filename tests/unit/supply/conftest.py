"""Skills, repositories and bundles to fetch from and to put into, made anew for each test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kdskills.supply.install import SkillSupply, SuppliedBundle
from kdskills.supply.sources import SkillCache


def skill_text(name: str, body: str = "Read, then write.") -> str:
    """Return a skill file."""
    return f"---\nname: {name}\ndescription: Turns long material into one page.\n---\n\n{body}\n"


def write_skill(folder: Path, name: str, body: str = "Read, then write.", **files: str) -> Path:
    """Make a skill's folder; names of further files have `__` for the dot of a suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "SKILL.md").write_text(skill_text(name, body))
    for file, text in files.items():
        (folder / file.replace("__", ".")).write_text(text)
    return folder


class Repository:
    """A real repository of git, whose commits have an author of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str) -> str:
        """Run git in it and return what it prints."""
        settings = ("-c", "user.name=t", "-c", "user.email=t@example.net", "-c", "protocol.file.allow=always")
        done = subprocess.run(["git", *settings, *words], cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, message: str = "change") -> str:
        """Commit everything and return the commit's name."""
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path):
    """A repository with one skill, `brief`, in a folder of it."""
    made = Repository(tmp_path / "repository")
    write_skill(made.folder / "skills/brief", "brief")
    made.commit("one")
    return made


@pytest.fixture
def bundle(tmp_path):
    """A bundle without skills."""
    (tmp_path / "bundle/skills").mkdir(parents=True)
    return SuppliedBundle(tmp_path / "bundle", tmp_path / "bundle/skills")


@pytest.fixture
def supply(bundle, tmp_path):
    """Returns what changes the bundle: `supply(accepts=True)` agrees to changes of sources, too."""

    def make(*, accepts: bool = False) -> SkillSupply:
        return SkillSupply(
            bundle,
            SkillCache(tmp_path / "cache"),
            tell=lambda *_: None,
            mcp=lambda *_: ([], []),
            prompt=lambda _, tree: (tree / "SKILL.md").read_text(),
            accepts=accepts,
        )

    return make


def tree_of(bundle: SuppliedBundle) -> dict[str, bytes]:
    """Return every file of a bundle with its bytes."""
    return {
        str(path.relative_to(bundle.root)): path.read_bytes()
        for path in sorted(bundle.root.rglob("*"))
        if path.is_file()
    }
