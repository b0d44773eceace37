"""Heads of tasks and jobs: frozen values read from the tables, and the states they move through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, get_args

from pydantic import TypeAdapter

from kdskills.jobs.attempts.order import Endpoint, OutputError
from kdskills.jobs.model import JobSpec, Mode, Scope, TaskSpec, Value

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


class ArtifactRef(Value):
    """A kept output of a task.

    Attributes:
        artifact_id: What it is read back by.
        path: Where the program left it, relative to the session's folder.
        mode: Its permission bits.
    """

    artifact_id: str
    path: str
    size: int
    sha256: str
    mime: str = "application/octet-stream"
    mode: int = 0o644


ARTIFACTS: Final = TypeAdapter(tuple[ArtifactRef, ...])
OUTPUT_ERRORS: Final = TypeAdapter(tuple[OutputError, ...])
ENDPOINTS: Final = TypeAdapter(tuple[Endpoint, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHead:
    """One task as its row tells it; a terminal head never changes.

    Attributes:
        attempt: Number of the latest attempt; 0 before the first.
        home: Host the task is pinned to; None for work any host of the pool may take.
        host: Host it runs on or ran on.
        executor: The worker that holds it, or held it last.
        started_at: When its first program was started; attempts that follow change nothing.
        ready_at: When the program of the latest attempt was ready; None while it is not.
        stdout_tail: Last bytes of the output; filled when the task is over.
        stdout_total: How much was printed; None before the task is over.
        cancel_at: When a cancel was asked for.
        step: Index of the job's step, for tasks of jobs, whose `try_` counts from 0.
    """

    id: str
    spec: TaskSpec
    status: TaskStatus
    mode: Mode
    session_key: str
    attempt: int = 0
    restarts: int = 0
    job_id: str | None = None
    step: int | None = None
    try_: int | None = None
    home: str | None = None
    host: str | None = None
    executor: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    ready_at: datetime | None = None
    finished_at: datetime | None = None
    exit_code: int | None = None
    signal: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    stdout_tail: bytes = b""
    stderr_tail: bytes = b""
    stdout_total: int | None = None
    stderr_total: int | None = None
    artifacts: tuple[ArtifactRef, ...] = ()
    output_errors: tuple[OutputError, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    cancel_at: datetime | None = None
    cancel_reason: str | None = None

    @property
    def scope(self) -> Scope:
        """Whose task it is."""
        return self.spec.scope

    @property
    def terminal(self) -> bool:
        """Whether the task is over."""
        return self.status in TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHead:
    """One step of a job, as its latest try tells it.

    Attributes:
        task: The task of the latest try; None while none was submitted, and for skipped steps.
        tries: How many tasks the step has had.
    """

    index: int
    name: str
    status: StepStatus
    tries: int = 0
    task: TaskHead | None = None

    @property
    def begun(self) -> bool:
        """Whether a program of it was ever begun: a step canceled while it was queued never was."""
        return self.tries > 1 or (self.task is not None and self.task.attempt > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHead:
    """One job and its steps; the fields are those of `TaskHead`."""

    id: str
    spec: JobSpec
    status: JobStatus
    session_key: str
    steps: tuple[StepHead, ...] = ()
    home: str | None = None
    host: str | None = None
    executor: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    error_code: str | None = None
    error_message: str | None = None
    cancel_at: datetime | None = None
    cancel_reason: str | None = None

    @property
    def scope(self) -> Scope:
        """Whose job it is."""
        return self.spec.scope

    @property
    def terminal(self) -> bool:
        """Whether the job is over."""
        return self.status in TERMINAL

    @property
    def current_step_index(self) -> int:
        """Index of the latest step that began, also one that waits for its next try; -1 before the first."""
        begun = [step.index for step in self.steps if step.begun]
        return max(begun, default=-1)
