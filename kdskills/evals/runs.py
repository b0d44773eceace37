"""Evaluations run by the real solver: which skill is loaded first (`trigger`), and whether it helps (`run`)."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack, cast

from pydantic import ValidationError

from kdskills import __version__
from kdskills.bundle import Bundle, load_bundle
from kdskills.bundle.descriptor import DECISION
from kdskills.errors import BadRequest, KdskillsError, StrPath
from kdskills.evals.figures import Detection, confusion, mcnemar
from kdskills.evals.files import Eval
from kdskills.evals.grading import CHECKS, CheckTable, Outcome, check_findings, commands_on, grade, row_status
from kdskills.evals.metering import CEILING_MET, CeilingMet, JudgeModel, Meter, MeteredModel, PickSettled
from kdskills.evals.results import (
    OUTPUTS,
    RECORDING,
    TRANSCRIPT,
    CheckVerdict,
    EvalKind,
    EvalPlan,
    EvalWorkspace,
    Iteration,
    IterationFolder,
    RowResult,
    RowStatus,
    side_named,
    workspace_of,
    write_row_files,
)
from kdskills.evals.retrieval import rank_rows, retrieval_figures
from kdskills.evals.sides import WITH, EvalSide, folders_of, other_side
from kdskills.models import ModelPrice, ModelProvider
from kdskills.session.receipts import text_digest
from kdskills.session.workspace import MAX_TOTAL
from kdskills.skills.safe_open import read_file
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem, TurnResult
from kdskills.solver.events import Event, ScriptFinished, SkillLoaded
from kdskills.solver.parts import Wiring, default_wiring
from kdskills.solver.react import PreviewWiring, PromptProbe
from kdskills.solver.tools import whole_text

if TYPE_CHECKING:
    from kdskills.execution import Executor
    from kdskills.solver.turn import Turn
    from kdskills.turn import SkillsSubsystem

Verdicts = tuple[CheckVerdict, ...]

TRIGGER_STEPS: Final = 4
"""Decisions in which a skill must be loaded, unless somebody says otherwise."""
MODEL_S, TURN_S = 120.0, 900.0
"""What a call of a model and a turn may take, beside the wait that a rate asks for."""


@dataclass(frozen=True)
class EvalProgress:
    """How far a run is. `calls` are those of models since it began, in `seconds`; `cost` is None where no price is known."""

    done: int
    total: int
    counts: Mapping[RowStatus, int]
    tokens: int
    cost: float | None
    calls: int
    seconds: float


class EvalOptions(TypedDict, total=False):
    """What `run` takes beside bundle, evaluations and kind.

    `model` is a model string or a provider, which stays open; `executor`, `consumer`, `temperature`, `max_tokens`, `prices` and
    `network` are as for turns; `seed` is handed to the provider. `repeat` is how often each evaluation is run, its own number
    by default; `max_steps` bounds decisions. `jobs` rows run at once, `rate` calls of models begin in a minute, and none
    begins that would take the tokens of the iteration over `max_tokens_total`. `record` keeps the model's replies. Outcomes of
    `run` are graded by `checks`, the shipped ones by default, and by a `judge`, which is named or given as a model is; without
    one assertions are `ungraded`. Its calls count for rate and ceiling, and not for the tokens of a row.
    """

    model: str | ModelProvider
    executor: str
    consumer: str
    temperature: float | None
    max_tokens: int | None
    seed: int | None
    prices: Mapping[str, ModelPrice]
    network: Mapping[str, tuple[str, ...]]
    repeat: int | None
    max_steps: int | None
    jobs: int
    rate: float | None
    max_tokens_total: int | None
    record: bool
    checks: CheckTable
    judge: str | ModelProvider | None


class SharedWiring:
    """A wiring whose subsystem of a bundle is made once, for all rows."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._subsystems: dict[Path, SkillsSubsystem] = {}

    def __getattr__(self, name: str) -> Any:
        """Return what the wiring has."""
        return getattr(self._wiring, name)

    def subsystem(self, bundle: Bundle) -> SkillsSubsystem:
        """Return the skills of a bundle."""
        if bundle.root not in self._subsystems:
            self._subsystems[bundle.root] = self._wiring.subsystem(bundle)
        return self._subsystems[bundle.root]


@dataclass
class RowTurn:
    """The turn of a row as far as it went: `loads` are the skills the model loaded, with the decision that did,
    `exits` the scripts that ended, with their exit codes; `former_result` is that of one that ended long ago.
    """

    loads: list[tuple[str, int]] = field(default_factory=list)
    exits: list[tuple[str, int | None]] = field(default_factory=list)
    turn: Turn | None = None
    former_result: TurnResult | None = None
    judge_tokens: int = 0
    version: str = ""

    def note(self, event: Event) -> None:
        """Take an event of the turn."""
        if isinstance(event, SkillLoaded) and event.by == "model":
            self.loads.append((event.skill, event.step))
        elif isinstance(event, ScriptFinished):
            self.exits.append((event.path or "", event.exit_code))

    @property
    def result(self) -> TurnResult | None:
        """What the turn came to, once it has ended."""
        return self.former_result if self.turn is None else self.turn.result

    def facts(self) -> dict[str, Any]:
        """Return what a row says of its turn."""
        result = self.result
        if result is None:
            return {}
        reason = "skill_loaded" if result.stop_reason == PickSettled.__name__ else result.stop_reason
        facts: dict[str, Any] = {"model": self.version, "stop_reason": reason}
        if result.steps:
            facts["prompt_digest"] = result.steps[0].prompt_digest
        usage = result.usage
        return {
            "picked": tuple(dict.fromkeys(skill for skill, _ in self.loads)),
            "steps": self.loads[0][1] if self.loads else len(result.steps),
            "tokens": usage.input + usage.output,
            "estimated": usage.estimated,
            "cost": usage.cost,
            "facts": facts,
        }


def picked_verdict(row: Eval, picked: Sequence[str]) -> CheckVerdict:
    """Return whether the skills that were loaded are right for an evaluation; the first of them decides."""
    first, right = next(iter(picked), None), right_skills(row)
    if right:
        text, passed = f"loads {' or '.join(right)} first", first in right
    elif row.owner in row.must_not:
        text, passed = f"does not load {row.owner}", True
    else:
        text, passed = "loads no skill", first is None
    evidence = f"loaded {', '.join(picked)}" if picked else "loaded none"
    return CheckVerdict(text=text, passed=passed and not set(picked).intersection(row.must_not), evidence=evidence)


def right_skills(row: Eval) -> tuple[str, ...]:
    """Return the skills that are right for an evaluation; none where none should be loaded."""
    return tuple(dict.fromkeys(filter(None, (row.skill, *row.acceptable))))


def trigger_figures(rows: Iterable[RowResult]) -> dict[str, Any]:
    """Return the figures of one side of `trigger` as JSON: `precision` and `recall` with intervals, `f1` and `confused`.

    A skill that was loaded where another one is right is a wrong load and a missed one. Errors count for nothing.
    """
    pairs = [(row, next(iter(row.picked), None)) for row in rows if row.status != "error"]
    expecting = [(row, first) for row, first in pairs if row.facts.get("expects")]
    hits = sum(row.status == "passed" for row, _ in expecting)
    wrong = sum(row.status == "failed" and first is not None for row, first in pairs)
    spared = sum(row.status == "passed" for row, _ in pairs) - hits
    detection = Detection(hits, wrong, len(expecting) - hits, spared)
    table = confusion((row.skill if row.facts.get("expects") else None, first) for row, first in pairs)
    return {
        "precision": detection.precision.to_json(),
        "recall": detection.recall.to_json(),
        "f1": round(detection.f1, 4),
        "confused": {expected: dict(counts) for expected, counts in table.items()},
    }


def figures_of(iteration: Iteration) -> dict[str, Any]:
    """Return the figures of each side by name and, of two sides, under `compared` in how many pairs only one passed.

    `p` is the exact two-sided p-value of McNemar's test that both are equally good; pairs with an error are left out.
    """
    kind, sides = iteration.plan.kind, iteration.plan.sides
    by_side = iteration.by_side()
    figures: dict[str, Any] = {}
    if kind in {"retrieval", "trigger"}:
        measure = retrieval_figures if kind == "retrieval" else trigger_figures
        figures = {name: measure(rows) for name, rows in by_side.items()}
    if len(sides) == 2:
        judged = {row.key: row.status == "passed" for row in iteration.rows if row.status in {"passed", "failed"}}
        rows = by_side[sides[0]]
        pairs = [tuple(judged.get((row.eval, name, row.repeat)) for name in sides) for row in rows]
        first, second = pairs.count((True, False)), pairs.count((False, True))
        compared = {"only_first": first, "only_second": second, "pairs": sum(None not in pair for pair in pairs)}
        figures["compared"] = compared | {"p": round(mcnemar(first, second), 4)}
    return figures


def progress_of(folder: IterationFolder, meter: Meter) -> EvalProgress:
    """Return how far an iteration is."""
    rows = folder.rows.values()
    costs = [row.cost for row in rows if row.cost is not None]
    return EvalProgress(
        done=len(rows),
        total=folder.plan.total,
        counts=Counter(row.status for row in rows),
        tokens=sum(row.tokens for row in rows),
        cost=sum(costs) if costs else None,
        calls=meter.calls,
        seconds=time.monotonic() - meter.started,
    )


@dataclass
class EvalRun:
    """A run of evaluations into an iteration; `stopped` says that it ended before its ceiling."""

    kind: EvalKind
    folder: IterationFolder
    sides: Sequence[EvalSide]
    wiring: Wiring
    executor: Executor | None
    options: EvalOptions
    tell: Callable[[EvalProgress], None]
    stopped: bool = False

    def __post_init__(self) -> None:
        rows, ceiling = self.folder.rows.values(), self.options.get("max_tokens_total")
        longest = max((row.longest_reply for row in rows), default=0)
        factor = max((row.undercounted for row in rows), default=1.0)
        self.meter = Meter(self.options.get("rate"), ceiling, self.folder.tokens_spent, longest, factor)

    async def run(self, rows: Sequence[tuple[Eval, str, int]]) -> None:
        """Run the rows that have not ended yet, each an evaluation, a side's name and a repetition.

        Raises OSError where they cannot be written.
        """
        waiting = iter([row for row in rows if not self.folder.settled((row[0].id, row[1], row[2]))])
        self._progress()

        async def work() -> None:
            for row in waiting:
                if self.stopped:
                    return
                await self._row(*row)

        workers = [asyncio.create_task(work()) for _ in range(max(self.options.get("jobs", 1), 1))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _row(self, row: Eval, side: str, repeat: int) -> None:
        key = (row.id, side, repeat)
        try:
            with self.folder.row_folder(key) as folder:
                result = await self._result(row, side, repeat, folder)
                await asyncio.to_thread(write_row_files, folder, result)
        except CeilingMet:
            self.stopped = True
            return
        self.folder.add(result)
        self._progress()

    def _progress(self) -> None:
        self.tell(progress_of(self.folder, self.meter))

    async def _result(self, row: Eval, side: str, repeat: int, folder: Path) -> RowResult:
        """Run one row; whatever goes wrong with it is said in the row."""
        turn, started, key = RowTurn(), time.monotonic(), (row.id, side, repeat)

        async def graded() -> Verdicts:
            with tempfile.TemporaryDirectory(prefix="kdskills-eval-", ignore_cleanup_errors=True) as work:
                variant = next(each for each in self.sides if each.name == side)
                await self._turn(row, variant, turn, self.folder.name_of(key), folder, Path(work))
                return await self._verdicts(row, turn, folder)

        verdicts, error = await verdicts_of(graded())
        facts = turn.facts()
        if error is not None and error[0] == CEILING_MET:
            self.stopped = True
            if not facts.get("tokens"):
                raise CeilingMet
        expected = {"expects": bool(right_skills(row)), "acceptable": list(row.acceptable)}
        return row_of(
            eval=row.id,
            skill=row.skill or row.owner,
            side=side,
            repeat=repeat,
            status=row_status(verdicts) if error is None else "error",
            verdicts=verdicts,
            duration_ms=round((time.monotonic() - started) * 1000),
            error=error,
            folder=self.folder.name_of(key),
            judge_tokens=turn.judge_tokens,
            longest_reply=self.meter.longest,
            undercounted=self.meter.factor,
            **facts | {"facts": facts.get("facts", {}) | expected},
        )

    async def _turn(self, row: Eval, variant: EvalSide, turn: RowTurn, name: str, folder: Path, work: Path) -> None:
        """Run the turn of a row, until a skill is loaded or to its end; what it leaves behind lies in *folder*."""
        model = self._model(name, folder)
        files = await asyncio.to_thread(files_of, row)
        system = SolverSystem(
            bundle=variant.bundle,
            model=model,
            executor=self.executor,
            settings=self._settings(row, folder, work),
            sinks=(turn.note,),
            wiring=self.wiring,
        )
        try:
            async with system:
                solver = ReactSolver(system, consumer=row.consumer or self.options.get("consumer", DECISION))
                given: dict[str, Any] = {"files": files, "skills": row.skills}
                if variant.without:
                    about = row.skill or row.owner
                    given["overlay"] = system.subsystem.overlay(rules={"disabled": [about] if about else True})
                    given["skills"] = [name for name in row.skills if about not in {name, None}]
                with suppress(PickSettled):
                    async with solver.prepare_session(row.prompt, **given) as turn.turn:
                        await solver.work(turn.turn)
        finally:
            turn.version = model.version
            await asyncio.to_thread(_keep_outputs, turn.result, folder)

    async def _verdicts(self, row: Eval, turn: RowTurn, folder: Path) -> Verdicts:
        if self.kind == "trigger":
            return (picked_verdict(row, turn.facts()["picked"]),)
        assert turn.result is not None
        outputs, judge = folder / OUTPUTS, cast("ModelProvider | None", self.options.get("judge"))
        command = None if self.executor is None else commands_on(outputs, self.executor)
        metered = judge and JudgeModel(judge, self.meter, picks=False, owned=False)
        verdicts = await grade(
            row,
            Outcome(turn.result, outputs, tuple(turn.exits), command),
            checks=self.options.get("checks", CHECKS),
            judge=cast("ModelProvider | None", metered),
            judge_s=MODEL_S + self._waits,
        )
        turn.judge_tokens = metered.tokens if metered else 0
        return verdicts

    @property
    def _waits(self) -> float:
        """Seconds a call may wait for its turn."""
        return self.meter.interval * max(self.options.get("jobs", 1), 1)

    def _model(self, name: str, folder: Path) -> MeteredModel:
        """Open the model of a row: recordings, and what records, are of one row each."""
        model = self.options["model"]
        opened = model
        if isinstance(model, str):
            prefix, _, target = model.partition(":")
            if prefix == "replay" and Path(target).is_dir():
                model = f"replay:{Path(target, name, RECORDING)}"
            if self.options.get("record"):
                model = f"record:{model}>{folder / RECORDING}"
            opened = self.wiring.model(model)
        return MeteredModel(
            cast("ModelProvider", opened), self.meter, picks=self.kind == "trigger", owned=isinstance(model, str)
        )

    def _settings(self, row: Eval, folder: Path, work: Path) -> SolverSettings:
        options, waits = self.options, self._waits
        given = {name: options.get(name) for name in ("temperature", "max_tokens", "seed")}
        bounds: dict[str, Any] = {"max_steps": options.get("max_steps"), "max_total_tokens": row.budget}
        if self.kind == "trigger":
            steps = options.get("max_steps") or TRIGGER_STEPS
            bounds |= {"max_steps": steps, "final_call": False, "check_answers": False}
        settings = SolverSettings(**{name: value for name, value in bounds.items() if value is not None})
        return settings.model_copy(
            update={
                "model_settings": {name: value for name, value in given.items() if value is not None},
                "prices": dict(options.get("prices", {})),
                "network": dict(options.get("network", {})),
                "model_timeout_s": MODEL_S + waits,
                "wall_s": TURN_S + waits * settings.max_steps,
                "work_dir": work,
                "transcripts": folder,
            }
        )


def row_of(**facts: Any) -> RowResult:
    """Return the result of a row; one whose provider counts what cannot be, such as fewer tokens than none, is an error without it."""
    try:
        return RowResult(**facts)
    except ValidationError as refused:
        names = {str(error["loc"][0]) for error in refused.errors()}
        valid = {name: value for name, value in facts.items() if name not in names}
        error = ("model_usage_invalid", f"the provider counts what cannot be: {', '.join(sorted(names))}")
        return RowResult(**valid | {"status": "error", "error": error})


async def verdicts_of(grading: Awaitable[Verdicts]) -> tuple[Verdicts, tuple[str, str] | None]:
    """Return the verdicts of a row, and code and words of what kept some or all of them from being made.

    Nothing is raised.
    """
    try:
        verdicts = await grading
    except CeilingMet as met:
        return (), (CEILING_MET, str(met))
    except KdskillsError as refused:
        return (), (refused.code, whole_text(refused.message))
    except Exception as broken:  # noqa: BLE001 - a provider or a tool may raise anything
        return (), ("internal_error", type(broken).__name__)
    if row_status(verdicts) != "error":
        return verdicts, None
    return verdicts, next((verdict.error, verdict.evidence) for verdict in verdicts if verdict.error)


def files_of(row: Eval) -> list[tuple[str, bytes]]:
    """Return the files handed in with an evaluation, by name. Raises FileRefused for what leads out of its folder."""
    return [(PurePosixPath(path).name, read_file(row.folder, path, limit=MAX_TOTAL).data) for path in row.files]


def _keep_outputs(result: TurnResult | None, folder: Path) -> None:
    """Copy the files a turn made below the row's folder, and give its transcript and answer their names."""
    if result is None:
        return
    with suppress(FileNotFoundError):
        Path(folder, f"{result.turn_id}.jsonl").rename(folder / TRANSCRIPT)
    outputs = folder / OUTPUTS
    outputs.mkdir()
    for file in result.files:
        target = outputs / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.location, target)


async def run(
    bundle: Bundle | StrPath,
    evals: Sequence[Eval],
    kind: EvalKind = "trigger",
    *,
    against: tuple[str, Mapping[str, str]] | None = None,
    baseline: Bundle | str | None = None,
    workspace: StrPath | None = None,
    resume: bool = False,
    task: str = "",
    wiring: Wiring | None = None,
    tell: Callable[[EvalProgress], None] = lambda progress: None,
    **options: Unpack[EvalOptions],
) -> Iteration:
    """Run evaluations of a bundle into a new iteration, row by row, and return it.

    Args:
        bundle: The bundle, or its folder, whose code then runs.
        evals: The evaluations, as `read` gives them.
        kind: `retrieval` asks no model, but whether search finds the skill; `trigger` asks the model until it loads a skill;
            `run` runs the whole turn, with the skill and without it.
        against: Name and descriptions by full id of a second side: the same skills, described otherwise. For `trigger` only.
        baseline: Another bundle, or a branch, tag or commit of its repository, as the second side. For `run` only.
        workspace: Folder of iterations; by default `<bundle>-workspace` beside the bundle.
        resume: Whether the newest iteration is gone on with: rows that are missing, or are errors, are run.
        task: Id of the background task that this is a run of, whose own iteration is gone on with where it has one.
        wiring: Turns names into objects; the installed Host's by default.
        tell: Told how far it is, after every row.
        options: See `EvalOptions`; without `model` there is nothing to ask.

    Raises:
        BadRequest: Evaluations or options that cannot be used.
        EvalsRefused: Another run writes to the workspace, it lies where skills would see it, or there is nothing to go on with.
        ExecRefused: No engine runs scripts here.
    """
    bundle = bundle if isinstance(bundle, Bundle) else load_bundle(bundle)
    shared = cast("Wiring", SharedWiring(wiring or default_wiring()))
    rows = checked_evals(evals, kind, options, compared=(against and against[0], baseline is not None))
    space = EvalWorkspace(workspace_of(bundle.root) if workspace is None else workspace)
    executor = None if kind == "retrieval" else await shared.executor(options.get("executor", "auto"))
    async with AsyncExitStack() as stack:
        stack.enter_context(space.alone(*folders_of(bundle, baseline)))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="kdskills-eval-"))
        sides = [EvalSide(WITH, bundle)]
        if against is not None or kind == "run":
            compare = partial(other_side, bundle, shared.subsystem(bundle), against, baseline, Path(scratch))
            sides.append(await asyncio.to_thread(compare))
        repeats = [(row, each.name, turn) for row in rows for each in sides for turn in _repeats(row, kind, options)]
        if isinstance(judge := options.get("judge"), str):
            options["judge"] = await stack.enter_async_context(aclosing(shared.model(judge)))
        plan = await _plan(kind, rows, sides, shared, executor, options, task)
        folder = await asyncio.to_thread(space.open, plan, resume=resume)
        try:
            if executor is None:
                await asyncio.to_thread(_rank, rows, shared.subsystem(bundle), folder, tell)
            else:
                await EvalRun(kind, folder, sides, shared, executor, options, tell).run(repeats)
        finally:
            iteration = folder.close(figures_of)
    return iteration


def _rank(
    rows: Sequence[Eval], subsystem: SkillsSubsystem, folder: IterationFolder, tell: Callable[[EvalProgress], None]
) -> None:
    meter = Meter(None, None, 0)
    for row in rows:
        view = subsystem.view(row.consumer or folder.plan.consumer)
        for result in rank_rows([row], view.search):
            if not folder.settled(result.key):
                folder.add(result)
        tell(progress_of(folder, meter))


def _repeats(row: Eval, kind: EvalKind, options: EvalOptions) -> range:
    return range(1 if kind == "retrieval" else options.get("repeat") or row.repeat)


def checked_evals(
    evals: Sequence[Eval], kind: str, options: EvalOptions, *, compared: tuple[str | None, bool]
) -> list[Eval]:
    """Return evaluations with ids that can be written; *compared* names other descriptions, and says whether there is a baseline.

    Raises BadRequest: there is no evaluation, two have one id, no model is named, the sides are those of another kind, or
    nobody understands a check.
    """
    rows = [replace(row, id=whole_text(row.id)) for row in evals]
    if not rows:
        raise BadRequest("there are no evaluations to run", code="evals_missing")
    ids = [row.id for row in rows]
    twice = next((name for name in ids if ids.count(name) > 1), None)
    if twice is not None:
        raise BadRequest(f"two evaluations have the id {twice!r}", code="eval_duplicate", id=twice)
    unknown = check_findings(rows, options.get("checks", CHECKS)) if kind == "run" else ()
    if unknown:
        raise BadRequest(unknown[0].message, code="check_invalid", errors=[finding.to_json() for finding in unknown])
    if kind != "retrieval" and options.get("model", "replay") == "replay":
        message = "say which model is asked, such as --model openai:NAME: demo.yaml has replies to one request only"
        raise BadRequest(message, code="model_missing")
    against, baseline = compared
    if against is not None and kind != "trigger":
        raise BadRequest("other descriptions are compared by `trigger` only", code="side_invalid")
    if against is not None and not side_named(against):
        raise BadRequest(f"{against!r:.100} cannot be the name of a side", code="side_invalid")
    if baseline and kind != "run":
        raise BadRequest("a baseline is compared with by `run` only", code="side_invalid")
    return rows


async def _plan(
    kind: EvalKind,
    rows: Sequence[Eval],
    sides: Sequence[EvalSide],
    wiring: Wiring,
    executor: Executor | None,
    options: EvalOptions,
    task: str,
) -> EvalPlan:
    """Return what is going to be run, with the digests that tell it from anything else."""
    consumer = options.get("consumer", DECISION)
    name, prompt = ("", "") if executor is None else await _asked(sides[0].bundle, wiring, executor, options)
    digests: dict[str, str] = {}
    for number, variant in enumerate(sides):
        skills = wiring.subsystem(variant.bundle).view(consumer).skills
        for key, skill in skills.items():
            tree = await asyncio.to_thread(skill.content.tree_digest)
            digests[f"{variant.name}:{key}" if number else key] = tree
    repeats = {row.id: len(_repeats(row, kind, options)) for row in rows}
    return EvalPlan(
        kind=kind,
        bundle=sides[0].bundle.name,
        consumer=consumer,
        model=name,
        executor="" if executor is None else executor.name,
        sides=tuple(variant.name for variant in sides),
        repeat=options.get("repeat"),
        seed=options.get("seed"),
        temperature=options.get("temperature"),
        judge=getattr(options.get("judge"), "name", ""),
        max_steps=options.get("max_steps"),
        max_tokens=options.get("max_tokens"),
        prompt_digest=prompt,
        digests=digests,
        evals={row.id: eval_digest(row) for row in rows},
        repeats={name: times for name, times in repeats.items() if times > 1},
        total=sum(repeats.values()) * len(sides),
        kdskills=__version__,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        tasks=(task,) if task else (),
    )


async def _asked(bundle: Bundle, wiring: Wiring, executor: Executor, options: EvalOptions) -> tuple[str, str]:
    """Return the model's name, and the digest of what it is sent first with a request that stands for any."""
    model, window = options["model"], None
    name = str(model)
    if not isinstance(model, str):
        name, window = model.name, model.context_window
    elif model.partition(":")[0] != "replay":
        async with aclosing(wiring.model(model)) as provider:
            name, window = provider.name, provider.context_window
    probe = PromptProbe(window)
    silent = cast("Wiring", PreviewWiring(wiring))
    async with SolverSystem(bundle=bundle, model=probe, executor=executor, wiring=silent) as system:
        await ReactSolver(system, consumer=options.get("consumer", DECISION)).run("(the user's request)")
    assert probe.request is not None
    return name, text_digest(probe.request.instructions)


def eval_digest(row: Eval) -> str:
    """Return a digest of all an evaluation says, but for where its folder is."""
    facts = {each.name: getattr(row, each.name) for each in fields(row) if each.name != "folder"}
    return text_digest(json.dumps(facts, sort_keys=True, default=dict))
