"""Operations on evaluations as durable work: a job that goes on until every row has ended, whatever is killed meanwhile.

The job has one program, which kdskills itself is: rows ask models, so they cannot run in a sandbox without a network. Rows
land in an iteration of the workspace as they end, and are the steps that are told. A program that was lost is begun again,
finds the iteration by the id of its task, and runs what has not landed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field

from kdskills import __version__
from kdskills.app.identity import LOCAL
from kdskills.app.operations.environments import chosen_skills
from kdskills.app.operations.evals import EvalTerms, answer_of, prepared, script_results
from kdskills.app.operations.models import Output
from kdskills.app.operations.scripts import SkillScriptsInput
from kdskills.app.operations.table import Context
from kdskills.app.operations.work_follow import CancelOutput, JobCancelInput, JobId, job_cancel
from kdskills.app.operations.work_run import DAY, Arguments, body_hash
from kdskills.app.work import scope_of
from kdskills.bundle.descriptor import DECISION
from kdskills.errors import BadRequest, Conflict, NotFound
from kdskills.evals.metering import Meter
from kdskills.evals.reports import REPORT, Thresholds
from kdskills.evals.results import (
    EvalKind,
    EvalPlan,
    EvalsRefused,
    EvalWorkspace,
    Iteration,
    RowResult,
    RowStatus,
    read_iteration,
    workspace_of,
)
from kdskills.evals.runs import EvalProgress, figures_of, progress_of
from kdskills.evals.scripts import ScriptEval, read_rows
from kdskills.evals.sides import WITH
from kdskills.jobs.model import Command, JobHead, JobSpec, JobStatus, Placement, StepSpec, step_task_id
from kdskills.session.receipts import text_digest
from kdskills.skills.safe_open import is_folder

if TYPE_CHECKING:
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.evals import EvalOutput
    from kdskills.app.settings import Settings
    from kdskills.app.wiring import HostWiring
    from kdskills.app.work import WorkService
    from kdskills.bundle import Bundle
    from kdskills.skills import Skill

ROWS_STEP: Final = "rows"


class StartEvalsInput(EvalTerms):
    """Which evaluations of which bundle, as for `evals.run`; of `scripts`, the rows of `evals/scripts.yaml`."""

    kind: EvalKind = Field(description="What is found out.")
    bundle: Path | None = Field(None, description="The bundle's folder; none means that of the caller's project.")


class EvalOrder(StartEvalsInput):
    """What a worker is to run: a call with everything in it that a worker could understand differently.

    Paths are absolute, model and engine are named; `trusted` are the bundles whose code may run.
    """

    bundle: Path
    workspace: Path
    trusted: tuple[Path, ...] = ()


class StartedEvalsOutput(Output):
    """A job that was accepted, and the workspace its iteration will lie in."""

    job_id: str
    status: JobStatus
    workspace: Path


class EvalStatusInput(Arguments):
    """A job of evaluations to look at."""

    job_id: JobId
    wait_sec: float = Field(
        0.0, ge=0, le=DAY, allow_inf_nan=False, description="Seconds to wait for its end before it is told."
    )


class EvalStep(Output):
    """One row: `queued` until it has landed, and `skipped` where the job is over without it."""

    eval: str
    side: str
    repeat: int
    status: RowStatus | Literal["queued", "skipped"]
    skill: str | None = None
    picked: tuple[str, ...] = ()
    tokens: int = 0
    cost: float | None = None
    duration_ms: int = 0
    error: tuple[str, str] | None = None
    folder: str = ""


class EvalStatusOutput(Output):
    """How a job of evaluations stands.

    Attributes:
        folder: The iteration; None before it was begun, and where it is gone or on another host.
        report: The page about it; None before the job has ended.
        total: How many rows there are; None before the iteration was begun.
        counts: Rows that have ended, by their status.
        complete: Whether every row has ended, and none is an error.
        figures: Those of the rows so far, as in `benchmark.json`.
    """

    job_id: str
    status: JobStatus
    kind: EvalKind
    bundle: str
    model: str
    workspace: Path
    folder: str | None
    report: str | None
    total: int | None
    done: int
    counts: dict[str, int]
    complete: bool
    tokens: int
    cost: float | None
    figures: dict[str, Any]
    steps: tuple[EvalStep, ...]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error_code: str | None
    error_message: str | None
    cancel_requested: bool


async def start_evals(
    bundles: BundleLoader,
    wiring: HostWiring,
    settings: Settings,
    work: WorkService,
    arguments: StartEvalsInput,
    context: Context,
) -> StartedEvalsOutput:
    """Start evaluations that go on in the background."""
    folder, trusting = arguments.bundle, context
    if folder is None:  # the operator's choice: its code runs as for every call that names no bundle
        folder, trusting = await _project_bundle(bundles, context), replace(context, trust=True)
    trusted: list[Path] = []

    def load(path: Path) -> Bundle:
        bundle = bundles.open(path, trusting if path == folder else context, tools=True)
        if bundle.trusted:
            trusted.append(path.absolute())
        return bundle

    bundle = await asyncio.to_thread(_checked_bundle, load, wiring, settings, folder, arguments)
    engine = None if arguments.kind == "retrieval" else await wiring.executor(arguments.executor)
    order = _order(arguments, settings, bundle, folder.absolute(), "" if engine is None else engine.name, trusted)
    seconds = work.limits.task_max_s
    program = Command(argv=(order.model_dump_json(),), timeout_s=seconds)
    spec = JobSpec(
        scope=scope_of(context.identity),
        session_id=f"evals-{hashlib.sha256(str(order.workspace).encode()).hexdigest()[:32]}",
        steps=(StepSpec(name=ROWS_STEP, command=program, retry_on_lost=True),),
        placement=Placement(engine=order.executor or "", skill_name=bundle.name, version_hash="", evals=True),
        max_wall_time_s=seconds,
        on_busy="refuse",
    )
    body = body_hash("evals.start", arguments, spec.scope)
    try:
        head = await work.submit(context, spec, context.idempotency_key, body)
    except Conflict as busy:
        if busy.details.get("reason") != "session_busy":
            raise
        message = f"{busy.details['holder']} writes to {order.workspace}: wait for it, or name another workspace"
        raise EvalsRefused(message, code="evals_running", path=str(order.workspace), **busy.details) from None
    return StartedEvalsOutput(job_id=head.id, status="queued", workspace=order.workspace)


async def _project_bundle(bundles: BundleLoader, context: Context) -> Path:
    project = context.identity.project
    folder = (await bundles.project_skills(project)).subsystem.bundle_root
    if folder is None:
        raise BadRequest(f"project {project!r} has no bundle: name one", code="no_bundle", project=project)
    return folder


def _checked_bundle(
    load: Callable[[Path], Bundle], wiring: HostWiring, settings: Settings, folder: Path, arguments: StartEvalsInput
) -> Bundle:
    """Return the bundle once its evaluations are known to be runnable; blocks. Raises as `prepared`."""
    if arguments.kind != "scripts":
        return prepared(load, wiring, settings, arguments.kind, folder, arguments).bundle
    bundle = load(folder)
    _script_rows(wiring, bundle, arguments.skills)
    return bundle


def _script_rows(
    wiring: HostWiring, bundle: Bundle, skills: tuple[str, ...]
) -> list[tuple[Skill, tuple[ScriptEval, ...]]]:
    """Return the skills that have rows; blocks. Raises BadRequest: there are none, or some that cannot be read."""
    chosen = list(chosen_skills(dict(wiring.subsystem(bundle).registry), skills))
    read = [(skill, *read_rows(skill)) for skill in chosen]
    problems = [finding for _, _, findings in read for finding in findings]
    if problems:
        errors = [finding.to_json() for finding in problems]
        raise BadRequest(f"{problems[0].ref}: {problems[0].message}", code="script_eval_invalid", errors=errors)
    if not any(rows for _, rows, _ in read):
        raise BadRequest("there are no rows of scripts to run", code="evals_missing")
    return [(skill, rows) for skill, rows, _ in read if rows]


def _order(
    arguments: StartEvalsInput,
    settings: Settings,
    bundle: Bundle,
    folder: Path,
    engine: str,
    trusted: list[Path],
) -> EvalOrder:
    """Return the order, which is read by a process that has another working folder, and maybe other settings."""
    workspace = arguments.workspace or workspace_of(bundle.root)
    baseline = arguments.baseline
    facts = {
        "bundle": folder,
        "workspace": workspace.resolve(),
        "against": None if arguments.against is None else arguments.against.absolute(),
        "baseline": str(Path(baseline).absolute()) if baseline is not None and is_folder(baseline) else baseline,
        "model": _model_from_anywhere(arguments.model or settings.model),
        "judge": _model_from_anywhere(arguments.judge),
        "executor": engine or None,
        "trusted": tuple(trusted),
    }
    return EvalOrder.model_validate(arguments.model_dump() | facts)


def _model_from_anywhere(name: str) -> str:
    """Return a model string whose recording, where it names one, is found from any working folder."""
    prefix, _, target = name.partition(":")
    return f"replay:{Path(target).absolute()}" if prefix == "replay" and target else name


# ---- what a worker does ----


async def run_order(
    bundles: BundleLoader,
    wiring: HostWiring,
    settings: Settings,
    order: EvalOrder,
    task: str,
    tell: Callable[[EvalProgress], None],
) -> None:
    """Run the rows of an order that have not landed in the iteration of its task. Raises as `kdskills.evals.run`."""
    # through no door where the working folder is the caller's own: a worker's is `/`
    context = Context(identity=replace(LOCAL, door="http"))

    def load(path: Path) -> Bundle:
        return bundles.open(path, replace(context, trust=path in order.trusted), tools=True)

    if order.kind == "scripts":
        await _run_script_rows(await asyncio.to_thread(load, order.bundle), wiring, settings, order, task, tell)
    else:
        call = await asyncio.to_thread(prepared, load, wiring, settings, order.kind, order.bundle, order)
        await call.run(wiring, tell, task)


async def _run_script_rows(
    bundle: Bundle,
    wiring: HostWiring,
    settings: Settings,
    order: EvalOrder,
    task: str,
    tell: Callable[[EvalProgress], None],
) -> None:
    chosen = await asyncio.to_thread(_script_rows, wiring, bundle, order.skills)
    rows = [row for _, skill_rows in chosen for row in skill_rows]
    consumer = None if order.consumer == DECISION else order.consumer  # as `evals.scripts` has it
    engine = await wiring.executor(order.executor)
    plan = EvalPlan(
        kind="scripts",
        bundle=bundle.name,
        consumer=consumer or "",
        executor=engine.name,
        digests={skill.full_id: await asyncio.to_thread(skill.content.tree_digest) for skill, _ in chosen},
        evals={row.id: text_digest(row.model_dump_json()) for row in rows},
        total=len(rows),
        kdskills=__version__,
        tasks=(task,),
    )
    space, meter = EvalWorkspace(order.workspace), Meter(None, None, 0)
    with space.alone():
        folder = await asyncio.to_thread(space.open, plan, resume=order.resume)
        tell(progress_of(folder, meter))

        def land(row: RowResult) -> None:
            folder.add(row)
            tell(progress_of(folder, meter))

        waiting = [
            (skill, [row for row in skill_rows if not folder.settled((row.id, WITH, 0))])
            for skill, skill_rows in chosen
        ]
        whose = SkillScriptsInput(bundle=order.bundle, consumer=consumer, executor=engine.name)
        try:
            await script_results(wiring.subsystem(bundle), wiring, settings, whose, waiting, order.jobs, land)
        finally:
            folder.close(figures_of)


def report_of_task(workspace: Path, task: str) -> EvalOutput:
    """Write the report of the iteration that a task ran, and return the answer about it; blocks.

    Raises EvalsRefused, `evals_none`: there is none.
    """
    return answer_of(read_iteration(require_iteration(workspace, task)), Thresholds())


def require_iteration(workspace: Path, task: str) -> Path:
    """Return the folder of the iteration that a task ran. Raises EvalsRefused, `evals_none`: there is none."""
    folder = EvalWorkspace(workspace).of_task(task)
    if folder is None:
        raise EvalsRefused(f"the iteration in {workspace} is gone, with the rows that had ended", code="evals_none")
    return folder


# ---- how it stands ----


async def evals_status(work: WorkService, arguments: EvalStatusInput, context: Context) -> EvalStatusOutput:
    """Show how evaluations in the background stand, row by row."""
    head, order = await _evals_job(work, arguments.job_id, context)
    if arguments.wait_sec:
        head = await work.client.wait(JobHead, head.scope, head.id, arguments.wait_sec, any_agent=True)
    iteration = await asyncio.to_thread(_iteration_of, order.workspace, step_task_id(head.id, 0, 0))
    return EvalStatusOutput.of(head, order, **_facts_of(head, order), **_figures_of(iteration, over=head.terminal))


def _facts_of(head: JobHead, order: EvalOrder) -> Mapping[str, Any]:
    """Return what is told of the job; why its one step failed says more than that one did."""
    task = head.steps[0].task
    source = head if task is None or task.error_code is None or head.error_code != "step_failed" else task
    return {
        "job_id": head.id,
        "bundle": order.bundle.name,
        "model": order.model or "",
        "error_code": source.error_code,
        "error_message": source.error_message,
        "cancel_requested": head.cancel_at is not None,
    }


def _figures_of(iteration: Iteration | None, *, over: bool) -> Mapping[str, Any]:
    """Return what is told of an iteration, which may not be there yet or any more."""
    rows = () if iteration is None else iteration.rows
    costs = [row.cost for row in rows if row.cost is not None]
    by_key = {row.key: row for row in rows}
    keys = [] if iteration is None else iteration.plan.keys()
    waiting: Literal["queued", "skipped"] = "skipped" if over else "queued"
    steps = [
        EvalStep.of(by_key[key]) if key in by_key else EvalStep(eval=key[0], side=key[1], repeat=key[2], status=waiting)
        for key in keys
    ]
    report = None if iteration is None else Path(iteration.folder, REPORT)
    return {
        "folder": None if iteration is None else iteration.folder,
        "report": str(report) if over and report is not None and report.is_file() else None,
        "total": None if iteration is None else iteration.plan.total,
        "done": len(rows),
        "counts": dict(Counter(row.status for row in rows)),
        "complete": iteration is not None and iteration.complete,
        "tokens": sum(row.tokens for row in rows),
        "cost": sum(costs) if costs else None,
        "figures": {} if iteration is None else figures_of(iteration),
        "steps": tuple(steps),
    }


def _iteration_of(workspace: Path, task: str) -> Iteration | None:
    folder = EvalWorkspace(workspace).of_task(task)
    return None if folder is None else read_iteration(folder)


async def cancel_evals(work: WorkService, arguments: JobCancelInput, context: Context) -> CancelOutput:
    """End evaluations in the background; rows that have landed stay, with a report on them."""
    await _evals_job(work, arguments.job_id, context)
    return await job_cancel(work, arguments, context)


async def _evals_job(work: WorkService, item: str, context: Context) -> tuple[JobHead, EvalOrder]:
    """Return a job of evaluations and its order. Raises NotFound for any other job, too."""
    head = await work.job(context.identity, item)
    if not head.spec.placement.evals:
        raise NotFound(f"{item[:200]!r} is no job of evaluations: see skills.job_status", id=item[:200])
    return head, EvalOrder.model_validate_json(head.spec.steps[0].command.argv[0])
