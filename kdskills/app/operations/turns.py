"""`solver.run`: one turn on a bundle, from the request to a cited answer with its files on disk."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kdskills.app.operations.bundles import open_bundle
from kdskills.app.operations.consumers import asker_findings
from kdskills.app.operations.extras import EXTRAS, installed
from kdskills.app.operations.models import Finding, Input, Output
from kdskills.app.operations.table import Context, Implementation
from kdskills.app.operations.transcripts import footnoted
from kdskills.errors import BadRequest, Diagnostic, MissingExtra
from kdskills.models.cassette import Cassette, read_cassette
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem, TurnResult

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.bundle import Bundle


class RunInput(Input):
    """One request to a solver over a bundle."""

    bundle: Path = Field(description="The bundle's folder.")
    request: str | None = Field(None, description="What the user asks; none means the one in the bundle's demo.yaml.")
    model: str | None = Field(None, description="Such as `openai:NAME`; none means the setting, which is `replay`.")
    executor: str | None = Field(None, description="Engine of scripts; none means the setting, which is `auto`.")
    consumer: str = Field("solver.react.decision", description="Consumer the solver acts as.")
    answer_role: str | None = Field(None, description="Generator that writes the answer, as a consumer of its own.")
    files: tuple[Path, ...] = Field((), description="Files handed in with the request.")
    skills: tuple[str, ...] = Field((), description="Skills loaded before the first decision.")
    out: Path | None = Field(None, description="Folder that gets the produced files and the transcript.")


class RunOutput(Output):
    """The turn's result, the answer with footnotes, and what the bundle's demo expected but did not get.

    `files` are those the turn made: below `out`, or where the turn left them when there is no `out`.
    """

    result: TurnResult
    footnoted: str
    engine: str | None
    out: str | None
    files: tuple[str, ...]
    transcript: str | None
    unmet: tuple[str, ...] = ()
    diagnostics: tuple[Finding, ...] = ()


def _demo(bundle: Bundle) -> Cassette | None:
    return None if bundle.demo_path is None else read_cassette(bundle.demo_path)


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
    paths = []
    for file in result.files:
        target = out / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.location, target)
        paths.append(str(target))
    return tuple(paths)


async def run(host: Host, arguments: RunInput, context: Context) -> RunOutput:
    """Run one turn."""
    bundle = open_bundle(host, arguments.bundle, context, tools=True)
    demo = _demo(bundle)
    model = arguments.model or host.settings.model
    request = arguments.request or (demo.request if demo else "")
    if not request:
        raise BadRequest(f"{bundle.name} has no demo.yaml with a request: say what to do", code="request_missing")
    files: tuple[Path, ...] = arguments.files
    if arguments.request is None and demo is not None:
        files += tuple(bundle.root / name for name in demo.files)
    options: dict[str, Any] = {
        "answer_role": arguments.answer_role or (demo.expect.get("answer_role") if demo else None)
    }
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        options["transcripts"] = arguments.out
    system = SolverSystem(
        bundle=bundle,
        model=model,
        executor=arguments.executor or host.settings.executor,
        settings=SolverSettings(**options),
        wiring=host.wiring,
        sinks=() if context.emit is None else (context.emit,),
    )
    async with system:
        result = await ReactSolver(system, consumer=arguments.consumer).run(
            request, files=files, skills=arguments.skills
        )
        engine = None if system.executor is None else system.executor.name
    turn_files = tuple(str(file.location) for file in result.files)
    delivered = turn_files if arguments.out is None else await asyncio.to_thread(_deliver, result, arguments.out)
    lacking = _lacking(demo, result) if arguments.request is None else {}
    findings = [Diagnostic(error.code, "warning", error.message, ref=name) for name, error in lacking.items()]
    findings += asker_findings(system.subsystem, arguments.consumer, demo)
    return RunOutput(
        result=result,
        footnoted=footnoted(result),
        engine=engine,
        out=None if arguments.out is None else str(arguments.out),
        files=delivered,
        transcript=None if arguments.out is None else str(arguments.out / f"{result.turn_id}.jsonl"),
        unmet=_unmet(demo, result, lacking) if arguments.request is None else (),
        diagnostics=tuple(Finding.of(d) for d in findings),
    )


RUN = Implementation(
    RunInput,
    RunOutput,
    (
        "request_missing",
        "bundle_untrusted",
        "replay_diverged",
        "replay_exhausted",
        "model_failed",
        "engine_unavailable",
    ),
    run,
)
