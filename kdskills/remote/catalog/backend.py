"""`client.catalog`: brings a catalog to the model, and reports what became of it.

Where no strategy reaches the model's tools, the catalog's text goes beside a message: once per change, and again after a
compaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kdskills.remote.catalog.changes import Changes, NotApplied, StartPlan, lint, start_plan, strategy_of_old
from kdskills.remote.catalog.digest import difference, fingerprints, flat_tools, text_digest, tools_digest
from kdskills.remote.catalog.store import POLL_SECONDS, CatalogRecord, CatalogRecords, CatalogStore, Sharing
from kdskills.remote.ports import AppServerGone, CatalogChange, CatalogContext, JsonObject, ServerProfile

if TYPE_CHECKING:
    from kdskills.remote.client.server import AppServer
    from kdskills.remote.client.threads import WatchedThreads


CONTEXT_KEY = "kdskills"
REPLACES = "This catalog replaces every earlier one."


def escaped(text: str) -> str:
    r"""Return the text with `</` as `<\/`: the server writes it unescaped between `<kdskills>` and `</kdskills>`."""
    return text.replace("</", "<\\/")


def context_text(instruction_text: str, *, earlier: bool) -> str | None:
    """Return what the channel must carry now, or None when there is nothing to say.

    Args:
        instruction_text: The catalog; empty for none.
        earlier: Whether the model has seen an earlier catalog, which this one replaces.
    """
    return "\n".join(filter(None, [REPLACES if earlier else "", instruction_text])) or None


def additional_context(text: str) -> JsonObject:
    """Return the `additionalContext` of `turn/start`."""
    return {CONTEXT_KEY: {"kind": "application", "value": escaped(text)}}


@dataclass(slots=True)
class _ChannelState:
    """The state of one thread's channel in this process."""

    offered: tuple[JsonObject, str] | None = None  # the context returned last by `next`, and its digest
    compactions: int = 0  # how often the history had been compacted when the context was sent
    lost: bool = False  # the context is gone from the history
    settling: asyncio.Task[None] | None = None  # work after the last turn that must end before the next message


class ContextChannel:
    """Decides which context the next message carries, and records which one the server accepted.

    Args:
        threads: The watched threads, whose histories may be compacted.
        records: Stores the digest of the text sent last.
    """

    def __init__(self, threads: WatchedThreads, records: CatalogRecords) -> None:
        self._threads = threads
        self._records = records
        self._states: defaultdict[str, _ChannelState] = defaultdict(_ChannelState)

    async def next(self, record: CatalogRecord, instruction_text: str) -> JsonObject:
        """Return keywords of the next message: `additional_context`, or nothing when the model has seen this text."""
        session_id = record.session_id
        state, digest = self._states[session_id], text_digest(instruction_text)
        lost = state.lost or self._threads.get(session_id).compactions != state.compactions
        unchanged = record.context_digest == digest
        if unchanged and not lost:
            return {}
        text = context_text(instruction_text, earlier=bool(record.context_digest) and not (lost and unchanged))
        if text is None:
            return {}
        context = additional_context(text)
        state.offered = (context[CONTEXT_KEY], digest)
        return {"additional_context": context}

    async def sent(self, session_id: str, context: object) -> None:
        """Record that the server accepted a message with this `additionalContext`."""
        state = self._states[session_id]
        if state.offered is None or not isinstance(context, dict) or context.get(CONTEXT_KEY) != state.offered[0]:
            return
        digest, state.offered, state.lost = state.offered[1], None, False
        state.compactions = self._threads.get(session_id).compactions
        await self._records.update(session_id, lambda record: replace(record, context_digest=digest))

    def lost(self, session_id: str) -> None:
        """Record that turns were rolled back: the context they carried is no longer in the history."""
        self._states[session_id].lost = True

    def settling(self, session_id: str, task: asyncio.Task[None]) -> None:
        """Remember a task that must end before the next message of a session."""
        self._states[session_id].settling = task

    async def settled(self, session_id: str) -> None:
        """Wait until the work after the last turn has ended."""
        task = self._states[session_id].settling
        if task is not None and not task.done():
            await asyncio.wait({task})

    def forget(self, session_id: str) -> None:
        """Delete the state of a closed session."""
        self._states.pop(session_id, None)


_DEFERRED = frozenset({"turn_active", "queued_turns", "held_open", "changed_underneath"})
_RETRIES = 3
_MIN_SECONDS = 2.0  # the least time a change gets, even when its caller's time is up


@dataclass(slots=True)
class _SessionState:
    """What this process knows of one thread's catalog."""

    lock: asyncio.Lock
    pending_change: CatalogChange | None = None  # deferred: applied by itself when the turn ends
    successor: str | None = None  # the thread that replaced this one
    verified: bool = False  # whether this process made the stored record, or compared it with the thread's file


class CodexCatalog:
    """The catalog backend of a client.

    Attributes:
        channel: The context texts that were sent to each thread's model.
        sharing: Releases threads that another worker needs to reload.

    Args:
        server: The server.
        profile: What the probe proved of the server.
        store: Stores the catalog record of each thread.
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
        self._profile = profile
        self._records = CatalogRecords(store)
        self.channel = ContextChannel(server.threads, self._records)
        self.sharing = Sharing(server, self._records)
        self._calls_running = calls_running
        self._bootstrap = bootstrap
        self._sessions: dict[str, _SessionState] = {}

    def trust(self, profile: ServerProfile) -> None:
        """Use the profile of a newer probe from now on."""
        self._profile = profile

    @property
    def _changes(self) -> Changes:
        return Changes(self._server, self._profile, bootstrap=self._bootstrap)

    async def apply(self, change: CatalogChange) -> JsonObject:
        """Apply a change and return the report; `deferred` and `failed` are reports, not errors.

        When a successor thread replaced this one, the change is applied to the successor, and the report names it.

        Raises:
            CatalogError: The server would drop, refuse or shadow one of the tools.
            AppServerGone: The server cannot be reached.
        """
        newest = self._newest(change.session_id)
        if newest != change.session_id:
            report = await self.apply(replace(change, session_id=newest))
            return {"new_session_id": newest, **report, "sessionId": change.session_id}
        session = self._session(change.session_id)
        session.pending_change = None
        tools = flat_tools(change.tools)
        record = await self._records.get(change.session_id)
        if not tools and not record.digest:
            return {"status": "noop", "sessionId": change.session_id}
        lint(tools, self._profile)
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
                    **await self._in_force_report(change.session_id, began),
                    "reason": problem.reason,
                    **({"pending": pending} if deferred else {}),
                    **({"error": problem.error} if problem.error else {}),
                }

    async def context_for(self, session_id: str, tools: Sequence[JsonObject], instruction_text: str) -> CatalogContext:
        """Return how the catalog travels with the next message.

        A catalog that is not in force is not described to the model either.
        """
        await self.channel.settled(session_id)
        if not await self.in_force(session_id, tools_digest(tools)):
            return CatalogContext({}, inject=False, current=False)
        if not self._profile.context:
            return CatalogContext({}, inject=bool(instruction_text), current=True)
        send = await self.channel.next(await self._records.get(session_id), instruction_text)
        return CatalogContext(send, inject=False, current=True)

    async def in_force(self, session_id: str, digest: str) -> bool:
        """Return whether this is the digest of the catalog in force; no catalog counts as the empty one."""
        record = await self._records.get(session_id)
        return (record.digest or tools_digest([])) == digest and await self._is_verified(record)

    async def _is_verified(self, record: CatalogRecord) -> bool:
        """Compare the stored record with the thread's file, once: a worker may have died after writing only one."""
        session = self._session(record.session_id)
        if not session.verified:
            differs = record.strategy == "reload" and await self._changes.holds_other(record.session_id, record.digest)
            session.verified = not differs
        return session.verified

    async def facts(self, session_id: str) -> JsonObject:
        """Return the facts about the catalog that a receipt contains.

        The keys are `strategy strategy_asked digest context_digest tools`.
        """
        record = await self._records.get(session_id)
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
        self.channel.forget(session_id)
        await self._records.forget(session_id)

    def plan_start(self, tools: Sequence[JsonObject] | None, *, ephemeral: bool) -> StartPlan:
        """Decide what a new thread starts with."""
        preference = self._server.options.strategy
        return start_plan(tools, self._profile, preference, local=self._server.local, ephemeral=ephemeral)

    async def started(self, session_id: str, plan: StartPlan) -> None:
        """Store the catalog a new thread was started with."""

        def change(record: CatalogRecord) -> CatalogRecord:
            digest = tools_digest(plan.tools) if plan.tools else ""
            return replace(record, strategy=plan.strategy, digest=digest, tools=fingerprints(plan.tools))

        await self._records.update(session_id, change)
        self._session(session_id).verified = True

    @contextlib.asynccontextmanager
    async def gate(self, session_id: str) -> AsyncIterator[None]:
        """Delay a message while the thread's catalog is being changed, by this worker or another."""
        async with self._session(session_id).lock:
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
        async with self._session(session_id).lock:
            record = await self._records.get(session_id)
            digest, marks = tools_digest(tools), fingerprints(tools)
            unchanged = record.digest == digest and await self._is_verified(record)
            if unchanged or (not record.digest and not tools):
                return {"status": "noop", **await self._in_force_report(session_id, began)}
            strategy = record.strategy or await self._strategy_of_old(session_id)
            await self._refuse_busy(session_id)
            async with self.sharing.releasing(session_id) if strategy == "reload" else contextlib.nullcontext():
                outcome = await self._changes.make(strategy, session_id, tools)
            added, removed = difference(record.tools, marks)
            changed = {"added": added, "removed": removed, **outcome}
            report = {**_report(session_id, strategy, digest, began), **changed}
            target = outcome.get("new_session_id", session_id)
            if target != session_id:
                self._session(session_id).successor = target
            await self._records.update(target, lambda old: replace(old, strategy=strategy, digest=digest, tools=marks))
            self._session(target).verified = True
            return report

    async def _in_force_report(self, session_id: str, began: float) -> JsonObject:
        record = await self._records.get(session_id)
        return (
            _report(session_id, record.strategy, record.digest, began) if record.digest else {"sessionId": session_id}
        )

    async def _strategy_of_old(self, session_id: str) -> str:
        if await self._changes.has_dispatcher(session_id):
            return "dispatcher"
        options, local = self._server.options, self._server.local
        strategy = strategy_of_old(self._profile, options.strategy, local=local, successor=options.allow_successor)
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

    def _newest(self, session_id: str) -> str:
        """Follow the chain of successors of a thread and return the last one, or the thread itself."""
        while session_id in self._sessions and (successor := self._sessions[session_id].successor) is not None:
            session_id = successor
        return session_id

    def _session(self, session_id: str) -> _SessionState:
        if session_id not in self._sessions:
            self._sessions[session_id] = _SessionState(asyncio.Lock())
        return self._sessions[session_id]


def _report(session_id: str, strategy: str, digest: str, began: float) -> JsonObject:
    """Return the entries every report has: the catalog in force, and that nothing changed."""
    return {
        "sessionId": session_id,
        "strategy": strategy,
        "digest": digest,
        "verified": True,
        "added": [],
        "removed": [],
        "duration_ms": round((time.monotonic() - began) * 1000, 3),
        "materialized_now": False,
    }
