"""Operations on work: what starts a command, a service or a job, what tells how it stands, and what it left.

Arguments become specifications of work here, with every number checked against the settings.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import Field

from kdskills.app.operations.models import Output, decode_moment, encode_moment
from kdskills.app.operations.work_inputs import (
    MAX_LOG_PIECE,
    ActivateInput,
    Arguments,
    InputFile,
    JobCancelInput,
    JobStatusInput,
    JobWatchInput,
    ListInput,
    RunAsyncInput,
    RunInput,
    RunServiceInput,
    StartJobInput,
    Step,
    TaskCancelInput,
    TaskListInput,
    TaskLogsInput,
    TaskStatusInput,
    TaskWatchInput,
)
from kdskills.app.operations.work_outputs import (
    ActivateOutput,
    CancelOutput,
    ExposedEndpoint,
    JobList,
    JobSnapshot,
    LogsOutput,
    RunOutput,
    ServiceOutput,
    StartedJobOutput,
    StartedOutput,
    TaskList,
    TaskSnapshot,
    WatchEvent,
    endpoints_of,
    job_row,
    job_snapshot,
    query_output,
    run_output,
    step_of,
    task_row,
    task_snapshot,
    text_of,
    workdir_of,
)
from kdskills.app.work import ProgressEvent, SkillCall, Snapshot, job_revision, scope_of, task_revision
from kdskills.errors import BadRequest, Conflict, ExecFailed, ExecRefused, KdskillsError, NotFound
from kdskills.execution.request import IsolationLevel
from kdskills.jobs.model import (
    Command,
    FromArtifact,
    Inline,
    InputSpec,
    JobHead,
    JobSpec,
    Scope,
    ServiceSpec,
    StepSpec,
    TaskHead,
    TaskSpec,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kdskills.app.operations.table import Context
    from kdskills.app.work import RunPlace, WorkService
    from kdskills.jobs.settings import JobsSettings


OURS = {"LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""What every command finds in its environment, before its own; PATH, HOME and TMPDIR are the engine's."""


def body_hash(operation: str, arguments: BaseModel, scope: Scope) -> str:
    """Return what requests under one idempotency key are compared by: caller, operation and all arguments.

    A key belongs to a project, so the caller counts: nobody is handed another agent's work by guessing its key.
    """
    body = [scope.model_dump(), operation, arguments.model_dump(mode="json")]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def refuse(path: str, problem: str) -> BadRequest:
    """Return the refusal of the argument at *path*, in the form of every other one."""
    return BadRequest(f"{path}: {problem}", errors=[{"path": path, "problem": problem}])


def timeout_of(seconds: float | None, default: float, most: float, path: str = "/timeout_sec") -> float:
    """Return the seconds a command may take. Raises BadRequest when the setting allows less."""
    if seconds is not None and seconds > most:
        raise refuse(path, f"must be at most {most:g}")
    return min(default, most) if seconds is None else seconds


def task_spec(
    arguments: RunInput | RunServiceInput,
    run_place: RunPlace,
    scope: Scope,
    limits: JobsSettings,
    *,
    sync: bool = False,
) -> TaskSpec:
    """Return the task that arguments ask for.

    Raises:
        BadRequest: A time or a size is beyond the settings.
    """
    timeout: float | None = None
    service: ServiceSpec | None = None
    if isinstance(arguments, RunInput):
        default, most = (
            (limits.run_cmd_timeout_s, limits.run_cmd_max_s) if sync else (limits.task_timeout_s, limits.task_max_s)
        )
        timeout = timeout_of(arguments.timeout_sec, default, most)
    else:
        # How to tell that it is ready travels flat: the one of its three forms that is given.
        ready = arguments.ready and (arguments.ready.http or arguments.ready).model_dump(exclude_none=True)
        service = ServiceSpec.model_validate(
            {
                "ready": ready,
                "startup_timeout_s": arguments.startup_timeout_sec,
                "restart": arguments.restart,
                "expose_ports": arguments.expose_ports,
            }
        )
    return TaskSpec(
        scope=scope,
        session_id=arguments.session_id,
        command=_command(arguments, arguments.workdir, arguments.env, timeout, run_place, limits),
        placement=run_place.placement,
        mode="batch" if service is None else "service",
        on_busy=arguments.on_busy,
        retry_on_lost=arguments.retry_on_lost if isinstance(arguments, RunAsyncInput) else False,
        service=service,
    )


def job_spec(arguments: StartJobInput, run_place: RunPlace, scope: Scope, limits: JobsSettings) -> JobSpec:
    """Return the job that arguments ask for. Raises BadRequest."""
    most = min(limits.task_max_s, arguments.max_wall_time_sec)
    steps = []
    for number, step in enumerate(arguments.steps):
        path = f"/steps/{number}"
        workdir = arguments.workdir if step.workdir is None else step.workdir
        timeout = timeout_of(step.timeout_sec, most, limits.task_max_s, f"{path}/timeout_sec")
        command = _command(step, workdir, {**arguments.env, **step.env}, timeout, run_place, limits, path)
        facts = step.model_dump(include={"name", "needs", "retry", "continue_on_error"})
        steps.append(StepSpec(command=command, **facts))
    return JobSpec(
        scope=scope,
        session_id=arguments.session_id,
        steps=tuple(steps),
        placement=run_place.placement,
        max_concurrency=arguments.max_concurrency,
        on_busy=arguments.on_busy,
        max_wall_time_s=arguments.max_wall_time_sec,
    )


def _command(
    program: RunInput | RunServiceInput | Step,
    workdir: str,
    env: Mapping[str, str],
    timeout_s: float | None,
    run_place: RunPlace,
    limits: JobsSettings,
    path: str = "",
) -> Command:
    """Return a program as it is run; text is for a shell inside the sandbox. Raises BadRequest."""
    folder = f"/skills/{run_place.placement.skill_name}"
    if workdir == "skill" and not run_place.has_files:
        raise refuse("/workdir", "the skill has no folder to start in; say `session`")
    skill = {"KDSKILLS_SKILL_DIR": folder} if run_place.has_files else {}
    return Command(
        argv=("/bin/sh", "-c", program.command) if isinstance(program.command, str) else program.command,
        cwd={"skill": folder, "session": "."}.get(workdir, workdir),
        env={**OURS, **skill, "KDSKILLS_TURN_DIR": "/work", **env},
        inputs=inputs_of(program.inputs, limits, f"{path}/inputs"),
        outputs=program.outputs,
        timeout_s=timeout_s,
    )


def inputs_of(files: Iterable[InputFile], limits: JobsSettings, path: str = "/inputs") -> tuple[InputSpec, ...]:
    """Return input files. Raises BadRequest when one is no base64 or too large."""
    specs: list[InputSpec] = []
    total = 0
    for number, item in enumerate(files):
        if item.artifact_id is not None:
            specs.append(FromArtifact(path=item.path, artifact_id=item.artifact_id))
            continue
        if item.content_base64 is None:
            data = (item.text or "").encode()
        else:
            try:
                data = base64.b64decode(item.content_base64, validate=True)
            except ValueError:
                raise refuse(f"{path}/{number}/content_base64", "is no base64") from None
        total += len(data)
        if len(data) > limits.input_bytes:
            raise refuse(f"{path}/{number}", f"has {len(data)} bytes, more than {limits.input_bytes}")
        if total > limits.files_bytes:
            raise refuse(path, f"have more than {limits.files_bytes} bytes together")
        specs.append(Inline(path=item.path, content_base64=base64.b64encode(data).decode()))
    return tuple(specs)


CALLERS_ERRORS: Final[Mapping[str, type[KdskillsError]]] = {
    "bad_request": BadRequest,
    "not_found": NotFound,
    "artifact_missing": NotFound,
    "root_changed": Conflict,
    "root_missing": Conflict,
}
"""What the caller changes when a command could not be started; everything else is for the operator."""


async def _run_place(work: WorkService, operation: str, arguments: Any, context: Context) -> RunPlace:
    policy_arguments = arguments.model_dump(mode="json", exclude={"skill_name"})
    call = SkillCall(operation, arguments.session_id, policy_arguments)
    return await work.run_place(context.identity, arguments.skill_name, call)


async def activate(work: WorkService, arguments: ActivateInput, context: Context) -> ActivateOutput:
    """Make a skill's files ready where commands run."""
    run_place = await _run_place(work, "skills.activate", arguments, context)
    placement = run_place.placement
    remote = run_place.level == IsolationLevel.VM
    if remote:  # the engine delivers the files into the session's sandbox, and checks their digest there
        command = Command(argv=("/bin/true",), timeout_s=arguments.timeout_sec)
        scope, session_id = scope_of(context.identity), arguments.session_id
        spec = TaskSpec(scope=scope, session_id=session_id, command=command, placement=placement)
        head = await work.run(context.identity, spec, None, "")
        if head.status != "succeeded":
            _require_ran(head)
            raise ExecFailed(
                f"the skill could not be delivered: {head.error_message or head.error_code or head.status}",
                code=head.error_code or "executor_failed",
            )
    path = f"/skills/{placement.skill_name}"
    return ActivateOutput.of(placement, arguments, mode="remote" if remote else "local", active_path=path)


async def run_cmd(work: WorkService, arguments: RunInput, context: Context) -> RunOutput:
    """Run a command and return what it did."""
    run_place = await _run_place(work, "skills.run_cmd", arguments, context)
    spec = task_spec(arguments, run_place, scope_of(context.identity), work.limits, sync=True)
    body = body_hash("skills.run_cmd", arguments, spec.scope)
    head = await work.run(context.identity, spec, context.idempotency_key, body)
    _require_ran(head)
    return run_output(head, await work.tails(head, work.limits.result_bytes))


def _require_ran(head: TaskHead) -> None:
    """Raise when the program was never started: that is an error with a code, not a result."""
    if head.started_at is None and head.status == "failed":
        raise early_failure(head)


def early_failure(head: TaskHead) -> KdskillsError:
    """Return why a program was never started, as the error that says who must act; the row keeps but code and words."""
    code = head.error_code or "executor_failed"
    kind = CALLERS_ERRORS.get(code, ExecRefused)
    return kind(head.error_message or "the command could not be started", code=code)


async def run_cmd_async(work: WorkService, arguments: RunAsyncInput, context: Context) -> StartedOutput:
    """Start a command in the background."""
    return StartedOutput(**await _started(work, "skills.run_cmd_async", arguments, context))


async def run_service(work: WorkService, arguments: RunServiceInput, context: Context) -> ServiceOutput:
    """Start a program that stays up."""
    facts = await _started(work, "skills.run_service", arguments, context)
    return ServiceOutput(
        **facts, exposed_endpoints=tuple(ExposedEndpoint(port=port) for port in arguments.expose_ports)
    )


async def _started(
    work: WorkService, operation: str, arguments: RunAsyncInput | RunServiceInput, context: Context
) -> dict[str, Any]:
    """Submit a task, and return what is told of it."""
    run_place = await _run_place(work, operation, arguments, context)
    placement = run_place.placement
    if isinstance(arguments, RunServiceInput) and run_place.level == IsolationLevel.VM:
        raise ExecRefused(
            f"services need an engine of this machine; {placement.engine} is remote",
            code="service_not_supported",
            who="caller",
        )
    spec = task_spec(arguments, run_place, scope_of(context.identity), work.limits)
    body = body_hash(operation, arguments, spec.scope)
    head = await work.submit_task(context.identity, spec, context.idempotency_key, body)
    return {
        "task_id": head.id,
        "mode": head.mode,
        "status": "queued",
        "session_id": head.spec.session_id,
        "workdir": workdir_of(head.spec.command.cwd),
        "skill_name": head.spec.placement.skill_name,
    }


async def start_job(work: WorkService, arguments: StartJobInput, context: Context) -> StartedJobOutput:
    """Start steps that run as tasks of one session."""
    run_place = await _run_place(work, "skills.start_job", arguments, context)
    spec = job_spec(arguments, run_place, scope_of(context.identity), work.limits)
    body = body_hash("skills.start_job", arguments, spec.scope)
    head = await work.submit_job(context.identity, spec, context.idempotency_key, body)
    return StartedJobOutput(job_id=head.id, status="queued", session_id=arguments.session_id)


# ---- work there is -----------------------------------------------------------------------------------------------

Head = TypeVar("Head", TaskHead, JobHead)

FOLLOW_S: Final = 0.1
CANCEL_S: Final = 2.0
"""How long a cancel waits to tell the state it led to; the work ends whether anybody waits or not."""


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
    policy_call = SkillCall("skills.task_status", None, call.model_dump(mode="json"))
    run_place = await work.run_place(context.identity, name, policy_call)
    spec = task_spec(call, run_place, scope_of(context.identity), work.limits, sync=True)
    ran = await work.run(context.identity, spec, None, "")
    query = query_output(ran, await work.tails(ran, arguments.tail_bytes))
    latest = ran if head is None else await work.task(context.identity, head.id)
    snapshot = await _task(work, latest, arguments.tail_bytes)
    facts = {"provider": "cmd", "query": query, "task_id": None if head is None else head.id}
    return snapshot.model_copy(update=facts)


async def _task(work: WorkService, head: TaskHead, tail_bytes: int) -> TaskSnapshot:
    tails = await work.tails(head, tail_bytes)
    return task_snapshot(head, tails, active=await work.endpoints_active(head))


async def job_status(work: WorkService, arguments: JobStatusInput, context: Context) -> JobSnapshot:
    """Show a job and its steps."""
    return await _job(work, await work.job(context.identity, arguments.job_id), arguments.tail_bytes)


async def _job(work: WorkService, head: JobHead, tail_bytes: int) -> JobSnapshot:
    tasks = {step.index: step.task for step in head.steps if step.task is not None} if tail_bytes else {}
    return job_snapshot(head, {index: await work.tails(task, tail_bytes) for index, task in tasks.items()})


async def task_watch(work: WorkService, arguments: TaskWatchInput, context: Context) -> TaskSnapshot:
    """Tell a task's progress until it is over."""
    item = arguments.task_id
    timed_out = await _watch(work, arguments, context, item, lambda: work.task(context.identity, item))
    snapshot = await _task(work, await work.task(context.identity, item), arguments.tail_bytes)
    return snapshot.model_copy(update={"watch_timeout": timed_out})


async def job_watch(work: WorkService, arguments: JobWatchInput, context: Context) -> JobSnapshot:
    """Tell a job's progress until it is over."""
    item = arguments.job_id
    timed_out = await _watch(work, arguments, context, item, lambda: work.job(context.identity, item))
    snapshot = await _job(work, await work.job(context.identity, item), arguments.tail_bytes)
    return snapshot.model_copy(update={"watch_timeout": timed_out})


async def _watch(
    work: WorkService,
    arguments: TaskWatchInput | JobWatchInput,
    context: Context,
    item: str,
    read: Callable[[], Awaitable[TaskHead | JobHead]],
) -> bool:
    """Tell progress until work is over; return whether the watch gave up before."""
    identity, emit = context.identity, context.emit

    async def look() -> Snapshot:
        head = await read()
        if isinstance(head, TaskHead):
            return Snapshot(task_revision(head), await work.printed(head), head.terminal, head)
        printed = sum([await work.printed(step.task) for step in head.steps if step.task is not None])
        return Snapshot(job_revision(head), printed, head.terminal, head)

    def tell(event: ProgressEvent) -> None:
        head = event.facts
        assert emit is not None
        assert isinstance(head, TaskHead | JobHead)
        if isinstance(head, TaskHead):
            facts: dict[str, Any] = {"exposed_endpoints": endpoints_of(head)}
        else:
            facts = {"steps": tuple(step_of(step) for step in head.steps)}
        emit(WatchEvent.of(event, head, at=event.time, **facts))

    key = None
    if arguments.dedupe_key is not None:
        key = (identity.tenant, identity.project, identity.agent, arguments.dedupe_key)
    watched = await work.watches.join(key, item, look, arguments.poll_interval_sec).listen(
        None if emit is None else tell,
        heartbeat_s=arguments.heartbeat_sec,
        timeout_s=arguments.timeout_sec,
        after=arguments.after_seq,
    )
    return watched.timed_out


async def task_cancel(work: WorkService, arguments: TaskCancelInput, context: Context) -> CancelOutput:
    """End a task and everything it started."""
    canceled = await work.cancel_task(context.identity, arguments.task_id, arguments.reason)
    head = await work.task(context.identity, arguments.task_id)
    if canceled and not head.terminal:
        head = await work.client.wait(TaskHead, head.scope, head.id, CANCEL_S, any_agent=True)
    return CancelOutput(id=head.id, status=head.status, canceled=canceled)


async def job_cancel(work: WorkService, arguments: JobCancelInput, context: Context) -> CancelOutput:
    """End a job and its steps."""
    canceled = await work.cancel_job(context.identity, arguments.job_id, arguments.reason)
    head = await work.job(context.identity, arguments.job_id)
    if canceled and not head.terminal:
        head = await work.client.wait(JobHead, head.scope, head.id, CANCEL_S, any_agent=True)
    return CancelOutput(id=head.id, status=head.status, canceled=canceled)


async def task_logs(work: WorkService, arguments: TaskLogsInput, context: Context) -> LogsOutput:
    """Read a piece of a task's output by offset."""
    end = time.monotonic() + (arguments.timeout_sec if arguments.follow else 0.0)
    while True:
        head = await work.task(context.identity, arguments.task_id)
        piece = await _piece(work, arguments, head)
        if not arguments.follow or piece.next_offset > piece.offset or piece.ended or time.monotonic() >= end:
            return piece
        await asyncio.sleep(FOLLOW_S)


async def _piece(work: WorkService, arguments: TaskLogsInput, head: TaskHead) -> LogsOutput:
    """Read one piece; the head was read before it, so that one of a task that is over misses nothing."""
    piece = await work.logs(head, arguments.stream, arguments.offset, arguments.limit)
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
    return LogsOutput.of(arguments, piece, head, offset=offset, next_offset=following, data=encoded, ended=ended)


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


async def list_tasks(work: WorkService, arguments: TaskListInput, context: Context) -> TaskList:
    """List the caller's tasks; administrators see those of every agent."""
    heads = await work.client.heads(
        TaskHead,
        scope_of(context.identity),
        job_id=arguments.job_id,
        steps=arguments.steps,
        **_filters(arguments, context),
    )
    page, following = _page(heads, arguments)
    return TaskList(tasks=tuple(map(task_row, page)), next_cursor=following)


async def list_jobs(work: WorkService, arguments: ListInput, context: Context) -> JobList:
    """List the caller's jobs; administrators see those of every agent."""
    heads = await work.client.heads(JobHead, scope_of(context.identity), **_filters(arguments, context))
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


async def get_artifact(work: WorkService, arguments: ArtifactInput, context: Context) -> ArtifactOutput:
    """Read an artifact of the caller's project back."""
    keeper = await work.keeper()
    record = await keeper.find(scope_of(context.identity), arguments.artifact_id)
    url = await keeper.store.link(record.project, record.sha256, timedelta(seconds=arguments.link_sec))
    begin = min(arguments.offset, record.size)
    end = min(begin + arguments.limit, record.size)
    data = await keeper.store.piece(record.project, record.sha256, begin, end)
    return ArtifactOutput.of(
        record,
        artifact_id=record.id,
        url=url,
        expires_in_sec=None if url is None else arguments.link_sec,
        offset=begin,
        next_offset=end,
        data_base64=base64.b64encode(data).decode(),
    )
