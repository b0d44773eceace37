"""Iterations judged again, by what was kept of each row: no model is asked for an answer once more, and no script runs.

A row's transcript says what its turn came to, and its outputs are there. Both are copied into the new iteration, so that it
stands alone, and then are held to the checks and assertions of the evaluations as they are now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

from kdskills import __version__
from kdskills.bundle import load_bundle
from kdskills.errors import BadRequest, FileRefused, KdskillsError, StrPath, path_argument
from kdskills.evals.files import Eval
from kdskills.evals.grading import CHECKS, CheckTable, check_findings, row_status
from kdskills.evals.metering import CEILING_MET
from kdskills.evals.results import (
    MAX_FILE,
    OUTPUTS,
    TRANSCRIPT,
    EvalsRefused,
    EvalWorkspace,
    Iteration,
    RowResult,
    read_iteration,
)
from kdskills.evals.runs import (
    EvalOptions,
    EvalProgress,
    EvalRun,
    RowTurn,
    Verdicts,
    eval_digest,
    figures_of,
    right_skills,
    verdicts_of,
)
from kdskills.evals.sides import folders_of
from kdskills.session.workspace import MAX_FILES, MAX_TOTAL
from kdskills.skills.private_files import write_private
from kdskills.skills.safe_open import read_file, walk_tree
from kdskills.solver.events import read_transcript
from kdskills.solver.parts import Wiring, default_wiring
from kdskills.solver.tools import whole_text


@dataclass
class KeptRun(EvalRun):
    """A run that runs nothing: its rows are those of an iteration that is there, graded anew."""

    source: Iteration = field(kw_only=True)

    async def _result(self, row: Eval, side: str, repeat: int, folder: Path) -> RowResult:
        """Grade what one row left behind; a row whose turn did not end stays the error it was."""
        key = (row.id, side, repeat)
        former = next(each for each in self.source.rows if each.key == key)
        turn, expected = RowTurn(), {"expects": bool(right_skills(row)), "acceptable": list(row.acceptable)}

        async def graded() -> Verdicts:
            await asyncio.to_thread(take_over, Path(self.source.folder), former, folder, turn, row.prompt)
            return await self._verdicts(row, turn, folder)

        verdicts, error = ((), former.error) if unfinished(former) else await verdicts_of(graded())
        changed: dict[str, Any] = {
            "verdicts": verdicts,
            "error": error,
            "status": row_status(verdicts) if error is None else "error",
        }
        if error is not None and error[0] == CEILING_MET:
            self.stopped = True
        changed |= {
            "judge_tokens": turn.judge_tokens,
            "longest_reply": self.meter.longest,
            "undercounted": self.meter.factor,
            "folder": self.folder.name_of(key),
            "facts": dict(former.facts) | expected,
        }
        return former.model_copy(update=changed | {"skill": row.skill or row.owner})


def unfinished(row: RowResult) -> bool:
    """Whether the turn of a row did not come to its end; one that only could not be judged did."""
    return row.status == "error" and not row.verdicts


def take_over(iteration: Path, former: RowResult, folder: Path, turn: RowTurn, prompt: str) -> None:
    """Copy transcript and outputs of a row into *folder*, regular files alone, and fill *turn* with what they tell; blocks.

    Raises FileRefused and BadRequest where they cannot be read, and EvalsRefused, `eval_changed`: they answer another prompt.
    """
    write_private(folder / TRANSCRIPT, read_file(iteration, f"{former.folder}/{TRANSCRIPT}", limit=MAX_FILE).data)
    transcript = read_transcript(folder / TRANSCRIPT)
    if transcript.started is None or transcript.result is None:
        raise BadRequest(f"the turn of {former.folder} did not end", code="transcript_incomplete")
    if transcript.started.request != whole_text(prompt):
        message = f"{former.eval} asks for something else by now: what is kept answers another prompt"
        raise EvalsRefused(message, code="eval_changed", eval=former.eval)
    for event in transcript.events:
        turn.note(event)
    turn.former_result = transcript.result
    below = f"{former.folder}/{OUTPUTS}"
    (folder / OUTPUTS).mkdir()
    entries = [entry for entry in walk_tree(iteration, below) if entry.kind == "file"]
    if len(entries) > MAX_FILES or sum(entry.size for entry in entries) > MAX_TOTAL:
        raise FileRefused(f"{below} has more than {MAX_FILES} files or {MAX_TOTAL} bytes", code="too_large", path=below)
    for entry in entries:
        target = folder / OUTPUTS / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(read_file(iteration, f"{below}/{entry.path}", limit=MAX_TOTAL).data)


def judgeable(source: Iteration, evals: Sequence[Eval], checks: CheckTable) -> list[tuple[Eval, str, int]]:
    """Return which rows of an iteration can be judged again, by which evaluations. Raises as `judge`."""
    if source.plan.kind not in {"run", "trigger"}:
        message = f"{source.folder} is of the kind {source.plan.kind}, which asks no model: run it again"
        raise EvalsRefused(message, code="evals_other_kind", path=source.folder)
    by_id = {whole_text(row.id): replace(row, id=whole_text(row.id)) for row in evals}
    rows = [(by_id[row.eval], row.side, row.repeat) for row in source.rows if row.eval in by_id]
    if not rows:
        raise BadRequest(f"no row of {source.folder} is of one of these evaluations", code="evals_missing")
    unknown = check_findings([row for row, _, _ in rows], checks) if source.plan.kind == "run" else ()
    if unknown:
        raise BadRequest(unknown[0].message, code="check_invalid", errors=[finding.to_json() for finding in unknown])
    return rows


def folders_at(path: StrPath) -> tuple[Path, ...]:
    """Return the folders that the skills at *path* read, of a bundle as `folders_of`; blocks, and runs nothing."""
    try:
        return folders_of(load_bundle(path, python="read", allow_outside_bundle=True))
    except KdskillsError:  # a skill's folder, or a bundle that nobody can run: `read` takes both
        return (path_argument(path, "bundle"),)


async def judge(
    evals: Sequence[Eval],
    iteration: StrPath,
    *,
    bundle: StrPath | None = None,
    resume: bool = False,
    wiring: Wiring | None = None,
    tell: Callable[[EvalProgress], None] = lambda progress: None,
    **options: Unpack[EvalOptions],
) -> Iteration:
    """Judge what an iteration of `run` or `trigger` kept into a new iteration beside it, and return that.

    Nothing is asked of the model it was run with, and none of its scripts runs; a check that needs an engine, such as
    `command`, runs on copies of the outputs. What was not kept cannot be judged: rows whose turn did not end stay errors, and
    evaluations that are not among *evals* any more are left out.

    Args:
        evals: The evaluations as they are now, as `read` gives them; the id says which row is whose.
        iteration: Folder of the iteration.
        bundle: Folder of the bundle, if its skills must not see what is written. Nothing of it runs.
        resume: Whether the newest iteration beside it, which judges the same, is gone on with.
        wiring: Turns names into objects; the installed Host's by default.
        tell: Told how far it is, after every row.
        options: Of `EvalOptions` those for grading: `judge`, `checks`, `executor`, `jobs`, `rate`, `max_tokens_total`, which
            here counts the judge's tokens alone.

    Raises:
        BadRequest: There is nothing to judge, or nobody understands a check.
        EvalsRefused: The iteration cannot be read or is of another kind, or as by `run`.
        ExecRefused: There are checks, and no engine runs here.
    """
    source = await asyncio.to_thread(read_iteration, iteration)
    rows = judgeable(source, evals, options.get("checks", CHECKS))
    used = list({row.id: row for row, _, _ in rows}.values())
    wiring = wiring or default_wiring()
    executor = await wiring.executor(options.get("executor", "auto")) if any(row.checks for row in used) else None
    real = await asyncio.to_thread(Path(source.folder).resolve)
    space = EvalWorkspace(real.parent)
    hidden = () if bundle is None else await asyncio.to_thread(folders_at, bundle)
    async with AsyncExitStack() as stack:
        stack.enter_context(space.alone(*hidden))
        if isinstance(named := options.get("judge"), str):
            options["judge"] = await stack.enter_async_context(aclosing(wiring.model(named)))
        plan = source.plan.model_copy(
            update={
                "judge": getattr(options.get("judge"), "name", ""),
                "judged": real.name,
                "evals": {row.id: eval_digest(row) for row in used},
                "total": len(rows),
                "kdskills": __version__,
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        )
        folder = await asyncio.to_thread(space.resume if resume else space.begin, plan)
        try:
            await KeptRun(source.plan.kind, folder, (), wiring, executor, options, tell, source=source).run(rows)
        finally:
            result = folder.close(figures_of)
    return result
