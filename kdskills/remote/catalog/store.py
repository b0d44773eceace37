"""The stored record of each thread's catalog."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

Release = Literal["", "releasing", "applied"]


@dataclass(frozen=True, slots=True)
class CatalogRecord:
    """One thread's catalog.

    Attributes:
        session_id: The thread.
        strategy: How its catalog reaches the model; empty while none was needed.
        digest: Digest of the catalog in force; empty if none was ever pushed.
        tools: Digest of each tool in force by qualified name.
        context_digest: Digest of the catalog text the model has seen last; empty for none.
        release: `releasing` while a worker asks the others to release the thread, `applied` when they may resume it.
        release_by: The worker that asked.
        version: Counts changes; a record is written only over the version it was read at.
    """

    session_id: str
    strategy: str = ""
    digest: str = ""
    tools: dict[str, str] = field(default_factory=dict)
    context_digest: str = ""
    release: Release = ""
    release_by: str = ""
    version: int = 0


class CatalogStore(Protocol):
    """Keeps the records. Methods may block; they are called from threads."""

    shared: bool
    """Whether other workers see the same records."""

    def get(self, session_id: str) -> CatalogRecord | None:
        """Return a thread's record."""
        ...

    def update(self, session_id: str, change: Callable[[CatalogRecord], CatalogRecord]) -> CatalogRecord:
        """Apply a change to the newest version and return what was written."""
        ...

    def forget(self, session_id: str) -> None:
        """Drop a thread's record."""
        ...

    def releases(self, session_ids: Sequence[str]) -> list[CatalogRecord]:
        """Return the records of those threads that are being released, or were."""
        ...


class MemoryCatalogStore:
    """Records of this process."""

    shared = False

    def __init__(self) -> None:
        self._records: dict[str, CatalogRecord] = {}
        self._lock = threading.Lock()

    def get(self, session_id: str) -> CatalogRecord | None:
        """Return a thread's record."""
        return self._records.get(session_id)

    def update(self, session_id: str, change: Callable[[CatalogRecord], CatalogRecord]) -> CatalogRecord:
        """Apply a change under a lock."""
        with self._lock:
            old = self._records.get(session_id) or CatalogRecord(session_id)
            new = replace(change(old), version=old.version + 1)
            self._records[session_id] = new
            return new

    def forget(self, session_id: str) -> None:
        """Drop a thread's record."""
        with self._lock:
            self._records.pop(session_id, None)

    def releases(self, session_ids: Sequence[str]) -> list[CatalogRecord]:
        """Return the records of those threads that are being released, or were."""
        return [record for key in session_ids if (record := self._records.get(key)) is not None and record.release]


class CatalogRecords:
    """A store's records for coroutines: every access runs on a thread.

    Args:
        store: The store.
    """

    def __init__(self, store: CatalogStore) -> None:
        self._store = store
        self.shared = store.shared

    async def get(self, session_id: str) -> CatalogRecord:
        """Return a thread's record, an empty one when none is stored."""
        return await asyncio.to_thread(self._store.get, session_id) or CatalogRecord(session_id)

    async def update(self, session_id: str, change: Callable[[CatalogRecord], CatalogRecord]) -> CatalogRecord:
        """Apply a change."""
        return await asyncio.to_thread(self._store.update, session_id, change)

    async def forget(self, session_id: str) -> None:
        """Drop a thread's record."""
        await asyncio.to_thread(self._store.forget, session_id)

    async def releases(self, session_ids: Sequence[str]) -> list[CatalogRecord]:
        """Return the records of those threads that are being released, or were."""
        return await asyncio.to_thread(self._store.releases, session_ids)
