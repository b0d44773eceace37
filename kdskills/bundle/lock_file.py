"""`kdskills.lock`, the TOML file beside a bundle's descriptor: kinds of entries are tables of their own, and do not touch
those of others.

Whoever changes it holds the folder it is in (`kdskills.execution.dirs.locked`) from reading to writing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from kdskills.errors import AuthorMustAct, FileRefused
from kdskills.skills.private_files import replace_file
from kdskills.skills.safe_open import read_file

LOCK_NAME: Final = "kdskills.lock"
MAX_LOCK: Final = 32 * 1024 * 1024
LOCK_MODE: Final = 0o644
"""It is committed with the bundle, and no secret."""

T = TypeVar("T")


class LockFileInvalid(AuthorMustAct, code="lock_invalid"):
    """`kdskills.lock` cannot be read, or an entry of it is not one; `details["path"]` is the file."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is no lock file: {reason}", path=str(path))


def lock_of(root: Path) -> Path:
    """Return the lock file of the bundle in *root*."""
    return root / LOCK_NAME


def read_entries(path: Path, table: str, entry: Callable[[str, Any], T]) -> dict[str, T]:
    """Return what *entry* makes of each key and row of a table, sorted by key; nothing when there is no file.

    Raises LockFileInvalid, also for a row of which *entry* raises KeyError, TypeError, ValueError or AttributeError.
    """
    rows = _tables(path).get(table, {})
    if not isinstance(rows, dict):
        raise LockFileInvalid(path, f"{table} is no table")
    try:
        return {key: entry(key, rows[key]) for key in sorted(rows)}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"an entry of {table} is not understood: {type(error).__name__}: {error}"
        raise LockFileInvalid(path, reason) from None


def table_text(path: Path, table: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the file's text with *rows*, sorted by key, as all that *table* has. Raises LockFileInvalid."""
    import tomli_w  # reading, which is all that most processes do, needs none

    tables = {name: value for name, value in _tables(path).items() if name != table}
    every = {**tables, **({table: {key: rows[key] for key in sorted(rows)}} if rows else {})}
    return tomli_w.dumps({name: every[name] for name in sorted(every)})


def write_text(path: Path, text: str) -> bool:
    """Write the whole file in one step, so that it is there after a power failure; return whether it changed."""
    data = text.encode()
    try:
        if read_file(path.parent, path.name, limit=MAX_LOCK).data == data:
            return False
    except FileRefused:  # a missing one is made; one that cannot be read is replaced
        pass
    replace_file(path, data, mode=LOCK_MODE, durable=True)
    return True


def _tables(path: Path) -> dict[str, Any]:
    try:
        data = read_file(path.parent, path.name, limit=MAX_LOCK).data
    except FileRefused as error:
        if error.code == "file_missing":
            return {}
        raise LockFileInvalid(path, error.message) from None
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise LockFileInvalid(path, str(error)[:300]) from None
