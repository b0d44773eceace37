"""Operations about work there is: status, watch, logs, cancel, lists, and artifacts."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import Field, StringConstraints, model_validator

from kdskills.app.logs import without_secrets
from kdskills.app.operations.models import MAX_PAGE, Output, PageInput, PageOutput, decode_moment, encode_moment
from kdskills.app.operations.work_run import (
    DAY,
    Arguments,
    Artifact,
    CommandWords,
    Env,
    ExposedEndpoint,
    LostOutput,
    RunInput,
    RunStatus,
    Seconds,
    SessionId,
    SkillName,
    Tails,
    printed,
    problem,
    run_output,
    sources_of,
    task_spec,
    workdir_of,
)
from kdskills.app.work import ProgressEvent, Snapshot, job_revision, scope_of, task_revision
from kdskills.execution.streams import text_of
from kdskills.jobs.model import JobHead, JobStatus, StepHead, StepStatus, TaskHead, TaskStatus
from kdskills.storage.database import moment_of

if TYPE_CHECKING:
    from kdskills.app.operations.table import Context
    from kdskills.app.work import WorkService

MAX_TAIL: Final = 1024 * 1024
MAX_LOG_PIECE: Final = 1024 * 1024
CANCEL_S: Final = 2.0
"""How long a cancel waits to tell the state it led to; the work ends whether anybody waits or not."""

Head = TypeVar("Head", TaskHead, JobHead)
TaskId = Annotated[str, StringConstraints(min_length=1, max_length=128), Field(description="Id of a task.")]
JobId = Annotated[str, StringConstraints(min_length=1, max_length=128), Field(description="Id of a job.")]
Tail = Annotated[int, Field(ge=0, le=MAX_TAIL, description="Bytes of the end of each stream to show.")]


class TaskStatusInput(Arguments):
    """A task to look at, or a command that asks how something stands."""

    task_id: TaskId | None = Field(None, description="Id of a task; may be left out with provider `cmd`.")
    tail_bytes: Tail = 8192
    provider: Literal["kdskills", "cmd"] = Field(
        "kdskills",
        description="`kdskills` reads the task's record; `cmd` runs `query_command` in a sandbox of its own.",
    )
    query_command: CommandWords | None = Field(None, description="With provider `cmd`: the command that tells.")
    skill_name: SkillName | None = Field(None, description="With provider `cmd`: its skill; none means the task's.")
    env: Env = Field(default_factory=dict)
    timeout_sec: Seconds | None = Field(None, description="With provider `cmd`: seconds the query may take.")

    @model_validator(mode="after")
    def _provider(self) -> Self:
        if self.provider == "kdskills":
            extra = [name for name in ("query_command", "skill_name", "timeout_sec") if getattr(self, name) is not None]
            if self.task_id is None:
                raise problem("task_id is missing")
            if extra or self.env:
                raise problem(f"{', '.join(extra) or 'env'} only goes with provider cmd")
        else:
            if self.query_command is None:
                raise problem("provider cmd needs query_command")
            if self.task_id is None and self.skill_name is None:
                raise problem("provider cmd needs skill_name, or the task_id of a task whose skill it takes")
        return self


class JobStatusInput(Arguments):
    """A job to look at."""

    job_id: JobId
    tail_bytes: Tail = 8192


class _Watching(Arguments):
    """How to watch."""

    poll_interval_sec: float = Field(0.5, ge=0.05, le=60, allow_inf_nan=False, description="Seconds between two looks.")
    heartbeat_sec: float = Field(
        20.0, ge=0.1, le=3600, allow_inf_nan=False, description="Seconds of silence until a heartbeat."
    )
    timeout_sec: float = Field(
        600.0, ge=0, le=DAY, allow_inf_nan=False, description="Seconds until the watch gives up."
    )
    dedupe_key: str | None = Field(
        None, min_length=1, max_length=256, description="Watches with one key are one watch."
    )
    after_seq: int = Field(0, ge=0, description="Events up to this number are known already.")
    tail_bytes: Tail = 8192


class TaskWatchInput(_Watching):
    """A task to watch."""

    task_id: TaskId


class JobWatchInput(_Watching):
    """A job to watch."""

    job_id: JobId


class TaskCancelInput(Arguments):
    """A task to end."""

    task_id: TaskId
    reason: str = Field("", max_length=1024, description="Why, for whoever looks at it later.")


class JobCancelInput(Arguments):
    """A job to end."""

    job_id: JobId
    reason: str = Field("", max_length=1024, description="Why, for whoever looks at it later.")


class TaskLogsInput(Arguments):
    """A piece of a task's output."""

    task_id: TaskId
    stream: Literal["stdout", "stderr"] = Field("stdout", description="Which of its two streams.")
    offset: int = Field(0, ge=-(2**62), le=2**62, description="Byte to begin at; a negative one counts from the end.")
    limit: int = Field(65_536, ge=0, le=MAX_LOG_PIECE, description="Bytes at most.")
    encoding: Literal["text", "base64"] = Field(
        "text", description="`text`: whole characters, with bad bytes as U+FFFD; `base64`: the bytes themselves."
    )
    follow: bool = Field(False, description="Wait until there is something new, or the task has ended.")  # fmt: skip
    timeout_sec: float = Field(30.0, ge=0, le=600, allow_inf_nan=False, description="Seconds `follow` waits.")


class ListInput(Arguments, PageInput):
    """Which of the project's tasks or jobs, the newest first."""

    session_id: SessionId | None = Field(None, description="Of this session only.")
    status: Literal["queued", "starting", "running", "succeeded", "failed", "canceled"] | None = Field(
        None, description="In this state only."
    )
    skill_name: SkillName | None = Field(None, description="Of the skill of this full id only.")
    limit: int = Field(50, ge=1, le=MAX_PAGE, description="How many at most.")


class TaskListInput(ListInput):
    """Which of the project's tasks, the newest first."""

    job_id: JobId | None = Field(None, description="Steps of this job only.")
    steps: bool = Field(True, description="Whether tasks that are steps of jobs are listed.")  # fmt: skip


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
        command: Program and arguments; text was run by `/bin/sh -c`. What looks like a secret in them is masked.
        repeat_of: The task it does again.
        trace_id: The trace of the request that began it, which its program and its log lines belong to as well.
        logs_elsewhere: The host that has its output, when it cannot be asked for it; as `elsewhere` of `skills.task_logs`.
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
    repeat_of: str | None = None
    trace_id: str | None = None
    command: tuple[str, ...]
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
    logs_elsewhere: str | None = None
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
    """A job as it is now; `current_step_index` is -1 before the first step, `repeat_of` the job it does again.

    `trace_id` is the trace of the request that began it.
    """

    job_id: str
    repeat_of: str | None = None
    trace_id: str | None = None
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
        elsewhere: The host that has the log, when it is not the one that answers and cannot be asked: while the task runs
            nothing of it can be read here, and its end only when it is over.
        elsewhere_reason: Why that host cannot be asked.
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
    elsewhere: str | None = None
    elsewhere_reason: str | None = None


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
    repeat_of: str | None = None
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
    repeat_of: str | None = None
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


def endpoints_of(head: TaskHead) -> tuple[ExposedEndpoint, ...]:
    """Return a service's ports, with their addresses when it runs."""
    running = {item.port: item for item in head.endpoints} if head.status == "running" else {}
    ports = head.spec.service.expose_ports if head.spec.service is not None else ()
    return tuple(ExposedEndpoint.of(running.get(port), port=port) for port in ports)


def masked_words(argv: Iterable[str]) -> tuple[str, ...]:
    """Return the words of a command as they are shown, with what looks like a secret masked as in logs."""
    return tuple(without_secrets(word) for word in argv)


def step_of(step: StepHead, tails: Tails | None = None) -> StepSnapshot:
    """Return a step, with the ends of its output when they were read."""
    task = step.task
    if task is None:
        return StepSnapshot.of(step, task_id=None)
    totals = {"stdout_total": task.stdout_total or 0, "stderr_total": task.stderr_total or 0}
    facts = {"stdout_tail": "", "stderr_tail": ""} if tails is None else printed(tails, more_after=not task.terminal)
    return StepSnapshot.of(step, task, task_id=task.id, **(totals | facts))


async def task_status(work: WorkService, arguments: TaskStatusInput, context: Context) -> TaskSnapshot:
    """Show a task, or run a command that asks how something stands, in a sandbox and under the policy of its skill."""
    head = None if arguments.task_id is None else await work.task(context.identity, arguments.task_id)
    if arguments.provider == "kdskills":
        assert head is not None
        return await _task(work, head, arguments.tail_bytes)
    assert arguments.query_command is not None
    name = arguments.skill_name or (head.spec.placement.skill_name if head is not None else "")
    call = RunInput(
        skill_name=name, command=arguments.query_command, env=arguments.env, timeout_sec=arguments.timeout_sec
    )
    told = call.model_dump(mode="json")
    run_place = await work.run_place(context.identity, name, "skills.task_status", None, told)
    spec = task_spec(call, run_place, scope_of(context.identity), work.limits, sync=True)
    ran = await work.run(context, spec, None, "")
    output = run_output(ran, await work.tails(ran, arguments.tail_bytes))
    latest = ran if head is None else await work.task(context.identity, head.id)
    facts = {"provider": "cmd", "query": QueryOutput.of(output, output.timing), "task_id": head and head.id}
    return await _task(work, latest, arguments.tail_bytes, **facts)


async def _task(work: WorkService, head: TaskHead, tail_bytes: int, **facts: Any) -> TaskSnapshot:
    """Return a task as it is now, with the ends of its two streams."""
    ends = await work.ends(head, tail_bytes)
    streams = printed((ends[0].log, ends[1].log), more_after=not head.terminal)
    usual = {
        "task_id": head.id,
        "workdir": workdir_of(head.spec.command.cwd),
        "command": masked_words(head.spec.command.argv),
        "logs_elsewhere": ends[0].elsewhere,
        "startup_ready": None if head.mode == "batch" else head.ready_at is not None,
        "cancel_requested": head.cancel_at is not None,
        "exposed_endpoints": endpoints_of(head),
        "exposed_endpoints_active": await work.endpoints_active(head),
    }
    return TaskSnapshot.of(*sources_of(head), **(usual | streams | facts))


async def job_status(work: WorkService, arguments: JobStatusInput, context: Context) -> JobSnapshot:
    """Show a job and its steps."""
    return await _job(work, await work.job(context.identity, arguments.job_id), arguments.tail_bytes)


async def _job(work: WorkService, head: JobHead, tail_bytes: int, **facts: Any) -> JobSnapshot:
    """Return a job as it is now, with the ends of its steps' output."""
    tails = {step.index: await work.tails(step.task, tail_bytes) for step in head.steps if tail_bytes and step.task}
    steps = tuple(step_of(step, tails.get(step.index)) for step in head.steps)
    asked = head.cancel_at is not None
    return JobSnapshot.of(*sources_of(head), job_id=head.id, steps=steps, cancel_requested=asked, **facts)


async def task_watch(work: WorkService, arguments: TaskWatchInput, context: Context) -> TaskSnapshot:
    """Tell a task's progress until it is over."""
    head, timed_out = await _watched(work, TaskHead, arguments.task_id, arguments, context)
    return await _task(work, head, arguments.tail_bytes, watch_timeout=timed_out)


async def job_watch(work: WorkService, arguments: JobWatchInput, context: Context) -> JobSnapshot:
    """Tell a job's progress until it is over."""
    head, timed_out = await _watched(work, JobHead, arguments.job_id, arguments, context)
    return await _job(work, head, arguments.tail_bytes, watch_timeout=timed_out)


async def _watched(
    work: WorkService, kind: type[Head], item: str, arguments: TaskWatchInput | JobWatchInput, context: Context
) -> tuple[Head, bool]:
    """Tell progress; return how the work stands at the end, and whether the watch gave up before."""
    identity, emit = context.identity, context.emit

    async def read() -> Head:
        return await work.client.head(kind, scope_of(identity), item, any_agent=identity.may("admin"))

    async def look() -> Snapshot:
        head: TaskHead | JobHead = await read()
        if isinstance(head, TaskHead):
            return Snapshot(task_revision(head), await work.printed(head), head.terminal, head)
        printed = sum([await work.printed(step.task) for step in head.steps if step.task is not None])
        return Snapshot(job_revision(head), printed, head.terminal, head)

    def tell(event: ProgressEvent) -> None:
        head = event.facts
        facts: dict[str, Any] = {}
        if isinstance(head, TaskHead):
            facts["exposed_endpoints"] = endpoints_of(head)
        elif isinstance(head, JobHead):
            facts["steps"] = tuple(step_of(step) for step in head.steps)
        if emit is not None:
            emit(WatchEvent.of(event, head, at=event.time, **facts))

    key = None
    if arguments.dedupe_key is not None:
        key = (identity.tenant, identity.project, identity.agent, arguments.dedupe_key)
    watch_end = await work.watches.join(key, item, look, arguments.poll_interval_sec).listen(
        None if emit is None else tell,
        heartbeat_s=arguments.heartbeat_sec,
        timeout_s=arguments.timeout_sec,
        after=arguments.after_seq,
    )
    return await read(), watch_end.timed_out


async def task_cancel(work: WorkService, arguments: TaskCancelInput, context: Context) -> CancelOutput:
    """End a task and everything it started."""
    return await _canceled(work, TaskHead, arguments.task_id, arguments.reason, context)


async def job_cancel(work: WorkService, arguments: JobCancelInput, context: Context) -> CancelOutput:
    """End a job and its steps."""
    return await _canceled(work, JobHead, arguments.job_id, arguments.reason, context)


async def _canceled(work: WorkService, kind: type[Head], item: str, reason: str, context: Context) -> CancelOutput:
    scope, any_agent = scope_of(context.identity), context.identity.may("admin")
    canceled = await work.cancel(context, kind, item, reason)
    head = await work.client.head(kind, scope, item, any_agent=any_agent)
    if canceled and not head.terminal:
        head = await work.client.wait(kind, head.scope, item, CANCEL_S, any_agent=True)
    return CancelOutput(id=item, status=head.status, canceled=canceled)


async def task_logs(work: WorkService, arguments: TaskLogsInput, context: Context) -> LogsOutput:
    """Read a piece of a task's output by offset."""
    end = time.monotonic() + (arguments.timeout_sec if arguments.follow else 0.0)
    head = await work.task(context.identity, arguments.task_id)
    while True:
        piece = await _piece(work, arguments, head)
        remaining_s = end - time.monotonic()
        if not arguments.follow or piece.next_offset > piece.offset or piece.ended or remaining_s <= 0:
            return piece
        head = await work.news(head, arguments.stream, piece.total, remaining_s)


async def _piece(work: WorkService, arguments: TaskLogsInput, head: TaskHead) -> LogsOutput:
    """Read one piece; the head was read before it, so that one of a task that is over misses nothing."""
    piece, elsewhere, reason = await work.client.piece(head, arguments.stream, arguments.offset, arguments.limit)
    over = head.terminal
    offset, data = piece.offset, piece.data
    if arguments.encoding == "base64":
        encoded = base64.b64encode(data).decode()
    else:
        reaches_end = piece.next_offset >= piece.total
        cut = piece.truncated or arguments.offset < 0
        text = text_of(data, cut_before=cut and offset > 0, more_after=not (over and reaches_end))
        incomplete = text.incomplete if text.incomplete < len(data) or not (reaches_end and over) else 0
        if incomplete == len(data) - text.skipped and not reaches_end:
            incomplete = 0  # a limit smaller than one character must not stop whoever reads on
            text = text_of(data, cut_before=cut and offset > 0, more_after=False)
        encoded, offset, data = text.text, offset + text.skipped, data[text.skipped : len(data) - incomplete]
    following = offset + len(data)
    ended = over and following >= piece.total
    facts = {"offset": offset, "next_offset": following, "data": encoded, "ended": ended}
    return LogsOutput.of(arguments, piece, head, **facts, elsewhere=elsewhere, elsewhere_reason=reason)


class ArtifactInput(Arguments):
    """Which artifact, and how much of it."""

    artifact_id: str = Field(min_length=1, max_length=128, description="The artifact's id.")
    offset: int = Field(0, ge=0, le=2**62, description="Byte to begin at.")
    limit: int = Field(0, ge=0, le=MAX_LOG_PIECE, description="Bytes to return; 0 tells about it only.")
    link_sec: int = Field(
        900, ge=1, le=7 * 86_400, description="Seconds a link stays good, where the store signs links."
    )


class ArtifactOutput(Artifact):
    """An artifact, where it came from, and a piece of it.

    Attributes:
        trace_id: The trace of the request that began its task; null when that is not kept any more.
        url: A link anybody may read it with until `expires_in_sec` are over; None where the store signs none.
        data_base64: The bytes `offset` to `next_offset`.
    """

    task_id: str | None
    job_id: str | None
    trace_id: str | None
    agent: str
    skill_name: str
    version_hash: str
    created_at: datetime
    url: str | None
    expires_in_sec: int | None
    offset: int
    next_offset: int
    data_base64: str


async def list_tasks(work: WorkService, arguments: TaskListInput, context: Context) -> TaskList:
    """List the caller's tasks; administrators see those of every agent."""
    page, following = await _page(work, TaskHead, arguments, context, job_id=arguments.job_id, steps=arguments.steps)
    rows = [
        TaskRow.of(*sources_of(each), each.scope, task_id=each.id, command=masked_words(each.spec.command.argv))
        for each in page
    ]
    return TaskList(tasks=tuple(rows), next_cursor=following)


async def list_jobs(work: WorkService, arguments: ListInput, context: Context) -> JobList:
    """List the caller's jobs; administrators see those of every agent."""
    page, following = await _page(work, JobHead, arguments, context)
    rows = [JobRow.of(*sources_of(each), each.scope, job_id=each.id, steps=len(each.steps)) for each in page]
    return JobList(jobs=tuple(rows), next_cursor=following)


async def _page(
    work: WorkService, kind: type[Head], arguments: ListInput, context: Context, **more: Any
) -> tuple[list[Head], str | None]:
    heads = await work.client.heads(
        kind,
        scope_of(context.identity),
        status=() if arguments.status is None else (arguments.status,),
        session_id=arguments.session_id,
        skill_name=arguments.skill_name,
        before=None if arguments.cursor is None else decode_moment(arguments.cursor),
        limit=arguments.limit + 1,  # one row more tells whether there is a next page
        any_agent=context.identity.may("admin"),
        **more,
    )
    page = heads[: arguments.limit]
    return page, encode_moment(page[-1].created_at, page[-1].id) if len(heads) > arguments.limit else None


async def get_artifact(work: WorkService, arguments: ArtifactInput, context: Context) -> ArtifactOutput:
    """Read an artifact of the caller's project back."""
    keeper = await work.keeper()
    record = await keeper.find(scope_of(context.identity), arguments.artifact_id)
    url = await keeper.store.link(record.project, record.sha256, timedelta(seconds=arguments.link_sec))
    begin = min(arguments.offset, record.size)
    end = min(begin + arguments.limit, record.size)
    data = b"".join([chunk async for chunk in work.artifact_bytes(record, begin, end)]) if begin < end else b""
    opened = await work.client.work()
    head = await opened.database.read(lambda link: opened.records.head(link, TaskHead, record.task_id or ""))
    return ArtifactOutput.of(
        record,
        artifact_id=record.id,
        trace_id=None if head is None else head.spec.trace_id,
        created_at=moment_of(record.created_at),
        url=url,
        expires_in_sec=None if url is None else arguments.link_sec,
        offset=begin,
        next_offset=end,
        data_base64=base64.b64encode(data).decode(),
    )
