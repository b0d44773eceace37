"""Operations about work there is: status, watch, logs, cancel, lists, and artifacts."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import Field

from kdskills.app.operations.models import Output
from kdskills.app.operations.paging import decode_moment, encode_moment
from kdskills.app.operations.table import Context, Implementation
from kdskills.app.operations.work_inputs import (
    MAX_LOG_PIECE,
    Arguments,
    JobCancelInput,
    JobStatusInput,
    JobWatchInput,
    ListInput,
    RunInput,
    TaskCancelInput,
    TaskListInput,
    TaskLogsInput,
    TaskStatusInput,
    TaskWatchInput,
)
from kdskills.app.operations.work_outputs import (
    CancelOutput,
    JobList,
    JobSnapshot,
    LogsOutput,
    TaskList,
    TaskSnapshot,
    WatchEvent,
    endpoints_of,
    job_row,
    job_snapshot,
    query_output,
    step_of,
    task_row,
    task_snapshot,
    text_of,
)
from kdskills.app.operations.work_run import task_spec
from kdskills.app.work import (
    Look,
    ProgressEvent,
    SkillCall,
    Snapshot,
    job_revision,
    scope_of,
    task_revision,
)
from kdskills.jobs.model import JobHead, TaskHead

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.jobs.model import JobHead, TaskHead


S = TypeVar("S", TaskSnapshot, JobSnapshot)

FOLLOW_S = 0.1
CANCEL_S = 2.0
"""How long a cancel waits to tell the state it led to; the work ends whether anybody waits or not."""


async def task_status(host: Host, arguments: TaskStatusInput, context: Context) -> TaskSnapshot:
    """Show a task, or run a command that asks how something stands."""
    head = None if arguments.task_id is None else await host.work.task(context.identity, arguments.task_id)
    if arguments.provider == "kdskills":
        assert head is not None
        return await _task(host, head, arguments.tail_bytes)
    return await _query(host, arguments, context, head)


async def _task(host: Host, head: TaskHead, tail_bytes: int) -> TaskSnapshot:
    tails = await host.work.tails(head, tail_bytes)
    return task_snapshot(head, tails, active=await host.work.endpoints_active(head))


async def _query(host: Host, arguments: TaskStatusInput, context: Context, head: TaskHead | None) -> TaskSnapshot:
    """Run a query in a sandbox and a session of its own, under the policy of its skill."""
    assert arguments.query_command is not None
    name = arguments.skill_name or (head.spec.placement.skill_name if head is not None else "")
    call = RunInput(
        skill_name=name, command=arguments.query_command, env=arguments.env, timeout_sec=arguments.timeout_sec
    )
    policy_call = SkillCall("skills.task_status", None, call.model_dump(mode="json"))
    run_place = await host.work.run_place(context.identity, name, policy_call)
    scope = scope_of(context.identity)
    spec = task_spec(call, run_place, scope, host.work.limits, sync=True)
    ran = await host.work.run(context.identity, spec, None, "")
    query = query_output(ran, await host.work.tails(ran, arguments.tail_bytes))
    if head is None:
        snapshot = await _task(host, ran, arguments.tail_bytes)
        return snapshot.model_copy(update={"task_id": None, "provider": "cmd", "query": query})
    fresh = await host.work.task(context.identity, head.id)
    task_view = await _task(host, fresh, arguments.tail_bytes)
    return task_view.model_copy(update={"provider": "cmd", "query": query})


async def job_status(host: Host, arguments: JobStatusInput, context: Context) -> JobSnapshot:
    """Show a job and its steps."""
    return await _job(host, await host.work.job(context.identity, arguments.job_id), arguments.tail_bytes)


async def _job(host: Host, head: JobHead, tail_bytes: int) -> JobSnapshot:
    steps = [step for step in head.steps if step.task is not None] if tail_bytes else []
    tails = {step.index: await host.work.tails(step.task, tail_bytes) for step in steps if step.task is not None}
    return job_snapshot(head, tails)


async def task_watch(host: Host, arguments: TaskWatchInput, context: Context) -> TaskSnapshot:
    """Tell a task's progress until it is over."""

    async def look() -> Snapshot:
        head = await host.work.task(context.identity, arguments.task_id)
        return Snapshot(task_revision(head), await host.work.printed(head), head.terminal, head)

    async def final() -> TaskSnapshot:
        return await _task(host, await host.work.task(context.identity, arguments.task_id), arguments.tail_bytes)

    return await _watch(host, arguments, context, arguments.task_id, look, final, _task_event)


async def job_watch(host: Host, arguments: JobWatchInput, context: Context) -> JobSnapshot:
    """Tell a job's progress until it is over."""

    async def look() -> Snapshot:
        head = await host.work.job(context.identity, arguments.job_id)
        running = [step.task for step in head.steps if step.task is not None]
        printed = sum([await host.work.printed(task) for task in running])
        return Snapshot(job_revision(head), printed, head.terminal, head)

    async def final() -> JobSnapshot:
        return await _job(host, await host.work.job(context.identity, arguments.job_id), arguments.tail_bytes)

    return await _watch(host, arguments, context, arguments.job_id, look, final, _job_event)


async def _watch(
    host: Host,
    arguments: TaskWatchInput | JobWatchInput,
    context: Context,
    item: str,
    look: Look,
    final: Callable[[], Awaitable[S]],
    event_of: Callable[[ProgressEvent], WatchEvent],
) -> S:
    identity = context.identity
    key = (
        None
        if arguments.dedupe_key is None
        else (identity.tenant, identity.project, identity.agent, arguments.dedupe_key)
    )
    emit = context.emit
    watched = await host.work.watches.join(key, item, look, arguments.poll_interval_sec).listen(
        None if emit is None else lambda event: emit(event_of(event)),
        heartbeat_s=arguments.heartbeat_sec,
        timeout_s=arguments.timeout_sec,
        after=arguments.after_seq,
    )
    snapshot = await final()
    return snapshot.model_copy(update={"watch_timeout": True}) if watched.timed_out else snapshot


def _task_event(event: ProgressEvent) -> WatchEvent:
    head = cast("TaskHead", event.facts)
    return WatchEvent(
        seq=event.seq,
        kind=event.kind,
        id=head.id,
        at=event.time,
        status=head.status,
        attempt=head.attempt,
        exposed_endpoints=endpoints_of(head),
    )


def _job_event(event: ProgressEvent) -> WatchEvent:
    head = cast("JobHead", event.facts)
    return WatchEvent(
        seq=event.seq,
        kind=event.kind,
        id=head.id,
        at=event.time,
        status=head.status,
        current_step_index=head.current_step_index,
        steps=tuple(step_of(step) for step in head.steps),
    )


async def task_cancel(host: Host, arguments: TaskCancelInput, context: Context) -> CancelOutput:
    """End a task and everything it started."""
    canceled = await host.work.cancel_task(context.identity, arguments.task_id, arguments.reason)
    head = await host.work.task(context.identity, arguments.task_id)
    if canceled and not head.terminal:
        head = await host.work.client.wait_task(head.scope, head.id, CANCEL_S, any_agent=True)
    return CancelOutput(id=arguments.task_id, status=head.status, canceled=canceled)


async def job_cancel(host: Host, arguments: JobCancelInput, context: Context) -> CancelOutput:
    """End a job and its steps."""
    canceled = await host.work.cancel_job(context.identity, arguments.job_id, arguments.reason)
    head = await host.work.job(context.identity, arguments.job_id)
    if canceled and not head.terminal:
        head = await host.work.client.wait_job(head.scope, head.id, CANCEL_S, any_agent=True)
    return CancelOutput(id=arguments.job_id, status=head.status, canceled=canceled)


async def task_logs(host: Host, arguments: TaskLogsInput, context: Context) -> LogsOutput:
    """Read a piece of a task's output by offset."""
    end = time.monotonic() + (arguments.timeout_sec if arguments.follow else 0.0)
    while True:
        head = await host.work.task(context.identity, arguments.task_id)
        piece = await _piece(host, arguments, head)
        if not arguments.follow or piece.next_offset > piece.offset or piece.ended or time.monotonic() >= end:
            return piece
        await asyncio.sleep(FOLLOW_S)


async def _piece(host: Host, arguments: TaskLogsInput, head: TaskHead) -> LogsOutput:
    """Read one piece; the head was read before it, so that one of a task that is over misses nothing."""
    piece = await host.work.logs(head, arguments.stream, arguments.offset, arguments.limit)
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
    return LogsOutput(
        task_id=head.id,
        stream=arguments.stream,
        offset=offset,
        next_offset=following,
        total=piece.total,
        truncated=piece.truncated,
        data=encoded,
        encoding=arguments.encoding,
        ended=over and following >= piece.total,
        status=head.status,
    )


MISSING = ("not_found", "database_unavailable", "missing_extra")


TASK_STATUS = Implementation(TaskStatusInput, TaskSnapshot, MISSING, task_status)
JOB_STATUS = Implementation(JobStatusInput, JobSnapshot, MISSING, job_status)
TASK_WATCH = Implementation(TaskWatchInput, TaskSnapshot, MISSING, task_watch)
JOB_WATCH = Implementation(JobWatchInput, JobSnapshot, MISSING, job_watch)
TASK_LOGS = Implementation(TaskLogsInput, LogsOutput, MISSING, task_logs)
TASK_CANCEL = Implementation(TaskCancelInput, CancelOutput, MISSING, task_cancel)
JOB_CANCEL = Implementation(JobCancelInput, CancelOutput, MISSING, job_cancel)


Head = TypeVar("Head", "TaskHead", "JobHead")


class ArtifactInput(Arguments):
    """Which artifact, and how much of it."""

    artifact_id: str = Field(min_length=1, max_length=128, description="The artifact's id.")
    offset: int = Field(0, ge=0, le=2**62, description="Byte to begin at.")
    limit: int = Field(0, ge=0, le=MAX_LOG_PIECE, description="Bytes to return; 0 tells about it only.")
    link_sec: int = Field(
        900, ge=1, le=7 * 86_400, description="Seconds a link stays good, where the store signs links."
    )


class ArtifactOutput(Output):
    """An artifact, where it came from, and a piece of it.

    Attributes:
        url: A link anybody may read it with until `expires_in_sec` are over; None where the store signs none.
        data_base64: The bytes `offset` to `next_offset`.
    """

    artifact_id: str
    path: str
    size: int
    sha256: str
    mime: str
    task_id: str | None
    job_id: str | None
    agent: str
    skill_name: str
    version_hash: str
    created_at: datetime
    url: str | None
    expires_in_sec: int | None
    offset: int
    next_offset: int
    data_base64: str


async def list_tasks(host: Host, arguments: TaskListInput, context: Context) -> TaskList:
    """List the caller's tasks; administrators see those of every agent."""
    heads = await host.work.client.list_tasks(
        scope_of(context.identity), job_id=arguments.job_id, steps=arguments.steps, **_filters(arguments, context)
    )
    page, following = _page(heads, arguments)
    return TaskList(tasks=tuple(map(task_row, page)), next_cursor=following)


async def list_jobs(host: Host, arguments: ListInput, context: Context) -> JobList:
    """List the caller's jobs; administrators see those of every agent."""
    heads = await host.work.client.list_jobs(scope_of(context.identity), **_filters(arguments, context))
    page, following = _page(heads, arguments)
    return JobList(jobs=tuple(map(job_row, page)), next_cursor=following)


def _filters(arguments: ListInput, context: Context) -> dict[str, Any]:
    """Return what tasks and jobs are listed by; one row more than asked for tells whether there is a next page."""
    return {
        "status": () if arguments.status is None else (arguments.status,),
        "session_id": arguments.session_id,
        "before": None if arguments.cursor is None else decode_moment(arguments.cursor),
        "limit": arguments.limit + 1,
        "any_agent": context.identity.may("admin"),
    }


def _page(heads: list[Head], arguments: ListInput) -> tuple[list[Head], str | None]:
    page = heads[: arguments.limit]
    return page, encode_moment(page[-1].created_at, page[-1].id) if len(heads) > arguments.limit else None


async def get_artifact(host: Host, arguments: ArtifactInput, context: Context) -> ArtifactOutput:
    """Read an artifact of the caller's project back."""
    keeper = await host.work.keeper()
    record = await keeper.find(scope_of(context.identity), arguments.artifact_id)
    url = await keeper.store.link(record.project, record.sha256, timedelta(seconds=arguments.link_sec))
    begin = min(arguments.offset, record.size)
    end = min(begin + arguments.limit, record.size)
    data = await keeper.store.piece(record.project, record.sha256, begin, end)
    return ArtifactOutput(
        artifact_id=record.id,
        path=record.path,
        size=record.size,
        sha256=record.sha256,
        mime=record.mime,
        task_id=record.task_id,
        job_id=record.job_id,
        agent=record.agent,
        skill_name=record.skill_name,
        version_hash=record.version_hash,
        created_at=record.created_at,
        url=url,
        expires_in_sec=None if url is None else arguments.link_sec,
        offset=begin,
        next_offset=end,
        data_base64=base64.b64encode(data).decode(),
    )


TASKS = Implementation(TaskListInput, TaskList, MISSING, list_tasks)
JOBS = Implementation(ListInput, JobList, MISSING, list_jobs)
ARTIFACT = Implementation(
    ArtifactInput,
    ArtifactOutput,
    (*MISSING, "artifact_missing", "artifact_corrupt", "artifact_store_unavailable"),
    get_artifact,
)
