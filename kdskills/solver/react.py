"""`ReactSolver`: a request in, a `TurnResult` or a stream of events out, those of the session among them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, Unpack, overload

from kdskills.bundle.descriptor import DECISION
from kdskills.errors import BadRequest, Diagnostic, KdskillsError, SessionError
from kdskills.execution.run import in_thread
from kdskills.models import ModelReply, ModelRequest, Redactor, TextDelta
from kdskills.session import TurnScope
from kdskills.session.approval import user_of
from kdskills.session.config import Budget
from kdskills.session.core import uuid7
from kdskills.session.scope import TurnSources
from kdskills.skills.explain import needs_scripts
from kdskills.skills.selection import Refused
from kdskills.solver.agents import tell_above
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
from kdskills.solver.history import History, check_history, open_conversation, own_messages, sole_turn
from kdskills.solver.loop import Loop
from kdskills.solver.output import OutputType, output_form
from kdskills.solver.parts import AgentSpec, check_request
from kdskills.solver.spans import agent_span, code_of
from kdskills.solver.system import SolverSystem
from kdskills.solver.turn import Turn
from kdskills.sources import SourcesPool
from kdskills.turn import SkillsOverlay
from kdskills.turn.subsystem import activated

if TYPE_CHECKING:
    from kdskills.session import Session, SkillRuntime, User
    from kdskills.session.conversations import Conversation
    from kdskills.session.receipts import SessionEvent
    from kdskills.session.workspace import FolderWorkspace
    from kdskills.solver.parts import Wiring
    from kdskills.solver.turn import Handover
    from kdskills.turn import SkillsSubsystem


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


MAX_FINDINGS: Final = 20
"""Of a user's own skills, that a turn tells."""

Deadline = float | timedelta | datetime | None
"""Seconds from now, a duration, or an aware moment."""
T = TypeVar("T")


class TurnOptions(TypedDict, total=False):
    """What `ReactSolver.run` takes beside the request and the type of the answer."""

    session_id: str | None
    files: Sequence[GivenFile]
    skills: Sequence[str]
    deadline: Deadline
    history: History
    user: User | str | None
    deps: object
    overlay: SkillsOverlay | None


class ReactSolver:
    """Works on requests by deciding, acting and reading, as *consumer* of an open system, until there is an answer."""

    def __init__(self, system: SolverSystem, *, consumer: str = DECISION) -> None:
        self.system = system
        self.consumer = consumer

    def for_agent(self, spec: AgentSpec, depth: int) -> ReactSolver:
        """Return what works on the turns of an agent with *depth* turns above them, within the bounds of this one."""
        return ReactSolver(self.system.for_agent(spec, depth), consumer=spec.consumer)

    @overload
    async def run(self, request: str, *, output_type: None = None, **options: Unpack[TurnOptions]) -> TurnResult: ...

    @overload
    async def run(self, request: str, *, output_type: type[T], **options: Unpack[TurnOptions]) -> TurnResult[T]: ...

    @overload
    async def run(
        self, request: str, *, output_type: Mapping[str, Any], **options: Unpack[TurnOptions]
    ) -> TurnResult[dict[str, Any]]: ...

    async def run(
        self,
        request: str,
        *,
        session_id: str | None = None,
        files: Sequence[GivenFile] = (),
        skills: Sequence[str] = (),
        deadline: Deadline = None,
        history: History = "session",
        user: User | str | None = None,
        deps: object = None,
        overlay: SkillsOverlay | None = None,
        output_type: OutputType | None = None,
    ) -> TurnResult[Any]:
        """Work on *request* to the end.

        Args:
            request: What the user asks.
            session_id: The conversation; a new one when None or unknown.
            files: Files copied into the turn's folder, read-only.
            skills: Skills loaded from the start, by code.
            deadline: When the turn must have ended, beside `settings.wall_s`.
            history: What was said before: that of the conversation, to which this turn is added; nothing; or messages of
                the caller's own. The latter two leave the conversation as it is.
            user: Whom the turn is for, or their id alone: a conversation is theirs alone from its first turn on. Rules of
                the descriptor for a group hold for users who have its role.
            deps: Any object, for tools (`ToolContext.deps`) and policy plugins; written nowhere.
            overlay: The user's own skills and rules, made by `system.subsystem.overlay(…)`.
            output_type: What `result.output` is to be: a pydantic model, a dataclass, or a JSON Schema of an object. A model
                that does not give it, however often it is asked, ends the turn `failed`, `output_invalid`.

        Raises:
            ConversationBusy: Another turn of the conversation is going on in this process; nothing was begun. Or one of
                another process ended first; then `.result` holds what this one came to.
            StoreUnavailable: The conversation cannot be read, or not be kept; then `.result` likewise.
            ModelFailed: The provider failed for good; `.result` holds what there was so far.
            ReplayError: A recording does not fit; likewise.
            BadRequest: The request, a file, the deadline, the user, the overlay or the type (`output_type_invalid`) cannot
                be used.
        """
        seconds = _seconds(deadline)
        prepared = self.prepare_session(
            request,
            session_id=session_id,
            files=files,
            skills=skills,
            history=history,
            user=user,
            deps=deps,
            overlay=overlay,
            output_type=output_type,
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
        user: User | str | None = None,
        deps: object = None,
        overlay: SkillsOverlay | None = None,
        output_type: OutputType | None = None,
    ) -> AsyncIterator[Event]:
        """Work on *request* and give its events; the last one is `turn.finished` with the result.

        The turn runs in a task of its own, so that the caller's context never changes. Leaving the loop cancels it.
        A provider that fails, and a conversation that cannot be added to, end the stream with status `failed`.
        """
        seconds = _seconds(deadline)
        reader = Reader()
        turns: list[Turn] = []

        async def work() -> None:
            try:
                prepared = self.prepare_session(
                    request,
                    session_id=session_id,
                    files=files,
                    skills=skills,
                    history=history,
                    user=user,
                    deps=deps,
                    overlay=overlay,
                    output_type=output_type,
                    reader=reader,
                )
                async with prepared as turn:
                    turns.append(turn)
                    await self.work(turn, seconds=seconds)
            finally:
                reader.close()

        task = asyncio.create_task(work())
        finished = False
        try:
            while (event := await reader.get()) is not None:
                finished = isinstance(event, TurnFinished)
                typed = turns[0].result if finished and turns else None
                yield event if typed is None else event.model_copy(update={"result": typed})
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
        with agent_span(turn.consumer, turn.session_id, turn.parts.model(turn.role), turn.user_id) as span:
            try:
                async with asyncio.timeout(limit):
                    await Loop(turn).run()
            except TimeoutError:
                turn.log.end("budget", "wall_s" if limit == wall else "deadline")
            finally:
                span.used(turn.log.usage, turn.log.cost)
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
        user: User | str | None = None,
        deps: object = None,
        overlay: SkillsOverlay | None = None,
        output_type: OutputType | None = None,
        reader: Reader | None = None,
        handover: Handover | None = None,
    ) -> AsyncIterator[Turn]:
        """Activate the skills for a turn that the caller runs, and end the turn however the block is left.

        Inside, `get_active_skills_subsystem()` is the system's; `work` runs the loop, `Turn.generate` a generator. With
        a *reader*, which gets every event, replies are read piece by piece. With a *handover* it is the turn of an agent.
        """
        system, runtime = self.system, self.system.runtime
        check_request(request)
        check_history(history)
        scope = _scope_of(system.subsystem, user_of(user), deps, overlay)
        form = None if output_type is None else output_form(output_type, answer_role=system.settings.answer_role)
        with sole_turn(system.conversations, session_id if history == "session" else None):
            turn_id = uuid7()
            workspace = await self._workspace(turn_id, files)
            try:
                session = await self._session(runtime, session_id)
                conversation = await self._conversation(session, scope.user_id, history, new=session_id is None)
                if overlay is not None:  # whose roots may be slow
                    await asyncio.to_thread(overlay.view, self.consumer)
                turn = _turn(system, turn_id, request, self.consumer, session, workspace, conversation, scope, handover)
                turn.solver, turn.output = self, form
                turn.history = own_messages(history) if conversation is None else conversation.messages()
            except BaseException:  # raised again: no folder of a turn that never began
                discard(workspace)
                raise
            if reader is not None:
                turn.bus.reader(reader)
                turn.streaming = True
            turn.bus.open()
            with activated(turn.subsystem, turn.view):
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

    async def _workspace(self, turn_id: str, files: Sequence[GivenFile]) -> FolderWorkspace:
        data, work_dir = self.system.bundle.root / "data", self.system.settings.work_dir
        make = partial(open_workspace, turn_id, work_dir=work_dir, data=data, files=files)
        return await in_thread(make, undo=lambda made: asyncio.to_thread(discard, made))

    async def _conversation(
        self, session: Session, user_id: str | None, history: History, *, new: bool
    ) -> Conversation | None:
        if new and history != "session":
            return None
        # Asked whatever is read of it: what a session has loaded is as much its user's as what was said.
        now = self.system.runtime.config.clock()
        conversation = await open_conversation(self.system.conversations, session.id, self.consumer, user_id, now)
        return conversation if history == "session" else None

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
    user_scope: TurnScope,
    handover: Handover | None,
) -> Turn:
    """Return the turn; *user_scope* has its user, and what is laid over the subsystem for them."""
    settings = system.settings
    if handover is None:
        redactor = Redactor(settings.secret_values())
        transcripts = [folder / f"{turn_id}.jsonl" for folder in settings.transcript_folders]
        bus = EventBus(turn_id, session.id, redactor=redactor, sinks=system.sinks, transcripts=transcripts)
    else:  # what either learns to be secret is masked in both
        redactor = handover.turn.bus.redactor
        bus = EventBus(turn_id, session.id, redactor=redactor, above=partial(tell_above, handover, consumer))

    def merged(full_id: str, result: object) -> None:
        added_sids, merged_sids = getattr(result, "added", ()), getattr(result, "merged", ())
        bus.emit(SourcesMerged, skill=full_id, added=tuple(added_sids), merged_sids=tuple(merged_sids))

    begun = conversation or handover
    pool = SourcesPool() if begun is None else begun.pool
    wiring = system.wiring
    sources = TurnSources(pool, merged, key=wiring.source_key, resolver=wiring.source_resolver, found=bus.diagnose)
    wall = None if handover is None else handover.turn.view
    if handover is not None:  # what is laid over the parent's skills for the user holds for those it hands over to
        user_scope = replace(user_scope, subsystem=handover.turn.session.scope.subsystem)
    view = (user_scope.subsystem or system.subsystem).view(consumer, tools=system.tool_ids, parent=wall)
    role = DECISION if handover is None else consumer
    scope = replace(
        user_scope,
        view=view,
        request=request,
        workspace=workspace,
        sources=sources,
        base=settings.base_text,
        tools=None if handover is None else system.skill_tools,
        budget=_budget(system, role),
        brief=system.brief(role),
        events=relay_to(bus),
        secrets=partial(system.learn, redactor),
    )
    bound_session = session.within(scope)
    return Turn(
        turn_id, request, consumer, system, bound_session, view, sources, workspace, bus, conversation, handover
    )


def _budget(system: SolverSystem, role: str) -> Budget:
    """Return what the model of a role has room for, and catalogs as the settings say."""
    budget, catalog = Budget.of(system.window(role)), system.settings.catalog_tokens
    return budget if catalog is None else replace(budget, catalog=catalog)


def _scope_of(subsystem: SkillsSubsystem, user: User | None, deps: object, overlay: SkillsOverlay | None) -> TurnScope:
    """Return what a turn has of its user, with what is laid over the subsystem for them. Raises BadRequest."""
    given: object = overlay
    if given is not None and not (isinstance(given, SkillsOverlay) and given.lies_over(subsystem)):
        problem = "is none of this system's skills: make it with system.subsystem.overlay(...)"
        raise BadRequest(f"the overlay {problem}", errors=[{"path": "/overlay", "problem": problem}])
    groups = subsystem.descriptor.groups.intersection(() if user is None else user.roles)
    laid_over = (overlay or subsystem).overlay(groups=groups) if groups else overlay
    return TurnScope(user=user, deps=deps, subsystem=laid_over)


async def _begin(turn: Turn, skills: Sequence[str]) -> None:
    """Emit the start of the turn, load the caller's skills, and adopt the sources of all active skills."""
    executor = turn.parts.executor
    model = turn.parts.model(turn.role)
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
    if isinstance(turn.subsystem, SkillsOverlay):
        findings = [finding for finding in turn.subsystem.findings if finding.severity != "info"]
        for finding in findings[:MAX_FINDINGS]:
            turn.bus.diagnose(finding)
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
