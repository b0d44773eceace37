"""The server's index of a thread's history, which points into the rollout file by byte.

Newer servers keep, beside the files, where in the file each turn begins. A first line of another length moves every turn, and a
revert would then cut the history at the wrong place. So a line keeps its length where it can (`rollout.padded`); where it cannot,
the thread's rows are dropped and the server builds them again from the file when it resumes the thread.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

from kdskills.remote.catalog.rollout import MAX_HEAD_BYTES, UnknownFormat

_PATTERN = "thread_history_*.sqlite"
_TABLES = frozenset({"thread_turns", "thread_items", "thread_history_projection_state"})
_FORGET = (
    "DELETE FROM thread_turns WHERE thread_id = ?",
    "DELETE FROM thread_items WHERE thread_id = ?",
    "DELETE FROM thread_history_projection_state WHERE thread_id = ?",
)
_BUSY_SECONDS = 5.0


def segment_of(rollout: Path, thread_id: str) -> str:
    """Return the id under which the index lists the turns of a file.

    It is the thread's id until a revert: then a new file `rollout-…-<thread>_<segment>.jsonl` continues an old one.
    """
    _, marked, segment = rollout.stem.rpartition(f"{thread_id}_")
    return segment if marked else thread_id


def find(codex_home: Path | None) -> list[Path]:
    """Return the indexes of a codex home; older servers have none."""
    return sorted(codex_home.glob(_PATTERN)) if codex_home is not None and codex_home.is_dir() else []


def continued_elsewhere(codex_home: Path, segment: str) -> Path | None:
    """Return a file whose history begins in this segment (a fork), or None.

    Such a file states up to which byte it shares this one, so the bytes must not move.
    """
    for folder in ("sessions", "archived_sessions"):
        for path in sorted((codex_home / folder).rglob("*.jsonl")):
            with path.open("rb") as file:
                line = file.readline(MAX_HEAD_BYTES)
            base = _history_base(line)
            if base == segment:
                return path
    return None


def _history_base(line: bytes) -> object:
    if b'"history_base"' not in line:
        return None
    try:
        return json.loads(line)["payload"]["history_base"]["thread_id"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None  # not a thread the server could continue either


def forget(index: Path, segment: str) -> int:
    """Drop the rows of one file's turns; returns how many there were.

    Raises:
        UnknownFormat: The index is not understood, or stays locked.
    """
    try:
        with (
            contextlib.closing(sqlite3.connect(f"{index.as_uri()}?mode=rw", uri=True, timeout=_BUSY_SECONDS)) as db,
            db,
        ):
            tables = {str(row[0]) for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables >= _TABLES:
                raise UnknownFormat("the server's history index has other tables than those known")
            return sum(db.execute(statement, (segment,)).rowcount for statement in _FORGET)
    except sqlite3.Error as problem:
        raise UnknownFormat(f"the server's history index cannot be changed: {problem}") from problem


def forget_file(codex_home: Path | None, rollout: Path, thread_id: str) -> None:
    """Drop the rows of a file's turns from every index of a codex home; the server builds them again from the file.

    Raises:
        UnknownFormat: An index is not understood, or stays locked.
    """
    for file in find(codex_home):
        forget(file, segment_of(rollout, thread_id))


def check_movable(codex_home: Path | None, rollout: Path, thread_id: str) -> None:
    """Refuse to move the turns of a file when another thread points into it, or when that cannot be known.

    Raises:
        UnknownFormat: There is no index where one must be, or a fork shares the file.
    """
    if codex_home is None or not find(codex_home):
        raise UnknownFormat("the server's history index was not found, and the turns would move")
    if continued_elsewhere(codex_home, segment_of(rollout, thread_id)) is not None:
        raise UnknownFormat("another thread's history begins in this file, and the turns would move")
