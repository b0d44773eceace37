"""SkillRuntime and its sessions, asynchronous and blocking: the loaded skills of many conversations."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kdskills.errors import BadRequest, PolicyUnavailable, SessionError
from kdskills.session import loading, reading, scripts, snapshots, tools
from kdskills.session.bodies import Bodies
from kdskills.session.codes import invalid, not_found
from kdskills.session.config import (
    BodyIn,
    Budget,
    Clock,
    RuntimeConfig,
    RuntimeLimits,
    ScriptApproval,
    ScriptEnv,
    config_invalid,
    merged_interpreters,
    utc_now,
)
from kdskills.session.core import Call, Core, checked_id, session_not_found, store_errors
from kdskills.session.receipts import (
    ActiveSkill,
    LoadReceipt,
    PromptParts,
    ReadResult,
    ScriptResult,
    SkillReceipt,
    ToolReply,
    UnloadReceipt,
)
from kdskills.session.scope import NO_TURN, TurnScope
from kdskills.session.snapshots import SessionSnapshot
from kdskills.session.source import Gate, GateOf, Locations, SkillCatalog, Subsystem
from kdskills.session.store import MemoryStore, SessionHead, SessionRecord, SessionStore
from kdskills.session.threads import LoopThread
from kdskills.session.tools import Catalogs, instructions
from kdskills.skills.model import Skill, TokenCounter, estimate_tokens

if TYPE_CHECKING:
    from kdskills.environments.scripts import ScriptPackages
    from kdskills.execution import Executor
    from kdskills.execution.egress import Grants
    from kdskills.models import ToolSpec
    from kdskills.session.approval import Approver, Deny
    from kdskills.session.config import Budget
    from kdskills.session.receipts import Sink
    from kdskills.skills.selection import By, CatalogMode


class SyncFacade:
    """Calls the async methods of a runtime or session and waits.

    The loop's thread starts with the first call and ends with `aclose`, which ends what other threads are waiting for
    (`cancelled`). Inside a running loop every call is refused (`sync_in_loop`): it would block that loop.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._closings = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._target, name)
        if not inspect.iscoroutinefunction(method):
            return method

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._wait(method, args, kwargs)

        return call

    def _wait(self, method: Callable[..., Coroutine[Any, Any, Any]], args: Any, kwargs: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise BadRequest("this thread runs an event loop: await the method instead", code="sync_in_loop")
        closing = method.__name__ == "aclose"
        with self._lock:
            self._closings += closing
            loop = self._loop = self._loop or LoopThread("kdskills-sync", _closed)
        try:
            return loop.run(lambda: method(*args, **kwargs))
        finally:
            with self._lock:
                self._closings -= closing
                if closing and self._closings == 0 and self._loop is not None:  # the last of several closings at once
                    self._loop.stop(wait=False)
                    self._loop = None


def _closed(_why: str) -> SessionError:
    return SessionError("the runtime was closed", code="cancelled")


PAGE = 100


class SkillRuntime:
    """Keeps what each conversation has loaded and answers the four tools.

    Args:
        subsystem: Live policy and files; exactly one of this, a frozen *view* and a *catalog* that can change is given.
        consumer: Consumer of sessions that name none.
        max_active: Skills a session may have loaded; None: no cap.
        max_sessions: Sessions kept in memory.
        idle_ttl: How long an unused session lives, as a timedelta or seconds.
        run_scripts: Whether `skills.run_script` is offered; needs *executor*.
        profile: Name of the executor profile that scripts run under; None: the executor's default.
        interpreters: Further suffixes, `{".rb": ["ruby", "{path}"]}`.
        locations: How receipts and catalogs name places: `logical` (`skill://` URIs), `host` (paths of this host, which a
            model then reads) or `none`.
        body_in: Where bodies reach the model: in the `instructions`, or in the `result` of a load.
        store: Where sessions are kept; memory by default.
        approve: Asks a person whether a run is approved.
        script_approval: When scripts are asked about: `allow`, `ask` or `deny`.
        script_env: Secrets for the scripts of a skill.
        network: Hosts that scripts may reach, by namespace or full id of their skill, such as `{"public.pdf": ["pypi.org"]}`.
        deny: Asks the policy plugins before a load, read or run.
        events: Called with every `SessionEvent`.
        window: Tokens of the model's window, for budgets; None: unknown.
        listing: What catalogs list, for consumers whose rules do not say: `auto`, `all`, `names` or `search-only`.
        packages: Says which built packages a script gets; None: the sandbox's own alone.

    Raises BadRequest, `config_invalid`.
    """

    def __init__(
        self,
        *,
        subsystem: Subsystem | None = None,
        view: Gate | None = None,
        catalog: SkillCatalog | None = None,
        consumer: str = "solver.react.decision",
        max_active: int | None = 8,
        max_sessions: int = 4096,
        idle_ttl: timedelta | float = timedelta(hours=24),
        run_scripts: bool = False,
        executor: Executor | None = None,
        profile: str | None = None,
        interpreters: Mapping[str, Sequence[str]] | None = None,
        limits: RuntimeLimits | None = None,
        locations: Locations = "logical",
        body_in: BodyIn = "instructions",
        store: SessionStore | None = None,
        approve: Approver | None = None,
        script_approval: ScriptApproval = "allow",
        script_env: ScriptEnv | None = None,
        network: Grants | None = None,
        deny: Deny | None = None,
        events: Sink | None = None,
        clock: Clock | None = None,
        window: int | None = None,
        listing: CatalogMode = "auto",
        packages: ScriptPackages | None = None,
        count: TokenCounter = estimate_tokens,
    ) -> None:
        config = RuntimeConfig(
            consumer=consumer,
            max_active=max_active,
            max_sessions=max_sessions,
            idle_ttl=idle_ttl if isinstance(idle_ttl, timedelta) else timedelta(seconds=idle_ttl),
            run_scripts=run_scripts,
            executor=executor,
            profile=profile,
            interpreters=merged_interpreters(interpreters or {}),
            limits=limits or RuntimeLimits(),
            locations=locations,
            body_in=body_in,
            approve=approve,
            script_approval=script_approval,
            script_env=script_env,
            deny=deny,
            events=events,
            clock=clock or utc_now,
            listing=listing,
            packages=packages,
            budget=Budget.of(window),
            count=count,
            network=network or {},
        ).check()
        self.config, self._catalog, bodies = config, catalog, Bodies(config.limits.max_body_bytes)
        self.store: SessionStore = MemoryStore() if store is None else store
        self._core = Core(config, _gate_of(subsystem, view, catalog, consumer), self.store, bodies)
        self._catalogs = Catalogs()
        self.sync = SyncFacade(self)
        """The same methods, blocking; refuses inside a running loop."""

    # ---- sessions ----

    async def create_session(
        self,
        session_id: str | None = None,
        *,
        consumer: str | None = None,
        max_active: int | None = None,
        initial: Sequence[str] = (),
    ) -> Session:
        """Open a session; with *initial* skills loaded, or not at all. Raises `session_exists`, and as `load`."""
        if max_active is not None and max_active < 1:
            raise config_invalid("max_active must be at least 1")
        core, config = self._core, self.config
        new_id = checked_id(session_id)
        now = config.clock()
        cap = max_active if max_active is not None else config.max_active
        record = SessionRecord(new_id, consumer or config.consumer, 1, now, now, cap)
        core.gate_of(record.consumer)  # a frozen view refuses other consumers before anything exists
        with store_errors():  # an expired session of this id makes room for the new one
            stored = await self.store.get(new_id)
            if stored is not None and now - stored.touched_at > config.idle_ttl:
                await self.store.delete(new_id)
        await core.create(record)
        if initial:
            try:
                await loading.load(core, Call(new_id, NO_TURN), initial, "replace", "code")
            except BaseException:  # raised again: no session stays without its first skills
                await self.close_session(new_id)
                raise
        return Session(self, new_id, record.consumer)

    async def get_session(self, session_id: str) -> Session:
        """Return a session that exists, renewing its idle clock. Raises `session_not_found`."""
        record = await self._core.record(session_id)
        return Session(self, session_id, record.consumer)

    async def close_session(self, session_id: str) -> bool:
        """Close a session: True, then False. Loads on their way end with `session_not_found`."""
        self._core.tickets.session_closed(session_id, session_not_found(session_id))
        self._core.drop(session_id)
        with store_errors():
            return await self.store.delete(session_id)

    async def list_sessions(
        self, *, consumer: str | None = None, limit: int = PAGE, after: str | None = None
    ) -> list[SessionHead]:
        """Return heads sorted by id, without expired ones; *after* is the last id of the page before."""
        if limit < 1:
            raise invalid("limit must be at least 1", ("/limit", "must be at least 1"))
        oldest = self.config.clock() - self.config.idle_ttl
        heads: list[SessionHead] = []
        while len(heads) < limit:
            missing = limit - len(heads)
            with store_errors():
                page = await self.store.page(consumer=consumer, after=after, limit=missing)
            heads += [head for head in page if head.touched_at >= oldest]
            if len(page) < missing:
                break
            after = page[-1].session_id
        return heads

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop reading; sessions stay in the store."""
        self._core.bodies.close()

    async def snapshot(self, session_id: str, *, bodies: bool = True) -> SessionSnapshot:
        """Return the session as it is, without renewing its idle clock."""
        return await snapshots.snapshot(self._core, session_id, bodies)

    async def restore(
        self,
        snapshot: SessionSnapshot | Mapping[str, Any],
        *,
        consumer: str | None = None,
        session_id: str | None = None,
        overwrite: bool = False,
        by: By = "model",
    ) -> Session:
        """Bring a session back; what the gate refuses now is dropped (`restore_dropped`, `body_lost`).

        It must be of *consumer*, by default the runtime's own, and keeps its id unless *session_id* is given. *by* is what
        entries loaded by a person or by code may count for: say `code` (or `user`) only for snapshots that nobody else
        could edit; with `model`, skills no model may load are dropped.

        Raises:
            BadRequest: `snapshot_unsupported`; `snapshot_untrusted` for a snapshot of another consumer, or one whose
                texts are known neither to the store nor to the skill's file.
            SessionError: `session_exists`; *overwrite* replaces it.
        """
        parsed = snapshot if isinstance(snapshot, SessionSnapshot) else SessionSnapshot.from_json(snapshot)
        asked = consumer or self.config.consumer
        record = await snapshots.restore(
            self._core, parsed, consumer=asked, session_id=session_id, overwrite=overwrite, max_loader=by
        )
        return Session(self, record.session_id, record.consumer)

    # ---- skills ----

    async def load(
        self,
        session_id: str,
        names: Sequence[str],
        mode: str | None = "replace",
        *,
        by: By = "model",
        scope: TurnScope = NO_TURN,
    ) -> LoadReceipt:
        """Load skills, all or nothing."""
        return await loading.load(self._core, Call(session_id, scope), names, mode, by)

    async def unload(
        self,
        session_id: str,
        names: Sequence[str] = (),
        *,
        all: bool = False,  # noqa: A002 - the name of the tool's argument
        scope: TurnScope = NO_TURN,
    ) -> UnloadReceipt:
        """Unload skills; what is not loaded has no effect."""
        return await loading.unload(self._core, Call(session_id, scope), names, all)

    async def active(self, session_id: str, *, scope: TurnScope = NO_TURN) -> list[ActiveSkill]:
        """Return the loaded skills with their texts, in load order."""
        return await loading.active(self._core, Call(session_id, scope))

    async def refresh(self, session_id: str, *, scope: TurnScope = NO_TURN) -> LoadReceipt:
        """Read every loaded skill again, in the same order."""
        return await loading.refresh(self._core, Call(session_id, scope))

    async def describe(self, name: str, *, session_id: str | None = None, scope: TurnScope = NO_TURN) -> SkillReceipt:
        """Return the receipt of a visible skill, hashed afresh; without a session, for the runtime's consumer."""
        return await reading.describe(self._core, None if session_id is None else Call(session_id, scope), name)

    async def read(
        self,
        session_id: str,
        path: str,
        *,
        skill: str | None = None,
        encoding: str = "text",
        offset: int = 0,
        scope: TurnScope = NO_TURN,
    ) -> ReadResult:
        """Read a file of a loaded skill."""
        return await reading.read(self._core, Call(session_id, scope), path, skill, encoding, offset)

    async def run_script(
        self,
        session_id: str,
        path: str,
        *,
        skill: str | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        workdir: str = ".",
        timeout_s: float | None = None,
        stdin: bytes = b"",
        scope: TurnScope = NO_TURN,
    ) -> ScriptResult:
        """Run a script of a loaded skill in isolation."""
        seconds = self.config.limits.script_timeout_s if timeout_s is None else timeout_s
        run = scripts.Run(path, skill, tuple(args), dict(env or {}), workdir, seconds, stdin)
        return await scripts.run_script(self._core, Call(session_id, scope), run)

    async def instructions(
        self, session_id: str, *, request: str | None = None, budget: Budget | None = None, scope: TurnScope = NO_TURN
    ) -> PromptParts:
        """Return the top-level text of the next model call, part by part.

        Where not all skills fit the budget, those that fit *request*, what the user asks, are listed.
        """
        scope = replace(
            scope,
            request=scope.request if request is None else request,
            budget=scope.budget if budget is None else budget,
        )
        return await instructions(self._core, Call(session_id, scope), self._catalogs)

    async def call(
        self, session_id: str, tool: str, arguments: Mapping[str, Any] | str, *, scope: TurnScope = NO_TURN
    ) -> ToolReply:
        """Answer a tool call of a model; its mistakes are replies with `ok=False`, never raised."""
        return await tools.reply(self._core, Call(session_id, scope), tool, arguments)

    async def add_skill(self, skill: Skill) -> None:
        """Add a skill to the catalog. Raises `skill_already_exists`; only with `catalog=`."""
        self._mutable().add(skill)

    async def remove_skill(self, name: str) -> None:
        """Remove a skill from the catalog and from every session; adding it again revives nothing.

        Raises `skill_not_found`, and `config_invalid` without `catalog=`.
        """
        full_id = self._mutable().remove(name)
        self._core.tickets.skill_removed(full_id, not_found([name], ()))
        await loading.prune_everywhere(self._core, full_id)

    def tool_specs(
        self, session_id: str | None = None, *, style: str = "safe", scope: TurnScope = NO_TURN
    ) -> tuple[ToolSpec, ...]:
        """Return the tools to offer: none when nothing is visible or active. Does no I/O on the store."""
        record = self._core.resident(session_id) if session_id is not None else None
        gate = scope.view or self._core.gate_of(record.consumer if record else self.config.consumer)
        if not gate.names and not (record and record.active):
            return ()
        whole = self._catalogs.whole(self._core, Call(session_id or "", scope), gate)
        fits = whole is not None and whole.shown == whole.total
        names = tools.enumerated(gate, record, fits)
        loaded = tools.names_loaded(gate, record) if scope.brief else None
        return self._catalogs.specs(tools.offered(self._core, scope.tools, fits=fits), names, style, loaded)

    def _mutable(self) -> SkillCatalog:
        if self._catalog is None:
            raise config_invalid("skills can be added and removed only in a runtime built with catalog=")
        return self._catalog


def _gate_of(subsystem: Subsystem | None, view: Gate | None, catalog: SkillCatalog | None, consumer: str) -> GateOf:
    def frozen(asking: str) -> Gate:
        if asking != consumer or view is None:
            raise PolicyUnavailable(f"this runtime holds the view of {consumer!r} only", consumer=asking)
        return view

    sources: list[GateOf] = [] if subsystem is None else [subsystem.view]
    sources += [] if view is None else [frozen]
    sources += [] if catalog is None else [catalog.gate]
    if len(sources) != 1:
        raise config_invalid(f"exactly one of subsystem, view and catalog must be given, not {len(sources)}")
    if view is not None and view.consumer not in {None, consumer}:
        raise config_invalid(f"the view is of {view.consumer!r}, so the runtime's consumer must be too")
    return sources[0]


class Session:
    """One session. The model never names it: tools are called on this object.

    `within(scope)` gives the same session as calls of one turn see it.
    """

    def __init__(self, runtime: SkillRuntime, session_id: str, consumer: str, scope: TurnScope = NO_TURN) -> None:
        self._runtime = runtime
        self.id = session_id
        self.consumer = consumer
        self.scope = scope

    def __repr__(self) -> str:
        return f"Session({self.id!r}, consumer={self.consumer!r})"

    def within(self, scope: TurnScope) -> Session:
        """Return this session with *scope*: a turn's view, files, sources and listener."""
        return Session(self._runtime, self.id, self.consumer, scope)

    async def load(self, names: Sequence[str], mode: str | None = "replace", *, by: By = "model") -> LoadReceipt:
        """Load skills, all or nothing."""
        return await self._runtime.load(self.id, names, mode, by=by, scope=self.scope)

    async def unload(self, names: Sequence[str] = (), *, all: bool = False) -> UnloadReceipt:  # noqa: A002
        """Unload skills; what is not loaded has no effect."""
        return await self._runtime.unload(self.id, names, all=all, scope=self.scope)

    async def active(self) -> list[ActiveSkill]:
        """Return the loaded skills with their texts, in load order."""
        return await self._runtime.active(self.id, scope=self.scope)

    async def refresh(self) -> LoadReceipt:
        """Read every loaded skill again, in the same order."""
        return await self._runtime.refresh(self.id, scope=self.scope)

    async def describe(self, name: str) -> SkillReceipt:
        """Return the receipt of a visible skill, hashed afresh."""
        return await self._runtime.describe(name, session_id=self.id, scope=self.scope)

    async def read(self, path: str, *, skill: str | None = None, encoding: str = "text", offset: int = 0) -> ReadResult:
        """Read a file of a loaded skill."""
        return await self._runtime.read(self.id, path, skill=skill, encoding=encoding, offset=offset, scope=self.scope)

    async def run_script(
        self,
        path: str,
        *,
        skill: str | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        workdir: str = ".",
        timeout_s: float | None = None,
    ) -> ScriptResult:
        """Run a script of a loaded skill in isolation."""
        return await self._runtime.run_script(
            self.id, path, skill=skill, args=args, env=env, workdir=workdir, timeout_s=timeout_s, scope=self.scope
        )

    async def instructions(self, *, request: str | None = None, budget: Budget | None = None) -> PromptParts:
        """Return the top-level text of the next model call, part by part."""
        return await self._runtime.instructions(self.id, request=request, budget=budget, scope=self.scope)

    async def call(self, tool: str, arguments: Mapping[str, Any] | str) -> ToolReply:
        """Answer a tool call of a model; its mistakes are replies with `ok=False`, never raised."""
        return await self._runtime.call(self.id, tool, arguments, scope=self.scope)

    def tool_specs(self, *, style: str = "safe") -> tuple[ToolSpec, ...]:
        """Return the tools to offer now."""
        return self._runtime.tool_specs(self.id, style=style, scope=self.scope)

    async def snapshot(self, *, bodies: bool = True) -> SessionSnapshot:
        """Return the session as JSON-able values."""
        return await self._runtime.snapshot(self.id, bodies=bodies)

    async def close(self) -> bool:
        """Close the session: True, then False."""
        return await self._runtime.close_session(self.id)
