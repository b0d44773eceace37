"""`ReactSolver`: a request in, a `TurnResult` or a stream of events out, those of the session among them.

`preview` shows what it would send first: a real turn is begun, and its first request is kept instead of sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from kdskills.bundle.descriptor import DECISION
from kdskills.errors import BadRequest, Diagnostic, ExecRefused, KdskillsError, SessionError
from kdskills.execution.run import in_thread
from kdskills.models import ModelReply, ModelRequest, Redactor, TextDelta
from kdskills.session import TurnScope
from kdskills.session.config import Budget
from kdskills.session.core import uuid7
from kdskills.session.scope import TurnSources
from kdskills.skills.explain import needs_scripts
from kdskills.skills.selection import Refused
from kdskills.solver.bus import EventBus, Reader
from kdskills.solver.events import (
    ApprovalDecided,
    ApprovalRequested,
    CatalogTruncated,
    Event,
    ScriptConnected,
    ScriptFinished,
    ScriptStarted,
    SkillLoaded,
    SkillPruned,
    SkillRefused,
    SkillStale,
    SkillUnloaded,
    SourcesMerged,
    TurnFinished,
    TurnResult,
    TurnStarted,
)
from kdskills.solver.finish import GivenFile, discard, finish, open_workspace, tell_plugins
from kdskills.solver.history import History, check_history, open_conversation, own_messages
from kdskills.solver.loop import Loop
from kdskills.solver.parts import SolverSettings, check_request
from kdskills.solver.spans import agent_span, code_of
from kdskills.solver.system import SolverSystem
from kdskills.solver.turn import Turn
from kdskills.sources import SourcesPool

if TYPE_CHECKING:
    from kdskills.bundle import Bundle
    from kdskills.execution import Executor
    from kdskills.session import Session, SkillRuntime
    from kdskills.session.conversations import Conversation
    from kdskills.session.receipts import SessionEvent
    from kdskills.session.workspace import FolderWorkspace
    from kdskills.solver.parts import Wiring


_RELAYED: Mapping[str, type[Event]] = {
    str(kind.model_fields["type"].default): kind
    for kind in (
        *(SkillLoaded, SkillUnloaded, SkillStale, SkillPruned, SkillRefused, CatalogTruncated),
        *(ApprovalRequested, ApprovalDecided, ScriptStarted, ScriptConnected, ScriptFinished),
    )
}
"""Events of a session that are events of its turn, too; they have the same names."""
_UNTOLD = {"path": None, "digest": "", "by": "", "reason": "", "engine": "", "level": ""}
"""What an event of a turn holds that the session leaves out."""


def relay_to(bus: EventBus) -> Callable[[SessionEvent], None]:
    """Return a listener for a session that emits the same as events of the turn; others become diagnostics."""

    def listen(event: SessionEvent) -> None:
        data, kind = event.data, _RELAYED.get(event.type)
        if kind is None:
            code = str(data.get("code", event.type))
            message = str(data.get("message") or f"{event.type}: {code}")
            bus.diagnose(Diagnostic(code, "warning", message, ref=data.get("id")))
            return
        facts = {**_UNTOLD, "skill": data.get("id"), "name": data.get("id"), **data}
        facts["limits"] = sorted(data.get("limits", ()))
        own_fields = kind.model_fields.keys() - Event.model_fields.keys()
        bus.emit(kind, **{name: facts[name] for name in own_fields if name in facts})

    return listen


Deadline = float | timedelta | datetime | None
"""Seconds from now, a duration, or an aware moment."""


class ReactSolver:
    """Works on requests by deciding, acting and reading, as *consumer* of an open system, until there is an answer."""

    def __init__(self, system: SolverSystem, *, consumer: str = DECISION) -> None:
        self.system = system
        self.consumer = consumer

    async def run(
        self,
        request: str,
        *,
        session_id: str | None = None,
        files: Sequence[GivenFile] = (),
        skills: Sequence[str] = (),
        deadline: Deadline = None,
        history: History = "session",
        user: str | None = None,
    ) -> TurnResult:
        """Work on *request* to the end.

        Args:
            request: What the user asks.
            session_id: The conversation; a new one when None or unknown.
            files: Files copied into the turn's folder, read-only.
            skills: Skills loaded from the start, by code.
            deadline: When the turn must have ended, beside `settings.wall_s`.
            history: What was said before: that of the conversation, to which this turn is added; nothing; or messages of
                the caller's own. The latter two leave the conversation as it is.
            user: Id of whom a conversation is with; it is theirs alone from its first turn on.

        Raises:
            ConversationBusy: Another turn of the conversation ended first; `.result` holds what this one came to.
            StoreUnavailable: The conversation cannot be read, or not be kept; then `.result` likewise.
            ModelFailed: The provider failed for good; `.result` holds what there was so far.
            ReplayError: A recording does not fit; likewise.
            BadRequest: The request, a file or the deadline cannot be used.
        """
        seconds = _seconds(deadline)
        prepared = self.prepare_session(
            request, session_id=session_id, files=files, skills=skills, history=history, user=user
        )
        async with prepared as turn:
            await self.work(turn, seconds=seconds)
        assert turn.result is not None
        return turn.result

    async def stream(
        self,
        request: str,
        *,
        session_id: str | None = None,
        files: Sequence[GivenFile] = (),
        skills: Sequence[str] = (),
        deadline: Deadline = None,
        history: History = "session",
        user: str | None = None,
    ) -> AsyncIterator[Event]:
        """Work on *request* and give its events; the last one is `turn.finished` with the result.

        The turn runs in a task of its own, so that the caller's context never changes. Leaving the loop cancels it.
        A provider that fails, and a conversation that cannot be added to, end the stream with status `failed`.
        """
        seconds = _seconds(deadline)
        reader = Reader()

        async def work() -> None:
            try:
                prepared = self.prepare_session(
                    request,
                    session_id=session_id,
                    files=files,
                    skills=skills,
                    history=history,
                    user=user,
                    reader=reader,
                )
                async with prepared as turn:
                    await self.work(turn, seconds=seconds)
            finally:
                reader.close()

        task = asyncio.create_task(work())
        finished = False
        try:
            while (event := await reader.get()) is not None:
                finished = isinstance(event, TurnFinished)
                yield event
            try:
                await task
            except KdskillsError:
                if not finished:
                    raise
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def work(self, turn: Turn, *, seconds: float | None = None) -> None:
        """Run the loop within a prepared turn; the outcome stands in `turn.log`, later in `turn.result`.

        Raises ModelFailed when the provider failed for good, ReplayError when a recording does not fit.
        """
        wall = turn.parts.settings.wall_s
        limit = wall if seconds is None else min(wall, seconds)
        with agent_span(turn.consumer, turn.session_id, turn.parts.model(DECISION)) as span:
            try:
                async with asyncio.timeout(limit):
                    await Loop(turn).run()
            except TimeoutError:
                turn.log.end("budget", "wall_s" if limit == wall else "deadline")
            finally:
                span.used(turn.log.usage)
            if turn.log.status != "final":
                span.failed(turn.log.stop_reason)

    @asynccontextmanager
    async def prepare_session(
        self,
        request: str,
        *,
        session_id: str | None = None,
        files: Sequence[GivenFile] = (),
        skills: Sequence[str] = (),
        history: History = "session",
        user: str | None = None,
        reader: Reader | None = None,
    ) -> AsyncIterator[Turn]:
        """Activate the skills for a turn that the caller runs, and end the turn however the block is left.

        Inside, `get_active_skills_subsystem()` is the system's; `work` runs the loop, `Turn.generate` a generator. With
        a *reader*, which gets every event, replies are read piece by piece.
        """
        system, runtime = self.system, self.system.runtime
        check_request(request)
        check_history(history, user)
        turn_id = uuid7()
        data, work_dir = system.bundle.root / "data", system.settings.work_dir
        make = partial(open_workspace, turn_id, work_dir=work_dir, data=data, files=files)
        workspace = await in_thread(make, undo=lambda made: asyncio.to_thread(discard, made))
        try:
            session = await self._session(runtime, session_id)
            conversation, now = None, runtime.config.clock()
            if history == "session":
                store = system.conversations
                conversation = await open_conversation(store, session.id, self.consumer, user, now)
            turn = _turn(system, turn_id, request, self.consumer, session, workspace, conversation)
            turn.history = own_messages(history) if conversation is None else conversation.messages()
        except BaseException:  # raised again: no folder of a turn that never began
            discard(workspace)
            raise
        if reader is not None:
            turn.bus.reader(reader)
            turn.streaming = True
        turn.bus.open()
        with system.subsystem.activate(self.consumer, tools=turn.view.tools):
            failure: BaseException | None = None
            try:
                await _begin(turn, skills)
                yield turn
            except BaseException as error:
                failure = error
                turn.log.end("failed", code_of(error))
                raise
            finally:
                result = await finish(turn)
                if isinstance(failure, KdskillsError):
                    failure.result = result
            if turn.unsaved is not None:
                turn.unsaved.result = result
                raise turn.unsaved

    async def _session(self, runtime: SkillRuntime, session_id: str | None) -> Session:
        session: Session | None = None
        if session_id is not None:
            try:
                session = await runtime.get_session(session_id)
            except SessionError as error:
                if error.code != "session_not_found":
                    raise
        if session is None:
            try:
                return await runtime.create_session(session_id, consumer=self.consumer)
            except SessionError as error:
                if session_id is None or error.code != "session_exists":
                    raise
            session = await runtime.get_session(session_id)  # another turn opened it a moment ago
        if session.consumer != self.consumer:
            message = f"session {session.id!r} belongs to {session.consumer!r}, not {self.consumer!r}"
            raise BadRequest(message, session_id=session.id)
        return session


def _turn(
    system: SolverSystem,
    turn_id: str,
    request: str,
    consumer: str,
    session: Session,
    workspace: FolderWorkspace,
    conversation: Conversation | None,
) -> Turn:
    settings = system.settings
    redactor = Redactor(settings.secret_values())
    transcript = None if settings.transcripts is None else settings.transcripts / f"{turn_id}.jsonl"
    bus = EventBus(turn_id, session.id, redactor=redactor, sinks=system.sinks, transcript=transcript)

    def merged(full_id: str, result: object) -> None:
        added_sids, merged_sids = getattr(result, "added", ()), getattr(result, "merged", ())
        bus.emit(SourcesMerged, skill=full_id, added=tuple(added_sids), merged_sids=tuple(merged_sids))

    pool = SourcesPool() if conversation is None else conversation.pool
    sources = TurnSources(pool, merged, key=system.wiring.source_key, found=bus.diagnose)
    view = system.subsystem.view(consumer, tools=system.tool_ids)
    scope = TurnScope(
        view=view,
        request=request,
        workspace=workspace,
        sources=sources,
        base=settings.base_text,
        budget=Budget.of(system.model(DECISION).context_window),
        events=relay_to(bus),
        secrets=partial(system.learn, redactor),
    )
    bound_session = session.within(scope)
    return Turn(turn_id, request, consumer, system, bound_session, view, sources, workspace, bus, conversation)


async def _begin(turn: Turn, skills: Sequence[str]) -> None:
    """Emit the start of the turn, load the caller's skills, and adopt the sources of all active skills."""
    executor = turn.parts.executor
    model = turn.parts.model(DECISION)
    turn.bus.emit(
        TurnStarted,
        request=turn.request,
        consumer=turn.consumer,
        model=model.name,
        replayed=model.replayed,
        engine=None if executor is None else executor.name,
        files=tuple(sorted(turn.workspace.protected)),
    )
    if executor is None:
        _tell_left_out(turn)
    if skills:
        await turn.session.load(list(skills), mode="add", by="code")
    await turn.session.instructions()  # adopts the sources of what is active, in load order
    turn.note_active(await turn.session.active())
    tell_plugins(turn, "kdskills_turn_started", lambda: turn.parts.wiring.turn_started(turn))


def _tell_left_out(turn: Turn) -> None:
    """Report which skills are left out because no engine runs their scripts here."""
    needing = [skill for skill in turn.subsystem.registry.values() if skill.tools and needs_scripts(skill)]
    answers = [turn.view.resolve(skill.full_id, by="code") for skill in needing]
    refusals = [answer for answer in answers if isinstance(answer, Refused) and answer.code == "tools_missing"]
    left_out = sorted(answer.full_id or answer.ref for answer in refusals)
    if not left_out:
        return
    names = ", ".join(left_out[:10]) + (f" and {len(left_out) - 10} more" if len(left_out) > 10 else "")
    message = (
        f"left out because they need scripts, and no engine runs any here: {names}; "
        'open the system with executor="auto", or name an engine that works'
    )
    turn.bus.diagnose(Diagnostic("scripts_off", "warning", message, ref=left_out[0]))


def _seconds(deadline: Deadline) -> float | None:
    """Return the seconds left. Raises BadRequest for a naive moment or one that has passed."""
    if deadline is None:
        return None
    if isinstance(deadline, datetime):
        if deadline.tzinfo is None:
            raise BadRequest("a deadline needs a time zone", errors=[{"path": "/deadline", "problem": "is naive"}])
        deadline = deadline - datetime.now(UTC)
    seconds = deadline.total_seconds() if isinstance(deadline, timedelta) else float(deadline)
    if not seconds > 0:
        raise BadRequest("the deadline has passed", errors=[{"path": "/deadline", "problem": "has passed"}])
    return seconds


class PromptProbe:
    """A model provider that keeps the request instead of sending it; *window* bounds catalogs, None when unknown."""

    name = "preview"
    replayed = False

    def __init__(self, window: int | None) -> None:
        self.context_window = window
        self.request: ModelRequest | None = None

    async def reply(self, request: ModelRequest) -> ModelReply:
        """Keep *request*, and answer so that the turn ends."""
        self.request = self.request or request
        return ModelReply(text="-")

    async def stream(self, request: ModelRequest) -> AsyncIterator[TextDelta | ModelReply]:
        """Keep *request*, and answer so that the turn ends."""
        yield await self.reply(request)

    async def aclose(self) -> None:
        """Release nothing."""


class PreviewWiring:
    """A wiring of which plugins are not told that a turn begins or ends: there is none."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring

    def __getattr__(self, name: str) -> Any:
        """Return what the wiring has."""
        return getattr(self._wiring, name)

    def turn_started(self, turn: Turn) -> None:
        """Tell nobody."""

    def turn_finished(self, turn: Turn, outcome: TurnResult) -> None:
        """Tell nobody."""


async def preview(
    wiring: Wiring, bundle: Bundle, *, consumer: str, skills: Sequence[str], model: str, executor: str
) -> tuple[ModelRequest, tuple[Diagnostic, ...]]:
    """Return what a solver over *bundle* would send first, and what is not as it would be; its `tools.py` runs.

    *model* says the context window that bounds the catalog. Raises as opening a `SolverSystem`, and for skills that
    cannot be loaded.
    """
    silent = cast("Wiring", PreviewWiring(wiring))
    findings: tuple[Diagnostic, ...] = ()
    engine: Executor | None = None
    try:
        engine = await silent.executor(executor)
    except ExecRefused as error:
        message = f"scripts and generated code are left out, and a turn would not begin: {error.message}"
        findings = (Diagnostic(error.code, "warning", message),)
    window = None
    if model.partition(":")[0] != "replay":  # recordings have none
        async with aclosing(wiring.model(model)) as provider:
            window = provider.context_window
    probe = PromptProbe(window)
    system = SolverSystem(bundle=bundle, model=probe, executor=engine, settings=SolverSettings(), wiring=silent)
    async with system:
        await ReactSolver(system, consumer=consumer).run("(the user's request)", skills=skills)
    assert probe.request is not None
    return probe.request, findings
