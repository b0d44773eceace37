"""Operations on evaluations: whether a model picks the skills of a bundle, whether they help, and what their scripts do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from kdskills.app.operations.environments import chosen_skills
from kdskills.app.operations.models import Finding, Input, Output
from kdskills.app.operations.scripts import SkillScriptsInput, script_runtime
from kdskills.bundle.descriptor import DECISION
from kdskills.errors import BadRequest, Diagnostic, NotFound
from kdskills.evals.files import MAX_PROMPT, PUBLISHED, Eval, add_row, read
from kdskills.evals.rejudging import judge
from kdskills.evals.reports import RowChange, Thresholds, changes, former_iteration, report, shortfalls
from kdskills.evals.results import EvalKind, Iteration, RowResult, read_iteration, slug_of
from kdskills.evals.runs import EvalOptions, EvalProgress, checked_evals, figures_of, run
from kdskills.evals.scripts import ScriptEval, read_rows, run_rows
from kdskills.evals.sides import descriptions_in
from kdskills.skills.safe_open import is_folder

if TYPE_CHECKING:
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context
    from kdskills.app.settings import Settings
    from kdskills.app.wiring import HostWiring
    from kdskills.bundle import Bundle
    from kdskills.errors import Diagnostic
    from kdskills.skills import Skill
    from kdskills.turn import SkillsSubsystem


class EvalTerms(Input):
    """Which evaluations of a bundle, by which model, and how many at once."""

    skills: tuple[str, ...] = Field(
        (), description="Skills whose evaluations are run, by name or full id; none means all."
    )
    model: str | None = Field(
        None,
        description="`openai:NAME`, `anthropic:NAME`, `ollama:NAME`, …, or `replay:ITERATION` for what one recorded; none means the setting.",
    )
    executor: str | None = Field(
        None, description="`auto`, or the name of the engine that scripts run in; none means the setting."
    )
    consumer: str = Field(DECISION, description="Consumer the solver acts as, where an evaluation names none.")
    repeat: int | None = Field(
        None, ge=1, le=1000, description="How often each is run; none means as often as it says."
    )
    max_steps: int | None = Field(
        None, ge=1, description="How often the model may decide; none means 4 for `trigger`, 24 for `run`."
    )
    max_tokens: int | None = Field(None, ge=1, description="Tokens that one reply of the model may take.")
    temperature: float | None = Field(None, ge=0, le=2, description="How freely the model chooses its words.")
    seed: int | None = Field(None, description="Seed handed to the provider.")
    against: Path | None = Field(
        None, description="YAML file with other descriptions by full id, compared side by side; for `trigger`."
    )
    baseline: str | None = Field(
        None,
        max_length=4096,
        description="Folder of a bundle, or a branch, tag or commit of this one, compared with instead of the bundle without the skill; for `run`.",
    )
    jobs: int = Field(1, ge=1, le=64, description="Rows that are run at once.")
    rate: float | None = Field(
        None, gt=0, le=100_000, description="Calls of the model that begin in a minute, at most."
    )
    max_tokens_total: int | None = Field(
        None, ge=1, description="Tokens that all rows of the iteration may take; it stops before."
    )
    workspace: Path | None = Field(
        None, description="Folder of iterations; none means `<bundle>-workspace` beside the bundle."
    )
    resume: bool = Field(default=False, description="Go on with the newest iteration instead of beginning one.")
    judge: str = Field(
        "none", description="Model that judges assertions of `run`, named as a model is; `none` leaves them ungraded."
    )
    record: bool = Field(
        default=False, description="Keep the model's replies, so that `replay:ITERATION` gives them again."
    )


class EvalInput(Thresholds, EvalTerms):
    """Which evaluations of which bundle, and what they must reach."""

    kind: Literal["retrieval", "trigger", "run"] = Field(description="What is found out.")
    bundle: Path = Field(description="The bundle's folder.")


class EvalOutput(Output):
    """The iteration.

    `figures` are those of each side by its name, and of two sides `compared`; `missing` counts rows that were not run, and
    `complete` says that every row was, and none is an error. `below` tells what it falls short of; complete and without any it
    is `ok`. `changes` are those since the iteration `before`: the one named, or the last one of the same kind and sides; without one it is "".
    """

    YES: ClassVar[str] = "ok"

    ok: bool
    below: tuple[str, ...] = ()
    folder: str
    kind: str
    model: str
    sides: tuple[str, ...]
    rows: tuple[RowResult, ...]
    missing: int
    complete: bool
    figures: dict[str, Any]
    before: str = ""
    changes: tuple[RowChange, ...] = ()
    diagnostics: tuple[Finding, ...] = ()


async def run_evals(
    bundles: BundleLoader, wiring: HostWiring, settings: Settings, arguments: EvalInput, context: Context
) -> EvalOutput:
    """Run evaluations of a bundle."""
    call = await asyncio.to_thread(
        prepared,
        lambda path: bundles.open(path, context, tools=True),
        wiring,
        settings,
        arguments.kind,
        arguments.bundle,
        arguments,
    )
    iteration = await call.run(wiring, context.emit or (lambda progress: None))
    return await asyncio.to_thread(answer_of, iteration, arguments, None, call.diagnostics)


@dataclass(frozen=True)
class PreparedEvals:
    """Evaluations that can be run: read, checked, and their bundles loaded; `options` are further arguments of `run`."""

    kind: EvalKind
    bundle: Bundle
    rows: Sequence[Eval]
    options: Mapping[str, Any]
    diagnostics: tuple[Diagnostic, ...]

    async def run(self, wiring: HostWiring, tell: Callable[[EvalProgress], None], task: str = "") -> Iteration:
        """Run them. Raises as `kdskills.evals.run`."""
        options: Any = self.options
        return await run(self.bundle, self.rows, self.kind, wiring=wiring, tell=tell, task=task, **options)


def prepared(
    load: Callable[[Path], Bundle],
    wiring: HostWiring,
    settings: Settings,
    kind: EvalKind,
    folder: Path,
    terms: EvalTerms,
) -> PreparedEvals:
    """Load the bundles of a call by *load*, and read and check its evaluations; blocks.

    Raises BundleError, and BadRequest for evaluations, sides and models that cannot be used.
    """
    bundle = load(folder)
    evals = read(bundle.root, wiring.subsystem(bundle).registry)
    rows = of_skills(evals.evals, terms.skills)
    baseline: Any = terms.baseline
    if baseline is not None and is_folder(baseline):
        baseline = load(Path(baseline))
    against = None if terms.against is None else (slug_of(terms.against.stem), descriptions_in(terms.against))
    options: Any = terms.model_dump(include=set(EvalOptions.__annotations__))
    options |= {"model": terms.model or settings.model, "executor": terms.executor or settings.executor}
    options |= {"judge": None if terms.judge == "none" else terms.judge, "checks": wiring.checks}
    checked_evals(rows, kind, options, compared=(against and against[0], baseline is not None))
    options |= {"against": against, "baseline": baseline, "workspace": terms.workspace, "resume": terms.resume}
    options |= {"prices": settings.prices, "network": settings.network}
    return PreparedEvals(kind, bundle, rows, options, evals.diagnostics)


def answer_of(
    iteration: Iteration, wanted: Thresholds, before: Path | None = None, diagnostics: Iterable[object] = ()
) -> EvalOutput:
    """Write the report of an iteration and return the answer about it; blocks."""
    plan, figures = iteration.plan, figures_of(iteration)
    former, findings = former_iteration(iteration, before)
    if former is None and wanted.max_regression is not None:
        words = f"no iteration before is a {plan.kind} of {', '.join(plan.sides)}: no regression can be told"
        findings += (Diagnostic("eval_former_missing", "info", words),)
    report(iteration, figures)
    below = shortfalls(iteration, figures, wanted, former)
    complete = iteration.complete
    return EvalOutput.of(
        iteration,
        plan,
        complete=complete,
        ok=complete and not below,
        below=below,
        figures=figures,
        before="" if former is None else former.folder,
        changes=() if former is None or former.plan.kind != plan.kind else changes(former, iteration),
        diagnostics=(*diagnostics, *findings),
    )


class ReportInput(Thresholds, Input):
    """Which iteration, and what it is compared with."""

    iteration: Path = Field(description="Folder of the iteration.")
    before: Path | None = Field(
        None, description="Folder of an earlier iteration; none means the last one before of its kind and sides."
    )


async def report_evals(arguments: ReportInput, context: Context) -> EvalOutput:
    """Write the report of an iteration again, and say what changed and what it falls short of."""
    del context
    iteration = await asyncio.to_thread(read_iteration, arguments.iteration)
    return await asyncio.to_thread(answer_of, iteration, arguments, arguments.before)


class JudgeInput(Thresholds, Input):
    """Which iteration is judged again, by which evaluations and model."""

    bundle: Path = Field(description="Folder of the bundle whose evaluations, as they are now, judge it.")
    iteration: Path = Field(description="Folder of the iteration whose outputs are judged.")
    judge: str = Field(
        "none", description="Model that judges assertions, named as a model is; `none` leaves them ungraded."
    )
    executor: str | None = Field(
        None, description="`auto`, or the name of the engine that checks run commands in; none means the setting."
    )
    jobs: int = Field(1, ge=1, le=64, description="Rows that are judged at once.")
    rate: float | None = Field(
        None, gt=0, le=100_000, description="Calls of the judge that begin in a minute, at most."
    )
    max_tokens_total: int | None = Field(None, ge=1, description="Tokens that the judge may take; it stops before.")
    resume: bool = Field(default=False, description="Go on with the newest iteration, if it judges the same.")


async def judge_evals(wiring: HostWiring, settings: Settings, arguments: JudgeInput, context: Context) -> EvalOutput:
    """Judge again what an iteration kept, without running anything again."""
    if not is_folder(arguments.bundle):
        raise NotFound(f"there is no folder at {arguments.bundle}", code="path_missing", path=str(arguments.bundle))
    evals = await asyncio.to_thread(read, arguments.bundle)
    iteration = await judge(
        evals.evals,
        arguments.iteration,
        bundle=arguments.bundle,
        resume=arguments.resume,
        wiring=wiring,
        tell=context.emit or (lambda progress: None),
        judge=None if arguments.judge == "none" else arguments.judge,
        checks=wiring.checks,
        executor=arguments.executor or settings.executor,
        **arguments.model_dump(include={"jobs", "rate", "max_tokens_total"}),
    )
    return await asyncio.to_thread(answer_of, iteration, arguments, arguments.iteration, evals.diagnostics)


def of_skills(evals: Iterable[Eval], skills: tuple[str, ...]) -> list[Eval]:
    """Return the evaluations of skills, by name or full id; without any, all. Raises BadRequest: one has none."""
    rows = list(evals)
    for skill in skills:
        if not any(_is_of(row, skill) for row in rows):
            raise BadRequest(f"there are no evaluations of {skill}", code="evals_missing", skill=skill)
    return [row for row in rows if not skills or any(_is_of(row, skill) for skill in skills)]


def _is_of(row: Eval, skill: str) -> bool:
    about = row.skill or row.owner
    return about is not None and skill in {about, about.rpartition(".")[2]}


# ---- scripts ----


class ScriptEvalsInput(SkillScriptsInput):
    """Whose rows, and how many run at a time."""

    skills: tuple[str, ...] = Field((), description="Skills by id; all when none is given.")
    at_once: int = Field(2, ge=1, le=16, description="How many run at a time.")


class ScriptEvalsOutput(Output):
    """What each row came to; `ok` means that there are rows, all can be read, and all passed."""

    YES: ClassVar[str] = "ok"
    ok: bool
    bundle: str
    rows: tuple[RowResult, ...]
    diagnostics: tuple[Finding, ...] = ()


async def run_scripts(
    bundles: BundleLoader, wiring: HostWiring, settings: Settings, arguments: ScriptEvalsInput, context: Context
) -> ScriptEvalsOutput:
    """Run the rows of `evals/scripts.yaml` of skills, each as a call of a model would run the script."""
    project = await bundles.skills(arguments.bundle, context)
    skills = list(chosen_skills(dict(project.subsystem.registry), arguments.skills))
    read = [await asyncio.to_thread(read_rows, skill) for skill in skills]
    findings = tuple(Finding.of(finding) for _, problems in read for finding in problems)
    chosen = [(skill, rows) for skill, (rows, _) in zip(skills, read, strict=True)]
    rows = await script_results(project.subsystem, wiring, settings, arguments, chosen, arguments.at_once)
    passed = bool(rows) and all(row.status == "passed" for row in rows)
    return ScriptEvalsOutput(ok=passed and not findings, bundle=project.name, rows=rows, diagnostics=findings)


async def script_results(
    subsystem: SkillsSubsystem,
    wiring: HostWiring,
    settings: Settings,
    arguments: SkillScriptsInput,
    chosen: Iterable[tuple[Skill, Sequence[ScriptEval]]],
    at_once: int,
    tell: Callable[[RowResult], None] = lambda row: None,
) -> tuple[RowResult, ...]:
    """Run rows of skills, each as a call of a model would run the script, and return what they came to."""
    engine = await wiring.executor(arguments.executor)
    turns = asyncio.Semaphore(at_once)
    async with script_runtime(subsystem, wiring, settings, arguments, engine) as runtime:
        results = await asyncio.gather(
            *(
                run_rows(runtime, skill, rows, consumer=arguments.consumer, turns=turns, tell=tell)
                for skill, rows in chosen
                if rows
            )
        )
    return tuple(row for skill_rows in results for row in skill_rows)


class AddEvalInput(Input):
    """The evaluation to add."""

    folder: Path = Field(description="Folder of the skill it is about, or of a bundle.")
    prompt: str = Field(min_length=1, max_length=MAX_PROMPT, description="What the user asks.")
    id: str | None = Field(None, min_length=1, max_length=200, description="Its id; none means the next number.")
    expected: str = Field("", description="The answer you expect, in words.")
    assertions: tuple[str, ...] = Field((), description="Sentence that must be true of the outcome; again for more.")
    files: tuple[str, ...] = Field((), description="File to hand in, from the skill's folder; again for more.")
    negative: bool = Field(default=False, description="The skill must not be loaded for it.")


class AddEvalOutput(Output):
    """The id it has, in which file."""

    id: str
    path: Path


async def add_eval(arguments: AddEvalInput, context: Context) -> AddEvalOutput:
    """Add an evaluation to the published file of a skill or bundle."""
    del context
    row = {
        "id": arguments.id,
        "prompt": arguments.prompt,
        "expected_output": arguments.expected,
        "files": list(arguments.files),
        "assertions": list(arguments.assertions),
    }
    extra = {"should_trigger": False} if arguments.negative else {}
    folder = arguments.folder
    if not is_folder(folder):
        raise NotFound(f"there is no folder at {folder}", code="path_missing", path=str(folder))
    present = {key: value for key, value in row.items() if value}
    row_id = await asyncio.to_thread(add_row, folder, present | extra, skill_name=folder.resolve().name)
    return AddEvalOutput(id=row_id, path=folder / PUBLISHED)
