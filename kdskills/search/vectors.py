"""Vectors of texts: how near a skill is to a question in meaning, where an operator chose who makes them.

Words alone are always an answer. Whatever an embedder does, fails, hangs or is not done yet, a search answers within seconds and
says with a diagnostic that it went by words.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from heapq import nsmallest
from itertools import islice
from math import dist, hypot, isfinite
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, Protocol, runtime_checkable

from kdskills.errors import Diagnostic, KdskillsError
from kdskills.search.cache_file import UNREADABLE, CacheFile, IndexDamaged, checked, sealed
from kdskills.search.ranking import CANDIDATES, MAX_QUERY
from kdskills.skills.model import Skill
from kdskills.skills.roots import far_content

WAIT_SECONDS: Final = 5.0
"""What a search waits for an embedder, all in all."""

PAUSE_SECONDS: Final = 60.0
"""How long an embedder that failed is not asked again."""

MAX_DIMENSIONS: Final = 8192

MAX_TEXT: Final = 2000
"""Characters of a skill that are embedded."""

MIN_TEXT: Final = 250
"""A text of so many characters that is refused has no vector."""

BATCH: Final = 32
"""Texts of one call."""

MAX_REASON: Final = 200
"""Characters of an embedder's own words in a diagnostic."""

FORMAT: Final = 1
"""Raised whenever the same skill gives another text or row."""

_KEYS: Final = 500
"""Keys of one statement."""

_SPARE: Final = 256

_LOG: Final = logging.getLogger("kdskills.search")

Vector = array
"""Of floats of 32 bits; its length is one, or it is empty: a text without a vector."""


@runtime_checkable
class Embedder(Protocol):
    """Makes vectors of texts; near ones mean that texts mean the same."""

    def embed(self, texts: Sequence[str]) -> Iterable[Iterable[float]]:
        """Return a vector of each of 1 to 32 texts, all of one length, up to 8,192 numbers.

        Called in any thread, also in several at once. A vector of zeros says that a text has none.

        Raises:
            ValueError: One of the texts cannot be embedded as it is, such as one too long; it is tried alone, and shorter.
            Exception: Anything else is a failure: nothing is asked for a minute, and searches go by words.
        """
        ...


EmbedderFactory = Callable[[str], Embedder]


class EmbedderFailed(Exception):
    """Why there is no vector, in words for the operator; it never leaves this room."""


class TextRefused(EmbedderFailed):
    """A question that an embedder does not take however short: no reason to leave it alone, since others may ask better."""


class EmbedderGuard:
    """Asks one embedder, so that whatever it does harms no search. Safe to use from any thread, and after a fork.

    Args:
        name: What the operator calls it; vectors of one name are held to be of one kind.
        make: Makes it; called at the first search, and again in a process that was forked.
    """

    def __init__(self, name: str, make: Callable[[], Embedder]) -> None:
        self.name = name
        self._make = make
        self._lock = threading.Lock()
        self._embedder: Embedder | None = None
        self._process = 0
        self._late: threading.Thread | None = None
        self._silent_until = 0.0
        self._reason = ""

    def require(self) -> None:
        """Raise `EmbedderFailed` while the embedder is not to be asked."""
        if time.monotonic() < self._silent_until:
            raise EmbedderFailed(self._reason)
        if self._late is not None and self._late.is_alive():
            raise EmbedderFailed("it has not answered an earlier question yet")

    def ask(self, text: str) -> Vector[float]:
        """Return the vector of a question, within five seconds. Raises `EmbedderFailed`."""
        self.require()
        answers: SimpleQueue[Vector[float] | BaseException] = SimpleQueue()

        def answer() -> None:
            try:
                answers.put(self.embed([text], refusing=True)[0])
            except BaseException as error:  # noqa: BLE001 - whatever it is, the search that waits is told
                answers.put(error)

        thread = threading.Thread(target=answer, name="kdskills-embedder", daemon=True)
        thread.start()
        try:
            vector = answers.get(timeout=WAIT_SECONDS)
        except Empty:
            self._late = thread
            raise self.failed(f"it gave no answer within {WAIT_SECONDS:g} s") from None
        if isinstance(vector, TextRefused):
            raise vector
        if isinstance(vector, BaseException):
            raise self.failed(vector) from vector
        return vector

    def embed(self, texts: Sequence[str], *, refusing: bool = False) -> list[Vector[float]]:
        """Return the vectors of *texts*; one that is refused however short has none, or raises `TextRefused` if *refusing*.

        Raises whatever the embedder raises.
        """
        embedder = self._opened()
        try:
            answer = embedder.embed([text.encode("utf-8", "replace").decode() for text in texts])
        except ValueError as error:
            if type(error) is not ValueError:  # such as an answer that is no JSON: that is no word about a text
                raise
            if len(texts) > 1:
                return [self.embed([text])[0] for text in texts]
            if len(texts[0]) > MIN_TEXT:
                return self.embed([texts[0][: max(MIN_TEXT, len(texts[0]) // 2)]], refusing=refusing)
            if refusing:
                raise TextRefused(f"it refuses the question: {_words(error)}") from error
            return [array("f")]
        return unit_vectors(answer, len(texts))

    def failed(self, cause: str | BaseException) -> EmbedderFailed:
        """Return the error of a failure, which is told in the log; for a minute nothing is asked."""
        words = cause if isinstance(cause, str) else _words(cause)
        self._reason, self._silent_until = words, time.monotonic() + PAUSE_SECONDS
        _LOG.warning("the embedder %s failed: %s", self.name, words)
        return EmbedderFailed(words)

    def _opened(self) -> Embedder:
        with self._lock:
            if self._embedder is None or self._process != os.getpid():
                self._embedder, self._process = self._make(), os.getpid()
            return self._embedder


def _words(error: BaseException) -> str:
    """Return what an error says, bounded: it may quote a whole answer of a server."""
    told = isinstance(error, KdskillsError | EmbedderFailed)
    text = str(error) if told else f"{type(error).__name__}: {error}"
    text = " ".join(text[: 2 * MAX_REASON].split()).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 1]}…"


def unit_vectors(answer: Iterable[Iterable[float]], count: int) -> list[Vector[float]]:
    """Return the *count* vectors of an embedder's answer, each of length one. Raises `EmbedderFailed` and `TypeError`."""
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        raise EmbedderFailed(f"it answered a {type(answer).__name__} instead of vectors")
    rows = [array("d", islice(row, MAX_DIMENSIONS + 1)) for row in islice(answer, count + 1)]
    sizes = {len(row) for row in rows}
    if len(rows) != count or len(sizes) != 1 or not 1 <= min(sizes) <= MAX_DIMENSIONS:
        raise EmbedderFailed(f"it answered {count} texts with something else than as many vectors of one length")
    vectors = []
    for row in rows:
        length = hypot(*row)
        if not isfinite(length):
            raise EmbedderFailed("a vector has numbers that are not finite")
        vectors.append(array("f", [number / length for number in row] if length else ()))
    return vectors


def skill_text(skill: Skill) -> str:
    """Return what is embedded of a skill: name, description, and the start of its text where that is here."""
    text = f"{skill.name}\n{skill.description}"
    if far_content(skill) is None:
        with suppress(KdskillsError, OSError):  # gone since discovery, which tells of it
            text = f"{text}\n{skill.body}"
    return text[:MAX_TEXT]


class VectorCache(CacheFile):
    """Vectors by key. Failures of the file are in `diagnostics`, and cost only that vectors are made again."""

    SCHEMA = (
        "CREATE TABLE meta (identity TEXT)",
        "CREATE TABLE vector (key BLOB PRIMARY KEY, numbers BLOB) WITHOUT ROWID",
    )
    LABEL = "The cache of vectors"
    COST = "embeds all skills"

    def _identity(self) -> str:
        return f"vectors {FORMAT} {sys.byteorder}"

    def _fill(self, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO meta VALUES (?)", (self._identity(),))

    def _load(self, connection: sqlite3.Connection) -> None:
        """Read nothing: rows are read when they are asked for."""

    def _forget(self) -> None:
        """Forget nothing: who asks remembers."""

    def read(self, keys: Sequence[bytes]) -> dict[bytes, Vector[float]]:
        """Return the vectors there are of *keys*."""
        vectors: dict[bytes, Vector[float]] = {}
        with self._lock:
            try:
                for start in range(0, len(keys), _KEYS):
                    part = keys[start : start + _KEYS]
                    marks = ",".join("?" * len(part))
                    statement = f"SELECT key, numbers FROM vector WHERE key IN ({marks})"  # noqa: S608 - question marks
                    for key, blob in self._opened().execute(statement, part):
                        vectors[key] = array("f", checked(blob, _seed(key)))
            except (*UNREADABLE, IndexDamaged, TypeError, ValueError) as damage:
                self.discard(f"it cannot be read ({damage})", self.generation)
                return {}
        return vectors

    def add(self, vectors: Mapping[bytes, Vector[float]]) -> None:
        """Keep *vectors*."""
        rows = [(key, sealed(vector.tobytes(), _seed(key))) for key, vector in vectors.items()]
        self._write("INSERT OR REPLACE INTO vector VALUES (?, ?)", rows)

    def prune(self, known: Collection[bytes]) -> None:
        """Drop vectors of keys that are not *known*, where most are not."""
        with self._lock, suppress(*UNREADABLE):
            keys = [key for (key,) in self._opened().execute("SELECT key FROM vector")]
            if len(keys) > 2 * len(known) + _SPARE:
                self._write("DELETE FROM vector WHERE key = ?", [(key,) for key in keys if key not in known])

    def _write(self, statement: str, rows: Sequence[tuple[bytes, ...]]) -> None:
        with self._lock:
            for _ in range(2):
                connection = self._opened()
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    connection.executemany(statement, rows)
                    connection.execute("COMMIT")
                except UNREADABLE as error:
                    with suppress(*UNREADABLE):
                        connection.rollback()
                    if isinstance(error, sqlite3.OperationalError):  # a full disk, a folder that is read-only
                        self._fall_back(error)
                    else:
                        self.discard(f"it cannot be written ({error})", self.generation)
                else:
                    return


def _seed(key: bytes) -> int:
    return int.from_bytes(key[:4], "little")


class Nearest(NamedTuple):
    """Full ids of the skills nearest to a question, the nearest first, and why there are none, or what was wrong with the cache."""

    full_ids: tuple[str, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()


class SkillVectors:
    """The vectors of the skills of one set of roots. Safe to use from any thread.

    Only skills that a search may answer with are embedded; a vector is made once for each text and name of an embedder.

    Args:
        guard: Asks the embedder.
        file: Where vectors are kept; None keeps them for this process only.
    """

    def __init__(self, guard: EmbedderGuard, file: Path | None = None) -> None:
        self._guard = guard
        self._cache = VectorCache(file)
        self._lock = threading.Lock()
        self._keys: dict[str, tuple[Skill, bytes]] = {}
        self._vectors: dict[bytes, Vector[float]] = {}
        self._filler: threading.Thread | None = None

    def nearest(self, query: str, listed: Collection[str], known: Mapping[str, Skill]) -> Nearest:
        """Return the hundred *listed* skills nearest to *query*, equally near ones by id; none unless all have vectors.

        *known* are all skills of the snapshot, whose vectors are kept.
        """
        end = time.monotonic() + WAIT_SECONDS
        query = query[:MAX_QUERY].strip()
        if not query or not listed:
            return Nearest()
        try:
            question = self._guard.ask(query)
            if not question:
                return Nearest()
            keys = {full_id: self._key(known[full_id]) for full_id in listed}
            count = self._completed(keys, known, len(question), end)
        except EmbedderFailed as failure:
            message = f"Skills are ranked by words only: the embedder {self._guard.name} failed: {failure}."
            return Nearest((), (Diagnostic("embedder_failed", "warning", message),))
        if count:
            message = (
                f"Skills are ranked by words only: {count} of {len(keys)} have no vectors yet, which are being made."
            )
            return Nearest((), (Diagnostic("vectors_incomplete", "info", message),))
        # Rounded, so that the last digit of a sum, which machines differ in, decides nothing.
        present = ((self._vectors[key], full_id) for full_id, key in keys.items())
        near = nsmallest(
            CANDIDATES, ((round(dist(question, vector), 6), full_id) for vector, full_id in present if vector)
        )
        return Nearest(tuple(full_id for _, full_id in near), self._cache.diagnostics)

    def _key(self, skill: Skill) -> bytes:
        """Return what decides a skill's vector, without reading its body."""
        asked, key = self._keys.get(skill.full_id, (None, b""))
        if asked is not skill:
            parts = repr((self._guard.name, skill.name, skill.description, skill.digest))
            key = blake2b(parts.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            self._keys[skill.full_id] = skill, key
        return key

    def _completed(self, keys: Mapping[str, bytes], known: Mapping[str, Skill], size: int, end: float) -> int:
        """Return how many skills have no vector; one thread makes them, and whoever started it waits for it until *end*."""
        with self._lock:
            unread = [key for key in keys.values() if key not in self._vectors]
            if unread:
                self._vectors |= self._cache.read(unread)
            missing = {key: known[full_id] for full_id, key in keys.items() if not self._fits(key, size)}
            if not missing:
                return 0
            filler = None
            if self._filler is None or not self._filler.is_alive():
                facts = (missing, size, known)
                filler = threading.Thread(target=self._make, args=facts, name="kdskills-vectors", daemon=True)
                self._filler = filler
                filler.start()
        if filler is not None:
            filler.join(max(0.0, end - time.monotonic()))
            self._guard.require()
        return sum(not self._fits(key, size) for key in missing)

    def _fits(self, key: bytes, size: int) -> bool:
        """Whether the vector of a key is there, and of the length of the question's; none at all is always fit."""
        vector = self._vectors.get(key)
        return vector is not None and len(vector) in {0, size}

    def _make(self, missing: Mapping[bytes, Skill], size: int, known: Mapping[str, Skill]) -> None:
        """Embed the skills that are missing, batch by batch, each of which is kept at once."""
        rows = iter(missing.items())
        try:
            while batch := dict(islice(rows, BATCH)):
                made = dict(zip(batch, self._embedded(batch.values(), size), strict=True))
                with self._lock:
                    self._vectors |= made
                self._cache.add(made)
            keys = {self._key(skill) for skill in known.values()}
            self._cache.prune(keys)
            with self._lock:
                if len(self._vectors) > 2 * len(keys) + _SPARE:
                    self._vectors = {key: self._vectors[key] for key in keys & self._vectors.keys()}
        except Exception as error:  # noqa: BLE001 - foreign code; the searches to come are told
            self._guard.failed(error)

    def _embedded(self, skills: Collection[Skill], size: int) -> list[Vector[float]]:
        vectors = self._guard.embed([skill_text(skill) for skill in skills])
        if any(len(vector) not in {0, size} for vector in vectors):
            raise EmbedderFailed("its vectors differ in length from call to call")
        return vectors
