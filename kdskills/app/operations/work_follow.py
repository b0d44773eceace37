"""Operations that look at running work or end it: status, watch, logs, cancel."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar, cast

from kdskills.app.operations.table import Context, Implementation
from kdskills.app.operations.work_inputs import (
    JobCancelInput,
    JobStatusInput,
    JobWatchInput,
    RunInput,
    TaskCancelInput,
    TaskLogsInput,
    TaskStatusInput,
    TaskWatchInput,
)
from kdskills.app.operations.work_outputs import CancelOutput, JobSnapshot, LogsOutput, TaskSnapshot, WatchEvent
from kdskills.app.operations.work_specs import task_spec
from kdskills.app.operations.work_views import endpoints_of, job_snapshot, query_output, step_of, task_snapshot
from kdskills.app.work import (
    Look,
    ProgressEvent,
    SkillCall,
    Snapshot,
    job_revision,
    scope_of,
    task_revision,
    text_of,
)
from kdskills.jobs.heads import JobHead, TaskHead

if TYPE_CHECKING:
    from kdskills.app.host import Host

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
