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

    from kdskills.app.work import Placed
    from kdskills.jobs.settings import JobsSettings

OURS = {"LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""What every command finds in its environment, before its own; PATH, HOME and TMPDIR are the engine's."""


def body_hash(operation: str, given: BaseModel, scope: Scope) -> str:
    """Return what requests under one idempotency key are compared by: caller, operation and all arguments.

    A key belongs to a project, so the caller counts: nobody is handed another agent's work by guessing its key.
    """
    body = [scope.model_dump(), operation, given.model_dump(mode="json")]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def refuse(path: str, said: str) -> BadRequest:
    """Return the refusal of the argument at *path*, in the form of every other one."""
    return BadRequest(f"{path}: {said}", errors=[{"path": path, "problem": said}])


def timeout_of(given: float | None, default: float, most: float, path: str = "/timeout_sec") -> float:
    """Return the seconds a command may take. Raises BadRequest when the setting allows less."""
    if given is not None and given > most:
        raise refuse(path, f"must be at most {most:g}")
    return min(default, most) if given is None else given


def task_spec(
    given: RunInput | RunServiceInput, placed: Placed, scope: Scope, limits: JobsSettings, *, sync: bool = False
) -> TaskSpec:
    """Return the task that arguments ask for.

    Raises:
        BadRequest: A time or a size is beyond the settings.
    """
    service = isinstance(given, RunServiceInput)
    timeout: float | None = None
    if isinstance(given, RunInput):
        default, most = (
            (limits.run_cmd_timeout_s, limits.run_cmd_max_s) if sync else (limits.task_timeout_s, limits.task_max_s)
        )
        timeout = timeout_of(given.timeout_sec, default, most)
    return TaskSpec(
        scope=scope,
        session_id=given.session_id,
        command=Command(
            argv=words_of(given.command),
            cwd=cwd_of(given.workdir, placed),
            env=_env(placed, given.env),
            inputs=inputs_of(given.inputs, limits),
            outputs=given.outputs,
            timeout_s=timeout,
        ),
        placement=placed.placement,
        mode="service" if service else "batch",
        on_busy=given.on_busy,
        retry_on_lost=given.retry_on_lost if isinstance(given, RunAsyncInput) else False,
        service=service_spec(given) if isinstance(given, RunServiceInput) else None,
    )


def service_spec(given: RunServiceInput) -> ServiceSpec:
    """Return what makes a service of a command."""
    return ServiceSpec(
        ready=None if given.ready is None else _ready(given.ready),
        startup_timeout_s=given.startup_timeout_sec,
        restart=given.restart,
        expose_ports=given.expose_ports,
    )


def job_spec(given: StartJobInput, placed: Placed, scope: Scope, limits: JobsSettings) -> JobSpec:
    """Return the job that arguments ask for. Raises BadRequest."""
    return JobSpec(
        scope=scope,
        session_id=given.session_id,
        steps=tuple(_step(number, step, given, placed, limits) for number, step in enumerate(given.steps)),
        placement=placed.placement,
        max_concurrency=given.max_concurrency,
        on_busy=given.on_busy,
        max_wall_time_s=given.max_wall_time_sec,
    )


def words_of(command: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return program and arguments; text is for a shell inside the sandbox."""
    return ("/bin/sh", "-c", command) if isinstance(command, str) else command


def cwd_of(workdir: str, placed: Placed) -> str:
    """Return where a command starts.

    Raises:
        BadRequest: `skill` for a skill without files.
    """
    if workdir == "skill":
        if not placed.has_files:
            raise refuse("/workdir", "the skill has no folder to start in; say `session`")
        return f"/skills/{placed.placement.skill_name}"
    return "." if workdir == "session" else workdir


def inputs_of(files: Iterable[InputFile], limits: JobsSettings, at: str = "/inputs") -> tuple[InputSpec, ...]:
    """Return input files. Raises BadRequest when one is no base64 or too large."""
    made: list[InputSpec] = []
    total = 0
    for number, item in enumerate(files):
        if item.artifact_id is not None:
            made.append(FromArtifact(path=item.path, artifact_id=item.artifact_id))
            continue
        if item.content_base64 is None:
            data = (item.text or "").encode()
        else:
            try:
                data = base64.b64decode(item.content_base64, validate=True)
            except (binascii.Error, ValueError):
                raise refuse(f"{at}/{number}/content_base64", "is no base64") from None
        total += len(data)
        if len(data) > limits.input_bytes:
            raise refuse(f"{at}/{number}", f"has {len(data)} bytes, more than {limits.input_bytes}")
        if total > limits.files_bytes:
            raise refuse(at, f"have more than {limits.files_bytes} bytes together")
        made.append(Inline(path=item.path, content_base64=base64.b64encode(data).decode()))
    return tuple(made)


def _step(number: int, step: Step, job: StartJobInput, placed: Placed, limits: JobsSettings) -> StepSpec:
    at = f"/steps/{number}"
    workdir = job.workdir if step.workdir is None else step.workdir
    most = min(limits.task_max_s, job.max_wall_time_sec)
    return StepSpec(
        name=step.name,
        command=Command(
            argv=words_of(step.command),
            cwd=cwd_of(workdir, placed),
            env=_env(placed, {**job.env, **step.env}),
            inputs=inputs_of(step.inputs, limits, f"{at}/inputs"),
            outputs=step.outputs,
            timeout_s=timeout_of(step.timeout_sec, most, limits.task_max_s, f"{at}/timeout_sec"),
        ),
        needs=step.needs,
        retry=step.retry,
        continue_on_error=step.continue_on_error,
    )


def _env(placed: Placed, env: Mapping[str, str]) -> dict[str, str]:
    skill = {"KDSKILLS_SKILL_DIR": f"/skills/{placed.placement.skill_name}"} if placed.has_files else {}
    return {**OURS, **skill, "KDSKILLS_TURN_DIR": "/work", **env}


def _ready(ready: Ready) -> ReadySpec:
    if ready.pattern is not None:
        return OnPattern(pattern=ready.pattern)
    if ready.tcp_port is not None:
        return OnPort(tcp_port=ready.tcp_port)
    assert ready.http is not None
    return OnHttp(port=ready.http.port, path=ready.http.path)
