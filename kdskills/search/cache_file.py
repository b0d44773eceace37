"""A cache in one SQLite file: where it is kept, when it is believed, and what is done where it cannot be written.

A file that is damaged, foreign or of another version is written anew, never believed. Without a folder it is a temporary file.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import struct
import threading
import zlib
from abc import ABC, abstractmethod
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from kdskills.errors import Diagnostic
from kdskills.skills.private_files import private_folder

_BUSY_SECONDS: Final = 30.0
_HOMES: Final = ("file:?mode=rwc", "file::memory:")
"""Where an index without a file lives: in one without a name, and in memory where even that cannot be written."""

_CHECK = struct.Struct("<I")

UNREADABLE: Final = (sqlite3.Error, UnicodeDecodeError)
"""What reading a damaged file raises: SQLite quotes the file in messages, and what it quotes may be no text."""


class IndexDamaged(Exception):
    """Why a file is not believed; it never leaves this room."""


class CacheFile(ABC):
    """Rows kept in one file. Safe to use from any thread, and after a fork.

    Args:
        file: Where it is kept; None keeps it for this process only.

    Attributes:
        generation: Grows whenever another file, or another process, is read.
        diagnostics: `index_ignored` or `index_not_written`, when the file could not be used.
    """

    SCHEMA: ClassVar[tuple[str, ...]]
    """Statements that make its tables; the first makes `meta`, of one row, with a column `identity`."""

    LABEL: ClassVar[str]
    """What it is called in diagnostics."""

    COST: ClassVar[str]
    """What each start does where it cannot be kept."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.generation = 0
        self.diagnostics: tuple[Diagnostic, ...] = ()
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._home = _HOMES[0]
        self._discarded = False

    @abstractmethod
    def _identity(self) -> str:
        """Return everything that decides about rows."""

    @abstractmethod
    def _fill(self, connection: sqlite3.Connection) -> None:
        """Write the row of `meta` into an empty file."""

    @abstractmethod
    def _load(self, connection: sqlite3.Connection) -> object:
        """Read what is kept in memory. Raises `IndexDamaged`."""

    @abstractmethod
    def _forget(self) -> None:
        """Forget what was read of another file, or by another process."""

    def discard(self, reason: str, generation: int) -> None:
        """Forget what is there, if it still is of this generation: it is not believed, and skills will be read again."""
        with self._lock:
            if generation != self.generation:  # another thread was first
                return
            if self._discarded:
                self._fall_back(IndexDamaged(reason))
                return
            self._discarded = True
            self._note("index_ignored", f"{self.LABEL} is not used and will be rebuilt: {reason}.")
            self._renew()

    def close(self) -> None:
        """Let go of the file; the next use opens it again."""
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def _opened(self) -> sqlite3.Connection:
        if self._connection is not None and self._process == os.getpid():
            return self._connection
        if self._connection is not None:
            _INHERITED.append(self._connection)  # of the parent: closing it here would give up the parent's locks
        self._begin()
        try:
            self._connection = self._kept() or self._created()
        except IndexDamaged as damage:
            self._connection = None
            self.discard(str(damage), self.generation)
        except (sqlite3.Error, OSError) as error:
            self._fall_back(error)
        assert self._connection is not None  # each of these ways opens one
        return self._connection

    def _kept(self) -> sqlite3.Connection | None:
        """Open the file there is, or None when there is none. Raises `IndexDamaged`."""
        if self.file is None:
            return None
        try:
            status = self.file.lstat()
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise IndexDamaged("it is not a regular file")
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise IndexDamaged("others may write to it")
        with ExitStack() as opening:
            try:
                connection = opening.enter_context(closing(_connect(f"{self.file.as_uri()}?mode=rw")))
                known = self._is_ours(connection)
                if known:
                    self._load(connection)
            except UNREADABLE as error:
                if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                    raise
                raise IndexDamaged("it is no database of ours") from error
            if not known:
                raise IndexDamaged("another version wrote it")
            opening.pop_all()
        return connection

    def _created(self) -> sqlite3.Connection:
        """Put an empty file in place of what is there. Raises `OSError` and `sqlite3.Error`."""
        if self.file is None:
            return self._initialised(_connect(self._home))
        private_folder(self.file.parent)
        aside = self.file.with_name(f".{self.file.name}.{os.getpid()}.{threading.get_ident()}")
        os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        try:
            self._initialised(_connect(f"{aside.as_uri()}?mode=rw")).close()
            # Of the file that was there: it would be rolled back into the new one.
            self.file.with_name(f"{self.file.name}-journal").unlink(missing_ok=True)
            aside.replace(self.file)
        finally:
            aside.unlink(missing_ok=True)
        return _connect(f"{self.file.as_uri()}?mode=rw")

    def _begin(self) -> None:
        """Forget what was read of another file, or by another process."""
        self.generation += 1
        self._process = os.getpid()
        self._forget()

    def _renew(self) -> None:
        """Begin again with an empty file."""
        self.close()
        self._begin()
        try:
            self._connection = self._created()
        except (sqlite3.Error, OSError) as error:
            self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        """Go on with a file of this process: the folder cannot be used."""
        reason = error.strerror if isinstance(error, OSError) else error  # without the path, which is the machine's
        self._note("index_not_written", f"{self.LABEL} cannot be kept ({reason}); each start {self.COST}.")
        self.close()
        self._home = _HOMES[0] if self.file is not None else _HOMES[-1]
        self.file = None
        self._begin()
        try:
            self._connection = self._created()
        except (sqlite3.Error, OSError):
            self._home = _HOMES[-1]
            self._connection = self._created()

    def _note(self, code: str, message: str) -> None:
        self.diagnostics = (*self.diagnostics[-3:], Diagnostic(code, "info", message))

    def _initialised(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        for statement in self.SCHEMA:
            connection.execute(statement)
        self._fill(connection)
        return connection

    def _is_ours(self, connection: sqlite3.Connection) -> bool:
        """Whether the file has our tables and nothing else, and holds rows as this version writes them."""
        statements = tuple(row[0] for row in connection.execute("SELECT sql FROM sqlite_master ORDER BY rowid"))
        expected = [(self._identity(),)]
        return statements == self.SCHEMA and connection.execute("SELECT identity FROM meta").fetchall() == expected


_INHERITED: list[sqlite3.Connection] = []


def _connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=16
    )
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    for pragma in ("trusted_schema=OFF", "synchronous=OFF", "cache_size=-4096", "temp_store=FILE"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _seal(data: bytes | bytearray, key: int = 0) -> int:
    return zlib.crc32(data, key & 0xFFFFFFFF)


def sealed(data: bytes | bytearray, key: int = 0) -> bytes:
    """Return *data* with a checksum over it and the key of its row in front."""
    return _CHECK.pack(_seal(data, key)) + data


def checked(blob: object, key: int = 0) -> bytes:
    """Return what `sealed` was given. Raises `IndexDamaged`."""
    if isinstance(blob, bytes) and _CHECK.pack(_seal(blob[_CHECK.size :], key)) == blob[: _CHECK.size]:
        return blob[_CHECK.size :]
    raise IndexDamaged("a row does not fit its checksum")
