"""Where sessions are kept: the protocol, its errors, and the store in memory."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import replace
from datetime import datetime
from typing import Final, Protocol, runtime_checkable

from kdskills.errors import CallerMustAct, OperatorMustAct
from kdskills.session.state import SessionHead, SessionRecord

SPARE_BODIES: Final = 256
"""How many texts stay in memory that no session refers to, not yet or no longer."""


class StoreConflict(CallerMustAct):
    """The session is not at the version that was expected."""

    code = "conflict"


class StoreUnavailable(OperatorMustAct):
    """The store does not answer; a store raises this (or OSError) for lost connections and full disks."""

    code = "store_unavailable"


@runtime_checkable
class SessionStore(Protocol):
    """Keeps session records and the SKILL.md texts they refer to by digest.

    `kdskills.testing.stores` checks any implementation. Methods may be called from any thread or loop.
    """

    async def get(self, session_id: str) -> SessionRecord | None:
        """Return the record, or None."""
        ...

    async def put(self, record: SessionRecord, *, expect: int | None) -> None:
        """Store *record* if the stored version is *expect*; None: if there is none.

        Raises:
            StoreConflict: Another version is stored.
        """
        ...

    async def touch(self, session_id: str, at: datetime) -> bool:
        """Set `touched_at` without a new version, never backwards; False for an unknown id."""
        ...

    async def delete(self, session_id: str) -> bool:
        """Forget the session; False for an unknown id."""
        ...

    async def page(self, *, consumer: str | None, after: str | None, limit: int) -> list[SessionHead]:
        """Return up to *limit* heads sorted by id, those after *after*, of *consumer* or of all."""
        ...

    async def purge(self, idle_before: datetime) -> int:
        """Forget every session touched before *idle_before*; return how many."""
        ...

    async def put_body(self, digest: str, text: str) -> None:
        """Keep the SKILL.md text of *digest*; keeping it again changes nothing."""
        ...

    async def get_body(self, digest: str) -> str | None:
        """Return the SKILL.md text of *digest*, or None."""
        ...


class MemoryStore:
    """Keeps sessions in this process. A text no session refers to is dropped once 256 such texts wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, SessionRecord] = {}
        self._bodies: dict[str, str] = {}
        self._uses: Counter[str] = Counter()
        self._spare: OrderedDict[str, None] = OrderedDict()

    async def get(self, session_id: str) -> SessionRecord | None:
        """Return the record, or None."""
        with self._lock:
            return self._records.get(session_id)

    async def put(self, record: SessionRecord, *, expect: int | None) -> None:
        """Store *record* if the stored version is *expect*; raises StoreConflict otherwise."""
        with self._lock:
            current = self._records.get(record.session_id)
            version = None if current is None else current.version
            if version != expect:
                raise StoreConflict(
                    f"session {record.session_id} is at version {version}, not {expect}", expected=expect, found=version
                )
            self._records[record.session_id] = record
            self._hold(record)
            if current is not None:
                self._release(current)

    async def touch(self, session_id: str, at: datetime) -> bool:
        """Renew the idle clock; False for an unknown id."""
        with self._lock:
            record = self._records.get(session_id)
            if record is None:
                return False
            if at > record.touched_at:
                self._records[session_id] = replace(record, touched_at=at)
            return True

    async def delete(self, session_id: str) -> bool:
        """Forget the session; False for an unknown id."""
        with self._lock:
            record = self._records.pop(session_id, None)
            if record is not None:
                self._release(record)
            return record is not None

    async def page(self, *, consumer: str | None, after: str | None, limit: int) -> list[SessionHead]:
        """Return up to *limit* heads sorted by id."""
        with self._lock:
            records = list(self._records.values())
        matching = sorted(
            (
                r
                for r in records
                if (consumer is None or r.consumer == consumer) and (after is None or r.session_id > after)
            ),
            key=lambda record: record.session_id,
        )
        return [record.head() for record in matching[:limit]]

    async def purge(self, idle_before: datetime) -> int:
        """Forget every session touched before *idle_before*."""
        with self._lock:
            idle = [record for record in self._records.values() if record.touched_at < idle_before]
            for record in idle:
                del self._records[record.session_id]
                self._release(record)
            return len(idle)

    async def put_body(self, digest: str, text: str) -> None:
        """Keep the SKILL.md text of *digest*."""
        with self._lock:
            self._bodies.setdefault(digest, text)
            if not self._uses[digest]:
                self._spare_one(digest)

    async def get_body(self, digest: str) -> str | None:
        """Return the SKILL.md text of *digest*, or None."""
        with self._lock:
            return self._bodies.get(digest)

    def _hold(self, record: SessionRecord) -> None:
        for digest in record.digests:
            self._uses[digest] += 1
            self._spare.pop(digest, None)

    def _release(self, record: SessionRecord) -> None:
        for digest in record.digests:
            self._uses[digest] -= 1
            if self._uses[digest] <= 0:
                del self._uses[digest]
                if digest in self._bodies:
                    self._spare_one(digest)

    def _spare_one(self, digest: str) -> None:
        self._uses.pop(digest, None)
        self._spare[digest] = None
        self._spare.move_to_end(digest)
        while len(self._spare) > SPARE_BODIES:
            oldest, _ = self._spare.popitem(last=False)
            self._bodies.pop(oldest, None)
