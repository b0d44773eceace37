"""What a job does next, decided from its steps and the tasks they have had; no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kdskills.errors import BadRequest
from kdskills.jobs.model import TERMINAL, JobSpec, JobStatus, StepHead, StepSpec, StepStatus, TaskHead


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What follows from the state of a job.

    Attributes:
        start: Steps to submit now, as (index, try).
        cancel: Tasks to cancel.
        status: The job's terminal state once everything of it is over; None while it goes on.
    """

    start: tuple[tuple[int, int], ...] = ()
    cancel: tuple[str, ...] = ()
    status: JobStatus | None = None
    error_code: str | None = None
    error_message: str | None = None


def step_task_id(job_id: str, index: int, number: int) -> str:
    """Return the id of try *number* of a step: derived, so that submitting it twice is submitting it once."""
    return "task_" + hashlib.sha256(f"{job_id}/{index}/{number}".encode()).hexdigest()[:32]


def needs_of(spec: JobSpec) -> tuple[tuple[int, ...], ...]:
    """Return, for each step, the indexes of those it needs: the one before it when no step of the job names any."""
    if not any(step.needs for step in spec.steps):
        return tuple((index - 1,) if index else () for index in range(len(spec.steps)))
    index_of = {step.name: index for index, step in enumerate(spec.steps)}
    return tuple(tuple(sorted({index_of[name] for name in step.needs})) for step in spec.steps)


def check_graph(steps: Sequence[StepSpec]) -> None:
    """Check that names are unique, that what is needed is there, and that nothing needs itself. Raises BadRequest."""
    names = [step.name for step in steps]
    if not steps:
        raise BadRequest("a job has at least one step", errors=["steps: empty"])
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest(f"two steps are named {twice!r}", errors=[f"steps: the name {twice!r} is used twice"])
    for index, step in enumerate(steps):
        for name in step.needs:
            if name not in names:
                raise BadRequest(
                    f"step {step.name!r} needs {name!r}, which is no step", errors=[f"steps.{index}.needs"]
                )
    open_, done = {step.name: set(step.needs) for step in steps}, set[str]()
    while open_:
        free = [name for name, needs in open_.items() if needs <= done]
        if not free:
            ring = ", ".join(sorted(open_))
            raise BadRequest(f"these steps need one another: {ring}", errors=["steps: needs form a ring"])
        done.update(free)
        for name in free:
            del open_[name]


def steps_of(spec: JobSpec, tasks: Sequence[TaskHead], *, over: bool = False) -> tuple[StepHead, ...]:
    """Return the steps as the tasks of their latest tries tell them.

    Args:
        spec: The job.
        tasks: Its tasks.
        over: Whether the job is over, so that a step without a task will never have one.
    """
    latest = _latest(tasks)
    states = _states(spec, latest, over=over)
    return tuple(
        StepHead(
            index=index,
            name=step.name,
            status=states[index],
            tries=0 if index not in latest else (latest[index].try_ or 0) + 1,
            task=latest.get(index),
        )
        for index, step in enumerate(spec.steps)
    )


def decide(
    spec: JobSpec,
    tasks: Sequence[TaskHead],
    *,
    canceled: bool = False,
    overdue: bool = False,
    resting: Collection[str] = (),
) -> JobPlan:
    """Return what a job does next. A cancel comes before everything, the wall time before failures.

    Args:
        spec: The job.
        tasks: Every task it has had.
        canceled: Whether a cancel was asked for.
        overdue: Whether its wall time is over.
        resting: Failed tasks after which the step's next try does not begin yet.
    """
    latest = _latest(tasks)
    living = [task for task in tasks if not task.terminal]
    if canceled or overdue:
        now = _states(spec, latest)
        in_time = all(state in TERMINAL and state != "canceled" for state in now)
        if in_time and not canceled:
            return _ended(spec, now)
        if living:
            return JobPlan(cancel=tuple(task.id for task in living if task.cancel_at is None))
        if canceled:
            return JobPlan(status="canceled", error_code="canceled")
        return JobPlan(status="failed", error_code="timeout", error_message=f"not done in {spec.max_wall_time_s:g} s")
    states = _states(spec, latest)
    room = spec.max_concurrency - len(living)
    needs = needs_of(spec)
    start: list[tuple[int, int]] = []
    paused = False
    for index, step in enumerate(spec.steps):
        if room > len(start) and states[index] == "queued" and _ready(spec, states, needs[index]):
            task = latest.get(index)
            number = 0 if task is None else (task.try_ or 0) + 1
            if task is not None and task.id in resting:
                paused = True
            elif task is None or (task.status == "failed" and number <= step.retry):
                start.append((index, number))
    if start or living or paused:
        return JobPlan(start=tuple(start))
    return _ended(spec, states)


def _ended(spec: JobSpec, states: Sequence[StepStatus]) -> JobPlan:
    failed = [
        step.name
        for step, state in zip(spec.steps, states, strict=True)
        if state in ("failed", "canceled") and not step.continue_on_error
    ]
    if not failed:
        return JobPlan(status="succeeded")
    return JobPlan(status="failed", error_code="step_failed", error_message=f"step {failed[0]!r} did not succeed")


def _latest(tasks: Sequence[TaskHead]) -> Mapping[int, TaskHead]:
    latest: dict[int, TaskHead] = {}
    for task in tasks:
        assert task.step is not None
        newest = latest.get(task.step)
        if newest is None or (task.try_ or 0) > (newest.try_ or 0):
            latest[task.step] = task
    return latest


def _ready(spec: JobSpec, states: Sequence[StepStatus], needs: Sequence[int]) -> bool:
    return all(_passed(spec, states, index) for index in needs)


def _passed(spec: JobSpec, states: Sequence[StepStatus], index: int) -> bool:
    """Whether a step lets those that need it begin."""
    if states[index] == "succeeded":
        return True
    return states[index] in ("failed", "canceled") and spec.steps[index].continue_on_error


def _states(spec: JobSpec, latest: Mapping[int, TaskHead], *, over: bool = False) -> list[StepStatus]:
    """Return the steps' states; a step is skipped once one it needs is over and does not let it begin."""
    states: list[StepStatus] = ["queued"] * len(spec.steps)
    for index, task in latest.items():
        retryable = task.status == "failed" and (task.try_ or 0) < spec.steps[index].retry and not over
        states[index] = "queued" if retryable else task.status
    needs = needs_of(spec)
    changed = True
    while changed:
        changed = False
        for index in range(len(spec.steps)):
            blocked = any(states[n] in TERMINAL and not _passed(spec, states, n) for n in needs[index])
            if states[index] == "queued" and index not in latest and (blocked or over):
                states[index] = "skipped"
                changed = True
    return states
