"""The kept index: terms of skills in one SQLite file per set of roots, read as far as a question needs it.

A skill is known by its full id and digest, so a change adds what changed and nothing else.
"""

from __future__ import annotations

import sqlite3
import sys
import unicodedata
from array import array
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import chain, count
from pathlib import Path
from sys import getsizeof
from typing import Final, NamedTuple

import Stemmer

from kdskills.errors import Diagnostic
from kdskills.search.cache_file import UNREADABLE, CacheFile, IndexDamaged, checked, sealed
from kdskills.search.ranking import FIELDS, LEAD, LENGTH_NORM, SATURATION, skill_terms
from kdskills.search.texts import files_stamp, skill_texts
from kdskills.search.words import STOP_WORDS, Lexicon, Word
from kdskills.skills.model import Skill
from kdskills.skills.registry import collector_paused

FORMAT: Final = 2
"""Raised whenever the same texts give other rows."""

_BATCH: Final = 1_000_000
"""Postings held in memory while an index is written."""

_STREAM_BYTES: Final = 8 * 1024 * 1024
"""Streams held in memory, those asked for last."""

_SPARE: Final = 256
_NUMBER: Final = 4
"""Bytes of a number."""

_POSTING: Final = _NUMBER + 2
"""Bytes of a posting: a number, an impact, and fields."""

_STREAM: Final = "utf-16-le"


class Postings(NamedTuple):
    """Who has a term: numbers of skills, ascending, the impact of the term in each, and where it stands, as bits."""

    numbers: Sequence[int]
    impacts: bytes
    fields: bytes

    def before(self, end: int) -> Postings:
        """Return those of skills with smaller numbers than *end*; another process may have added more."""
        if self.numbers[-1] < end:
            return self
        at = bisect_left(self.numbers, end)
        return Postings(self.numbers[:at], self.impacts[:at], self.fields[:at])

    def fields_in(self, number: int) -> int:
        """Return where the term stands in a skill; 0 is nowhere."""
        at = bisect_left(self.numbers, number)
        return self.fields[at] if at < len(self.numbers) and self.numbers[at] == number else 0


class SearchIndex(CacheFile):
    """The terms of skills; with `generation` the numbers given before hold no longer."""

    SCHEMA = (
        "CREATE TABLE meta (identity TEXT, codes BLOB, names BLOB)",
        "CREATE TABLE skill (number INTEGER PRIMARY KEY, stream BLOB)",
        "CREATE TABLE term (code INTEGER PRIMARY KEY, postings BLOB)",
    )
    LABEL = "The search index"
    COST = "reads all skills"

    def __init__(self, file: Path | None = None) -> None:
        super().__init__(file)
        self._numbers: dict[str, int] = {}
        self._codes = array("q")  # of all terms there are, ascending
        self._asked: tuple[int, Mapping[str, Skill], dict[str, int]] = (0, {}, {})
        self._streams: OrderedDict[int, str] = OrderedDict()
        self._stream_bytes = 0

    def _identity(self) -> str:
        return _identity()

    def _fill(self, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO meta VALUES (?, ?, ?)", (_identity(), sealed(b""), sealed(b"")))

    def _forget(self) -> None:
        self._numbers, self._codes = {}, array("q")
        self._streams.clear()
        self._stream_bytes = 0

    def ready(self) -> int:
        """Open the index where it is not open, as after a fork, and return its generation."""
        with self._lock:
            self._opened()
            return self.generation

    def numbers(self, skills: Mapping[str, Skill]) -> dict[str, int]:
        """Return `{full id: number}` of *skills*, a mapping never changed, after reading those the index does not hold yet."""
        with self._lock:
            generation, asked, numbers = self._asked
            if asked is not skills or generation != self.ready():
                names = {full_id: f"{full_id} {skill.digest}{files_stamp(skill)}" for full_id, skill in skills.items()}
                self._complete(names, skills)
                numbers = dict(zip(names, map(self._numbers.__getitem__, names.values()), strict=True))
                self._asked = (self.generation, skills, numbers)
            return numbers

    def _complete(self, names: Mapping[str, str], skills: Mapping[str, Skill]) -> None:
        """Read the skills that the index does not hold under these names."""
        if all(map(self._numbers.__contains__, names.values())):
            return
        with collector_paused():
            for _ in range(2):
                try:
                    self._add(names, skills)
                except (sqlite3.OperationalError, OSError) as error:  # a full disk, a folder that is read-only
                    self._fall_back(error)
                except (*UNREADABLE, IndexDamaged) as damage:
                    self.discard(str(damage), self.generation)
                else:
                    return
            self._add(names, skills)

    def postings(self, terms: Iterable[str]) -> dict[str, Postings]:
        """Return who has each of *terms*; terms that no skill has are left out.

        Raises:
            IndexDamaged: The file does not hold what was written.
        """
        codes = {term: _code(term) for term in terms}
        # Terms that no skill has are asked for, too: how long an answer takes tells nothing of skills out of reach.
        blobs = self._blobs("SELECT code, postings FROM term WHERE code IN", list(codes.values()))
        if any(code not in blobs and self._has_code(code) for code in codes.values()):
            raise IndexDamaged("a row is missing")
        return {term: _postings(blobs[code]) for term, code in codes.items() if code in blobs}

    def _has_code(self, code: int) -> bool:
        at = bisect_left(self._codes, code)
        return at < len(self._codes) and self._codes[at] == code

    def streams(self, numbers: Sequence[int]) -> list[str]:
        """Return the streams of signs of the skills with these numbers, in their order.

        Raises:
            IndexDamaged: The file does not hold what was written.
        """
        with self._lock:
            held = self._streams
            missing = [number for number in numbers if number not in held]
            for number, blob in self._blobs("SELECT number, stream FROM skill WHERE number IN", missing).items():
                held[number] = blob.decode(_STREAM)
                self._stream_bytes += getsizeof(held[number])
            try:
                streams = [held[number] for number in numbers]
            except KeyError as error:
                raise IndexDamaged("a row is missing") from error
            for number in numbers:
                held.move_to_end(number)
            while self._stream_bytes > _STREAM_BYTES:
                self._stream_bytes -= getsizeof(held.popitem(last=False)[1])
            return streams

    def _blobs(self, statement: str, keys: Sequence[int]) -> dict[int, bytes]:
        """Return the blob of each of *keys* that is there. Raises `IndexDamaged`."""
        with self._lock:
            try:
                marks = ",".join("?" * len(keys))
                rows = self._opened().execute(f"{statement} ({marks})", keys).fetchall()
            except UNREADABLE as error:
                raise IndexDamaged(f"it cannot be read ({error})") from error
        return {key: checked(blob, key) for key, blob in rows}

    def _load(self, connection: sqlite3.Connection) -> list[str]:
        """Read which terms there are, and which skills, whose names are returned in the order of numbers. Raises `IndexDamaged`."""
        codes, names = connection.execute("SELECT codes, names FROM meta").fetchone()
        self._codes = array("q", checked(codes))
        known = checked(names).decode("utf-8", "surrogatepass").split("\n")[1:]  # each stands behind a line feed
        self._numbers = dict(zip(known, count()))
        return known

    def _add(self, names: Mapping[str, str], skills: Mapping[str, Skill]) -> None:
        """Read the skills that are missing, in one transaction; other processes wait for it and find them there."""
        if len(self._numbers) > 2 * len(names) + _SPARE:  # most of it is of skills that are gone or changed
            self._renew()
        connection = self._opened()
        connection.execute("BEGIN IMMEDIATE")
        try:
            known = self._load(connection)
            missing = [full_id for full_id, name in names.items() if name not in self._numbers]
            postings: defaultdict[Word, list[int]] = defaultdict(list)
            lexicon, held = Lexicon.latest(), 0
            for number, full_id in enumerate(missing, len(known)):
                texts, complete = skill_texts(skills[full_id])
                terms = skill_terms(texts, lexicon)
                # What could not be read in full is tried again by the next process.
                known.append(names[full_id] + ("" if complete else " ?"))
                stream = sealed(terms.stream.encode(_STREAM), number)
                connection.execute("INSERT INTO skill VALUES (?, ?)", (number, stream))
                self._numbers[names[full_id]] = number
                entries = {mentions: number << 16 | entry for mentions, entry in terms.entries.items()}
                for word, mentions in terms.mentions.items():
                    postings[word].append(entries[mentions])
                held += len(terms.mentions)
                if held > _BATCH or lexicon.full:
                    self._append(connection, postings)
                    postings.clear()
                    lexicon, held = Lexicon.latest(), 0
            self._append(connection, postings)
            listing = "".join([f"\n{name}" for name in known]).encode("utf-8", "surrogatepass")
            connection.execute("UPDATE meta SET codes = ?, names = ?", (sealed(self._codes.tobytes()), sealed(listing)))
            connection.execute("COMMIT")
        except BaseException:  # raised again: no half of a build stays, however it was ended
            self._numbers = {}
            with suppress(*UNREADABLE):  # a file that is damaged may not even be rolled back
                connection.rollback()
            self.close()
            raise

    def _append(self, connection: sqlite3.Connection, postings: Mapping[Word, list[int]]) -> None:
        """Add postings to those of earlier skills, in the order of keys, which is how the file lies."""
        entries = {_code(word.stem): entries for word, entries in postings.items()}
        codes = sorted(entries)
        # By way of a list, which is quicker than one by one.
        numbers, impacts, fields = _columns(array("Q", list(chain.from_iterable(map(entries.__getitem__, codes)))))
        rows, start = [], 0
        for code in codes:
            end = start + len(entries[code])
            data = numbers[_NUMBER * start : _NUMBER * end] + impacts[start:end] + fields[start:end]
            start = end
            if self._has_code(code):
                row = connection.execute("SELECT postings FROM term WHERE code = ?", (code,)).fetchone()
                data = _joined(checked(row and row[0], code), data)
            rows.append((code, sealed(data, code)))
        connection.executemany("INSERT OR REPLACE INTO term VALUES (?, ?)", rows)
        self._codes = array("q", sorted({*self._codes, *codes}))


def _identity() -> str:
    """Return everything that decides which rows a text gives."""
    parts = (
        FORMAT,
        sys.byteorder,
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


def _columns(postings: array[int]) -> tuple[bytes, bytes, bytes]:
    """Return numbers, impacts and fields of postings, each the number of a skill times 65,536 and an entry of `SkillTerms`."""
    if sys.byteorder == "big":
        postings.byteswap()
    data = postings.tobytes()
    numbers = bytearray(len(postings) * _NUMBER)
    for byte in range(_NUMBER):
        numbers[byte::_NUMBER] = data[2 + byte :: postings.itemsize]
    return bytes(numbers), data[1 :: postings.itemsize], data[:: postings.itemsize]


def _cut(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return numbers, impacts and fields of kept postings."""
    count = len(data) // _POSTING
    return data[: _NUMBER * count], data[_NUMBER * count : -count], data[-count:]


def _joined(before: bytes, after: bytes) -> bytes:
    return b"".join(part for pair in zip(_cut(before), _cut(after), strict=True) for part in pair)


def _postings(data: bytes) -> Postings:
    numbers, impacts, fields = _cut(data)
    return Postings(array("I", numbers), impacts, fields)


class JoinedIndex:
    """One index with the terms of some more skills beside it, of which it is never told: questions see both as one.

    Args:
        base: The index that is there, and is left as it is.
        held: The skills it holds, a mapping never changed.
        extra: An index for the further skills alone.
        added: The further skills, a mapping never changed, none of which is *held*.
    """

    def __init__(
        self, base: SearchIndex | JoinedIndex, held: Mapping[str, Skill], extra: SearchIndex, added: Mapping[str, Skill]
    ) -> None:
        self._base, self._known, self._own, self._added = base, held, extra, added
        self._end = 0

    @property
    def generation(self) -> int:
        """Grows whenever that of either index does."""
        return self._base.generation + self._own.generation

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """What was wrong with either file."""
        return (*self._base.diagnostics, *self._own.diagnostics)

    def ready(self) -> int:
        """Open what is not open, and return the generation."""
        return self._base.ready() + self._own.ready()

    def discard(self, reason: str, _generation: int) -> None:
        """Believe neither index; skills will be read again."""
        self._base.discard(reason, self._base.generation)
        self._own.discard(reason, self._own.generation)

    def numbers(self, _skills: Mapping[str, Skill]) -> dict[str, int]:
        """Return `{full id: number}` of all skills; those added come behind the others."""
        numbers = dict(self._base.numbers(self._known))
        self._end = 1 + max(numbers.values(), default=-1)
        return numbers | {full_id: self._end + number for full_id, number in self._own.numbers(self._added).items()}

    def postings(self, terms: Iterable[str]) -> dict[str, Postings]:
        """Return who has each of *terms*. Raises `IndexDamaged`."""
        words = list(terms)
        rows = {term: row.before(self._end) for term, row in self._base.postings(words).items()}
        for term, added in self._own.postings(words).items():
            row = rows.get(term, _NOBODY)
            numbers = [*row.numbers, *(self._end + number for number in added.numbers)]
            rows[term] = Postings(numbers, row.impacts + added.impacts, row.fields + added.fields)
        return {term: row for term, row in rows.items() if row.numbers}

    def streams(self, numbers: Sequence[int]) -> list[str]:
        """Return the streams of signs of the skills with these numbers, in their order. Raises `IndexDamaged`."""
        known_numbers, own_numbers = ([n for n in numbers if (n >= self._end) is added] for added in (False, True))
        streams = dict(zip(known_numbers, self._base.streams(known_numbers), strict=True))
        streams |= zip(own_numbers, self._own.streams([n - self._end for n in own_numbers]), strict=True)
        return [streams[number] for number in numbers]


_NOBODY: Final = Postings((), b"", b"")
