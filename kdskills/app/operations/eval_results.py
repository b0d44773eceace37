"""`evals.list` and `evals.get`: what evaluations of a bundle came to, for people who look at them. Nothing is run or written."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from kdskills.app.operations.models import (
    Finding,
    Input,
    Output,
    PageInput,
    PageOutput,
    decode_cursor,
    encode_cursor,
)
from kdskills.errors import BadRequest, NotFound
from kdskills.evals.reports import RowChange, changes, former_iteration, page, passed_share
from kdskills.evals.results import EvalsRefused, EvalWorkspace, Iteration, RowResult, read_iteration, workspace_of
from kdskills.evals.runs import figures_of

if TYPE_CHECKING:
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context


class EvalsInput(Input):
    """Whose evaluations."""

    bundle: Path | None = Field(None, description="A bundle's folder; none means that of the caller's project.")
    workspace: Path | None = Field(
        None, description="Folder of iterations; none means `<bundle>-workspace` beside the bundle."
    )

    async def space(self, bundles: BundleLoader, context: Context) -> EvalWorkspace:
        """Return the workspace. Raises as loading the bundle, and BadRequest, `no_bundle`."""
        if self.workspace is not None:
            return EvalWorkspace(self.workspace)
        root = self.bundle or (await bundles.skills(None, context)).subsystem.bundle_root
        if root is None:
            raise BadRequest("these skills have no bundle's folder, and no evaluations", code="no_bundle")
        return EvalWorkspace(workspace_of(Path(root)))


class SideFigures(Output):
    """A side of an iteration: how many of its rows passed, with the bounds of the 95 % interval, and what they took."""

    name: str
    passed: int
    judged: int
    low: float
    high: float
    ungraded: int
    errors: int
    tokens: int


class EvalIteration(Output):
    """An iteration in a list; `missing` counts rows that were not run."""

    number: int
    kind: str
    model: str
    judge: str
    started: str
    kdskills: str
    sides: tuple[SideFigures, ...]
    total: int
    missing: int


class EvalsOutput(PageOutput):
    """The iterations of a workspace, the newest first; those that cannot be read are told as findings."""

    workspace: str
    iterations: tuple[EvalIteration, ...]
    diagnostics: tuple[Finding, ...] = ()


class EvalListInput(EvalsInput, PageInput):
    """Whose evaluations, and which page of them."""


class EvalIterationInput(EvalsInput):
    """Which iteration."""

    number: int = Field(ge=1, le=10**9, description="Number of the iteration.")
    before: int | None = Field(
        None, ge=1, le=10**9, description="Number of the one it is compared with; none means the one before."
    )


class EvalIterationOutput(EvalIteration):
    """An iteration in full: its rows, its figures, what changed since another one, and its report as one page of HTML."""

    rows: tuple[RowResult, ...]
    figures: dict[str, Any]
    compared_with: int | None = None
    changes: tuple[RowChange, ...] = ()
    page: str = ""
    diagnostics: tuple[Finding, ...] = ()


def _side_figures(name: str, rows: list[RowResult]) -> SideFigures:
    share = passed_share(rows)
    return SideFigures(
        name=name,
        passed=share.hits,
        judged=share.total,
        low=share.low,
        high=share.high,
        ungraded=sum(row.status == "ungraded" for row in rows),
        errors=sum(row.status == "error" for row in rows),
        tokens=sum(row.tokens for row in rows),
    )


def _facts(number: int, iteration: Iteration) -> dict[str, Any]:
    plan = iteration.plan
    facts = {name: getattr(plan, name) for name in ("kind", "model", "judge", "started", "kdskills", "total")}
    sides = tuple(_side_figures(name, rows) for name, rows in iteration.by_side().items())
    return {"number": number, "sides": sides, "missing": iteration.missing, **facts}


async def list_evals(bundles: BundleLoader, arguments: EvalListInput, context: Context) -> EvalsOutput:
    """List what evaluations of a bundle came to."""
    space = await arguments.space(bundles, context)

    def read_all() -> EvalsOutput:
        rows, findings = [], []
        before = None if arguments.cursor is None else decode_cursor(arguments.cursor, int)[0]
        numbers = [number for number in reversed(space.numbers()) if before is None or number < before]
        following = encode_cursor(numbers[arguments.limit - 1]) if len(numbers) > arguments.limit else None
        for number in numbers[: arguments.limit]:
            try:
                rows.append(EvalIteration(**_facts(number, read_iteration(space.folder / f"iteration-{number}"))))
            except EvalsRefused as error:
                findings.append(Finding(code=error.code, severity="warning", message=error.message))
        return EvalsOutput(
            workspace=str(space.folder),
            iterations=tuple(rows),
            next_cursor=following,
            diagnostics=tuple(findings),
        )

    return await asyncio.to_thread(read_all)


async def get_evals(bundles: BundleLoader, arguments: EvalIterationInput, context: Context) -> EvalIterationOutput:
    """Show one iteration of evaluations."""
    space = await arguments.space(bundles, context)

    def read_one() -> EvalIterationOutput:
        number = arguments.number
        if number not in space.numbers():
            raise NotFound(f"there is no iteration {number} of evaluations here", number=number)
        iteration = read_iteration(space.folder / f"iteration-{number}")
        before = None if arguments.before is None else space.folder / f"iteration-{arguments.before}"
        (former, findings), figures = former_iteration(iteration, before), figures_of(iteration)
        return EvalIterationOutput.of(
            **_facts(number, iteration),
            rows=iteration.rows,
            figures=figures,
            compared_with=None if former is None else int(Path(former.folder).name.removeprefix("iteration-")),
            changes=() if former is None else changes(former, iteration),
            page=page(iteration, figures),
            diagnostics=findings,
        )

    return await asyncio.to_thread(read_one)
