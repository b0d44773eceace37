"""Rules about the repository as a whole."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

TOP = {
    "pyproject.toml",
    "kdskills",
    "bundles",
    "deploy",
    "runtime",
    "tests",
    "docs",
    "README.md",
    "LICENSE",
    "Makefile",
    ".ci",
    ".gitignore",
    "mkdocs.yml",
}


def _tracked(repo: Path) -> list[str]:
    return subprocess.run(["git", "ls-files"], cwd=repo, capture_output=True, text=True, check=True).stdout.splitlines()


def test_top_level_folders_are_fixed(repo: Path) -> None:
    """Nothing stands at the top but the rooms the design names."""
    assert {name.split("/")[0] for name in _tracked(repo)} - TOP == set()


def test_no_machine_paths(repo: Path) -> None:
    """No tracked file names a path of somebody's machine."""
    pattern = re.compile(
        r"/(?:work|farm)/(?:main|shared|steering)|/home/(?!\w*user\b|me\b|you\b|alice\b)\w+/|/root/\.pyenv"
    )
    found = []
    for name in _tracked(repo):
        path = repo / name
        if path.is_file() and path.suffix not in {".csv", ".png", ".pdf"} and name != "tests/arch/test_repository.py":
            found += [
                f"{name}: {m.group()}" for m in pattern.finditer(path.read_text(encoding="utf-8", errors="replace"))
            ]
    assert found == []


def test_every_test_says_what_it_promises(repo: Path) -> None:
    """Each test function has a docstring."""
    silent = []
    for path in sorted((repo / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name.startswith("test_")
                and not ast.get_docstring(node)
            ):
                silent.append(f"{path.relative_to(repo)}::{node.name}")
    assert silent == []


def test_every_dependency_has_its_reason(repo: Path) -> None:
    """Each dependency line of pyproject.toml carries a comment saying what it is for."""
    text = (repo / "pyproject.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    wanted = [*table["project"]["dependencies"], *table["dependency-groups"]["dev"]]
    wanted += [
        item for name, items in table["project"]["optional-dependencies"].items() if name != "all" for item in items
    ]
    bare = [item for item in wanted if not re.search(re.escape(f'"{item}"') + r",\s*#\s*\S", text)]
    assert bare == []


def test_no_code_in_strings_for_the_far_side(repo: Path) -> None:
    """The in-sandbox package is files of its own: no room runs Python kept in a triple-quoted string."""
    suspects = []
    for path in sorted((repo / "kdskills").rglob("*.py")):
        if "programs" in path.parts:  # hostile programs are files already, and may start others as they like
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.search(r"^\s*(import sys|import os|from os import)\b.*\n", node.value)
            ):
                suspects.append(f"{path.relative_to(repo)}:{node.lineno}")
    assert suspects == []


def test_changelog_has_a_fragment_or_release(repo: Path) -> None:
    """Users can read what changed: a fragment or a released section exists, and fragments have known types."""
    folder = repo / "docs" / "changelog"
    fragments = [path.name for path in folder.glob("*.md") if path.name not in {"CHANGELOG.md", "README.md"}]
    known = {"feature", "bugfix", "doc", "removal", "misc"}
    assert [name for name in fragments if name.split(".")[-2] not in known] == []
    assert fragments or (folder / "CHANGELOG.md").exists()
