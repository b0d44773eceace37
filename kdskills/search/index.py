"""The kept index: terms of skills in one SQLite file per set of roots, read as far as a question needs it.

A skill is known by its full id and digest, so a change adds what changed and nothing else. The file is a cache: one that is
damaged, foreign or of another version is written anew, never believed. Without a folder it is a temporary file.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import struct
import threading
import unicodedata
import zlib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from typing import Final

from kdskills.errors import Diagnostic
from kdskills.search.ranking import FIELDS, LEAD, LENGTH_NORM, SATURATION, skill_terms
from kdskills.search.texts import skill_texts
from kdskills.search.words import STOP_WORDS
from kdskills.skills.model import Skill
from kdskills.skills.private_files import private_folder
from kdskills.skills.registry import collector_paused

FORMAT: Final = 1
"""Raised whenever the same texts give other rows."""

_SCHEMA: Final = (
    "CREATE TABLE meta (identity TEXT, codes BLOB)",
    "CREATE TABLE skill (number INTEGER PRIMARY KEY, name TEXT, seal INTEGER, stream BLOB)",
    "CREATE TABLE term (code INTEGER PRIMARY KEY, postings BLOB)",
)
_BUSY_SECONDS: Final = 30.0
_BATCH: Final = 600_000
"""Postings held in memory while an index is written."""

_SPARE: Final = 256
_POSTING = struct.Struct("<IBB")
_CHECK = struct.Struct("<I")
_STREAM: Final = "utf-16-le"
Posting = tuple[int, int, int]
"""Number of a skill, impact of a term in it, and the fields the term stands in, as bits."""


_UNREADABLE: Final = (sqlite3.Error, UnicodeDecodeError)
"""What reading a damaged file raises: SQLite quotes the file in messages, and what it quotes may be no text."""


class IndexDamaged(Exception):
    """Why an index file is not believed; it never leaves this room."""


class SearchIndex:
    """The terms of skills. Safe to use from any thread, and after a fork.

    Args:
        file: Where it is kept; None keeps it for this process only.

    Attributes:
        generation: Grows whenever numbers given before hold no longer.
        diagnostics: `index_ignored` or `index_not_written`, when the file could not be used.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.generation = 0
        self.diagnostics: tuple[Diagnostic, ...] = ()
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0
        self._numbers: dict[str, int] = {}
        self._codes = array("q")  # of all terms there are, ascending

    def ready(self) -> int:
        """Open the index where it is not open, as after a fork, and return its generation."""
        with self._lock:
            self._opened()
            return self.generation

    def numbers(self, skills: Mapping[str, Skill]) -> dict[str, int]:
        """Return `{full id: number}` of *skills*, after reading those that the index does not hold yet."""
        names = {full_id: f"{full_id} {skill.digest}" for full_id, skill in skills.items()}
        with self._lock:
            self._opened()
            if any(name not in self._numbers for name in names.values()):
                with collector_paused():
                    try:
                        self._add(names, skills)
                    except (sqlite3.OperationalError, OSError) as error:  # a full disk, a folder that is read-only
                        self._fall_back(error)
                        self._add(names, skills)
                    except (*_UNREADABLE, IndexDamaged) as damage:
                        self.discard(str(damage))
                        self._add(names, skills)
            known = self._numbers
            return {full_id: known[name] for full_id, name in names.items()}

    def postings(self, terms: Iterable[str], numbers: Container[int]) -> dict[str, list[Posting]]:
        """Return the postings of each of *terms* in the skills with these *numbers*; terms none of them has are left out.

        Raises:
            IndexDamaged: The file does not hold what was written.
        """
        codes = {term: code for term in terms if self._has_code(code := _code(term))}
        blobs = self._blobs("SELECT code, postings FROM term WHERE code IN", list(codes.values()))
        rows = {
            term: [posting for posting in _POSTING.iter_unpack(blobs[code]) if posting[0] in numbers]
            for term, code in codes.items()
        }
        return {term: mine for term, mine in rows.items() if mine}

    def _has_code(self, code: int) -> bool:
        at = bisect_left(self._codes, code)
        return at < len(self._codes) and self._codes[at] == code

    def streams(self, numbers: Sequence[int]) -> dict[int, str]:
        """Return the streams of signs of the skills with these numbers.

        Raises:
            IndexDamaged: The file does not hold what was written.
        """
        blobs = self._blobs("SELECT number, stream FROM skill WHERE number IN", numbers)
        return {number: blob.decode(_STREAM) for number, blob in blobs.items()}

    def discard(self, reason: str) -> None:
        """Forget the file: what it held is not believed, and will be read again."""
        with self._lock:
            self._note("index_ignored", f"The search index is not used and will be rebuilt: {reason}.")
            self._renew()

    def close(self) -> None:
        """Let go of the file; the next use opens it again."""
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def _blobs(self, statement: str, keys: Sequence[int]) -> dict[int, bytes]:
        """Return the blob of each of *keys*, all of which were written. Raises `IndexDamaged`."""
        with self._lock:
            try:
                marks = ",".join("?" * len(keys))
                rows = self._opened().execute(f"{statement} ({marks})", keys).fetchall()
            except _UNREADABLE as error:
                raise IndexDamaged(f"it cannot be read ({error})") from error
        if len(rows) != len(keys):
            raise IndexDamaged("a row is missing")
        return {key: _checked(blob, key) for key, blob in rows}

    def _opened(self) -> sqlite3.Connection:
        if self._connection is not None and self._process == os.getpid():
            return self._connection
        if self._connection is not None:
            _INHERITED.append(self._connection)  # of the parent: closing it here would give up the parent's locks
        self.generation += 1
        self._process = os.getpid()
        try:
            self._connection = self._kept() or self._created()
        except IndexDamaged as damage:
            self._connection = None
            self.discard(str(damage))
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
                known = _is_ours(connection)
                if known:
                    self._load(connection)
            except _UNREADABLE as error:
                if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                    raise
                raise IndexDamaged("it is no database of ours") from error
            if not known:
                raise IndexDamaged("another version wrote it")
            opening.pop_all()
        return connection

    def _created(self) -> sqlite3.Connection:
        """Put an empty index in place of what is there. Raises `OSError` and `sqlite3.Error`."""
        self._numbers, self._codes = {}, array("q")
        if self.file is None:
            return _initialised(_connect("file:?mode=rwc"))
        private_folder(self.file.parent)
        aside = self.file.with_name(f".{self.file.name}.{os.getpid()}.{threading.get_ident()}")
        os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        try:
            _initialised(_connect(f"{aside.as_uri()}?mode=rw")).close()
            # Of the file that was there: it would be rolled back into the new one.
            self.file.with_name(f"{self.file.name}-journal").unlink(missing_ok=True)
            aside.replace(self.file)
        finally:
            aside.unlink(missing_ok=True)
        return _connect(f"{self.file.as_uri()}?mode=rw")

    def _renew(self) -> None:
        """Begin again with an empty index."""
        self.close()
        self.generation += 1
        self._process = os.getpid()
        try:
            self._connection = self._created()
        except (sqlite3.Error, OSError) as error:
            self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        """Go on with an index of this process: the folder cannot be used."""
        reason = error.strerror if isinstance(error, OSError) else error  # without the path, which is the machine's
        self._note("index_not_written", f"The search index cannot be kept ({reason}); each start reads all skills.")
        self.close()
        self.file = None
        self.generation += 1
        self._process = os.getpid()
        self._connection = self._created()

    def _note(self, code: str, message: str) -> None:
        self.diagnostics = (*self.diagnostics[-3:], Diagnostic(code, "info", message))

    def _load(self, connection: sqlite3.Connection) -> None:
        """Read which skills and terms there are. Raises `IndexDamaged`."""
        rows = connection.execute("SELECT name, number, seal FROM skill").fetchall()
        if any(_seal(f"{number} {name}".encode()) != seal for name, number, seal in rows):
            raise IndexDamaged("a skill does not fit its checksum")
        (codes,) = connection.execute("SELECT codes FROM meta").fetchone()
        self._numbers = {name: number for name, number, _ in rows}
        self._codes = array("q", _checked(codes))

    def _add(self, names: Mapping[str, str], skills: Mapping[str, Skill]) -> None:
        """Read the skills that are missing, in one transaction; other processes wait for it and find them there."""
        if len(self._numbers) > 2 * len(names) + _SPARE:  # most of it is of skills that are gone or changed
            self._renew()
        connection = self._opened()
        connection.execute("BEGIN IMMEDIATE")
        try:
            self._load(connection)
            missing = [full_id for full_id, name in names.items() if name not in self._numbers]
            first = max(self._numbers.values(), default=-1) + 1
            postings: defaultdict[str, bytearray] = defaultdict(bytearray)
            count = 0
            for number, full_id in enumerate(missing, first):
                texts, complete = skill_texts(skills[full_id])
                terms = skill_terms(texts)
                # What could not be read in full is tried again by the next process.
                name = names[full_id] + ("" if complete else " ?")
                stream = _sealed(terms.stream.encode(_STREAM), number)
                row = (number, name, _seal(f"{number} {name}".encode()), stream)
                connection.execute("INSERT INTO skill VALUES (?, ?, ?, ?)", row)
                self._numbers[names[full_id]] = number
                records = map(_POSTING.pack, repeat(number), terms.impacts(), terms.fields.values())
                for term, record in zip(terms.weights, records, strict=True):
                    postings[term].extend(record)
                count += len(terms.weights)
                if count > _BATCH:
                    self._append(connection, postings)
                    postings, count = defaultdict(bytearray), 0
            self._append(connection, postings)
            connection.execute("UPDATE meta SET codes = ?", (_sealed(self._codes.tobytes()),))
            connection.execute("COMMIT")
        except BaseException:
            self._numbers = {}
            with suppress(*_UNREADABLE):  # a file that is damaged may not even be rolled back
                connection.rollback()
            self.close()
            raise

    def _append(self, connection: sqlite3.Connection, postings: Mapping[str, bytearray]) -> None:
        """Add postings to those of earlier skills, in the order of keys, which is how the file lies."""
        rows = sorted((_code(term), records) for term, records in postings.items())
        cursor = connection.cursor()
        for code, records in rows:
            data: bytes | bytearray = records
            if self._has_code(code):
                row = cursor.execute("SELECT postings FROM term WHERE code = ?", (code,)).fetchone()
                data = _checked(row and row[0], code) + records
            cursor.execute("INSERT OR REPLACE INTO term VALUES (?, ?)", (code, _sealed(data, code)))
        self._codes = array("q", sorted({*self._codes, *(code for code, _ in rows)}))


_INHERITED: list[sqlite3.Connection] = []


def _connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=16
    )
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    for pragma in ("trusted_schema=OFF", "synchronous=OFF", "cache_size=-4096", "temp_store=FILE"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _initialised(connection: sqlite3.Connection) -> sqlite3.Connection:
    for statement in _SCHEMA:
        connection.execute(statement)
    connection.execute("INSERT INTO meta VALUES (?, ?)", (_identity(), _sealed(b"")))
    return connection


def _is_ours(connection: sqlite3.Connection) -> bool:
    """Whether the file has our tables and nothing else, and holds rows as this version writes them."""
    statements = tuple(row[0] for row in connection.execute("SELECT sql FROM sqlite_master ORDER BY rowid"))
    return statements == _SCHEMA and connection.execute("SELECT identity FROM meta").fetchall() == [(_identity(),)]


def _identity() -> str:
    """Return everything that decides which rows a text gives."""
    import Stemmer

    parts = (
        FORMAT,
        dict(FIELDS),
        LENGTH_NORM,
        SATURATION,
        LEAD,
        sorted(STOP_WORDS),
        unicodedata.unidata_version,
        Stemmer.version(),
    )
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _code(term: str) -> int:
    """Return the key of a term's row: 63 bits, so that two terms share one in none of our lifetimes."""
    return int.from_bytes(blake2b(term.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1


def _seal(data: bytes | bytearray, key: int = 0) -> int:
    return zlib.crc32(data, key & 0xFFFFFFFF)


def _sealed(data: bytes | bytearray, key: int = 0) -> bytes:
    """Return *data* with a checksum over it and the key of its row in front."""
    return _CHECK.pack(_seal(data, key)) + data


def _checked(blob: object, key: int = 0) -> bytes:
    if isinstance(blob, bytes) and _CHECK.pack(_seal(blob[_CHECK.size :], key)) == blob[: _CHECK.size]:
        return blob[_CHECK.size :]
    raise IndexDamaged("a row does not fit its checksum")
