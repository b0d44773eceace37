"""States of tasks, jobs and steps: tables, and nothing else decides what may follow what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

TaskStatus = Literal["queued", "starting", "running", "succeeded", "failed", "canceled"]
JobStatus = Literal["queued", "running", "succeeded", "failed", "canceled"]
StepStatus = Literal["queued", "starting", "running", "succeeded", "failed", "canceled", "skipped"]

Table = Mapping[str, frozenset[str]]

TASKS: Final[Table] = {
    "queued": frozenset({"starting", "failed", "canceled"}),
    "starting": frozenset({"starting", "running", "succeeded", "failed", "canceled"}),
    "running": frozenset({"starting", "running", "succeeded", "failed", "canceled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "canceled": frozenset(),
}
"""A task goes back to `starting` with a new attempt only: a service restarted, or a lost attempt tried again."""

JOBS: Final[Table] = {
    "queued": frozenset({"running", "failed", "canceled"}),
    "running": frozenset({"running", "succeeded", "failed", "canceled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "canceled": frozenset(),
}

STEPS: Final[Table] = {
    "queued": frozenset({"starting", "failed", "canceled", "skipped"}),
    "starting": frozenset({"starting", "running", "succeeded", "failed", "canceled", "queued"}),
    "running": frozenset({"starting", "running", "succeeded", "failed", "canceled", "queued"}),
    "succeeded": frozenset(),
    "failed": frozenset({"queued"}),
    "canceled": frozenset(),
    "skipped": frozenset(),
}
"""A step that failed is queued again while it has tries left, each of them a task of its own."""

TERMINAL: Final = frozenset({"succeeded", "failed", "canceled", "skipped"})
"""A terminal state is final: later facts never change status, exit code or output."""

OPEN: Final = tuple(sorted(TASKS.keys() - TERMINAL))
"""The states of what is not over, named one by one: no database finds rows by what they are not."""

ACTIVE: Final = frozenset({"starting", "running"})
"""A task in one of these may have a program."""


def before(table: Table, status: str) -> tuple[str, ...]:
    """Return the states *status* may follow, sorted: what a compare-and-set compares with."""
    return tuple(sorted(state for state, following in table.items() if status in following))


def may(table: Table, status: str, following: str) -> bool:
    """Whether *following* may come after *status*."""
    return following in table[status]


def is_task_status(text: str) -> bool:
    """Whether *text* names a state of tasks."""
    return text in get_args(TaskStatus)
