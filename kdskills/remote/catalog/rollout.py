"""A thread's rollout file and the server's index of it: line 1 is read, replaced after a backup, and restored.

Newer servers keep, beside the files, where in the file each turn begins. A first line of another length moves every turn, and a
revert would then cut the history at the wrong place. So a line keeps its length where it can (`padded`); where it cannot, the
thread's rows are dropped and the server builds them again from the file when it resumes the thread.

The backup beside a file is written before anything is changed and goes last. So whatever moment a change died at, the backup is
there, and says that neither line 1 nor the server's index can be trusted: both are settled before it is dropped. Dropping rows of
the index is harmless at any moment.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kdskills.remote.ports import JsonObject
from kdskills.skills.private_files import replace_file

BACKUP_SUFFIX = ".kdskills.bak"
LOCK_SUFFIX = ".kdskills.lock"
MAX_HEAD_BYTES = 64 * 1024 * 1024  # a first line longer than this is not changed

ROOM_BYTES = 16 * 1024
"""Blanks appended to a first line that grows, so that the next catalogs fit without moving what follows."""

_CHUNK = 1024 * 1024
_LOG = logging.getLogger("kdskills.remote")


class UnknownFormat(ValueError):
    """Line 1 is not the `session_meta` of this thread, or the file cannot be read."""

    reason: Final = "unknown_format"  # in the report of the change


class ChangedUnderneath(ValueError):
    """The file is not what it was when it was read."""

    reason: Final = "changed_underneath"


class LockBusy(ValueError):
    """Another process changes this file now."""

    reason: Final = "held_open"


def _stamp(info: os.stat_result) -> tuple[int, int, int, int]:
    """Return facts that differ between two states of a file."""
    return info.st_size, info.st_mtime_ns, info.st_ino, info.st_dev


@dataclass(frozen=True, slots=True)
class Head:
    """The first line of a rollout file: its bytes with its end, the same as JSON, and the file's stamp when it was read."""

    path: Path
    line: bytes
    record: JsonObject
    stamp: tuple[int, int, int, int]

    @property
    def tools(self) -> object:
        """The tools the line holds, or None."""
        return self.record["payload"].get("dynamic_tools")

    def with_tools(self, tools: list[JsonObject]) -> bytes:
        """Return the line with other tools, and blanks before its end: of the same length if it fits.

        Everything else keeps its place and value. The server points into the file by byte, so what follows must not move
        without need.
        """
        payload = {**self.record["payload"], "dynamic_tools": tools}
        text = json.dumps({**self.record, "payload": payload}, ensure_ascii=False, separators=(",", ":"))
        return padded(text.encode("utf-8", "surrogatepass"), len(self.line))


def padded(text: bytes, length: int) -> bytes:
    """Return a line of exactly `length` bytes, or a longer one with room to spare where that is too short."""
    return text.ljust((length if len(text) < length else len(text) + 1 + ROOM_BYTES) - 1) + b"\n"


def backup_of(path: Path) -> Path:
    """Return the path of the backup of a file's first line."""
    return path.with_name(path.name + BACKUP_SUFFIX)


def read_head(path: Path, thread_id: str) -> Head:
    """Read line 1 of a thread's file. Raises UnknownFormat when it is no regular file, or not this thread's."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise UnknownFormat("the rollout is no regular file")
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            info = os.fstat(file.fileno())
            line = file.readline(MAX_HEAD_BYTES)
    except OSError as problem:
        raise UnknownFormat(f"the rollout cannot be read: {problem.strerror}") from problem
    record = _meta(line)
    if record is None:
        raise UnknownFormat("line 1 of the rollout is no session_meta")
    if record["payload"].get("id") != thread_id:
        raise UnknownFormat("line 1 of the rollout is of another thread")
    return Head(path, line, record, _stamp(info))


def _meta(line: bytes) -> JsonObject | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(record, dict) and record.get("type") == "session_meta"
    return record if known and isinstance(record.get("payload"), dict) else None


def back_up(head: Head) -> None:
    """Write the old line beside the file, for its owner's eyes only, and make sure it is on the disk."""
    replace_file(backup_of(head.path), head.line, durable=True)
    _sync_folder(head.path.parent)


def stage(head: Head, line: bytes) -> Path:
    """Write a temporary neighbour: the new line, then the file's other bytes unchanged; same mode, on the disk.

    Raises ChangedUnderneath when the file is not the one whose head was read.
    """
    return _rewritten(head.path, line, head)


def _rewritten(path: Path, line: bytes, head: Head | None = None) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.kdskills.tmp")
    try:
        with (
            os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as old,
            os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as new,
        ):
            info, old_line = os.fstat(old.fileno()), old.readline()
            if head is not None:
                _check_unchanged(head, info, old_line)
            new.write(line)
            shutil.copyfileobj(old, new, _CHUNK)
            new.flush()
            os.fchmod(new.fileno(), info.st_mode & 0o7777)
            os.fsync(new.fileno())
    except BaseException:  # raised again: nothing half-written stays
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def swap(head: Head, staged: Path) -> None:
    """Put the staged file in the old one's place, if that is still the one that was read. Raises ChangedUnderneath."""
    try:
        _check_unchanged(head, head.path.lstat(), head.line)
        staged.replace(head.path)
    except OSError as problem:
        raise ChangedUnderneath(f"the rollout cannot be replaced: {problem.strerror}") from problem
    finally:
        staged.unlink(missing_ok=True)
    _sync_folder(head.path.parent)


def restore(path: Path) -> bool:
    """Put a backed-up first line back, keeping whatever follows line 1 now; False if there is no backup.

    The backup stays: it marks a change that is not settled until the server's pointers into the file are.
    """
    try:
        line = backup_of(path).read_bytes()
    except FileNotFoundError:
        return False
    staged = _rewritten(path, line)
    try:
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return True


def drop_backup(path: Path) -> None:
    """Forget the old first line."""
    backup_of(path).unlink(missing_ok=True)


def backup_owner(path: Path) -> str | None:
    """Return the thread whose first line is backed up beside a file, or None."""
    try:
        record = _meta(backup_of(path).read_bytes())
    except OSError:
        return None
    owner = record["payload"].get("id") if record is not None else None
    return owner if isinstance(owner, str) else None


def needs_mending(path: Path) -> bool:
    """Return whether a file with a backup has an unreadable first line."""
    if not backup_of(path).is_file() or not path.is_file():
        return False
    with path.open("rb") as file:
        return _meta(file.readline(MAX_HEAD_BYTES)) is None


@contextlib.contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock that keeps this machine's other workers off the file. Raises LockBusy after `timeout_s`."""
    try:
        import fcntl
    except ModuleNotFoundError:
        raise LockBusy("this system has no locks on files: another process may change this one") from None
    end = time.monotonic() + timeout_s
    lock = path.with_name(path.name + LOCK_SUFFIX)
    handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise LockBusy("another process changes this thread's file") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def response_items(path: Path) -> list[JsonObject]:
    """Return the recorded `response_item`s of a file minus developer messages, for a successor thread."""
    items: list[JsonObject] = []
    if not path.is_file():
        return items  # the thread never had a turn
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a line the server itself would skip
            known = isinstance(record, dict) and record.get("type") == "response_item"
            if known and isinstance(payload := record.get("payload"), dict) and payload.get("role") != "developer":
                items.append(payload)
    return items


def _check_unchanged(head: Head, info: os.stat_result, line: bytes) -> None:
    if _stamp(info) != head.stamp or line != head.line:
        raise ChangedUnderneath("the rollout changed while its first line was replaced")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_PATTERN = "thread_history_*.sqlite"
_TABLES = ("thread_turns", "thread_items", "thread_history_projection_state")
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
            # a line that cannot be read is not of a thread the server could continue either
            with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
                if b'"history_base"' in line and json.loads(line)["payload"]["history_base"]["thread_id"] == segment:
                    return path
    return None


def forget(index: Path, segment: str) -> int:
    """Drop the rows of one file's turns and return how many. Raises UnknownFormat for a locked or strange index."""
    try:
        with (
            contextlib.closing(sqlite3.connect(f"{index.as_uri()}?mode=rw", uri=True, timeout=_BUSY_SECONDS)) as db,
            db,
        ):
            tables = {str(row[0]) for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables.issuperset(_TABLES):
                raise UnknownFormat("the server's history index has other tables than those known")
            return sum(db.execute(f"DELETE FROM {name} WHERE thread_id = ?", (segment,)).rowcount for name in _TABLES)  # noqa: S608
    except sqlite3.Error as problem:
        raise UnknownFormat(f"the server's history index cannot be changed: {problem}") from problem


def forget_file(codex_home: Path | None, rollout: Path, thread_id: str) -> None:
    """Drop the rows of a file's turns from every index of a codex home; as `forget`, the server builds them again."""
    for file in find(codex_home):
        forget(file, segment_of(rollout, thread_id))


def check_movable(codex_home: Path | None, rollout: Path, thread_id: str) -> None:
    """Refuse to move a file's turns when a thread points into it, or that is unknown. Raises UnknownFormat."""
    if codex_home is None or not find(codex_home):
        raise UnknownFormat("the server's history index was not found, and the turns would move")
    if continued_elsewhere(codex_home, segment_of(rollout, thread_id)) is not None:
        raise UnknownFormat("another thread's history begins in this file, and the turns would move")


def interrupted(home: Path) -> list[Path]:
    """Return the files below a codex home with a backup beside them, sorted."""
    return [
        backup.with_name(backup.name.removesuffix(BACKUP_SUFFIX))
        for folder in ("sessions", "archived_sessions")
        for backup in sorted((home / folder).rglob(f"*{BACKUP_SUFFIX}"))
    ]


def mend_home(home: Path) -> list[Path]:
    """Undo every interrupted change below the home of a server that does not run yet; return the restored files.

    A change that was not confirmed is undone even if line 1 can be read: the server may not understand it.
    """
    return [path for path in interrupted(home) if mend(home, path)]


def mend(home: Path, path: Path) -> bool:
    """Restore a file's first line and settle its pointers; return False if there was nothing to restore.

    A file another process changes now is left alone; where an index stays locked the backup stays, for the next time.
    """
    try:
        with locked(path, 0.0):
            owner = backup_owner(path)
            if owner is None or not path.is_file():
                return False
            restore(path)
            try:
                settle(home, path, owner)
            except UnknownFormat as problem:
                _LOG.warning("%s: the server's pointers could not be settled; the backup stays: %s", path, problem)
            return True
    except (LockBusy, OSError) as problem:
        _LOG.warning("%s: an interrupted change could not be undone now; its backup stays: %s", path, problem)
        return False


def settle(home: Path | None, path: Path, thread_id: str) -> None:
    """Drop the server's pointers into a file, then the backup that said they are in doubt; as `forget`, it may refuse."""
    forget_file(home, path, thread_id)
    drop_backup(path)
