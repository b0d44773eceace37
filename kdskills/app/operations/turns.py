"""`solver.run`: one turn on a bundle, from the request to a cited answer; `turns.show`: what happened in a turn."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SerializeAsAny

from kdskills.app.crowd import bundle_in_crowd
from kdskills.app.operations.bundles import demo_consumers
from kdskills.app.operations.machine import EXTRAS, installed
from kdskills.app.operations.models import Finding, Output, RunInput, ShowTurnInput
from kdskills.app.turns import TurnKeeper
from kdskills.errors import BadRequest, CallRefused, Diagnostic, MissingExtra
from kdskills.models.cassette import Cassette, read_cassette
from kdskills.session.approval import User
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem, TurnResult
from kdskills.solver.events import Event, SourcesMerged, Transcript, TurnFinished, read_transcript
from kdskills.sources import render_citations
from kdskills.turn.near_names import asker_findings

if TYPE_CHECKING:
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.conversation import Conversations
    from kdskills.app.operations.table import Context
    from kdskills.app.settings import Settings
    from kdskills.app.turns import TurnArchive
    from kdskills.solver.parts import Wiring


class CitedSource(Output):
    """A number the answer cites, and the source it resolves to.

    Attributes:
        sid: The number.
        known: Whether there is such a source.
        title: The source's title.
        place: Its URL or path.
        skills: Full ids of the skills that brought it along.
    """

    sid: int
    known: bool
    title: str = ""
    place: str = ""
    skills: tuple[str, ...] = ()


class ShowTurnOutput(Output):
    """A turn from its request to its end.

    Attributes:
        transcript: The file read.
        turn_id: Id of the turn.
        ended: Whether the turn ended; one that broke off has no result.
        events: What happened, in order, but for the last event, whose result stands in `result`.
        result: What came of the turn.
        footnoted: The answer with `[1]` for citations and its sources below.
        citations: What the answer cites: sources in order of first appearance, then numbers that name none.
        diagnostics: What is odd about the file.
    """

    transcript: str
    turn_id: str
    ended: bool
    events: tuple[SerializeAsAny[Event], ...]
    result: TurnResult | None
    footnoted: str = ""
    citations: tuple[CitedSource, ...] = ()
    diagnostics: tuple[Finding, ...] = ()


def _citations(read: Transcript, result: TurnResult) -> tuple[CitedSource, ...]:
    skills_of_source: dict[int, list[str]] = {}
    for event in read.events:
        if isinstance(event, SourcesMerged):
            for sid in (*event.added, *event.merged_sids):
                skills_of_source.setdefault(sid, []).append(event.skill)
    rows = {row.get("sid"): row for row in result.sources}
    citations = []
    for sid in result.cited:
        row = rows.get(sid, {})
        location = str(row.get("url") or row.get("physical_path") or "")
        skills = tuple(dict.fromkeys(skills_of_source.get(sid, ())))
        title = str(row.get("title", ""))
        citations.append(CitedSource(sid=sid, known=True, title=title, place=location, skills=skills))
    unknown = dict.fromkeys(issue.sid for issue in result.citation_issues)
    return (*citations, *(CitedSource(sid=sid, known=False) for sid in unknown))


def show_turn(arguments: ShowTurnInput) -> ShowTurnOutput:
    """Read the transcript of a turn."""
    return ShowTurnOutput.of(**turn_facts(str(arguments.transcript), read_transcript(arguments.transcript)))


def turn_facts(transcript: str, read: Transcript) -> dict[str, Any]:
    """Return what is shown of a turn by the name of the field."""
    result = read.result
    return {
        "transcript": transcript,
        "turn_id": read.events[0].turn_id if read.events else "",
        "ended": result is not None,
        "events": tuple(event for event in read.events if not isinstance(event, TurnFinished)),
        "result": result,
        "footnoted": "" if result is None else footnoted(result),
        "citations": () if result is None else _citations(read, result),
        "diagnostics": read.diagnostics,
    }


def footnoted(result: TurnResult) -> str:
    """Return the answer with `[1]` for citations and the list of sources below, for readers without links."""
    return render_citations(result.text, {row["sid"]: row for row in result.sources}, mode="footnotes")


class RunOutput(Output):
    """The turn's result, the answer with footnotes, and what the bundle's demo expected but did not get.

    `files` are those the turn made: below `folder`, which is `out`, or where the turn left them when there is no `out`. `many`
    is the folder that was made for the turn.
    """

    result: TurnResult
    footnoted: str
    engine: str | None
    out: str | None
    files: tuple[str, ...]
    transcript: str | None
    folder: str | None = None
    many: str | None = None
    unmet: tuple[str, ...] = ()
    diagnostics: tuple[Finding, ...] = ()

    @property
    def negative(self) -> bool:
        """Whether the turn did not end well, or not as the demo expects."""
        return bool(self.unmet) or not self.result.ok


def _lacking(demo: Cassette | None, result: TurnResult) -> dict[str, MissingExtra]:
    """Return the files of a demo that were not made because an optional part is not installed, with the error saying so."""
    expected = None if demo is None else demo.expect.get("extras")
    extras = {name: str(extra) for name, extra in expected.items()} if isinstance(expected, dict) else {}
    produced = {file.path for file in result.files}
    return {
        name: MissingExtra(name, extra)
        for name, extra in extras.items()
        if name not in produced and extra in EXTRAS and not installed(EXTRAS[extra])
    }


def _unmet(demo: Cassette | None, result: TurnResult, lacking: Mapping[str, MissingExtra]) -> tuple[str, ...]:
    """Compare a demo's outcome with what its author expects: skills, files, cited sources, status; *lacking* files are excused."""
    if demo is None or not result.replayed:
        return ()
    used = {use.id for use in result.skills_used}
    missing = [f"skill {name} was not used" for name in demo.expect.get("skills", ()) if name not in used]
    produced = {file.path for file in result.files} | lacking.keys()
    missing += [f"file {name} was not made" for name in demo.expect.get("files", ()) if name not in produced]
    if result.status != demo.expect.get("status", "final"):
        missing.append(f"the turn ended {result.status} ({result.stop_reason})")
    missing += [f"citation {issue.sid} does not resolve" for issue in result.citation_issues]
    if demo.expect.get("cited") and not result.cited:
        missing.append("the answer cites nothing")
    return tuple(missing)


def _deliver(result: TurnResult, out: Path) -> tuple[str, ...]:
    """Copy the turn's files to *out* and return their paths."""
    targets = {out / file.path: file.location for file in result.files}
    for target, source in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return tuple(map(str, targets))


def _solver_settings(
    arguments: RunInput, settings: Settings, answer_role: str | None, turns: Path | None
) -> SolverSettings:
    """Return the bounds and choices of a run; what it leaves is kept in the folder *turns*."""
    options: dict[str, Any] = {"answer_role": answer_role, "network": settings.network, "prices": settings.prices}
    options["model_settings"] = arguments.model_dump(include={"max_tokens", "temperature"}, exclude_none=True)
    options |= arguments.model_dump(include={"max_steps"}, exclude_none=True)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    folders = tuple(folder for folder in (arguments.out, turns) if folder is not None)
    return SolverSettings(**options, transcripts=folders, work_dir=turns)


def _locations(result: TurnResult) -> tuple[str, ...]:
    return tuple(file.location for file in result.files)


def _folder(result: TurnResult, out: Path | None) -> str | None:
    """Return where the files of a turn are, if it made any."""
    folders = (file.location.removesuffix(f"/{file.path}") if out is None else str(out) for file in result.files)
    return next(folders, None)


def _user_of(arguments: RunInput, context: Context) -> User | None:
    """Return whom the turn is for. Raises CallRefused for callers who may not say it."""
    if (arguments.session or arguments.user or arguments.roles) and not context.identity.account:
        message = "conversations and users are for the account of this machine to name"
        raise CallRefused(message, code="not_yours_to_say", operation="solver.run", argument="session")
    if arguments.roles and arguments.user is None:
        raise BadRequest("roles are those of a user: name the user, too")
    return None if arguments.user is None else User(arguments.user, arguments.roles)


async def run(
    bundles: BundleLoader,
    wiring: Wiring,
    settings: Settings,
    conversations: Conversations,
    turns: TurnArchive,
    arguments: RunInput,
    context: Context,
) -> RunOutput:
    """Run one turn."""
    user = _user_of(arguments, context)
    bundle = bundles.open(arguments.bundle, context, tools=True)
    demo = None if bundle.demo_path is None else read_cassette(bundle.demo_path)
    request = arguments.request or (demo.request if demo else "")
    if not request:
        raise BadRequest(f"{bundle.name} has no demo.yaml with a request: say what to do", code="request_missing")
    if arguments.many is not None:  # a copy is trusted as what it was copied from
        await asyncio.to_thread(bundle_in_crowd, bundle, arguments.many, arguments.crowd, arguments.consumer)
        bundle = bundles.open(arguments.many, replace(context, trust=bundle.trusted), tools=True)
    is_demo, out = arguments.request is None, arguments.out
    answer_role = arguments.answer_role or (demo.expect.get("answer_role") if demo else None)
    keeper = await TurnKeeper.of(turns, context.identity, bundle.name)
    system = SolverSystem(
        bundle=bundle,
        model=arguments.model or settings.model,
        executor=arguments.executor or settings.executor,
        settings=_solver_settings(arguments, settings, answer_role, keeper.folder),
        store=None if arguments.session is None else await conversations.store(),
        wiring=wiring,
        sinks=() if context.emit is None else (context.emit,),
    )
    async with system:
        demo_files = demo.files if is_demo and demo is not None else ()
        files = (*arguments.files, *(bundle.root / name for name in demo_files))
        solver = ReactSolver(system, consumer=arguments.consumer)
        dialogue: dict[str, Any] = {"session_id": arguments.session, "user": user, "skills": arguments.skills}
        async with keeper.keeping(solver.prepare_session(request, files=files, **dialogue)) as turn:
            turn.streaming = arguments.stream
            await solver.work(turn)
        result = turn.result
        assert result is not None
        engine = None if system.executor is None else system.executor.name
    lacking = _lacking(demo, result) if is_demo else {}
    findings = [Diagnostic(error.code, "warning", error.message, ref=name) for name, error in lacking.items()]
    return RunOutput.of(
        result=result,
        footnoted=footnoted(result),
        engine=engine,
        out=None if out is None else str(out),
        files=_locations(result) if out is None else await asyncio.to_thread(_deliver, result, out),
        transcript=next((str(each / f"{result.turn_id}.jsonl") for each in (out, keeper.folder) if each), None),
        folder=_folder(result, out),
        many=None if arguments.many is None else str(arguments.many),
        unmet=_unmet(demo, result, lacking) if is_demo else (),
        diagnostics=(
            *findings,
            *keeper.findings,
            *asker_findings(system.subsystem, arguments.consumer, demo_consumers(demo)),
        ),
    )
