"""From arguments to what is submitted: every number checked against the settings, nothing looked at."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kdskills.app.operations.work_inputs import RunAsyncInput, RunInput, RunServiceInput, StartJobInput, Step
from kdskills.app.operations.work_parts import InputFile, Ready
from kdskills.errors import BadRequest
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

    from kdskills.app.work import RunPlace
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
