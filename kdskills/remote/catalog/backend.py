"""`client.catalog`: brings a catalog to the model, and reports what became of it.

Where no strategy reaches the model's tools, the catalog's text goes beside a message: once per change, and again after a
compaction. Workers that share the stored records of threads release threads for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from kdskills.errors import Conflict
from kdskills.remote.catalog.changes import Changes, NotApplied, StartPlan, lint, start_plan, strategy_of_old
from kdskills.remote.journal.sql import JournalUnavailable
from kdskills.remote.names import DISPATCHER_TOOL, difference, fingerprints, flat_tools, text_digest, tools_digest
from kdskills.remote.ports import (
    AppServerError,
    AppServerGone,
    CatalogChange,
    CatalogContext,
    JsonObject,
    ServerProfile,
    WaitTimeoutError,
)
from kdskills.storage.database import upsert

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.remote.client.server import AppServer


Release = Literal["", "releasing", "applied"]


@dataclass(frozen=True, slots=True)
class CatalogRecord:
    """One thread's catalog; a digest is empty where there is none."""

    session_id: str
    strategy: str = ""  # how the catalog reaches the model; empty while none was needed
    digest: str = ""  # of the catalog in force
    tools: dict[str, str] = field(default_factory=dict)  # digest of each tool in force by qualified name
    context_digest: str = ""  # of the catalog text the model has seen last
    release: Release = ""  # `releasing` while a worker asks the others to release the thread, then `applied`
    release_by: str = ""  # the worker that asked
    version: int = 0  # counts changes; a record is written only over the version it was read at


class MemoryCatalogStore:
    """Records of this process; as those of `SqlCatalogStore`, its methods are called from threads."""

    shared = False  # other workers do not see them

    def __init__(self) -> None:
        self._records: dict[str, CatalogRecord] = {}
        self._lock = threading.Lock()

    def get(self, session_id: str) -> CatalogRecord:
        """Return a thread's record, an empty one when none is stored."""
        return self._records.get(session_id) or CatalogRecord(session_id)

    def update(self, session_id: str, change: Callable[[CatalogRecord], CatalogRecord]) -> CatalogRecord:
        """Apply a change to the newest version and return what was written."""
        with self._lock:
            old = self.get(session_id)
            self._records[session_id] = new = replace(change(old), version=old.version + 1)
            return new

    def forget(self, session_id: str) -> None:
        """Drop a thread's record."""
        with self._lock:
            self._records.pop(session_id, None)

    def releases(self, session_ids: Sequence[str]) -> list[CatalogRecord]:
        """Return the records of those threads that are being released, or were."""
        return [record for key in session_ids if (record := self.get(key)).release]


_TRIES = 20


class SqlCatalogStore:
    """Records in table `remote_catalogs` of a journal's *engine*, whose schema is up to date."""

    shared = True

    def __init__(self, engine: sa.Engine) -> None:
        from kdskills.remote.journal.statements import catalogs

        self._engine = engine
        self._table = catalogs

    def get(self, session_id: str) -> CatalogRecord:
        """As `MemoryCatalogStore.get`."""
        return next(iter(self._find(self._table.c.session_id == session_id)), CatalogRecord(session_id))

    def update(self, session_id: str, change: Callable[[CatalogRecord], CatalogRecord]) -> CatalogRecord:
        """As `MemoryCatalogStore.update`, by compare-and-swap. Raises Conflict when others win at every attempt."""
        columns = self._table.c
        for _ in range(_TRIES):
            old = self.get(session_id)
            new = replace(change(old), session_id=session_id, version=old.version + 1)
            facts = {"tools": json.dumps(new.tools, sort_keys=True), "updated_at": int(time.time() * 1_000_000)}
            if old.version:
                same_version = (columns.session_id == session_id, columns.version == old.version)
                write: Any = self._table.update().where(*same_version)
            else:
                write = upsert(self._engine.dialect.name, self._table).on_conflict_do_nothing()
            with self._transaction() as link:
                if link.execute(write.values(**asdict(new) | facts).returning(columns.version)).first() is not None:
                    return new
        raise Conflict(f"other workers keep changing the catalog record of {session_id}", session_id=session_id)

    def forget(self, session_id: str) -> None:
        """Drop a thread's record."""
        with self._transaction() as link:
            link.execute(self._table.delete().where(self._table.c.session_id == session_id))

    def releases(self, session_ids: Sequence[str]) -> list[CatalogRecord]:
        """Return those of these threads that are being released, or were."""
        return self._find(self._table.c.session_id.in_(session_ids), self._table.c.release != "") if session_ids else []

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with self._engine.begin() as link:
                yield link
        except SQLAlchemyError as problem:
            raise JournalUnavailable(f"the catalog records do not answer: {type(problem).__name__}") from problem

    def _find(self, *conditions: Any) -> list[CatalogRecord]:
        columns = [self._table.c[name.name] for name in fields(CatalogRecord)]
        with self._transaction() as link:
            rows = link.execute(self._table.select().with_only_columns(*columns).where(*conditions)).mappings().all()
        return [CatalogRecord(**{**row, "tools": json.loads(row["tools"])}) for row in rows]


CatalogStore = MemoryCatalogStore | SqlCatalogStore


POLL_SECONDS = 0.25
FREE_SECONDS = 30.0
"""How long a thread stays released for the worker that requested it; a worker that takes longer counts as dead."""


class Sharing:
    """One worker's part in sharing threads: what it asks of others, and they of it, is in the stored records."""

    def __init__(self, server: AppServer, store: CatalogStore) -> None:
        self._server = server
        self._store = store
        self._owner = secrets.token_hex(6)
        self._released: set[str] = set()
        self._request_times: dict[str, tuple[int, float]] = {}

    async def watch(self) -> None:
        """Release idle threads that others request, and resume them afterwards; runs until the client closes."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            # a failed look is repeated after the next pause
            with contextlib.suppress(AppServerGone, AppServerError, WaitTimeoutError, JournalUnavailable):
                await self._look()

    async def free(self, session_id: str) -> None:
        """Wait until a thread that this worker released is resumed, for `FREE_SECONDS` at most."""
        threads = self._server.threads
        await threads.until(lambda: session_id not in self._released or self._server.disconnected, FREE_SECONDS)

    @contextlib.asynccontextmanager
    async def releasing(self, session_id: str) -> AsyncIterator[None]:
        """Have the other workers release a thread for the body of the `with`."""
        if not self._store.shared:
            yield
            return

        def mark(word: Release) -> Awaitable[CatalogRecord]:
            mine = partial(replace, release=word, release_by=self._owner)
            return asyncio.to_thread(self._store.update, session_id, mine)

        await mark("releasing")
        try:
            yield
        finally:
            await mark("applied")

    async def _look(self) -> None:
        threads = [thread for thread in self._server.threads.all() if thread.subscribed or thread.id in self._released]
        if not threads or self._server.disconnected:
            return
        records = await asyncio.to_thread(self._store.releases, [thread.id for thread in threads])
        requested_ids = {record.session_id for record in records if self._asks(record)}
        for thread in threads:
            if thread.id in requested_ids and thread.subscribed and thread.active_turn is None:
                self._released.add(thread.id)
                await self._server.request("thread/unsubscribe", threadId=thread.id)
                thread.subscribed = False
            elif thread.id in self._released and thread.id not in requested_ids:
                await self._server.resume(thread.id)
                self._released.discard(thread.id)
                self._server.threads.changed()

    def _asks(self, record: CatalogRecord) -> bool:
        """Whether another worker requests the thread; one that did so long ago and did not finish counts as dead."""
        if record.release != "releasing" or record.release_by == self._owner:
            return False
        version, since = self._request_times.get(record.session_id, (0, 0.0))
        if version != record.version:
            since = time.monotonic()
            self._request_times[record.session_id] = (record.version, since)
        return time.monotonic() - since < FREE_SECONDS


CONTEXT_KEY = "kdskills"
REPLACES = "This catalog replaces every earlier one."


def context_text(instruction_text: str, *, earlier: bool) -> str | None:
    """Return what the channel must carry now, or None; *earlier*: the model has seen a catalog this one replaces."""
    return "\n".join(filter(None, [REPLACES if earlier else "", instruction_text])) or None


def additional_context(text: str) -> JsonObject:
    r"""Return the `additionalContext` of `turn/start`; `</` becomes `<\/`, since the server escapes nothing."""
    return {CONTEXT_KEY: {"kind": "application", "value": text.replace("</", "<\\/")}}


_DEFERRED = frozenset({"turn_active", "queued_turns", "held_open", "changed_underneath"})
_RETRIES = 3
_MIN_SECONDS = 2.0  # the least time a change gets, even when its caller's time is up


@dataclass(slots=True)
class _SessionState:
    """What this process knows of one thread's catalog."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    pending_change: CatalogChange | None = None  # deferred: applied by itself when the turn ends
    successor: str | None = None  # the thread that replaced this one
    verified: bool = False  # whether this process made the stored record, or compared it with the thread's file
    offered: tuple[JsonObject, str] | None = None  # the context for the next message, and its digest
    compactions: int = 0  # how often the history had been compacted when the context was sent
    context_lost: bool = False  # the context is gone from the history
    settling: asyncio.Task[None] | None = None  # work after the last turn that must end before the next message


class CodexCatalog:
    """The catalog backend of a client; its `sharing` releases threads that another worker needs to reload.

    Args:
        calls_running: Returns whether a journalled call of a thread runs now, in any worker; may block.
        bootstrap: Makes the server write a thread's rollout file, by a turn that is rolled back.
    """

    def __init__(
        self,
        server: AppServer,
        profile: ServerProfile,
        store: CatalogStore,
        *,
        calls_running: Callable[[str], bool],
        bootstrap: Callable[[str], Awaitable[None]],
    ) -> None:
        self._server = server
        self._changes = Changes(server, profile, bootstrap)
        self._store = store
        self.sharing = Sharing(server, store)
        self._calls_running = calls_running
        self._sessions: defaultdict[str, _SessionState] = defaultdict(_SessionState)

    def trust(self, profile: ServerProfile) -> None:
        """Use the profile of a newer probe from now on."""
        self._changes.profile = profile

    async def apply(self, change: CatalogChange) -> JsonObject:
        """Apply a change and return the report; `deferred` and `failed` are reports, not errors.

        When a successor thread replaced this one, the change is applied to the successor, and the report names it.

        Raises:
            CatalogError: The server would drop, refuse or shadow one of the tools.
            AppServerGone: The server cannot be reached.
        """
        newest = change.session_id
        while newest in self._sessions and (successor := self._sessions[newest].successor) is not None:
            newest = successor
        if newest != change.session_id:
            report = await self.apply(replace(change, session_id=newest))
            return {"new_session_id": newest, **report, "sessionId": change.session_id}
        session = self._sessions[change.session_id]
        session.pending_change = None
        tools = flat_tools(change.tools)
        record = await asyncio.to_thread(self._store.get, change.session_id)
        if not tools and not record.digest:
            return {"status": "noop", "sessionId": change.session_id}
        lint(tools, self._changes.profile)
        began = time.monotonic()
        end = began + change.timeout_s
        tries = 0
        while True:
            tries += 1
            try:
                if session.lock.locked() or not await self.in_force(change.session_id, tools_digest(tools)):
                    await self._refuse_busy(change.session_id)
                return await self._bounded(change, tools, end)
            except NotApplied as problem:
                seconds_left = end - time.monotonic()
                busy = problem.reason in ("turn_active", "queued_turns")
                retry = busy or (problem.reason == "changed_underneath" and tries < _RETRIES)
                if change.wait and retry and seconds_left > 0:
                    await self._until_idle(change.session_id, min(seconds_left, POLL_SECONDS))
                    continue
                pending = problem.goes_on
                if busy and not change.wait:
                    session.pending_change, pending = change, True
                    later = self._when_idle(session, change)
                    self._server.spawn_task(later, f"kdskills-catalog-later-{change.session_id}")
                deferred = problem.reason in _DEFERRED
                return {
                    "status": "deferred" if deferred else "failed",
                    **_report(await asyncio.to_thread(self._store.get, change.session_id), began),
                    "reason": problem.reason,
                    **({"pending": pending} if deferred else {}),
                    **({"error": problem.error} if problem.error else {}),
                }

    async def context_for(self, session_id: str, tools: Sequence[JsonObject], instruction_text: str) -> CatalogContext:
        """Return how the catalog travels with the next message: as its context, unless the model has seen this text.

        A catalog that is not in force is not described to the model either.
        """
        state = self._sessions[session_id]
        if state.settling is not None and not state.settling.done():
            await asyncio.wait({state.settling})
        if not await self.in_force(session_id, tools_digest(tools)):
            return CatalogContext({}, inject=False, current=False)
        if not self._changes.profile.context:
            return CatalogContext({}, inject=bool(instruction_text), current=True)
        seen_digest, digest = (
            (await asyncio.to_thread(self._store.get, session_id)).context_digest,
            text_digest(instruction_text),
        )
        lost = state.context_lost or self._server.threads.get(session_id).compactions != state.compactions
        send: JsonObject = {}
        if seen_digest != digest or lost:
            text = context_text(instruction_text, earlier=bool(seen_digest) and not (lost and seen_digest == digest))
            if text is not None:
                send = {"additional_context": additional_context(text)}
                state.offered = (send["additional_context"][CONTEXT_KEY], digest)
        return CatalogContext(send, inject=False, current=True)

    async def context_sent(self, session_id: str, context: object) -> None:
        """Record that the server accepted a message with this `additionalContext`."""
        state = self._sessions[session_id]
        if state.offered is None or not isinstance(context, dict) or context.get(CONTEXT_KEY) != state.offered[0]:
            return
        digest, state.offered, state.context_lost = state.offered[1], None, False
        state.compactions = self._server.threads.get(session_id).compactions
        await asyncio.to_thread(self._store.update, session_id, partial(replace, context_digest=digest))

    def context_lost(self, session_id: str) -> None:
        """Record that turns were rolled back: the context they carried is no longer in the history."""
        self._sessions[session_id].context_lost = True

    def settling(self, session_id: str, task: asyncio.Task[None]) -> None:
        """Remember a task that must end before the next message of a session."""
        self._sessions[session_id].settling = task

    async def in_force(self, session_id: str, digest: str) -> bool:
        """Return whether this is the digest of the catalog in force; no catalog counts as the empty one."""
        record = await asyncio.to_thread(self._store.get, session_id)
        return (record.digest or tools_digest([])) == digest and await self._is_verified(record)

    async def _is_verified(self, record: CatalogRecord) -> bool:
        """Compare the stored record with the thread's file, once: a worker may have died after writing only one."""
        session = self._sessions[record.session_id]
        if not session.verified:
            filed = None
            if (
                record.strategy == "reload" and self._changes.profile.namespaces
            ):  # else a file's digest is another anyway
                filed = await self._changes.filed_tools(record.session_id)
            session.verified = filed is None or tools_digest(filed) == record.digest
        return session.verified

    async def facts(self, session_id: str) -> JsonObject:
        """Return what a receipt contains of the catalog: `strategy strategy_asked digest context_digest tools`."""
        record = await asyncio.to_thread(self._store.get, session_id)
        return {
            "strategy": record.strategy or None,
            "strategy_asked": self._server.options.strategy,
            "digest": record.digest or None,
            "context_digest": record.context_digest or None,
            "tools": sorted(record.tools),
        }

    async def forget(self, session_id: str) -> None:
        """Delete everything stored about a closed session."""
        self._sessions.pop(session_id, None)
        for state in self._sessions.values():
            state.successor = None if state.successor == session_id else state.successor
        await asyncio.to_thread(self._store.forget, session_id)

    def plan_start(self, tools: Sequence[JsonObject] | None, *, ephemeral: bool) -> StartPlan:
        """Decide what a new thread starts with."""
        preference = self._server.options.strategy
        return start_plan(tools, self._changes.profile, preference, local=self._server.local, ephemeral=ephemeral)

    async def started(self, session_id: str, plan: StartPlan) -> None:
        """Store the catalog a new thread was started with."""
        digest = tools_digest(plan.tools) if plan.tools else ""
        change = partial(replace, strategy=plan.strategy, digest=digest, tools=fingerprints(plan.tools))
        await asyncio.to_thread(self._store.update, session_id, change)
        self._sessions[session_id].verified = True

    @contextlib.asynccontextmanager
    async def gate(self, session_id: str) -> AsyncIterator[None]:
        """Delay a message while the thread's catalog is being changed, by this worker or another."""
        async with self._sessions[session_id].lock:
            await self.sharing.free(session_id)
            yield

    async def _bounded(self, change: CatalogChange, tools: list[JsonObject], end: float) -> JsonObject:
        # A change that began is finished even if its caller gives up: a half-done change would be worse.
        task = self._server.spawn_task(self._attempt(change, tools), f"kdskills-catalog-{change.session_id}")
        # Retrieves the error of a change whose caller gave up, so that asyncio does not warn; the next report has the facts.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.wait({task}, timeout=max(_MIN_SECONDS, end - time.monotonic()))
        if not task.done():
            raise NotApplied("held_open", f"not finished within {change.timeout_s:g} s", goes_on=True)
        return task.result()

    async def _attempt(self, change: CatalogChange, tools: list[JsonObject]) -> JsonObject:
        session_id, began = change.session_id, time.monotonic()
        async with self._sessions[session_id].lock:
            record = await asyncio.to_thread(self._store.get, session_id)
            digest, marks = tools_digest(tools), fingerprints(tools)
            unchanged = record.digest == digest and await self._is_verified(record)
            if unchanged or (not record.digest and not tools):
                return {"status": "noop", **_report(record, began)}
            strategy = record.strategy or await self._strategy_of_old(session_id)
            await self._refuse_busy(session_id)
            async with self.sharing.releasing(session_id) if strategy == "reload" else contextlib.nullcontext():
                outcome = await self._changes.make(strategy, session_id, tools)
            in_force = partial(replace, strategy=strategy, digest=digest, tools=marks)
            added, removed = difference(record.tools, marks)
            report = {**_report(in_force(record), began), "added": added, "removed": removed, **outcome}
            target = outcome.get("new_session_id", session_id)
            if target != session_id:
                self._sessions[session_id].successor = target
            await asyncio.to_thread(self._store.update, target, in_force)
            self._sessions[target].verified = True
            return report

    async def _strategy_of_old(self, session_id: str) -> str:
        """Return the strategy for a thread without a record, which may have been started with the dispatcher's tool."""
        filed = await self._changes.filed_tools(session_id) or []
        if any(tool.get("name") == DISPATCHER_TOOL for tool in filed):
            return "dispatcher"
        profile, options, local = self._changes.profile, self._server.options, self._server.local
        strategy = strategy_of_old(profile, options.strategy, local=local, successor=options.allow_successor)
        if strategy is None:
            raise NotApplied("no_strategy")
        return strategy

    async def _refuse_busy(self, session_id: str) -> None:
        if self._server.threads.get(session_id).active_turn is not None:
            raise NotApplied("turn_active")
        if await asyncio.to_thread(self._calls_running, session_id):
            raise NotApplied("turn_active", "a call of this thread still runs")

    async def _when_idle(self, session: _SessionState, change: CatalogChange) -> None:
        tools = flat_tools(change.tools)
        while session.pending_change is change and not self._server.disconnected:
            await self._until_idle(change.session_id, POLL_SECONDS)
            if session.pending_change is not change:
                return
            try:
                await self._attempt(change, tools)
            except NotApplied as problem:
                if problem.reason in ("turn_active", "queued_turns"):
                    continue
            except AppServerGone:
                return
            if session.pending_change is change:
                session.pending_change = None

    async def _until_idle(self, session_id: str, timeout_s: float) -> None:
        """Wait for the end of the running turn; without one, pause briefly because something else blocks the change."""
        thread = self._server.threads.get(session_id)
        if thread.active_turn is None:
            await asyncio.sleep(min(timeout_s, POLL_SECONDS))
        else:
            await self._server.threads.until(lambda: thread.active_turn is None or self._server.disconnected, timeout_s)


def _report(record: CatalogRecord, began: float) -> JsonObject:
    """Return the entries every report has: the catalog in force, if there is one, and that nothing changed."""
    if not record.digest:
        return {"sessionId": record.session_id}
    return {
        "sessionId": record.session_id,
        "strategy": record.strategy,
        "digest": record.digest,
        "verified": True,
        "added": [],
        "removed": [],
        "duration_ms": round((time.monotonic() - began) * 1000, 3),
        "materialized_now": False,
    }
