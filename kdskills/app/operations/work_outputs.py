"""Answers of the work operations, made from the heads of tasks and jobs and from bytes of output; nothing asks the database."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from kdskills.app.operations.models import Output, PageOutput
from kdskills.execution.streams import LogPiece, text_of
from kdskills.jobs.model import JobHead, JobStatus, StepHead, StepStatus, TaskHead, TaskStatus

RunStatus = Literal["succeeded", "failed", "timeout", "canceled"]


class Artifact(Output):
    """A kept output, read back by its id."""

    artifact_id: str
    path: str
    size: int
    sha256: str
    mime: str


class LostOutput(Output):
    """An output that was asked for and not kept, and why."""

    path: str
    code: str
    message: str


class Timing(Output):
    """How long the command ran."""

    duration_ms: int | None


class ExposedEndpoint(Output):
    """Where a port of a service is reached on its host; not known before the service runs."""

    port: int
    host_port: int | None = None
    url: str | None = None


class ActivateOutput(Output):
    """Where a skill's files are.

    Attributes:
        mode: `local` or `remote`: whether the sandbox is on this machine.
        active_path: The skill's folder as commands see it.
    """

    mode: Literal["local", "remote"]
    skill_name: str
    version_hash: str
    tree_digest: str
    active_path: str
    session_id: str | None


class RunOutput(Output):
    """What a command did. One that exits non-zero is a result with status `failed`, not an error."""

    status: RunStatus
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    exit_code: int | None
    created_artifacts: tuple[Artifact, ...]
    output_errors: tuple[LostOutput, ...]
    timing: Timing
    version_hash: str
    tree_digest: str
    workdir: str
    session_id: str | None
    signal: int | None = None
    stdout_total: int = 0
    stderr_total: int = 0
    error_code: str | None = None
    error_message: str | None = None


class StartedOutput(Output):
    """A task that was accepted; `provider` is what `skills.task_status` is asked with."""

    task_id: str
    provider: Literal["kdskills"] = "kdskills"
    mode: Literal["batch", "service"]
    status: TaskStatus
    session_id: str | None
    workdir: str
    skill_name: str


class ServiceOutput(StartedOutput):
    """A service that was accepted; its ports get addresses when it runs (`skills.task_status`)."""

    exposed_endpoints: tuple[ExposedEndpoint, ...] = ()


class StartedJobOutput(Output):
    """A job that was accepted."""

    job_id: str
    status: JobStatus
    session_id: str


class QueryOutput(Output):
    """What a status query of provider `cmd` printed."""

    status: RunStatus
    exit_code: int | None
    stdout: str
    stderr: str
    stdout_truncated: bool
    stderr_truncated: bool
    duration_ms: int | None


class TaskSnapshot(Output):
    """A task as it is now.

    Attributes:
        startup_ready: Whether a service was found ready; None for batch tasks.
        stdout_offset: Byte of the output the tail begins at; `stdout_total` is its length.
        exposed_endpoints_active: Whether the endpoints can be reached now.
        watch_timeout: Whether a watch gave up before the task ended.
        query: With provider `cmd`: what the query printed. Without a task the snapshot is the query's own.
    """

    task_id: str | None
    provider: Literal["kdskills", "cmd"] = "kdskills"
    status: TaskStatus
    mode: Literal["batch", "service"]
    skill_name: str
    version_hash: str
    tree_digest: str
    session_id: str | None
    job_id: str | None = None
    workdir: str
    startup_ready: bool | None
    created_at: datetime
    started_at: datetime | None
    ready_at: datetime | None
    finished_at: datetime | None
    exit_code: int | None
    signal: int | None
    error_code: str | None
    error_message: str | None
    cancel_requested: bool
    stdout_tail: str
    stderr_tail: str
    stdout_offset: int
    stderr_offset: int
    stdout_total: int
    stderr_total: int
    stdout_truncated: bool
    stderr_truncated: bool
    artifacts: tuple[Artifact, ...]
    output_errors: tuple[LostOutput, ...]
    exposed_endpoints: tuple[ExposedEndpoint, ...]
    exposed_endpoints_active: bool
    attempt: int
    host: str | None
    engine: str
    watch_timeout: bool = False
    query: QueryOutput | None = None


class StepSnapshot(Output):
    """A step of a job as its latest try tells it."""

    index: int
    name: str
    status: StepStatus
    task_id: str | None
    tries: int
    started_at: datetime | None = None
    finished_at: datetime | None = None
    exit_code: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    stdout_tail: str = ""
    stderr_tail: str = ""
    stdout_total: int = 0
    stderr_total: int = 0
    artifacts: tuple[Artifact, ...] = ()
    output_errors: tuple[LostOutput, ...] = ()


class JobSnapshot(Output):
    """A job as it is now; `current_step_index` is -1 before the first step."""

    job_id: str
    status: JobStatus
    skill_name: str
    version_hash: str
    tree_digest: str
    session_id: str
    current_step_index: int
    steps: tuple[StepSnapshot, ...]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error_code: str | None
    error_message: str | None
    cancel_requested: bool
    watch_timeout: bool = False


class CancelOutput(Output):
    """What came of a cancel; `canceled` is false, and nothing changed, when the work was over."""

    id: str
    status: TaskStatus
    canceled: bool


class LogsOutput(Output):
    """A piece of output: bytes `offset` to `next_offset` of `total` so far.

    Attributes:
        data: The bytes, in `encoding`.
        truncated: Whether bytes between the asked offset and this piece are not kept any more.
        ended: Whether the task is over and this piece reaches the end.
    """

    task_id: str
    stream: Literal["stdout", "stderr"]
    offset: int
    next_offset: int
    total: int
    truncated: bool
    data: str
    encoding: Literal["text", "base64"]
    ended: bool
    status: TaskStatus


class WatchEvent(Output):
    """Progress of a watched task or job; never its result.

    Attributes:
        seq: Grows with every event; give the last one as `after_seq` to go on from there. A heartbeat repeats it.
    """

    seq: int
    kind: Literal["state", "output", "heartbeat"]
    id: str
    at: datetime
    status: TaskStatus
    attempt: int | None = None
    exposed_endpoints: tuple[ExposedEndpoint, ...] = ()
    current_step_index: int | None = None
    steps: tuple[StepSnapshot, ...] = ()


class TaskRow(Output):
    """A task in a list."""

    task_id: str
    status: TaskStatus
    mode: Literal["batch", "service"]
    skill_name: str
    session_id: str | None
    job_id: str | None
    command: tuple[str, ...]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    exit_code: int | None
    error_code: str | None
    agent: str


class JobRow(Output):
    """A job in a list."""

    job_id: str
    status: JobStatus
    skill_name: str
    session_id: str
    current_step_index: int
    steps: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error_code: str | None
    agent: str


class TaskList(PageOutput):
    """Tasks, the newest first."""

    tasks: tuple[TaskRow, ...]


class JobList(PageOutput):
    """Jobs, the newest first."""

    jobs: tuple[JobRow, ...]


class WorkPage(PageOutput):
    """Jobs, and tasks that belong to none, the newest first over both."""

    jobs: tuple[JobRow, ...]
    tasks: tuple[TaskRow, ...]


Tails = tuple[LogPiece, LogPiece]


def workdir_of(cwd: str) -> str:
    """Return a command's folder in the words of the arguments: `skill`, `session`, or a folder inside that one."""
    return "skill" if cwd.startswith("/skills/") else "session" if cwd == "." else cwd


def endpoints_of(head: TaskHead) -> tuple[ExposedEndpoint, ...]:
    """Return a service's ports, with their addresses when it runs."""
    running = {item.port: item for item in head.endpoints} if head.status == "running" else {}
    ports = head.spec.service.expose_ports if head.spec.service is not None else ()
    return tuple(ExposedEndpoint.of(running.get(port), port=port) for port in ports)


def _printed(tails: Tails, *, more_after: bool) -> dict[str, Any]:
    """Return the ends of both streams in the words of all answers that tell of them."""
    facts: dict[str, Any] = {}
    for name, piece in zip(("stdout", "stderr"), tails, strict=True):
        text = text_of(piece.data, cut_before=piece.offset > 0, more_after=more_after)
        begin = piece.offset + text.skipped
        facts |= {name: text.text, f"{name}_tail": text.text, f"{name}_offset": begin, f"{name}_truncated": begin > 0}
        facts[f"{name}_total"] = piece.total
    return facts


def _sources(head: TaskHead | JobHead) -> tuple[object, ...]:
    """Return what most fields of answers about a task or job are attributes of."""
    return head, head.spec, head.spec.placement


def step_of(step: StepHead, tails: Tails | None = None) -> StepSnapshot:
    """Return a step, with the ends of its output when they were read."""
    task = step.task
    if task is None:
        return StepSnapshot.of(step, task_id=None)
    printed = {"stdout_tail": "", "stderr_tail": ""} if tails is None else _printed(tails, more_after=not task.terminal)
    totals = {"stdout_total": task.stdout_total or 0, "stderr_total": task.stderr_total or 0}
    return StepSnapshot.of(step, task, task_id=task.id, **(totals | printed))


def task_row(head: TaskHead) -> TaskRow:
    """Return a task as a list shows it."""
    return TaskRow.of(*_sources(head), head.scope, task_id=head.id, command=head.spec.command.argv)


def job_row(head: JobHead) -> JobRow:
    """Return a job as a list shows it."""
    return JobRow.of(*_sources(head), head.scope, job_id=head.id, steps=len(head.steps))


def task_snapshot(head: TaskHead, tails: Tails, *, active: bool) -> TaskSnapshot:
    """Return a task as it is now, with the ends of its two streams; *active* tells whether its ports can be reached."""
    return TaskSnapshot.of(
        *_sources(head),
        task_id=head.id,
        workdir=workdir_of(head.spec.command.cwd),
        startup_ready=None if head.mode == "batch" else head.ready_at is not None,
        cancel_requested=head.cancel_at is not None,
        exposed_endpoints=endpoints_of(head),
        exposed_endpoints_active=active,
        **_printed(tails, more_after=not head.terminal),
    )


def job_snapshot(head: JobHead, tails: Mapping[int, Tails]) -> JobSnapshot:
    """Return a job as it is now, with the ends of its steps' output by index."""
    return JobSnapshot.of(
        *_sources(head),
        job_id=head.id,
        steps=tuple(step_of(step, tails.get(step.index)) for step in head.steps),
        cancel_requested=head.cancel_at is not None,
    )


def run_output(head: TaskHead, tails: Tails) -> RunOutput:
    """Return what a finished command did."""
    status: str = head.status if head.status in {"succeeded", "canceled"} else "failed"
    duration = None
    if head.started_at is not None and head.finished_at is not None:
        duration = max(0, round((head.finished_at - head.started_at).total_seconds() * 1000))
    return RunOutput.of(
        *_sources(head),
        status="timeout" if (head.status, head.error_code) == ("failed", "timeout") else status,
        created_artifacts=head.artifacts,
        timing=Timing(duration_ms=duration),
        workdir=workdir_of(head.spec.command.cwd),
        **_printed(tails, more_after=False),
    )


def query_output(head: TaskHead, tails: Tails) -> QueryOutput:
    """Return what a status query printed."""
    ran = run_output(head, tails)
    return QueryOutput.of(ran, ran.timing)
