"""The table of hostile programs and engines in the reference, made from a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kdskills.execution import Executor
from kdskills.testing.abuse.cases import CASES, Case
from kdskills.testing.abuse.run import run_case

Cell = Literal["held", "FAILED", "no bound", "—"]

BEGIN: Final = "<!-- made by .ci/isolation-table: begin -->"
END: Final = "<!-- made by .ci/isolation-table: end -->"


@dataclass(frozen=True, slots=True)
class Column:
    """What came of every case on one engine; `problems` holds the words of those that failed."""

    name: str
    cells: Mapping[str, Cell]
    problems: Mapping[str, str]


async def column(name: str, executor: Executor, cases: Sequence[Case] = CASES) -> Column:
    """Put *executor* through every case meant for its level.

    A case reads `held`, `FAILED`, `no bound` where the engine does not claim the limit the case is about, or `—` where the
    engine does not promise it.
    """
    cells: dict[str, Cell] = {}
    problems: dict[str, str] = {}
    for case in cases:
        if case.level > executor.level:
            cells[case.name] = "—"
            continue
        verdict = await run_case(executor, case)
        if verdict is None:
            cells[case.name] = "no bound"
        elif verdict.problems:
            cells[case.name] = "FAILED"
            problems[case.name] = "; ".join(verdict.problems)
        else:
            cells[case.name] = "held"
    return Column(name, cells, problems)


def render(columns: Sequence[Column], about: str, explained: Mapping[tuple[str, str], str]) -> str:
    """Return the table between its marks, one row a case and one column an engine.

    Args:
        columns: What came of each engine.
        about: One sentence about the machine.
        explained: Why a case fails, by (engine, case).
    """
    names = [item.name for item in columns]
    lines = [BEGIN, "", about, ""]
    lines.append("| area | program | what must be true | " + " | ".join(names) + " |")
    lines.append("|---|---|---|" + "---|" * len(names))
    lines += [
        f"| {case.area} | `{case.name}` | {case.must} | " + " | ".join(item.cells[case.name] for item in columns) + " |"
        for case in CASES
    ]
    failed = [(item.name, case) for item in columns for case in item.problems]
    if failed:
        lines += ["", "What failed, and why:", ""]
        lines += [f"* `{case}` on {name}: {explained.get((name, case), 'NOT EXPLAINED')}" for name, case in failed]
    return "\n".join([*lines, "", END])


def insert(page: str, table: str) -> str:
    """Return *page* with the table between its marks replaced. Raises ValueError when it has no marks."""
    begin, end = page.index(BEGIN), page.index(END) + len(END)
    return page[:begin] + table + page[end:]


def rows(page: str) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Return (area, program, what must be true, cells) of every row of the table on *page*."""
    inside = page[page.index(BEGIN) : page.index(END)]
    found = []
    for line in inside.splitlines():
        words = [word.strip() for word in line.strip().strip("|").split(" | ")]
        if len(words) > 3 and words[1].startswith("`"):
            found.append((words[0], words[1].strip("`"), words[2], tuple(words[3:])))
    return found
