"""The parts of a runtime and the steps every call shares: session, gate, pruning, commit."""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kdskills.errors import PluginFailed, SessionError, ToolCallRefused
from kdskills.session.approval import Approvals
from kdskills.session.bodies import Bodies, Body, parsed
from kdskills.session.codes import not_found, refuse
from kdskills.session.config import Budget, RuntimeConfig
from kdskills.session.events import SessionEvent, send
from kdskills.session.flights import Tickets
from kdskills.session.scope import TurnScope
from kdskills.session.source import Gate, Source
from kdskills.session.state import LoadedSkill, SessionRecord, without
from kdskills.session.store import MemoryStore, SessionStore, StoreConflict, StoreUnavailable
from kdskills.session.wiring import UNDECIDED, AccessKind, AccessRequest, arguments_digest, denial_of
from kdskills.skills.model import Skill
from kdskills.skills.selection import By, Granted, Refused

TRIES: Final = 5
MAX_TOLD: Final = 4096
_SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Standing:
    """A session as it stands under its gate: the record, the gate, and every skill its entries need by full id."""

    record: SessionRecord
    gate: Gate
    skills: Mapping[str, Skill] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """Whose call it is: the session id and the turn it belongs to."""

    session_id: str
    scope: TurnScope


class Core:
    """What the operations of a runtime share. One per runtime; safe from any thread or loop."""

    def __init__(self, config: RuntimeConfig, source: Source, store: SessionStore, bodies: Bodies) -> None:
        self.config = config
        self.source = source
        self.store = store
        self.bodies = bodies
        self.tickets = Tickets()
        self.approvals = Approvals(config.approve)
        self._lock = threading.Lock()
        self._resident: OrderedDict[str, SessionRecord] = OrderedDict()
        self._told: OrderedDict[Hashable, None] = OrderedDict()

    # ---- records ----

    async def record(self, session_id: str, *, touch: bool = True) -> SessionRecord:
        """Return the session's record, renewing its idle clock and its place among the recently used.

        Raises:
            SessionError: `session_not_found` for an unknown, expired, evicted or closed session.
            ToolCallRefused: `store_unavailable`.
        """
        with store_errors():
            record = await self.store.get(session_id)
            now = self.config.clock()
            if record is not None and now - record.touched_at > self.config.idle_ttl:
                await self.store.delete(session_id)
                record = None
            if record is None:
                self.drop(session_id)
                raise gone(session_id)
            if touch:
                await self.store.touch(session_id, now)
        if touch:
            await self.remember(record)
        return record

    async def record_expired(self, session_id: str) -> None:
        """Forget a session whose id is wanted again but which has expired."""
        with store_errors():
            record = await self.store.get(session_id)
            if record is not None and self.config.clock() - record.touched_at > self.config.idle_ttl:
                await self.store.delete(session_id)

    async def create(self, record: SessionRecord, *, expect: int | None = None) -> None:
        """Put a new record, or a restored one over version *expect*.

        Raises:
            SessionError: `session_exists` when the id is taken.
        """
        try:
            with store_errors():
                await self.store.put(record, expect=expect)
        except StoreConflict as error:
            message = f"a session {record.session_id!r} exists"
            raise SessionError(message, code="session_exists", session_id=record.session_id) from error
        await self.remember(record)

    async def commit(self, record: SessionRecord, active: Iterable[LoadedSkill]) -> SessionRecord:
        """Put the next version of *record* holding *active*. Raises StoreConflict when it was overtaken."""
        following = record.with_active(tuple(active), self.config.clock())
        with store_errors():
            await self.store.put(following, expect=record.version)
        await self.remember(following)
        return following

    async def remember(self, record: SessionRecord) -> None:
        """Make *record* the most recently used; over `max_sessions` the least used one is evicted."""
        evicted: list[str] = []
        with self._lock:
            self._resident[record.session_id] = record
            self._resident.move_to_end(record.session_id)
            while len(self._resident) > self.config.max_sessions:
                evicted.append(self._resident.popitem(last=False)[0])
        if isinstance(self.store, MemoryStore):  # a durable store keeps what is merely not resident
            for session_id in evicted:
                await self.store.delete(session_id)
                self.tickets.session_closed(session_id, gone(session_id))

    def resident(self, session_id: str) -> SessionRecord | None:
        """Return the record last seen in this process, without asking the store."""
        with self._lock:
            return self._resident.get(session_id)

    def drop(self, session_id: str) -> None:
        """Forget the resident copy and what was approved for the session."""
        with self._lock:
            self._resident.pop(session_id, None)
        self.approvals.forget(session_id)

    def first_time(self, fact: Hashable) -> bool:
        """Whether *fact* has not been told before; the last 4,096 are remembered."""
        with self._lock:
            known = fact in self._told
            self._told[fact] = None
            self._told.move_to_end(fact)
            while len(self._told) > MAX_TOLD:
                self._told.popitem(last=False)
        return not known

    # ---- the gate ----

    def gate(self, record: SessionRecord, scope: TurnScope) -> Gate:
        """Return the view in force: the turn's, or the live one."""
        return scope.view if scope.view is not None else self.source.gate(record.consumer)

    def resolve(self, record: SessionRecord, scope: TurnScope, gate: Gate, ref: str, by: By) -> Granted | Refused:
        """Resolve *ref*; under a turn's frozen view a skill that was removed since is refused as well."""
        found = gate.resolve(ref, by=by)
        if isinstance(found, Refused) or scope.view is None:
            return found
        now = self.source.gate(record.consumer).resolve(found.full_id, by="code")
        if isinstance(now, Refused) and now.code in {"unknown_skill", "skill_invalid"}:
            return Refused(now.code, now.reason, ref, found.full_id)
        return found

    async def standing(self, call: Call, *, touch: bool = True) -> Standing:
        """Return the session under its gate; what is no longer granted is pruned first."""
        for _ in range(TRIES):
            record = await self.record(call.session_id, touch=touch)
            gate = self.gate(record, call.scope)
            skills: dict[str, Skill] = {}
            kept: list[LoadedSkill] = []
            lost: list[Refused] = []
            for entry in record.active:
                found = self.resolve(record, call.scope, gate, entry.id, loader_of(entry))
                if isinstance(found, Refused):
                    lost.append(found)
                    continue
                brought = {skill.full_id: skill for skill in found.closure}
                skills |= brought
                kept.append(replace(entry, imports=tuple(item for item in entry.imports if item.id in brought)))
            if not lost:
                return Standing(replace(record, active=tuple(kept)), gate, skills)
            try:
                await self.commit(record, without(record.active, {item.full_id or item.ref for item in lost}))
            except StoreConflict:
                continue
            for item in lost:
                self.emit(call, "skill.pruned", id=item.full_id or item.ref, code=item.code)
        raise conflict(call.session_id)

    def granted(self, call: Call, standing: Standing, refs: Iterable[str], by: By) -> list[Granted]:
        """Return the grants of *refs*, each skill once in first-seen order.

        Raises:
            ToolCallRefused: `skill_not_found` naming every ref that was refused.
        """
        grants: dict[str, Granted] = {}
        refused: list[Refused] = []
        asked: list[str] = []
        for ref in refs:
            found = self.resolve(standing.record, call.scope, standing.gate, ref, by)
            if isinstance(found, Refused):
                refused.append(found)
                asked.append(ref)
            else:
                grants.setdefault(found.full_id, found)
        if refused:
            for item in refused:
                self.emit(call, "skill.refused", ref=item.ref, code=item.code)
            raise not_found(asked, standing.gate.names, tuple(refused))
        return list(grants.values())

    def ask(
        self,
        call: Call,
        record: SessionRecord,
        kind: AccessKind,
        skill: Skill,
        arguments: Mapping[str, Any],
        path: str | None = None,
    ) -> None:
        """Ask the policy plugins.

        Raises:
            ToolCallRefused: `skill_denied` with the Denial's public text.
        """
        if self.config.deny is None:
            return
        tool = {"load": "skills.load", "read": "skills.read", "run": "skills.run_script"}.get(kind)
        digest = arguments_digest(arguments)
        request = AccessRequest(kind, record.consumer, call.session_id, skill.full_id, path, tool, digest)
        try:
            denial = denial_of(self.config.deny, request)
        except PluginFailed as error:
            self.emit(call, "diagnostic", code=error.code, id=skill.full_id, message=error.message)
            self.emit(call, "skill.refused", ref=skill.full_id, code=error.code, reason=error.message)
            raise refuse("skill_denied", UNDECIDED, refusal=error) from error
        if denial is not None:
            self.emit(call, "skill.refused", ref=skill.full_id, code="skill_denied", reason=denial.reason)
            raise refuse("skill_denied", denial.public, refusal=denial)

    # ---- texts ----

    async def body(self, skill: Skill, digest: str) -> Body | None:
        """Return the text of *digest*: from memory, the store, or the file if it is still the same; else None."""
        known = self.bodies.known(digest)
        if known is not None:
            return known
        with store_errors():
            raw = await self.store.get_body(digest)
        if raw is not None:
            return self.bodies.keep(parsed(raw.encode("utf-8"), skill, "SKILL.md", ""))
        try:
            current = await self.bodies.current(skill)
        except ToolCallRefused:  # gone or broken now: the text of this digest is lost
            return None
        return self.bodies.keep(current) if current.digest == digest else None

    # ---- small things ----

    def budget(self, scope: TurnScope) -> Budget:
        """Return the token shares in force."""
        return scope.budget or self.config.budget

    def count(self, scope: TurnScope, text: str) -> int:
        """Count tokens as the provider does, or by estimate."""
        return (scope.count or self.config.count)(text)

    def emit(self, call: Call, kind: str, **data: Any) -> None:
        """Tell the turn's listener, or the runtime's."""
        send(call.scope.events or self.config.events, SessionEvent(kind, call.session_id, data))


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn a store that does not answer into `store_unavailable`."""
    try:
        yield
    except (StoreUnavailable, OSError) as error:
        raise refuse("store_unavailable", "the session store does not answer; try again later") from error


def gone(session_id: str) -> SessionError:
    """Build `session_not_found`: unknown, expired, evicted and closed sessions read the same."""
    return SessionError(f"there is no session {session_id!r}", code="session_not_found", session_id=session_id)


def conflict(session_id: str) -> SessionError:
    """Build `conflict`."""
    message = f"session {session_id!r} was changed by others {TRIES} times in a row; try again"
    return SessionError(message, code="conflict", session_id=session_id)


def checked_id(session_id: str | None) -> str:
    """Return the caller's id, or a new UUIDv7.

    Raises:
        ToolCallRefused: `invalid_argument` when the id does not match `[A-Za-z0-9._:-]{1,128}`.
    """
    if session_id is None:
        return uuid7()
    if not _SESSION_ID.fullmatch(session_id):
        raise refuse(
            "invalid_argument",
            "a session id has 1 to 128 of A-Z a-z 0-9 . _ : -",
            errors=[{"path": "/session_id", "problem": "malformed"}],
        )
    return session_id


def uuid7() -> str:
    """Return a UUIDv7: 48 bits of milliseconds, then random bits; ids sort by time."""
    random = int.from_bytes(os.urandom(10), "big")
    moment = time.time_ns() // 1_000_000 & ((1 << 48) - 1)
    high = (moment << 16) | (0x7 << 12) | (random >> 68)
    value = (high << 64) | (0b10 << 62) | (random & ((1 << 62) - 1))
    return str(uuid.UUID(int=value))


def loader_of(entry: LoadedSkill) -> By:
    """Return who loaded *entry*, as the gate asks for it."""
    by = entry.loaded_by
    return "user" if by == "user" else "code" if by == "code" else "model"
