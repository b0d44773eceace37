"""A number for every state of a task or job, which grows with each change and is the same in every process."""

from __future__ import annotations

from typing import Final

from kdskills.jobs.heads import JobHead, StepHead, TaskHead
from kdskills.jobs.states import TERMINAL

_RANKS: Final = {"queued": 1, "starting": 2, "running": 3}
_OVER: Final = 9
_ATTEMPT: Final = 20
_TRY: Final = 10_000


def _rank(status: str) -> int:
    return _OVER if status in TERMINAL else _RANKS[status]


def task_revision(head: TaskHead) -> int:
    """Return the number of a task's state: attempts count most, then the state, then whether a cancel was asked for."""
    return head.attempt * _ATTEMPT + 2 * _rank(head.status) + (head.cancel_at is not None)


def job_revision(head: JobHead) -> int:
    """Return the number of a job's state: what its steps have been through, and its own."""
    return sum(map(_step, head.steps)) + 2 * _rank(head.status) + (head.cancel_at is not None)


def _step(step: StepHead) -> int:
    if step.task is None:
        return _TRY - 1 if step.status in TERMINAL else 0
    return step.tries * _TRY + min(task_revision(step.task), _TRY - 1)
