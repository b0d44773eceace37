"""Operations that start something: a command now, in the background, as a service, or as steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kdskills.app.operations.table import Context, Implementation
from kdskills.app.operations.work_inputs import ActivateInput, RunAsyncInput, RunInput, RunServiceInput, StartJobInput
from kdskills.app.operations.work_outputs import (
    ActivateOutput,
    ExposedEndpoint,
    RunOutput,
    ServiceOutput,
    StartedJobOutput,
    StartedOutput,
)
from kdskills.app.operations.work_specs import body_hash, job_spec, task_spec
from kdskills.app.operations.work_views import run_output, workdir_of
from kdskills.app.work import RunPlace, SkillCall, scope_of
from kdskills.errors import BadRequest, Conflict, ExecFailed, ExecRefused, KdskillsError, NotFound
from kdskills.execution.request import IsolationLevel
from kdskills.jobs.model import Command, TaskSpec

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.jobs.heads import TaskHead

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
