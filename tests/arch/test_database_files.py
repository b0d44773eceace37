"""Database files are made, closed to others and connected to in one place; nothing else opens them.

Closing any descriptor of a SQLite file drops the locks its process holds on it, so one `open` in the wrong place loses data.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CONNECTS = {
    "kdskills/storage/database.py": "the one way to a database",
    "kdskills/search/cache_file.py": "a cache of this user, below the room of databases; a damaged one is thrown away",
    "kdskills/remote/catalog/rollout.py": "codex's own index, through SQLite itself",
    "kdskills/testing/journal_storm.py": "reads SQLite's verdict when every process has ended",
}
"""Modules that connect to a database by themselves, and why."""

URLS = {
    "kdskills/storage/database.py": "tells a file from other URLs",
    "kdskills/jobs/settings.py": "the default database",
    "kdskills/remote/journal/sql.py": "the default journal",
}
"""Modules that write or read a SQLite URL, and why."""

OPENING = re.compile(
    r"\b(open|open_private|write_private|fopen|touch|copy\w*|read_bytes|read_text|write_bytes|write_text)$"
)
DATABASE = re.compile(r"\.db\b|\.sqlite|sqlite_file|url\.database|work_database", re.IGNORECASE)


def _modules(repo: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((repo / "kdskills").rglob("*.py")):
        yield str(path.relative_to(repo)), ast.parse(path.read_text(encoding="utf-8"))


def _docstrings(tree: ast.Module) -> set[int]:
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return {id(node.value) for node in nodes}


def _connecting(tree: ast.Module) -> bool:
    """Whether a module connects to a database with the driver's or SQLAlchemy's own functions."""
    names = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return any(re.search(r"\b(sqlite3|aiosqlite)\.connect$|\bcreate_(async_)?engine$", name) for name in names)


def _opening(tree: ast.Module) -> list[str]:
    """Return the calls that open a file whose name says that it is a database."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and OPENING.search(ast.unparse(node.func))]
    return [text for call in calls if DATABASE.search(text := ast.unparse(call))]


def _naming(tree: ast.Module) -> bool:
    """Whether a module has a SQLite URL in a string that is no docstring, and could so come by the file's name."""
    words = _docstrings(tree)
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in words
    ]
    return any(text.startswith("sqlite:///") for text in texts)


def test_one_module_connects(repo: Path) -> None:
    """Engines are made where the file is made private first; whoever else connects is named here with the reason."""
    assert {name for name, tree in _modules(repo) if _connecting(tree)} == set(CONNECTS)


def test_nobody_opens_a_database_file(repo: Path) -> None:
    """No call opens, touches or copies a file that is named as a database."""
    assert {name: found for name, tree in _modules(repo) if (found := _opening(tree))} == {}


def test_files_of_databases_are_found_in_one_place(repo: Path) -> None:
    """Nobody takes a URL apart to come by the file: `sqlite_file` does."""
    assert {name for name, tree in _modules(repo) if _naming(tree)} == set(URLS)


@pytest.mark.parametrize(
    ("code", "check"),
    [
        ("import sqlite3\nsqlite3.connect('x')", _connecting),
        ("import sqlalchemy as sa\nsa.create_engine(url)", _connecting),
        ("Path(engine.url.database).touch(mode=0o600)", _opening),
        ("os.close(os.open(state / 'calls.sqlite3', os.O_RDWR | os.O_CREAT))", _opening),
        ("shutil.copyfile(state / 'work.db', aside)", _opening),
        ("path = url.removeprefix('sqlite:///')", _naming),
    ],
)
def test_the_checks_see_what_they_forbid(code: str, check: object) -> None:
    """Each check finds the code it is there for."""
    assert callable(check)
    assert check(ast.parse(code))
