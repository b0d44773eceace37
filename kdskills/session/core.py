"""The parts of a runtime and the steps every call shares: session, gate, pruning, commit."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kdskills.errors import PluginFailed, SessionError, ToolCallRefused
from kdskills.session.approval import UNDECIDED, AccessKind, AccessRequest, Approvals, arguments_digest, denial_of
from kdskills.session.bodies import Bodies, Body, Tickets, parsed
from kdskills.session.codes import invalid, not_found, refuse
from kdskills.session.config import Budget, RuntimeConfig
from kdskills.session.receipts import SessionEvent, send
from kdskills.session.scope import TurnScope
from kdskills.session.source import Gate, GateOf
from kdskills.session.store import (
    LoadedSkill,
    MemoryStore,
    SessionRecord,
    SessionStore,
    StoreConflict,
    StoreUnavailable,
    without,
)
from kdskills.skills.model import Skill
from kdskills.skills.selection import By, Granted, Refused

TRIES: Final = 5
MAX_REPORTED: Final = 4096
_SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class PromptText:
    """One text of the prompt, as it was loaded.

    `importer` is the full id of the skill that imports it, None for a loaded skill; `stale` tells that its file has
    changed since, and `current` is the digest of the file now, None when it cannot be read.
    """

    skill: Skill
    body: Body
    importer: str | None
    stale: bool
    current: str | None


@dataclass(frozen=True, slots=True)
class GatedSession:
    """A session checked against its gate: every skill its entries need by full id, and its texts once they are read."""

    record: SessionRecord
    gate: Gate
    skills: Mapping[str, Skill] = field(default_factory=dict)
    texts: tuple[PromptText, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """The session a call is made in, and the turn it belongs to."""

    session_id: str
    scope: TurnScope


class CallOrder:
    """Lets a model's calls wait for the loads and unloads before them: agents run the calls of one reply side by side."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: dict[str, Future[None]] = {}

    @asynccontextmanager
    async def after_changes(self, session_id: str, *, changes: bool) -> AsyncIterator[None]:
        """Hold a call back until the changes of its session that began before it are over; *changes*: it is one itself."""
        change: Future[None] = Future()
        change.set_running_or_notify_cancel()  # who gives up waiting for it does not cancel it
        with self._lock:
            earlier = self._changes.get(session_id)
            if changes:
                self._changes[session_id] = change
        try:
            if earlier is not None:
                await asyncio.wrap_future(earlier)
            yield
        finally:
            if changes:
                self._end(session_id, change, earlier)

    def _end(self, session_id: str, change: Future[None], earlier: Future[None] | None) -> None:
        """Let those go on that wait for *change*, once the one before it is over, too."""

        def end(_: Future[None] | None) -> None:
            with self._lock:
                if self._changes.get(session_id) is change:
                    del self._changes[session_id]
            change.set_result(None)

        if earlier is None:
            end(None)
        else:
            earlier.add_done_callback(end)


class Core:
    """What the operations of a runtime share. One per runtime; safe from any thread or loop."""

    def __init__(self, config: RuntimeConfig, gate_of: GateOf, store: SessionStore, bodies: Bodies) -> None:
        self.config = config
        self.gate_of = gate_of
        self.store = store
        self.bodies = bodies
        self.tickets = Tickets()
        self.order = CallOrder()
        self.approvals = Approvals(config.approve)
        self._lock = threading.Lock()
        self._resident: OrderedDict[str, SessionRecord] = OrderedDict()
        self._reported: OrderedDict[Hashable, None] = OrderedDict()

    # ---- records ----

    async def record(self, session_id: str, *, touch: bool = True) -> SessionRecord:
        """Return the session's record, renewing its idle clock and its place among the recently used.

        Raises `session_not_found` for an unknown, expired, evicted or closed session, or `store_unavailable`.
        """
        with store_errors():
            record = await self.store.get(session_id)
            now = self.config.clock()
            if record is not None and now - record.touched_at > self.config.idle_ttl:
                await self.store.delete(session_id)
                record = None
            if record is None:
                self.drop(session_id)
                raise session_not_found(session_id)
            if touch:
                await self.store.touch(session_id, now)
        if touch:
            await self.remember(record)
        return record

    async def create(self, record: SessionRecord, *, expect: int | None = None) -> None:
        """Put a new record, or a restored one over version *expect*; raises `session_exists` when the id is taken."""
        try:
            with store_errors():
                await self.store.put(record, expect=expect)
        except StoreConflict as error:
            message = f"a session {record.session_id!r} exists"
            raise SessionError(message, code="session_exists", session_id=record.session_id) from error
        await self.remember(record)

    async def commit(self, record: SessionRecord, active: Iterable[LoadedSkill]) -> SessionRecord:
        """Put the next version of *record* holding *active*. Raises StoreConflict when it was overtaken."""
        return await self._put(record, record.with_active(tuple(active), self.config.clock()))

    async def commit_shown(self, record: SessionRecord, **shown: tuple[str, ...]) -> SessionRecord:
        """Put the next version of *record* with another `listed` or `located`. Raises StoreConflict when it was overtaken."""
        return await self._put(record, record.following(self.config.clock(), **shown))

    async def _put(self, record: SessionRecord, following: SessionRecord) -> SessionRecord:
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
        if isinstance(self.store, MemoryStore):  # a durable store keeps sessions this process evicts from memory
            for session_id in evicted:
                await self.store.delete(session_id)
                self.tickets.session_closed(session_id, session_not_found(session_id))

    def resident(self, session_id: str) -> SessionRecord | None:
        """Return this process's copy of the record, without asking the store."""
        with self._lock:
            return self._resident.get(session_id)

    def drop(self, session_id: str) -> None:
        """Forget the resident copy and what was approved for the session."""
        with self._lock:
            self._resident.pop(session_id, None)
        self.approvals.forget(session_id)

    def first_time(self, fact: Hashable) -> bool:
        """Whether *fact* was never reported before; the last 4,096 facts are remembered."""
        with self._lock:
            repeated = fact in self._reported
            self._reported[fact] = None
            self._reported.move_to_end(fact)
            while len(self._reported) > MAX_REPORTED:
                self._reported.popitem(last=False)
        return not repeated

    # ---- the gate ----

    def resolve(self, record: SessionRecord, scope: TurnScope, gate: Gate, ref: str, loader: By) -> Granted | Refused:
        """Resolve *ref*; under a turn's frozen view a skill that was removed since is refused as well."""
        grant = gate.resolve(ref, by=loader)
        if isinstance(grant, Refused) or scope.view is None:
            return grant
        laid_over = scope.subsystem
        live = laid_over.view(record.consumer, scope.view.tools) if laid_over else self.gate_of(record.consumer)
        live_grant = live.resolve(grant.full_id, by="code")
        if isinstance(live_grant, Refused) and live_grant.code in {"unknown_skill", "skill_invalid"}:
            return Refused(live_grant.code, live_grant.reason, ref, grant.full_id)
        return grant

    async def gated_session(self, call: Call, *, touch: bool = True) -> GatedSession:
        """Return the session checked against its gate; skills no longer granted are unloaded first."""
        # Another call may commit between our read and our write; then everything is judged again from its record.
        for _ in range(TRIES):
            record = await self.record(call.session_id, touch=touch)
            gate = call.scope.view or self.gate_of(record.consumer)
            skills: dict[str, Skill] = {}
            entries: list[LoadedSkill] = []
            refusals: list[Refused] = []
            for entry in record.active:
                grant = self.resolve(record, call.scope, gate, entry.id, loader_of(entry))
                if isinstance(grant, Granted) and not _is_as_loaded(entry, grant):
                    grant = Refused("skill_changed", "another text of the user's was loaded", entry.id, entry.id)
                if isinstance(grant, Refused):
                    refusals.append(grant)
                    continue
                closure = {skill.full_id: skill for skill in grant.closure}
                skills |= closure
                entries.append(replace(entry, imports=tuple(item for item in entry.imports if item.id in closure)))
            if not refusals:
                return GatedSession(replace(record, active=tuple(entries)), gate, skills)
            try:
                await self.commit(record, without(record.active, {item.full_id or item.ref for item in refusals}))
            except StoreConflict:
                continue
            for item in refusals:
                self.emit(call, "skill.pruned", id=item.full_id or item.ref, code=item.code)
        raise conflict(call.session_id)

    def granted(self, call: Call, session: GatedSession, refs: Iterable[str], loader: By) -> list[Granted]:
        """Return the grants of *refs*, each skill once; raises `skill_not_found` naming every ref that was refused."""
        grants: dict[str, Granted] = {}
        refusals: list[Refused] = []
        refused_refs: list[str] = []
        for ref in refs:
            grant = self.resolve(session.record, call.scope, session.gate, ref, loader)
            if isinstance(grant, Refused):
                refusals.append(grant)
                refused_refs.append(ref)
            else:
                grants.setdefault(grant.full_id, grant)
        if refusals:
            for item in refusals:
                self.emit(call, "skill.refused", ref=item.ref, code=item.code)
            raise not_found(refused_refs, session.gate.names, tuple(refusals))
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
        """Ask the policy plugins; raises `skill_denied` with the Denial's public text."""
        if self.config.deny is None:
            return
        tool = {"load": "skills.load", "read": "skills.read", "run": "skills.run_script"}.get(kind)
        digest = arguments_digest(arguments)
        scope = call.scope
        request = AccessRequest(
            kind, record.consumer, call.session_id, skill.full_id, path, tool, digest, scope.user, scope.deps
        )
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
        cached = self.bodies.cached_body(digest)
        if cached is not None:
            return cached
        with store_errors():
            raw = await self.store.get_body(digest)
        if raw is not None:
            return self.bodies.keep(parsed(raw.encode("utf-8"), skill, "SKILL.md", ""))
        try:
            current = await self.bodies.current(skill)
        except ToolCallRefused:  # the file is gone or broken now, so no text has this digest any more
            return None
        return self.bodies.keep(current) if current.digest == digest else None

    # ---- budgets and events ----

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


def session_not_found(session_id: str) -> SessionError:
    """Build `session_not_found`: unknown, expired, evicted and closed sessions read the same."""
    return SessionError(f"there is no session {session_id!r}", code="session_not_found", session_id=session_id)


def conflict(session_id: str) -> SessionError:
    """Build `conflict`."""
    message = f"session {session_id!r} was changed by others {TRIES} times in a row; try again"
    return SessionError(message, code="conflict", session_id=session_id)


def checked_id(session_id: str | None) -> str:
    """Return the caller's id, or a new UUIDv7; raises `invalid_argument` for a malformed one."""
    if session_id is None:
        return uuid7()
    if not _SESSION_ID.fullmatch(session_id):
        raise invalid("a session id has 1 to 128 of A-Z a-z 0-9 . _ : -", ("/session_id", "malformed"))
    return session_id


def uuid7() -> str:
    """Return a UUIDv7: 48 bits of milliseconds, then random bits; ids sort by time."""
    moment, random = time.time_ns() // 1_000_000, int.from_bytes(os.urandom(10), "big")
    fixed = (0xF << 76) | (0b11 << 62)  # the bits of version and variant
    return str(uuid.UUID(int=(moment << 80 | random) & ~fixed | (0x7 << 76) | (0b10 << 62)))


def _is_as_loaded(entry: LoadedSkill, grant: Granted) -> bool:
    """Whether what a user brings along is what was loaded: in one session, users may have different skills of one id."""
    loaded = {entry.id: entry.digest, **{item.id: item.digest for item in entry.imports}}
    overlay_skills = [skill for skill in grant.closure if skill.layer == "overlay"]
    return all(loaded.get(skill.full_id, skill.digest) == skill.digest for skill in overlay_skills)


def loader_of(entry: LoadedSkill) -> By:
    """Return who loaded *entry*, as the argument of the gate."""
    loader = entry.loaded_by
    return "user" if loader == "user" else "code" if loader == "code" else "model"
