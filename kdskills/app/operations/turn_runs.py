"""Turns in the background: started, watched and stopped, within the rights of whoever asks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from pydantic import Field, SerializeAsAny

from kdskills.app.operations.models import Input, Output
from kdskills.app.operations.turn_archive import TurnInput, events_for, readable_row
from kdskills.app.turn_runs import ProjectWiring, TurnFollower, project_bundle
from kdskills.app.turns import TurnKeeper, TurnRow, TurnState
from kdskills.bundle.descriptor import DECISION
from kdskills.errors import BadRequest, CallRefused, Conflict, OperatorMustAct
from kdskills.models.cassette import Cassette, read_cassette
from kdskills.skills.selection import Refused
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem
from kdskills.solver.events import Event
from kdskills.storage.database import utc_now

if TYPE_CHECKING:
    from kdskills.app.identity import Identity
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context
    from kdskills.app.settings import Settings
    from kdskills.app.turn_runs import TurnRuns
    from kdskills.app.turns import TurnArchive
    from kdskills.bundle import Bundle
    from kdskills.solver.parts import Wiring

MAX_REQUEST: Final = 256 * 1024
MOST_STEPS: Final = 100
CHUNK: Final = 200
PAUSE_S: Final = 0.02
"""How many events are told at once, and how long a reader then has before more follow."""


class TurnsNotKept(OperatorMustAct, code="turns_not_kept"):
    """A turn in the background is read from where turns are kept; the setting `turns.keep` is off, or there is no room."""


class StartTurnInput(Input):
    """A request to work on in the background."""

    request: str | None = Field(
        None, max_length=MAX_REQUEST, description="What is asked; none means the one in the bundle's demo.yaml."
    )
    bundle: Path | None = Field(None, description="A bundle's folder; none means that of the caller's project.")
    consumer: str | None = Field(
        None, description="Consumer the solver acts as; none means the caller's agent, else the decision model."
    )
    skills: tuple[str, ...] = Field((), max_length=64, description="Skills loaded before the first decision.")
    model: str | None = Field(
        None, description="Model, as for `solver.run`; callers elsewhere may name those of the setting `turns.models`."
    )
    max_steps: int | None = Field(
        None, ge=1, le=MOST_STEPS, description="How often the model may decide; none means 24."
    )
    max_tokens: int | None = Field(None, ge=1, description="Tokens that one reply of the model may take.")
    temperature: float | None = Field(None, ge=0, le=2, description="How freely the model chooses its words.")


class StartedTurn(Output):
    """A turn that has begun: watch it with `turns.watch`, end it with `turns.stop`."""

    turn_id: str
    model: str
    consumer: str


class WatchTurnInput(TurnInput):
    """A turn to watch."""

    poll_interval_sec: float = Field(0.1, ge=0.05, le=60, allow_inf_nan=False, description="Seconds between two looks.")
    heartbeat_sec: float = Field(
        20.0, ge=0.1, le=3600, allow_inf_nan=False, description="Seconds of silence until a heartbeat."
    )
    timeout_sec: float = Field(
        600.0, ge=0, le=86_400, allow_inf_nan=False, description="Seconds until the watch gives up."
    )
    after_seq: int = Field(0, ge=0, description="Events up to this number are known already.")


class TurnProgress(Output):
    """Something that happened in a watched turn.

    Attributes:
        seq: Grows with every event; give the last one as `after_seq` to go on from there. A heartbeat repeats it.
        type: What happened, as `event` tells in full; empty of a heartbeat.
    """

    seq: int
    kind: Literal["event", "heartbeat"]
    id: str
    at: datetime
    status: TurnState = "running"
    type: str = ""
    event: SerializeAsAny[Event] | None = None


class WatchedTurnOut(TurnRow, Output):
    """A turn as it is at the end of a watch; `watch_timeout` tells whether the watch gave up before the turn ended."""

    watch_timeout: bool = False


class StopTurnOutput(Output):
    """What came of a stop; `stopped` is false, and nothing changed, when the turn was over."""

    turn_id: str
    status: TurnState
    stopped: bool


@dataclass(frozen=True)
class _Plan:
    """What a turn is run with."""

    bundle: Bundle
    wiring: Wiring
    demo: Cassette | None
    request: str
    consumer: str
    model: str

    @property
    def files(self) -> tuple[Path, ...]:
        """Files handed in: those of the recording, with its own request."""
        demo = self.demo
        is_demo = demo is not None and demo.request == self.request
        return tuple(self.bundle.root / name for name in demo.files) if demo is not None and is_demo else ()


def _model_of(arguments: StartTurnInput, settings: Settings, identity: Identity) -> str:
    """Return the model to ask. Raises CallRefused, `model_not_allowed`: a caller elsewhere may not name it."""
    listed = settings.turns.models
    if identity.local:
        return arguments.model or settings.model
    model = arguments.model or (settings.model if settings.model in listed else next(iter(listed), settings.model))
    if model not in listed:
        message = (
            f"turns.start: the model is none of those that callers elsewhere may use: {', '.join(listed) or 'none'}"
        )
        raise CallRefused(message, code="model_not_allowed", operation="turns.start", argument="model")
    return model


async def _plan(
    bundles: BundleLoader, wiring: Wiring, settings: Settings, arguments: StartTurnInput, context: Context
) -> _Plan:
    identity = context.identity
    model = _model_of(arguments, settings, identity)
    if arguments.bundle is not None:
        bundle = bundles.open(arguments.bundle, context, tools=True)
    else:
        skills = await bundles.skills(None, context)
        bundle = await asyncio.to_thread(project_bundle, skills)
        wiring = cast("Wiring", ProjectWiring(wiring, skills.subsystem))
    demo = None if bundle.demo_path is None else read_cassette(bundle.demo_path)
    request = arguments.request or (demo.request if demo else "")
    if not request:
        raise BadRequest(f"{bundle.name} has no demo.yaml with a request: say what to do", code="request_missing")
    return _Plan(bundle, wiring, demo, request, arguments.consumer or identity.consumer or DECISION, model)


async def start_turn(
    bundles: BundleLoader,
    wiring: Wiring,
    settings: Settings,
    turns: TurnArchive,
    turn_runs: TurnRuns,
    arguments: StartTurnInput,
    context: Context,
) -> StartedTurn:
    """Start a turn in the background, in this process; at the command line it is waited for."""
    plan = await _plan(bundles, wiring, settings, arguments, context)
    keeper = await TurnKeeper.of(turns, context.identity, plan.bundle.name)
    if keeper.folder is None:
        reason = next((finding.message for finding in keeper.findings), "the setting turns.keep is off")
        raise TurnsNotKept(f"turns.start reads turns from where they are kept: {reason}")
    turn_id = await turn_runs.start(_work(plan, keeper, settings, arguments, context.identity))
    return StartedTurn(turn_id=turn_id, model=plan.model, consumer=plan.consumer)


def _work(
    plan: _Plan, keeper: TurnKeeper, settings: Settings, arguments: StartTurnInput, identity: Identity
) -> Callable[[Callable[[str], None]], Coroutine[Any, Any, None]]:
    """Return what runs the turn and tells its id when it has begun."""
    options: dict[str, Any] = arguments.model_dump(include={"max_steps"}, exclude_none=True)
    options["model_settings"] = arguments.model_dump(include={"max_tokens", "temperature"}, exclude_none=True)
    solver_settings = SolverSettings(
        answer_role=plan.demo.expect.get("answer_role") if plan.demo else None,
        network=settings.network,
        prices=settings.prices,
        transcripts=keeper.folder,
        work_dir=keeper.folder,
        **options,
    )

    async def work(begun: Callable[[str], None]) -> None:
        system = SolverSystem(
            bundle=plan.bundle,
            model=plan.model,
            executor=settings.executor,
            settings=solver_settings,
            wiring=plan.wiring,
        )
        async with system:
            if not identity.sees_all:
                await asyncio.to_thread(_require_startable, system, plan.consumer, arguments.skills, identity)
            solver = ReactSolver(system, consumer=plan.consumer)
            prepared = solver.prepare_session(plan.request, files=plan.files, skills=arguments.skills)
            async with keeper.keeping(prepared) as turn:
                turn.streaming = True
                begun(turn.id)
                await solver.work(turn)

    return work


def _require_startable(system: SolverSystem, consumer: str, refs: tuple[str, ...], identity: Identity) -> None:
    """Refuse skills that the caller may not start itself: what loads them in a turn asks as code does. Raises BadRequest."""
    view = system.subsystem.view(consumer, tools=system.tool_ids)
    for ref in refs:
        answer = view.resolve(ref, by=identity.starter)
        if isinstance(answer, Refused) or answer.skill.hidden:
            public = Refused("unknown_skill", "", ref).public()
            raise BadRequest(f"{ref}: {public.reason}", code=public.code, ref=ref)


async def watch_turn(turns: TurnArchive, arguments: WatchTurnInput, context: Context) -> WatchedTurnOut:
    """Tell what happens in a turn until it is over, wherever it runs."""
    project, turn_id = arguments.project_of(context), arguments.turn_id
    await asyncio.to_thread(readable_row, turns, arguments, context)
    follower = await asyncio.to_thread(TurnFollower, turns, project, turn_id)
    begun = last_event_at = time.monotonic()
    seq, going_on = arguments.after_seq, True
    try:
        while going_on:
            events, going_on = await asyncio.to_thread(follower.read, CHUNK)
            for event in events_for(context.identity, events):
                if event.seq > seq:
                    seq, last_event_at = event.seq, time.monotonic()
                    _tell(context, turn_id, seq, event)
            now = time.monotonic()
            if going_on and now - begun >= arguments.timeout_sec and len(events) < CHUNK:
                break
            if now - last_event_at >= arguments.heartbeat_sec:
                last_event_at = now
                _tell(context, turn_id, seq, None)
            if going_on:
                await asyncio.sleep(PAUSE_S if len(events) == CHUNK else arguments.poll_interval_sec)
    finally:
        follower.close()
    row = await asyncio.to_thread(readable_row, turns, arguments, context)
    return WatchedTurnOut.of(row, watch_timeout=going_on)


def _tell(context: Context, turn_id: str, seq: int, event: Event | None) -> None:
    if context.emit is None:
        return
    if event is None:
        context.emit(TurnProgress(seq=seq, kind="heartbeat", id=turn_id, at=utc_now()))
    else:
        facts = {"at": event.ts, "type": event.type, "event": event}
        context.emit(TurnProgress(seq=seq, kind="event", id=turn_id, **facts))


async def stop_turn(turns: TurnArchive, turn_runs: TurnRuns, arguments: TurnInput, context: Context) -> StopTurnOutput:
    """End a turn that runs in this process. Raises Conflict, `turn_elsewhere`, for one of another process."""
    row = await asyncio.to_thread(readable_row, turns, arguments, context)
    stopped = await turn_runs.stop(row.turn_id)
    if not stopped and row.status == "running":
        row = await asyncio.to_thread(readable_row, turns, arguments, context)
        if row.status == "running":
            message = f"turn {row.turn_id} runs in another process: stop it there"
            raise Conflict(message, code="turn_elsewhere", turn_id=row.turn_id)
    elif stopped:
        row = await asyncio.to_thread(readable_row, turns, arguments, context)
    return StopTurnOutput.of(row, stopped=stopped)
