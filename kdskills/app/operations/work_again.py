"""Operations that run again what is over: the same command or steps, as new work of the caller, through the same gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field

from kdskills.app.operations.calling import require_allowed
from kdskills.app.operations.models import Output
from kdskills.app.operations.work_follow import JobId, TaskId
from kdskills.app.operations.work_run import (
    OURS,
    Arguments,
    RunAsyncInput,
    RunServiceInput,
    StartJobInput,
    body_hash,
    job_spec,
    require_service_engine,
    run_place_of,
    task_spec,
    workdir_of,
)
from kdskills.app.work import scope_of
from kdskills.errors import Conflict, NotFound
from kdskills.jobs.model import Command, FromArtifact, Inline, JobHead, OnHttp, TaskHead, TaskStatus

if TYPE_CHECKING:
    from kdskills.app.operations.table import Context, Operation
    from kdskills.app.work import WorkService

Version = Literal["same", "active"]
SHELL: Final = ("/bin/sh", "-c")
SURROUNDINGS: Final = {**OURS, "KDSKILLS_TURN_DIR": "/work"}
"""What every command finds in its environment, and no caller said."""


class TaskAgainInput(Arguments):
    """A task that is over, and which version of its skill runs now."""

    task_id: TaskId
    version: Version = Field(
        "same", description="`same`: the version it had, or a refusal; `active`: the one that is in use now."
    )


class JobAgainInput(Arguments):
    """A job that is over, and which version of its skill runs now."""

    job_id: JobId
    version: Version = Field("same", description="As for a task.")


class RepeatedOutput(Output):
    """Work that was accepted: `repeat_of` names what it does again; the one of `task_id` and `job_id` is set that it is."""

    task_id: str | None = None
    job_id: str | None = None
    repeat_of: str
    mode: Literal["batch", "service", "job"]
    status: TaskStatus = "queued"
    session_id: str | None
    skill_name: str
    version_hash: str


async def task_again(
    work: WorkService, operations: Mapping[str, Operation], arguments: TaskAgainInput, context: Context
) -> RepeatedOutput:
    """Start the command of a task that is over again."""
    head = await work.task(context.identity, arguments.task_id)
    name = "skills.run_cmd_async" if head.mode == "batch" else "skills.run_service"
    return await _again(work, operations[name], head, arguments.version, context)


async def job_again(
    work: WorkService, operations: Mapping[str, Operation], arguments: JobAgainInput, context: Context
) -> RepeatedOutput:
    """Start the steps of a job that is over again, all of them."""
    head = await work.job(context.identity, arguments.job_id)
    return await _again(work, operations["skills.start_job"], head, arguments.version, context)


async def _again(
    work: WorkService, operation: Operation, head: TaskHead | JobHead, version: Version, context: Context
) -> RepeatedOutput:
    """Ask everything that *operation* asks, with the arguments *head* was made of, and submit it as a repeat."""
    require_allowed(operation, context.identity)
    if not head.terminal:
        raise Conflict(
            f"{head.id} is {head.status}: wait until it is over, or cancel it", code="work_not_over", id=head.id
        )
    arguments = start_arguments(head)
    await _require_inputs(work, head)
    run_place = await run_place_of(work, operation.name, arguments, context)
    if version == "same":
        run_place = await work.same_version(run_place, context.identity.project, head.spec.placement)
    require_service_engine(arguments, run_place)
    scope = scope_of(context.identity)
    if isinstance(arguments, StartJobInput):
        spec: Any = job_spec(arguments, run_place, scope, work.limits)
    else:
        spec = task_spec(arguments, run_place, scope, work.limits)
    body = body_hash(f"{operation.name} again {version} {head.id}", arguments, scope)
    started = await work.submit(context, spec, context.idempotency_key, body, repeat_of=head.id)
    ids = {"job_id" if isinstance(head, JobHead) else "task_id": started.id}
    mode = head.mode if isinstance(head, TaskHead) else "job"
    return RepeatedOutput.of(
        spec, spec.placement, **({"task_id": None, "job_id": None} | ids), repeat_of=head.id, mode=mode, status="queued"
    )


async def _require_inputs(work: WorkService, head: TaskHead | JobHead) -> None:
    """Raise NotFound, `inputs_gone`, when a file that was put into the session's folder first is not kept any more."""
    parts = head.spec.steps if isinstance(head, JobHead) else (head.spec,)
    for file in (file for part in parts for file in part.command.inputs if isinstance(file, FromArtifact)):
        try:
            await (await work.keeper()).require(head.scope, [file.artifact_id])
        except NotFound as error:
            message = f"the input {file.path} of {head.id} is not kept any more: start it anew with your own"
            raise NotFound(message, code="inputs_gone", id=head.id, path=file.path) from error


def start_arguments(head: TaskHead | JobHead) -> RunAsyncInput | RunServiceInput | StartJobInput:
    """Return the arguments by which *head* was started, or others that mean the same."""
    spec, skill_name = head.spec, head.spec.placement.skill_name
    facts: dict[str, Any] = {"skill_name": skill_name, "session_id": spec.session_id, "on_busy": spec.on_busy}
    if isinstance(head, JobHead):
        steps = [
            {**step.model_dump(include={"name", "needs", "retry", "continue_on_error"}), **_program(step.command)}
            for step in head.spec.steps
        ]
        facts |= {"steps": steps, "max_wall_time_sec": head.spec.max_wall_time_s}
        return StartJobInput.model_validate({**facts, "max_concurrency": head.spec.max_concurrency})
    assert isinstance(head, TaskHead)
    facts |= _program(head.spec.command)
    service = head.spec.service
    if service is None:
        return RunAsyncInput.model_validate({**facts, "retry_on_lost": head.spec.retry_on_lost})
    del facts["timeout_sec"]
    if service.ready is not None:
        ready = service.ready.model_dump()
        facts["ready"] = {"http": ready} if isinstance(service.ready, OnHttp) else ready
    facts |= {"startup_timeout_sec": service.startup_timeout_s, "restart": service.restart}
    return RunServiceInput.model_validate({**facts, "expose_ports": service.expose_ports})


def _program(command: Command) -> dict[str, Any]:
    """Return a program in the words of arguments."""
    text = command.argv[len(SHELL) :] if command.argv[: len(SHELL)] == SHELL else ()
    env = {
        name: value
        for name, value in command.env.items()
        if SURROUNDINGS.get(name) != value and name != "KDSKILLS_SKILL_DIR"
    }
    inputs = [
        {"path": file.path, "content_base64": file.content_base64}
        if isinstance(file, Inline)
        else {"path": file.path, "artifact_id": file.artifact_id}
        for file in command.inputs
    ]
    return {
        "command": text[0] if len(text) == 1 else command.argv,
        "workdir": workdir_of(command.cwd),
        "env": env,
        "inputs": inputs,
        "outputs": command.outputs,
        "timeout_sec": command.timeout_s,
    }
