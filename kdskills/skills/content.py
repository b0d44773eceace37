"""Long texts of skills, read on first use and checked against what discovery saw."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from kdskills.errors import Diagnostic, FileRefused, RootChanged, RootMissing
from kdskills.skills.digest import bytes_digest
from kdskills.skills.safe_open import read_file
from kdskills.skills.stamps import RACY_NS, newest_of, stamp_of

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
