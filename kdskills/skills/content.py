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


class _Kept(NamedTuple):
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
        self._most = cache_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._held = 0

    @property
    def held(self) -> int:
        """Bytes in the cache now."""
        return self._held

    def clear(self) -> None:
        """Forget everything read so far."""
        with self._lock:
            self._kept.clear()
            self._held = 0

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
        kept = self._cached(base, path)
        if kept is None:
            read_at = self._clock()
            try:
                got = read_file(base, path, limit=limit)
            except FileRefused as refusal:
                raise RootMissing(
                    f"{path} of skill {ref} can no longer be read ({refusal.code}).",
                    code="skill_missing",
                    ref=ref,
                    path=path,
                    reason=refusal.code,
                ) from refusal
            kept = _Kept(stamp_of(got.stat), read_at, bytes_digest(got.data), decode(got.data))
            self._keep(f"{base}/{path}", kept)
        if kept.digest == expected:
            return ContentRead(kept.decoded.value, kept.decoded.diagnostics)
        if self._verified:
            raise RootChanged(
                f"{path} of skill {ref} is not the file this process was started with.",
                code="skill_changed",
                ref=ref,
                path=path,
                expected=expected,
                found=kept.digest,
            )
        return ContentRead(kept.decoded.value, (*kept.decoded.diagnostics, stale(ref, path)))

    def _cached(self, base: str, path: str) -> _Kept | None:
        key = f"{base}/{path}"
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            self._kept.move_to_end(key)
        try:
            found = os.lstat(key)
        except OSError:
            return None
        certain = newest_of(kept.stamp) < kept.read_at - RACY_NS and stamp_of(found) == kept.stamp
        return kept if certain else None

    def _keep(self, key: str, kept: _Kept) -> None:
        with self._lock:
            before = self._kept.pop(key, None)
            if before is not None:
                self._held -= before.decoded.cost
            if kept.decoded.cost > self._most:
                return
            self._kept[key] = kept
            self._held += kept.decoded.cost
            while self._held > self._most:
                _, dropped = self._kept.popitem(last=False)
                self._held -= dropped.decoded.cost


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
