"""Operations that start something: a command now, in the background, as a service, or as steps of a job.

Arguments become specifications of work here, with every number checked against the settings.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kdskills.app.operations.table import Context, Implementation
from kdskills.app.operations.work_inputs import (
    ActivateInput,
    InputFile,
    Ready,
    RunAsyncInput,
    RunInput,
    RunServiceInput,
    StartJobInput,
    Step,
)
from kdskills.app.operations.work_outputs import (
    ActivateOutput,
    ExposedEndpoint,
    RunOutput,
    ServiceOutput,
    StartedJobOutput,
    StartedOutput,
    run_output,
    workdir_of,
)
from kdskills.app.work import RunPlace, SkillCall, scope_of
from kdskills.errors import BadRequest, Conflict, ExecFailed, ExecRefused, KdskillsError, NotFound
from kdskills.execution.request import IsolationLevel
from kdskills.jobs.model import (
    Command,
    FromArtifact,
    Inline,
    InputSpec,
    JobSpec,
    OnHttp,
    OnPattern,
    OnPort,
    Scope,
    ServiceSpec,
    StepSpec,
    TaskSpec,
)
from kdskills.jobs.model import Ready as ReadySpec

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kdskills.app.host import Host
    from kdskills.app.work import RunPlace
    from kdskills.jobs.model import TaskHead
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
    service = isinstance(arguments, RunServiceInput)
    timeout: float | None = None
    if isinstance(arguments, RunInput):
        default, most = (
            (limits.run_cmd_timeout_s, limits.run_cmd_max_s) if sync else (limits.task_timeout_s, limits.task_max_s)
        )
        timeout = timeout_of(arguments.timeout_sec, default, most)
    return TaskSpec(
        scope=scope,
        session_id=arguments.session_id,
        command=Command(
            argv=words_of(arguments.command),
            cwd=cwd_of(arguments.workdir, run_place),
            env=_env(run_place, arguments.env),
            inputs=inputs_of(arguments.inputs, limits),
            outputs=arguments.outputs,
            timeout_s=timeout,
        ),
        placement=run_place.placement,
        mode="service" if service else "batch",
        on_busy=arguments.on_busy,
        retry_on_lost=arguments.retry_on_lost if isinstance(arguments, RunAsyncInput) else False,
        service=service_spec(arguments) if isinstance(arguments, RunServiceInput) else None,
    )


def service_spec(arguments: RunServiceInput) -> ServiceSpec:
    """Return what makes a service of a command."""
    return ServiceSpec(
        ready=None if arguments.ready is None else _ready(arguments.ready),
        startup_timeout_s=arguments.startup_timeout_sec,
        restart=arguments.restart,
        expose_ports=arguments.expose_ports,
    )


def job_spec(arguments: StartJobInput, run_place: RunPlace, scope: Scope, limits: JobsSettings) -> JobSpec:
    """Return the job that arguments ask for. Raises BadRequest."""
    return JobSpec(
        scope=scope,
        session_id=arguments.session_id,
        steps=tuple(_step(number, step, arguments, run_place, limits) for number, step in enumerate(arguments.steps)),
        placement=run_place.placement,
        max_concurrency=arguments.max_concurrency,
        on_busy=arguments.on_busy,
        max_wall_time_s=arguments.max_wall_time_sec,
    )


def words_of(command: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return program and arguments; text is for a shell inside the sandbox."""
    return ("/bin/sh", "-c", command) if isinstance(command, str) else command


def cwd_of(workdir: str, run_place: RunPlace) -> str:
    """Return where a command starts.

    Raises:
        BadRequest: `skill` for a skill without files.
    """
    if workdir == "skill":
        if not run_place.has_files:
            raise refuse("/workdir", "the skill has no folder to start in; say `session`")
        return f"/skills/{run_place.placement.skill_name}"
    return "." if workdir == "session" else workdir


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
            except (binascii.Error, ValueError):
                raise refuse(f"{path}/{number}/content_base64", "is no base64") from None
        total += len(data)
        if len(data) > limits.input_bytes:
            raise refuse(f"{path}/{number}", f"has {len(data)} bytes, more than {limits.input_bytes}")
        if total > limits.files_bytes:
            raise refuse(path, f"have more than {limits.files_bytes} bytes together")
        specs.append(Inline(path=item.path, content_base64=base64.b64encode(data).decode()))
    return tuple(specs)


def _step(number: int, step: Step, job: StartJobInput, run_place: RunPlace, limits: JobsSettings) -> StepSpec:
    path = f"/steps/{number}"
    workdir = job.workdir if step.workdir is None else step.workdir
    most = min(limits.task_max_s, job.max_wall_time_sec)
    return StepSpec(
        name=step.name,
        command=Command(
            argv=words_of(step.command),
            cwd=cwd_of(workdir, run_place),
            env=_env(run_place, {**job.env, **step.env}),
            inputs=inputs_of(step.inputs, limits, f"{path}/inputs"),
            outputs=step.outputs,
            timeout_s=timeout_of(step.timeout_sec, most, limits.task_max_s, f"{path}/timeout_sec"),
        ),
        needs=step.needs,
        retry=step.retry,
        continue_on_error=step.continue_on_error,
    )


def _env(run_place: RunPlace, env: Mapping[str, str]) -> dict[str, str]:
    skill = {"KDSKILLS_SKILL_DIR": f"/skills/{run_place.placement.skill_name}"} if run_place.has_files else {}
    return {**OURS, **skill, "KDSKILLS_TURN_DIR": "/work", **env}


def _ready(ready: Ready) -> ReadySpec:
    if ready.pattern is not None:
        return OnPattern(pattern=ready.pattern)
    if ready.tcp_port is not None:
        return OnPort(tcp_port=ready.tcp_port)
    assert ready.http is not None
    return OnHttp(port=ready.http.port, path=ready.http.path)


REFUSALS = (
    "unknown_skill", "skill_denied", "skill_changed", "no_bundle", "conflict",
    "engine_unavailable", "isolation_too_weak", "too_much_work", "not_found", "database_unavailable", "missing_extra",
)  # fmt: skip

CALLERS_ERRORS: Final[Mapping[str, type[KdskillsError]]] = {
    "bad_request": BadRequest,
    "not_found": NotFound,
    "artifact_missing": NotFound,
    "root_changed": Conflict,
    "root_missing": Conflict,
}
"""What the caller changes when a command could not be started; everything else is for the operator."""


async def _run_place(host: Host, operation: str, arguments: Any, context: Context) -> RunPlace:
    policy_arguments = {
        name: value for name, value in arguments.model_dump(mode="json").items() if name != "skill_name"
    }
    return await host.work.run_place(
        context.identity, arguments.skill_name, SkillCall(operation, arguments.session_id, policy_arguments)
    )


async def activate(host: Host, arguments: ActivateInput, context: Context) -> ActivateOutput:
    """Make a skill's files ready where commands run."""
    run_place = await _run_place(host, "skills.activate", arguments, context)
    placement = run_place.placement
    remote = run_place.level == IsolationLevel.VM
    if remote:
        await _delivered(host, arguments, context, run_place)
    return ActivateOutput(
        mode="remote" if remote else "local",
        skill_name=placement.skill_name,
        version_hash=placement.version_hash,
        tree_digest=placement.tree_digest,
        active_path=f"/skills/{placement.skill_name}",
        session_id=arguments.session_id,
    )


async def _delivered(host: Host, arguments: ActivateInput, context: Context, run_place: RunPlace) -> None:
    """Let the engine deliver the files into the session's sandbox; it checks their digest there."""
    spec = TaskSpec(
        scope=scope_of(context.identity),
        session_id=arguments.session_id,
        command=Command(argv=("/bin/true",), timeout_s=arguments.timeout_sec),
        placement=run_place.placement,
    )
    head = await host.work.run(context.identity, spec, None, "")
    if head.status != "succeeded":
        _require_ran(head)
        raise ExecFailed(
            f"the skill could not be delivered: {head.error_message or head.error_code or head.status}",
            code=head.error_code or "executor_failed",
        )


async def run_cmd(host: Host, arguments: RunInput, context: Context) -> RunOutput:
    """Run a command and return what it did."""
    run_place = await _run_place(host, "skills.run_cmd", arguments, context)
    spec = task_spec(arguments, run_place, scope_of(context.identity), host.work.limits, sync=True)
    head = await host.work.run(
        context.identity, spec, context.idempotency_key, body_hash("skills.run_cmd", arguments, spec.scope)
    )
    _require_ran(head)
    return run_output(head, await host.work.tails(head, host.work.limits.result_bytes))


def _require_ran(head: TaskHead) -> None:
    """Raise when the program was never started: that is an error with a code, not a result."""
    if head.started_at is None and head.status == "failed":
        raise early_failure(head)


def early_failure(head: TaskHead) -> KdskillsError:
    """Return why a program was never started, as the error that says who must act; the row keeps but code and words."""
    code = head.error_code or "executor_failed"
    kind = CALLERS_ERRORS.get(code, ExecRefused)
    return kind(head.error_message or "the command could not be started", code=code)


async def run_cmd_async(host: Host, arguments: RunAsyncInput, context: Context) -> StartedOutput:
    """Start a command in the background."""
    head = await _submitted(host, "skills.run_cmd_async", arguments, context)
    return StartedOutput(**_started(head))


async def run_service(host: Host, arguments: RunServiceInput, context: Context) -> ServiceOutput:
    """Start a program that stays up."""
    head = await _submitted(host, "skills.run_service", arguments, context)
    return ServiceOutput(
        **_started(head), exposed_endpoints=tuple(ExposedEndpoint(port=port) for port in arguments.expose_ports)
    )


async def _submitted(
    host: Host, operation: str, arguments: RunAsyncInput | RunServiceInput, context: Context
) -> TaskHead:
    run_place = await _run_place(host, operation, arguments, context)
    if isinstance(arguments, RunServiceInput) and run_place.level == IsolationLevel.VM:
        raise ExecRefused(
            f"services need an engine of this machine; {run_place.placement.engine} is remote",
            code="service_not_supported",
            who="caller",
        )
    spec = task_spec(arguments, run_place, scope_of(context.identity), host.work.limits)
    return await host.work.submit_task(
        context.identity, spec, context.idempotency_key, body_hash(operation, arguments, spec.scope)
    )


def _started(head: TaskHead) -> dict[str, Any]:
    return {
        "task_id": head.id,
        "mode": head.mode,
        "status": "queued",
        "session_id": head.spec.session_id,
        "workdir": workdir_of(head.spec.command.cwd),
        "skill_name": head.spec.placement.skill_name,
    }


async def start_job(host: Host, arguments: StartJobInput, context: Context) -> StartedJobOutput:
    """Start steps that run as tasks of one session."""
    run_place = await _run_place(host, "skills.start_job", arguments, context)
    spec = job_spec(arguments, run_place, scope_of(context.identity), host.work.limits)
    head = await host.work.submit_job(
        context.identity, spec, context.idempotency_key, body_hash("skills.start_job", arguments, spec.scope)
    )
    return StartedJobOutput(job_id=head.id, status="queued", session_id=arguments.session_id)


ACTIVATE = Implementation(ActivateInput, ActivateOutput, REFUSALS, activate)
RUN_CMD = Implementation(RunInput, RunOutput, REFUSALS, run_cmd)
RUN_CMD_ASYNC = Implementation(RunAsyncInput, StartedOutput, REFUSALS, run_cmd_async)
RUN_SERVICE = Implementation(RunServiceInput, ServiceOutput, REFUSALS, run_service)
START_JOB = Implementation(StartJobInput, StartedJobOutput, REFUSALS, start_job)
