"""Long texts of registered skills: read on first use, cached, and compared with what discovery saw."""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from kdskills.errors import Diagnostic, FileRefused, RootChanged, RootMissing
from kdskills.skills.digest import bytes_digest, tree_digest
from kdskills.skills.folder import COMPACT_FILE, SOURCES_FILES, limit_of, read_compact, read_sources
from kdskills.skills.frontmatter import MAX_SKILL_BYTES, read_body
from kdskills.skills.listing import RACY_NS, newest_of, printable_path, stamp_of
from kdskills.skills.safe_open import read_file

T = TypeVar("T")

CACHE_BYTES = 16 * 1024 * 1024


class ContentRead(NamedTuple, Generic[T]):
    """A long text as read just now: `value`, with `stale` among the findings when the file has changed."""

    value: T
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def stale(self) -> bool:
        """Whether the file is unlike what the snapshot saw."""
        return any(finding.code == "stale" for finding in self.diagnostics)


class Decoded(NamedTuple, Generic[T]):
    """What the bytes of a file mean, and about how many bytes of memory that takes."""

    value: T
    cost: int
    diagnostics: tuple[Diagnostic, ...] = ()


class _CachedText(NamedTuple):
    stamp: bytes
    read_at: int
    digest: str
    decoded: Decoded[Any]


class ContentReader:
    """Reads skills' files for one registry, through a cache bounded in bytes. Safe from any thread.

    Args:
        verified: Whether a file unlike its snapshot is refused instead of served with `stale`.
        clock: Nanoseconds since the epoch.
        cache_bytes: Most bytes of decoded text to keep.
    """

    def __init__(self, *, verified: bool, clock: Callable[[], int], cache_bytes: int = CACHE_BYTES) -> None:
        self._verified = verified
        self._clock = clock
        self._most_bytes = cache_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _CachedText] = OrderedDict()
        self._cached_bytes = 0

    @property
    def cached_bytes(self) -> int:
        """Bytes in the cache now."""
        return self._cached_bytes

    def clear(self) -> None:
        """Forget everything read so far."""
        with self._lock:
            self._entries.clear()
            self._cached_bytes = 0

    def read(
        self, base: str, path: str, *, limit: int, expected: str, ref: str, decode: Callable[[bytes], Decoded[T]]
    ) -> ContentRead[T]:
        """Read the file *path* below the folder *base*, from the cache when the file is certainly the same.

        Args:
            base: The resolved root.
            path: Posix path below it.
            limit: Most bytes to accept.
            expected: Digest the snapshot knows.
            ref: Full id, for findings and errors.
            decode: What to make of the bytes; its result is kept.

        Raises:
            RootMissing: The file is gone or may not be read (`skill_missing`).
            RootChanged: The file has changed and the registry is verified (`skill_changed`).
        """
        entry = self._cached(base, path)
        if entry is None:
            read_at = self._clock()
            try:
                file = read_file(base, path, limit=limit)
            except FileRefused as refusal:
                raise RootMissing(
                    f"{path} of skill {ref} can no longer be read ({refusal.code}).",
                    code="skill_missing",
                    ref=ref,
                    path=path,
                    reason=refusal.code,
                ) from refusal
            entry = _CachedText(stamp_of(file.stat), read_at, bytes_digest(file.data), decode(file.data))
            self._store(f"{base}/{path}", entry)
        if entry.digest == expected:
            return ContentRead(entry.decoded.value, entry.decoded.diagnostics)
        if self._verified:
            raise RootChanged(
                f"{path} of skill {ref} is not the file this process was started with.",
                code="skill_changed",
                ref=ref,
                path=path,
                expected=expected,
                found=entry.digest,
            )
        return ContentRead(entry.decoded.value, (*entry.decoded.diagnostics, stale(ref, path)))

    def _cached(self, base: str, path: str) -> _CachedText | None:
        key = f"{base}/{path}"
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
        try:
            status = os.lstat(key)
        except OSError:
            return None
        certain = newest_of(entry.stamp) < entry.read_at - RACY_NS and stamp_of(status) == entry.stamp
        return entry if certain else None

    def _store(self, key: str, entry: _CachedText) -> None:
        with self._lock:
            before = self._entries.pop(key, None)
            if before is not None:
                self._cached_bytes -= before.decoded.cost
            if entry.decoded.cost > self._most_bytes:
                return
            self._entries[key] = entry
            self._cached_bytes += entry.decoded.cost
            while self._cached_bytes > self._most_bytes:
                _, dropped = self._entries.popitem(last=False)
                self._cached_bytes -= dropped.decoded.cost


def stale(ref: str, path: str) -> Diagnostic:
    """Say that a file changed since the snapshot was taken."""
    return Diagnostic(
        "stale",
        "warning",
        f"{path} has changed since the skills were last looked through; the new text is served.",
        path,
        ref=ref,
        fix="Refresh the registry.",
    )


class RootTexts(NamedTuple):
    """Where the skills of one root are read from: the registry's reader, and the resolved root."""

    reader: ContentReader
    base: str


class RegistryContent:
    """The long texts of a registered skill, read on first use and compared with what discovery saw."""

    __slots__ = ("_digests", "_files", "_path", "_ref", "_source")

    def __init__(
        self, source: RootTexts, path: str, ref: str, files: tuple[str, ...], digests: tuple[str, ...]
    ) -> None:
        self._source = source
        self._path = path
        self._ref = ref
        self._files = files
        self._digests = digests

    def read_body(self) -> ContentRead[str]:
        """Return the body, with `stale` when the file has changed since.

        Raises:
            RootMissing: The file is gone.
            RootChanged: The registry is verified and the file has changed (`skill_changed`).
        """
        return self._read(0, MAX_SKILL_BYTES, lambda data, _: _decode_body(data))

    def read_compact(self) -> ContentRead[str | None]:
        """Return the text of `compact.md` as discovery saw it there, or None. Raises as `read_body`."""
        number = self._companion((COMPACT_FILE,))
        return ContentRead(None) if number is None else self._read(number, limit_of(COMPACT_FILE), _decode_compact)

    def read_sources(self) -> ContentRead[tuple[Mapping[str, Any], ...]]:
        """Return the rows of `sources.yaml` as discovery saw it there, or (). Raises as `read_body`."""
        number = self._companion(SOURCES_FILES)
        return ContentRead(()) if number is None else self._read(number, limit_of(SOURCES_FILES[0]), _decode_sources)

    def _read(self, number: int, limit: int, decode: Callable[[bytes, str], Decoded[T]]) -> ContentRead[T]:
        file_path = f"{self._path}/{self._files[number]}"
        return self._source.reader.read(
            self._source.base,
            file_path,
            limit=limit,
            expected=self._digests[number],
            ref=self._ref,
            decode=lambda data: decode(data, file_path),
        )

    def _companion(self, names: tuple[str, ...]) -> int | None:
        """Return which file is the companion; one that could not be read then is not read now."""
        files = range(1, len(self._files))
        return next((each for each in files if self._files[each] in names and self._digests[each]), None)

    def body(self) -> str:
        """Return the body. Raises as `read_body`."""
        return self.read_body().value

    def compact(self) -> str | None:
        """Return the text of `compact.md`, or None. Raises as `read_body`."""
        return self.read_compact().value

    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """Return the rows of `sources.yaml`, or (). Raises as `read_body`."""
        return self.read_sources().value

    def tree_digest(self) -> str:
        """Return the digest over every file of the skill, as they are now. Raises `FileRefused`."""
        return tree_digest(self._source.base, self._path)


def _decode_body(data: bytes) -> Decoded[str]:
    text = read_body(data)
    return Decoded(text, sys.getsizeof(text))


def _decode_compact(data: bytes, path: str) -> Decoded[str | None]:
    compact = read_compact(data, path=printable_path(path))
    return Decoded(compact.text, sys.getsizeof(compact.text), compact.findings)


def _decode_sources(data: bytes, path: str) -> Decoded[tuple[Mapping[str, Any], ...]]:
    sources = read_sources(data, name=path.rpartition("/")[2], path=printable_path(path))
    # Objects weigh several times the text they were read from.
    return Decoded(sources.rows, 8 * len(data) + 1024, sources.findings)
