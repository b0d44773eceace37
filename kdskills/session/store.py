"""What a session holds, how it changes, and where it is kept: frozen values, replaced at the version a change began at."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Literal, Protocol, runtime_checkable

from kdskills.errors import BadRequest, CallerMustAct, OperatorMustAct
from kdskills.session.conversations import MemoryConversations

LoadMode = Literal["replace", "add"]


@dataclass(frozen=True, slots=True)
class ImportedSkill:
    """A skill that came along with a loaded one, by full id and the digest of its SKILL.md then."""

    id: str
    digest: str
    tree_digest: str


@dataclass(frozen=True, slots=True)
class LoadedSkill:
    """One entry of a session: full id, digests when it was loaded, when and by whom, and what came along."""

    id: str
    digest: str
    tree_digest: str
    loaded_at: datetime
    loaded_by: str = "model"
    imports: tuple[ImportedSkill, ...] = ()

    @property
    def digests(self) -> frozenset[str]:
        """Digests of every SKILL.md text this entry needs."""
        return frozenset({self.digest, *(item.digest for item in self.imports)})


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as a store keeps it; `version` grows by one with each change.

    `listed` are the full ids that its catalog shows, in order, where not all skills fit; `located` those its searches gave.
    """

    session_id: str
    consumer: str
    version: int
    created_at: datetime
    touched_at: datetime
    max_active: int | None = 8
    active: tuple[LoadedSkill, ...] = ()
    listed: tuple[str, ...] = ()
    located: tuple[str, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        """Full ids of the loaded skills, in load order."""
        return tuple(entry.id for entry in self.active)

    @property
    def digests(self) -> frozenset[str]:
        """Digests of every SKILL.md text the session needs."""
        return frozenset[str]().union(*(entry.digests for entry in self.active))

    def head(self) -> SessionHead:
        """Return what listings show."""
        return SessionHead(self.session_id, self.consumer, self.created_at, self.touched_at, self.ids)

    def with_active(self, active: Sequence[LoadedSkill], now: datetime) -> SessionRecord:
        """Return the next version with *active*."""
        return self.following(now, active=tuple(active))

    def following(self, now: datetime, **changes: Any) -> SessionRecord:
        """Return the next version, with *changes* of fields."""
        return replace(self, version=self.version + 1, touched_at=now, **changes)


@dataclass(frozen=True, slots=True)
class SessionHead:
    """A session in a listing: no bodies."""

    session_id: str
    consumer: str
    created_at: datetime
    touched_at: datetime
    active: tuple[str, ...] = ()


def load_mode(mode: str | None) -> LoadMode | None:
    """Return the mode meant by *mode*; `""` and None mean replace; None for anything else."""
    return "add" if mode == "add" else "replace" if mode in (None, "", "replace") else None


def next_ids(current: Sequence[str], requested: Sequence[str], mode: LoadMode) -> tuple[str, ...]:
    """Return the ids in force after a load: `add` moves what is loaded again to the end."""
    requested_ids = tuple(dict.fromkeys(requested))
    if mode == "replace":
        return requested_ids
    return tuple(name for name in current if name not in requested_ids) + requested_ids


def merge_entries(
    current: Iterable[LoadedSkill], fresh: Iterable[LoadedSkill], order: Sequence[str]
) -> tuple[LoadedSkill, ...]:
    """Return entries in *order*, fresh ones before current ones of the same id."""
    entries = {entry.id: entry for entry in current} | {entry.id: entry for entry in fresh}
    return tuple(entries[name] for name in order)


def without(entries: Iterable[LoadedSkill], ids: Collection[str]) -> tuple[LoadedSkill, ...]:
    """Return *entries* but those of *ids*."""
    return tuple(entry for entry in entries if entry.id not in ids)


def prompt_order(entries: Sequence[LoadedSkill]) -> tuple[tuple[str, str, str | None], ...]:
    """Return `(full id, digest, importer or None)`: imports once each, before their first importer.

    A loaded skill is shown as loaded: at its own position unless an earlier one imports it, and then there.
    """
    loaded = {entry.id: entry for entry in entries}
    listed_ids: set[str] = set()
    order: list[tuple[str, str, str | None]] = []
    for entry in entries:
        for item in entry.imports:
            if item.id in listed_ids:
                continue
            listed_ids.add(item.id)
            own = loaded.get(item.id)
            order.append((own.id, own.digest, None) if own else (item.id, item.digest, entry.id))
        if entry.id not in listed_ids:
            listed_ids.add(entry.id)
            order.append((entry.id, entry.digest, None))
    return tuple(order)


def iso(moment: datetime) -> str:
    """Return UTC ISO-8601 with `Z` and microseconds."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def from_iso(text: str) -> datetime:
    """Return the moment *text* names in the form of `iso` (fraction optional); raises `snapshot_unsupported`."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() is None:
        raise BadRequest(f"not a UTC time: {text!r}", code="snapshot_unsupported")
    return moment


SPARE_BODIES: Final = 256
"""How many texts stay in memory that no session refers to, not yet or no longer."""


class StoreConflict(CallerMustAct, code="conflict"):
    """The session is not at the version that was expected."""


class StoreUnavailable(OperatorMustAct, code="store_unavailable"):
    """The store does not answer; a store raises this (or OSError) for lost connections and full disks."""


@runtime_checkable
class SessionStore(Protocol):
    """Keeps session records and the SKILL.md texts they refer to by digest.

    `kdskills.testing.stores` checks any implementation. Methods may be called from any thread or loop.
    """

    async def get(self, session_id: str) -> SessionRecord | None:
        """Return the record, or None."""

    async def put(self, record: SessionRecord, *, expect: int | None) -> None:
        """Store *record* if the stored version is *expect*; None: if there is none. Raises StoreConflict."""

    async def touch(self, session_id: str, at: datetime) -> bool:
        """Set `touched_at` without a new version, never backwards; False for an unknown id."""

    async def delete(self, session_id: str) -> bool:
        """Forget the session; False for an unknown id."""

    async def page(self, *, consumer: str | None, after: str | None, limit: int) -> list[SessionHead]:
        """Return up to *limit* heads sorted by id, those after *after*, of *consumer* or of all."""

    async def purge(self, idle_before: datetime) -> int:
        """Forget every session touched before *idle_before*; return how many."""

    async def put_body(self, digest: str, text: str) -> None:
        """Keep the SKILL.md text of *digest*; keeping it again changes nothing."""

    async def get_body(self, digest: str) -> str | None:
        """Return the SKILL.md text of *digest*, or None."""


class MemoryStore:
    """Keeps sessions in this process. A text no session refers to is dropped once 256 such texts wait.

    `conversations` keeps what was said in them.
    """

    def __init__(self) -> None:
        self.conversations = MemoryConversations()
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
                message = f"session {record.session_id} is at version {version}, not {expect}"
                raise StoreConflict(message, expected=expect, found=version)
            self._records[record.session_id] = record
            for digest in record.digests:
                self._uses[digest] += 1
                self._spare.pop(digest, None)
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
        records = [record for record in records if consumer in {None, record.consumer}]
        following = [record for record in records if after is None or record.session_id > after]
        return [record.head() for record in sorted(following, key=lambda record: record.session_id)[:limit]]

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
