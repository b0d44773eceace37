"""Results of evaluations on disk, in the published layout; a row is written when it ends, so that a broken run can go on.

A workspace holds iterations. In `iteration-N`, `plan.json` says what is run, `rows.jsonl` has a line for each row that
ended, `eval-<slug>/<side>/` what one run left behind, and `benchmark.json` the figures of them all. The page
`docs/reference/eval-results.md` has every file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

from kdskills.errors import CallerMustAct, FileRefused, StrPath, path_argument
from kdskills.evals.figures import spread
from kdskills.execution.dirs import locked, new_tree
from kdskills.models import finite_number
from kdskills.skills.private_files import make_folder, open_private, replace_file, write_private
from kdskills.skills.safe_open import read_file

EvalKind = Literal["retrieval", "trigger", "run", "scripts"]
RowStatus = Literal["passed", "failed", "ungraded", "error"]
"""`ungraded` was not judged and counts as nothing; `error` is the provider's or the machine's fault, and is run again."""

PLAN: Final = "plan.json"
ROWS: Final = "rows.jsonl"
BENCHMARK: Final = "benchmark.json"
TRANSCRIPT: Final = "transcript.jsonl"
RECORDING: Final = "recording.yaml"
OUTPUTS: Final = "outputs"
MAX_SLUG: Final = 60
MAX_FILE: Final = 64 * 1024 * 1024
"""Bytes of a plan or of all rows that are read back."""
MAX_ITERATION: Final = 999_999
_ITERATION: Final = re.compile(r"iteration-([1-9][0-9]{0,5})")
_SIDE: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}")

MAX_AMOUNT: Final = 2**53
MAX_FACTOR: Final = 1e6
Amount = Annotated[int, Field(ge=0, le=MAX_AMOUNT)]
"""A count that others wrote, too: sums and means of many are finite."""


class EvalsRefused(CallerMustAct, code="evals_invalid"):
    """A workspace of evaluations cannot be used so: `evals_invalid`, `evals_running`, `evals_plan_changed`, `evals_none`,
    `evals_other_kind`, `workspace_inside`, or of a row `eval_changed`.
    """


class EvalForm(BaseModel):
    """A frozen form that is written to disk; unknown keys are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class CheckVerdict(EvalForm):
    """What one check or assertion came to; `passed` is None where nobody judged it.

    `by` is `code` or the judge's `provider:model`; `evidence` is a quotation from the outputs, or what was seen instead.
    `error` is the code of what kept it from being judged, such as `model_failed`.
    """

    text: str
    passed: bool | None
    evidence: str = ""
    by: str = "code"
    error: str = ""


class RowFacts(EvalForm):
    """Those of `RowResult.facts` that figures and reports read; there may be more, nested less deep than a parser goes."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    expects: bool = False
    acceptable: tuple[str, ...] = ()
    rank: Annotated[Amount, Field(ge=1)] | None = None
    pulled: dict[str, dict[str, tuple[str, ...]]] = {}
    model: str = ""


class RowResult(EvalForm):
    """What one run of one evaluation came to.

    Attributes:
        eval: Id of the evaluation.
        skill: Skill the evaluation is about, by full id.
        side: `with_skill`, `without_skill`, or the name of a baseline or of a variant of descriptions.
        repeat: Which of its repetitions, from 0.
        picked: Skills in the order they were loaded or, of `retrieval`, ranked.
        steps: Decisions of the model until the first skill was loaded, or in all.
        verdicts: Checks first, then assertions.
        tokens: Input and output of all model calls; `estimated` where the provider counts none.
        judge_tokens: Those of the judge, which are not among `tokens`.
        longest_reply: Tokens of the longest reply in its iteration until it ended, and
        undercounted: how many times as many tokens as estimated a request had at most; a ceiling is held with both.
        cost: In dollars, where a price is known.
        error: Code of the error and its words, of status `error`.
        folder: What the run left behind, relative to the iteration.
        facts: Further facts of the kind, such as the words that pulled a wrong skill up.
    """

    eval: str
    skill: str | None = None
    side: str = "with_skill"
    repeat: Amount = 0
    status: RowStatus
    picked: tuple[str, ...] = ()
    steps: Amount = 0
    verdicts: tuple[CheckVerdict, ...] = ()
    tokens: Amount = 0
    judge_tokens: Amount = 0
    longest_reply: Amount = 0
    undercounted: float = Field(1.0, ge=1, le=MAX_FACTOR)
    estimated: bool = False
    cost: float | None = Field(None, ge=0, le=1e12)
    duration_ms: Amount = 0
    error: tuple[str, str] | None = None
    folder: str = ""
    facts: dict[str, Any] = {}

    @field_validator("facts")
    @classmethod
    def _readable(cls, facts: dict[str, Any]) -> dict[str, Any]:
        RowFacts.model_validate(facts)
        return facts

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells the row apart within its iteration."""
        return self.eval, self.side, self.repeat

    @property
    def pass_rate(self) -> float | None:
        """Share of the verdicts that are passed among those that were judged; without any, 1 or 0 by the status, or None."""
        judged = [verdict.passed for verdict in self.verdicts if verdict.passed is not None]
        if judged:
            return sum(judged) / len(judged)
        return float(self.status == "passed") if self.status in {"passed", "failed"} else None


class EvalPlan(EvalForm):
    """What an iteration runs, so that the same can be gone on with, and be told later.

    `digests` has the tree digest of every skill in view by full id, those of a further side after its name and a colon;
    `evals` a digest of every evaluation by id. `total` counts the rows, and `repeats` says how often an evaluation is run, where
    that is more than once. `tasks` are the ids of the background tasks that ran it. `judged` names the iteration beside it whose
    outcomes are judged again instead of running anything.
    """

    kind: EvalKind
    bundle: str
    consumer: str
    model: str = ""
    judge: str = ""
    judged: str = ""
    executor: str = ""
    sides: tuple[str, ...] = Field(("with_skill",), min_length=1)
    repeat: int | None = None
    seed: int | None = None
    temperature: float | None = None
    max_steps: int | None = None
    max_tokens: int | None = None
    prompt_digest: str = ""
    digests: dict[str, str] = {}
    evals: dict[str, str] = {}
    repeats: dict[str, int] = {}
    total: Amount = 0
    kdskills: str = ""
    started: str = ""
    tasks: tuple[str, ...] = ()

    def differs(self, plan: EvalPlan) -> tuple[str, ...]:
        """Return the names of what another plan says differently; when it was begun, and by whom, does not count."""
        names = type(self).model_fields.keys() - {"started", "tasks", "repeats"}  # `evals` and `repeat` tell the last
        return tuple(sorted(name for name in names if getattr(self, name) != getattr(plan, name)))

    def keys(self) -> list[tuple[str, str, int]]:
        """Return what tells each row apart, of those that have not ended, too, in the order they are run."""
        times = {name: range(self.repeats.get(name, 1)) for name in self.evals}
        return [(name, side, repeat) for name in self.evals for side in self.sides for repeat in times[name]]


class Iteration(EvalForm):
    """One iteration, read back."""

    folder: str
    plan: EvalPlan
    rows: tuple[RowResult, ...] = ()
    tokens_spent: int = 0
    """All that models took, judges and rows that were run again among them."""

    def by_side(self) -> dict[str, list[RowResult]]:
        """Return the rows of each side by its name."""
        return {name: [row for row in self.rows if row.side == name] for name in self.plan.sides}

    @property
    def missing(self) -> int:
        """Rows that did not end yet."""
        return max(self.plan.total - len(self.rows), 0)

    @property
    def complete(self) -> bool:
        """Whether every row has ended, and none is an error."""
        return not self.missing and all(row.status != "error" for row in self.rows)


def side_named(name: str) -> bool:
    """Whether *name* may be that of a further side: it is a folder's, and nothing else in figures is called so."""
    return _SIDE.fullmatch(name) is not None and name not in {"with_skill", "delta", "compared"}


def slug_of(text: str) -> str:
    """Return a file name of small letters, digits and dashes that resembles *text*."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:MAX_SLUG].strip("-") or "row"


def slugs_of(names: Iterable[str]) -> dict[str, str]:
    """Return a slug for each of *names*, all of them different, whatever stands in the names."""
    slugs: dict[str, str] = {}
    numbers: Counter[str] = Counter()
    for name in names:
        base = slug = slug_of(name)
        while slug in slugs.values():
            numbers[base] += 1
            slug = f"{base}-{numbers[base] + 1}"
        slugs[name] = slug
    return slugs


def workspace_of(bundle: Path) -> Path:
    """Return where the iterations of a bundle lie unless somebody says otherwise: beside it."""
    return bundle.parent / f"{bundle.name}-workspace"


class IterationFolder:
    """An iteration that rows are added to. `rows` are those that ended, by key; `tokens_spent` as of `Iteration`."""

    def __init__(self, folder: Path, plan: EvalPlan, rows: Iterable[RowResult] = (), tokens_spent: int = 0) -> None:
        self.folder, self.plan, self.tokens_spent = folder, plan, tokens_spent
        self.rows = {row.key: row for row in rows}
        self._slugs = slugs_of(plan.evals)

    def settled(self, key: tuple[str, str, int]) -> bool:
        """Whether a row has ended and need not be run again."""
        return key in self.rows and self.rows[key].status != "error"

    def name_of(self, key: tuple[str, str, int]) -> str:
        """Return the folder of a row, relative to the iteration; further repetitions have a number."""
        eval_id, variant, repeat = key
        number = f"--{repeat + 1}" if repeat else ""  # no slug has two dashes
        return f"eval-{self._slugs[eval_id]}{number}/{variant}"

    @contextmanager
    def row_folder(self, key: tuple[str, str, int]) -> Iterator[Path]:
        """Give an empty folder to fill, which becomes that of the row when that succeeds. Raises as `add`."""
        self._require_plan()
        final = self.folder / self.name_of(key)
        make_folder(final.parent)
        with new_tree(final) as work:
            yield work
            if final.is_symlink():
                final.unlink()
            elif final.exists():  # of a run that was killed before its line was written, or that was an error
                shutil.rmtree(final)

    def add(self, row: RowResult) -> None:
        """Append the line of a row that ended; it is on disk when this returns.

        Raises EvalsRefused, `evals_none`: somebody took the iteration away, and what is written now would belong to none.
        """
        self._require_plan()
        text = json.dumps(row.model_dump(mode="json"))
        with open_private(self.folder / ROWS, "ab") as stream:
            stream.write(text.encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        self.rows[row.key] = row
        self.tokens_spent += spent_on(row, self.plan)

    def close(self, figures: Callable[[Iteration], dict[str, Any]]) -> Iteration:
        """Write the figures of the rows so far, and return the iteration. Raises as `add`."""
        self._require_plan()
        facts = {"plan": self.plan, "rows": tuple(self.rows.values()), "tokens_spent": self.tokens_spent}
        iteration = Iteration(folder=str(self.folder), **facts)
        write_json(self.folder / BENCHMARK, benchmark(iteration, figures(iteration)))
        return iteration

    def _require_plan(self) -> None:
        if not (self.folder / PLAN).is_file():
            raise EvalsRefused(f"{self.folder} is gone, with the rows that had ended", code="evals_none")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file in one step."""
    replace_file(path, json.dumps(value, indent=2).encode() + b"\n")


def write_row_files(folder: Path, row: RowResult) -> None:
    """Write `timing.json` and `grading.json` of a row into its folder, in the published form."""
    judged = [verdict for verdict in row.verdicts if verdict.passed is not None]
    passed = sum(verdict.passed is True for verdict in judged)
    summary: dict[str, Any] = {"passed": passed, "failed": len(judged) - passed, "total": len(judged)}
    summary["pass_rate"] = row.pass_rate or 0.0
    grading: dict[str, Any] = {
        "assertion_results": [verdict.model_dump(include={"text", "passed", "evidence"}) for verdict in judged],
        "summary": summary,
        "kdskills": {
            "status": row.status,
            "ungraded": [verdict.text for verdict in row.verdicts if verdict.passed is None],
        },
    }
    write_json(folder / "grading.json", grading)
    write_json(folder / "timing.json", {"total_tokens": row.tokens, "duration_ms": row.duration_ms})


def benchmark(iteration: Iteration, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands in `benchmark.json`: the published figures of each side, those of the kind, and what was run with what;
    `models` are the names that providers gave themselves.
    """
    plan = iteration.plan
    by_side = iteration.by_side()
    summary: dict[str, Any] = {name: _figures(rows) for name, rows in by_side.items()}
    if len(plan.sides) > 1:
        first, second = (summary[name] for name in plan.sides[:2])
        pairs = {name: (first[name]["mean"], second[name]["mean"]) for name in first}
        summary["delta"] = {name: None if None in pair else round(pair[0] - pair[1], 4) for name, pair in pairs.items()}
    counts = {name: dict(Counter(row.status for row in rows)) for name, rows in by_side.items()}
    models = sorted({str(row.facts["model"]) for row in iteration.rows if row.facts.get("model")})
    facts = {"models": models, "rows": counts, "missing": iteration.missing}
    facts |= {"tokens_spent": iteration.tokens_spent, "figures": dict(figures)}
    return {"run_summary": summary, "kdskills": plan.model_dump(mode="json") | facts}


def _figures(rows: Sequence[RowResult]) -> dict[str, dict[str, float | None]]:
    """Return mean and standard deviation of the published figures; rows that are errors count for none."""
    valid = [row for row in rows if row.status != "error"]
    rates = [rate for row in valid if (rate := row.pass_rate) is not None]
    figures = {"pass_rate": rates, "time_seconds": [row.duration_ms / 1000 for row in valid]}
    return {
        name: _spread(values) for name, values in (figures | {"tokens": [float(row.tokens) for row in valid]}).items()
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    middle, deviation = spread(values)
    return {"mean": round(middle, 4) if values else None, "stddev": round(deviation, 4)}


class EvalWorkspace:
    """The folder that holds the iterations of a bundle."""

    def __init__(self, folder: StrPath) -> None:
        self.folder = path_argument(folder, "workspace")

    @contextmanager
    def alone(self, *folders: Path) -> Iterator[None]:
        """Hold the workspace, which one run at a time writes to and lies in none of *folders*, bundles of skills.

        Raises EvalsRefused, `evals_running` or as `outside`.
        """
        self.outside(*folders)
        make_folder(self.folder, parents=0o755)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.folder / ".lock", wait=False))
            except BlockingIOError:
                message = f"another run of evaluations writes to {self.folder}: wait for it, or say --workspace"
                raise EvalsRefused(message, code="evals_running", path=str(self.folder)) from None
            yield

    def outside(self, *folders: Path) -> None:
        """Raise EvalsRefused, `workspace_inside`, if the workspace, links followed, lies in one of *folders*; blocks."""
        real = Path(os.path.realpath(self.folder))
        inside = next((folder for folder in folders if real.is_relative_to(os.path.realpath(folder))), None)
        if inside is not None:
            message = f"the workspace {self.folder} lies in {inside}, whose skills would see results: say --workspace"
            raise EvalsRefused(message, code="workspace_inside", path=str(self.folder))

    def numbers(self) -> list[int]:
        """Return the numbers of the iterations that are there, in order."""
        if not self.folder.is_dir():
            return []
        names = (_ITERATION.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def of_task(self, task: str) -> Path | None:
        """Return the folder of the iteration that a background task runs or ran, the newest first; None where it has none."""
        for number in reversed(self.numbers()):
            folder = self.folder / f"iteration-{number}"
            with suppress(EvalsRefused):  # whatever cannot be read is not gone on with
                if task in read_plan(folder).tasks:
                    return folder
        return None

    def open(self, plan: EvalPlan, *, resume: bool) -> IterationFolder:
        """Return the iteration to write to: that of the plan's task where it has one, the newest to *resume*, else the next."""
        own = next(filter(None, map(self.of_task, plan.tasks)), None)
        return self.resume(plan, own) if own is not None or resume else self.begin(plan)

    def before(self, name: str) -> list[int]:
        """Return the numbers of the iterations before the one of that name, in order; before any other name there is none."""
        match = _ITERATION.fullmatch(name)
        return [] if match is None else [number for number in self.numbers() if number < int(match[1])]

    def begin(self, plan: EvalPlan) -> IterationFolder:
        """Make the next iteration. Raises EvalsRefused, `evals_invalid`: no number is left."""
        number = max(self.numbers(), default=0) + 1
        if number > MAX_ITERATION:
            message = f"{self.folder} has iteration-{MAX_ITERATION}, and none has a higher number: say --workspace"
            raise EvalsRefused(message, path=str(self.folder))
        final = self.folder / f"iteration-{number}"
        with new_tree(final) as work:
            write_private(work / PLAN, plan.model_dump_json(indent=2) + "\n")
        return IterationFolder(final, plan)

    def resume(self, plan: EvalPlan, folder: Path | None = None) -> IterationFolder:
        """Return an iteration, by default the newest, if it runs the same.

        Raises EvalsRefused: `evals_none`, `evals_plan_changed`, `evals_invalid`.
        """
        if folder is None:
            numbers = self.numbers()
            if not numbers:
                raise EvalsRefused(f"there is no iteration in {self.folder} to go on with", code="evals_none")
            folder = self.folder / f"iteration-{numbers[-1]}"
        if folder.is_symlink():
            raise EvalsRefused(f"{folder} is a link, and nothing is written behind it", path=str(folder))
        iteration = read_iteration(folder)
        different = iteration.plan.differs(plan)
        if different:
            message = f"{folder.name} was begun with another {', '.join(different)}: begin a new one without --resume"
            raise EvalsRefused(message, code="evals_plan_changed", differs=list(different), path=str(folder))
        if not _is_ours(folder):
            message = (
                f"{folder / BENCHMARK} is of another tool, and is not written over: move it, or begin a new iteration"
            )
            raise EvalsRefused(message, path=str(folder))
        for leftover in folder.glob("eval-*/.new-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        _cut_torn_line(folder / ROWS)
        tasks = tuple(dict.fromkeys((*iteration.plan.tasks, *plan.tasks)))
        now = iteration.plan.model_copy(update={"tasks": tasks})
        if now != iteration.plan:
            write_json(folder / PLAN, now.model_dump(mode="json"))
        return IterationFolder(folder, now, iteration.rows, iteration.tokens_spent)


def read_iteration(folder: StrPath) -> Iteration:
    """Read an iteration back; a last line that was not written to its end is dropped, of two lines of a row the later counts.

    Raises EvalsRefused: it is none, or a line of it cannot be understood.
    """
    plan, path = read_plan(folder), path_argument(folder, "iteration")
    rows: list[RowResult] = []
    for number, line in enumerate(_read(path, ROWS, b"").split(b"\n")[:-1], 1):
        with _understood(path, f"line {number} of {ROWS}"):
            row = RowResult.model_validate(_parsed(line))
            if row.side not in plan.sides:
                raise ValueError(f"the plan has no side {row.side!r:.100}")
            rows.append(row)
    tokens = sum(spent_on(row, plan) for row in rows)
    return Iteration(
        folder=str(path), plan=plan, rows=tuple({row.key: row for row in rows}.values()), tokens_spent=tokens
    )


def read_plan(folder: StrPath) -> EvalPlan:
    """Return what an iteration runs. Raises EvalsRefused: it is none of ours, or its plan cannot be understood."""
    path = path_argument(folder, "iteration")
    data = _read(path, PLAN)
    with _understood(path, PLAN):
        plan = EvalPlan.model_validate(_parsed(data))
        strange = [name for name in plan.sides if name != "with_skill" and not side_named(name)]
        if strange or len(set(plan.sides)) < len(plan.sides):
            raise ValueError(f"its sides have no names of their own: {', '.join(strange or plan.sides):.100}")
    return plan


@contextmanager
def _understood(path: Path, part: str) -> Iterator[None]:
    """Raise EvalsRefused for what a file of an iteration has instead of what it should, and say where."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_input=False)[0]
            reason = f"{'.'.join(map(str, first['loc'][:4]))[:100]}: {first['msg']:.200}"
        message = f"{path} is no iteration that can be read: {part}: {reason}"
        raise EvalsRefused(message, path=str(path)) from error


def _parsed(data: bytes) -> Any:
    return json.loads(data, parse_float=finite_number, parse_constant=finite_number)


def _read(path: Path, name: str, otherwise: bytes | None = None) -> bytes:
    """Return a file of an iteration, or what counts where it is not there. Raises EvalsRefused."""
    try:
        return read_file(path, name, limit=MAX_FILE).data
    except FileRefused as error:
        if error.code == "file_missing" and otherwise is not None:
            return otherwise
        message = f"{path} is no iteration that can be read: {error.message}"
        raise EvalsRefused(message, path=str(path)) from error


def _is_ours(folder: Path) -> bool:
    """Whether figures in an iteration's folder, if there are any, are those of this program."""
    with suppress(EvalsRefused), _understood(folder, BENCHMARK):
        figures = _parsed(_read(folder, BENCHMARK, b'{"kdskills": {}}'))
        return isinstance(figures, dict) and "kdskills" in figures
    return False


def spent_on(row: RowResult, plan: EvalPlan) -> int:
    """Return the tokens a row took in its iteration; where it was only judged again, those of the judge."""
    return row.judge_tokens + (0 if plan.judged else row.tokens)


def _cut_torn_line(path: Path) -> None:
    """Cut a last line that has no end, so that the next one begins a line of its own."""
    if not path.exists():
        return
    with open_private(path, "r+b") as stream:
        stream.truncate(stream.read().rfind(b"\n") + 1)
