"""Operations that start something: a command now, in the background, as a service, or as steps of a job.

Rules about arguments that need no look at settings stand in their models. Functions make specifications of work of them,
with every number checked against the settings.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kdskills.app.operations.models import Input, Output
from kdskills.app.work import scope_of
from kdskills.errors import BadRequest, Conflict, ExecFailed, ExecRefused, KdskillsError, NotFound
from kdskills.execution.check import MAX_ARGS, MAX_GLOBS, MAX_INPUTS, path_problem
from kdskills.execution.request import IsolationLevel
from kdskills.execution.streams import LogPiece, text_of
from kdskills.jobs.model import (
    SESSION_ID,
    Command,
    FromArtifact,
    Inline,
    InputSpec,
    JobHead,
    JobSpec,
    JobStatus,
    Scope,
    ServiceSpec,
    StepSpec,
    TaskHead,
    TaskSpec,
    TaskStatus,
    graph_problem,
)
from kdskills.session.scripts import call_env_problems

if TYPE_CHECKING:
    from kdskills.app.operations.table import Context
    from kdskills.app.work import RunPlace, WorkService
    from kdskills.jobs.settings import JobsSettings

MAX_ENV: Final = 256
MAX_STEPS: Final = 256
DAY: Final = 86_400.0
CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def problem(text: str) -> PydanticCustomError:
    """Return a finding about an argument whose text holds nothing but *text*."""
    return PydanticCustomError("work", "{text}", {"text": text})


def rule(words: Callable[[Any], str | None]) -> AfterValidator:
    """Return the validator that refuses a value about which *words* has any; they are the finding."""

    def check(value: Any) -> Any:
        text = words(value)
        if text:
            raise problem(text)
        return value

    return AfterValidator(check)


def _path_words(path: str) -> str | None:
    text = path_problem(path)
    return f"{path[:80]!r} {text}" if text else None


def _env_words(env: dict[str, str]) -> str | None:
    first = next(iter(call_env_problems(env, MAX_ENV)), None)
    return None if first is None else f"{first[0].removeprefix('/env').lstrip('/') or 'it'} {first[1]}"


def _clash_words(files: tuple[InputFile, ...]) -> str | None:
    paths = [file.path for file in files]
    unique = set(paths)
    if len(unique) != len(paths):
        return f"a path is given twice: {next(path for path in paths if paths.count(path) > 1)!r}"
    for path in sorted(unique):
        parts = path.split("/")
        above = next((top for depth in range(1, len(parts)) if (top := "/".join(parts[:depth])) in unique), None)
        if above is not None:
            return f"{above!r} is both a file and a folder"
    return None


SessionId = Annotated[
    str,
    StringConstraints(pattern=f"^{SESSION_ID.pattern}$"),
    Field(description="Commands of one session share a folder and never overlap; letters, digits and . _ : -"),
]
StepName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
SkillName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=255),
    Field(description="The skill the command belongs to: full id, bare id or short id."),
]
Seconds = Annotated[float, Field(gt=0, le=DAY, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]


class Arguments(Input):
    """Arguments of a work operation; the content of a file that is given as text may be any text."""

    MAY_HOLD_NUL: ClassVar[tuple[str, ...]] = ("/inputs/*/text", "/steps/*/inputs/*/text")


class Part(BaseModel):
    """A value inside arguments; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class InputFile(Part):
    """A file put into the session's folder before the command starts; exactly one way to say its content."""

    path: Annotated[str, rule(_path_words)] = Field(description="Relative to the session's folder.")
    text: str | None = Field(None, description="Content as text, in UTF-8.")
    content_base64: str | None = Field(None, description="Content as bytes, in base64.")
    artifact_id: str | None = Field(None, description="An artifact of the same project.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        sources = [name for name in ("text", "content_base64", "artifact_id") if getattr(self, name) is not None]
        if len(sources) != 1:
            listed = " and ".join(sources) or "none of them"
            raise problem(f"exactly one of text, content_base64 and artifact_id must be given, not {listed}")
        return self


def _url_words(path: str) -> str | None:
    begins = path.startswith("/") and not CONTROL.search(path) and " " not in path
    return None if begins else "must begin with / and hold no blanks or control characters"


class HttpReady(Part):
    """A GET of this path on this port answers below 500."""

    port: Port
    path: Annotated[str, Field(max_length=1024), rule(_url_words)] = "/"


class Ready(Part):
    """How to tell that a service is ready; exactly one of the three."""

    pattern: str | None = Field(
        None, min_length=1, max_length=1024, description="A regular expression of RE2 that an output line matches."
    )
    tcp_port: Port | None = Field(None, description="A port something listens on.")
    http: HttpReady | None = Field(None, description="An address that answers.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                from kdskills.jobs.companion import line_pattern
            except ModuleNotFoundError:  # without background work nothing will match it, and the operation says so
                return value
            try:
                line_pattern(value)
            except ValueError as error:
                raise problem(f"is no regular expression that is matched in linear time: {error}") from None
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if sum(value is not None for value in (self.pattern, self.tcp_port, self.http)) != 1:
            raise problem("exactly one of pattern, tcp_port and http must be given")
        return self


Words = Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_ARGS)]
CommandWords = Annotated[
    str | Words,
    Field(description="Text is run by /bin/sh -c inside the sandbox; a list is program and arguments, with no shell."),
    rule(lambda words: None if (words if isinstance(words, str) else words[0]).strip() else "is empty"),
]
Workdir = Annotated[
    str,
    Field(
        description="`skill`: the skill's own folder; `session`: the session's folder; else a folder inside that one."
    ),
    rule(lambda folder: None if folder in {"skill", "session", "."} else _path_words(folder)),
]
Env = Annotated[
    dict[str, str], Field(description="Environment variables, byte-exact; nothing expands them."), rule(_env_words)
]
Globs = Annotated[
    tuple[str, ...],
    Field(max_length=MAX_GLOBS, description="Paths or globs in the session's folder to keep as artifacts."),
    rule(lambda globs: next(filter(None, map(_path_words, globs)), None)),
]
Files = Annotated[
    tuple[InputFile, ...],
    Field(max_length=MAX_INPUTS, description="Files put into the session's folder first."),
    rule(_clash_words),
]


class CommandInput(Arguments):
    """A program of a skill, and what it is started with."""

    skill_name: SkillName
    command: CommandWords
    session_id: SessionId | None = Field(
        None, description="Session whose folder it runs in; none means one of its own."
    )
    workdir: Workdir = "skill"
    env: Env = Field(default_factory=dict)
    inputs: Files = ()
    outputs: Globs = ()


class RunInput(CommandInput):
    """A command of a skill."""

    timeout_sec: Seconds | None = Field(None, description="Seconds it may take; none means the setting.")
    on_busy: Literal["wait", "refuse"] = Field(
        "wait", description="What happens when the session is busy: wait for it, or be refused with `conflict`."
    )


class RunAsyncInput(RunInput):
    """A command that goes on in the background."""

    retry_on_lost: bool = Field(default=False, description="Whether it is run again when its machine died under it.")


class RunServiceInput(CommandInput):
    """A program that stays up and is reached through ports."""

    session_id: SessionId
    ready: Ready | None = Field(None, description="When it counts as running; none means as soon as it has started.")
    startup_timeout_sec: float = Field(
        30.0, gt=0, le=600, allow_inf_nan=False, description="Seconds until it must be ready."
    )
    restart: int = Field(0, ge=0, le=100, description="How often it is started again when it ends by itself.")
    expose_ports: Annotated[
        tuple[Port, ...],
        Field(max_length=16, description="Ports inside the sandbox to reach from this host."),
        rule(lambda ports: "names a port twice" if len(set(ports)) != len(ports) else None),
    ] = ()
    on_busy: Literal["wait", "refuse"] = Field("wait", description="As for a command.")


class Step(Part):
    """One step of a job."""

    name: StepName
    command: CommandWords
    needs: tuple[StepName, ...] = Field((), max_length=MAX_STEPS, description="Steps that must have succeeded before.")
    workdir: Workdir | None = Field(None, description="None means the job's.")
    env: Env = Field(default_factory=dict)
    inputs: Files = ()
    outputs: Globs = ()
    timeout_sec: Seconds | None = Field(None, description="Seconds it may take; none means the job's time.")
    retry: int = Field(0, ge=0, le=10, description="How often it is tried again when it failed.")
    continue_on_error: bool = Field(False, description="Whether the job goes on as if it had succeeded.")  # fmt: skip


class StartJobInput(Arguments):
    """Steps of one skill in one session."""

    skill_name: SkillName
    session_id: SessionId
    steps: Annotated[
        tuple[Step, ...],
        Field(min_length=1, max_length=MAX_STEPS, description="What is run, in order or as a graph."),
        rule(lambda steps: graph_problem([(step.name, step.needs) for step in steps])),
    ]
    workdir: Workdir = "skill"
    env: Env = Field(default_factory=dict)
    max_concurrency: int = Field(1, ge=1, le=64, description="Steps that may run at the same time.")
    max_wall_time_sec: Seconds = Field(1800.0, description="Seconds the whole job may take.")
    on_busy: Literal["wait", "refuse"] = Field("wait", description="As for a command.")


class ActivateInput(Arguments):
    """A skill to make ready."""

    skill_name: SkillName
    session_id: SessionId | None = Field(None, description="Session the files are made ready for.")
    timeout_sec: float = Field(60.0, gt=0, le=600, allow_inf_nan=False, description="Seconds it may take.")


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


Started = TypeVar("Started", bound=StartedOutput)
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
    """Return the task that arguments ask for. Raises BadRequest: A time or a size is beyond the settings."""
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
        facts = arguments.model_dump(include={"restart", "expose_ports"})
        service = ServiceSpec.model_validate(
            {"ready": ready, "startup_timeout_s": arguments.startup_timeout_sec, **facts}
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


Tails = tuple[LogPiece, LogPiece]


def workdir_of(cwd: str) -> str:
    """Return a command's folder in the words of the arguments: `skill`, `session`, or a folder inside that one."""
    return "skill" if cwd.startswith("/skills/") else "session" if cwd == "." else cwd


def printed(tails: Tails, *, more_after: bool) -> dict[str, Any]:
    """Return the ends of both streams in the words of all answers that tell of them."""
    facts: dict[str, Any] = {}
    for name, piece in zip(("stdout", "stderr"), tails, strict=True):
        text = text_of(piece.data, cut_before=piece.offset > 0, more_after=more_after)
        begin = piece.offset + text.skipped
        facts |= {name: text.text, f"{name}_tail": text.text, f"{name}_offset": begin, f"{name}_truncated": begin > 0}
        facts[f"{name}_total"] = piece.total
    return facts


def sources_of(head: TaskHead | JobHead) -> tuple[object, ...]:
    """Return what most fields of answers about a task or job are attributes of."""
    return head, head.spec, head.spec.placement


def run_output(head: TaskHead, tails: Tails) -> RunOutput:
    """Return what a finished command did."""
    status: str = head.status if head.status in {"succeeded", "canceled"} else "failed"
    duration = None
    if head.started_at is not None and head.finished_at is not None:
        duration = max(0, round((head.finished_at - head.started_at).total_seconds() * 1000))
    return RunOutput.of(
        *sources_of(head),
        status="timeout" if (head.status, head.error_code) == ("failed", "timeout") else status,
        created_artifacts=head.artifacts,
        timing=Timing(duration_ms=duration),
        workdir=workdir_of(head.spec.command.cwd),
        **printed(tails, more_after=False),
    )


CALLERS_ERRORS: Final[Mapping[str, type[KdskillsError]]] = {
    "bad_request": BadRequest,
    "not_found": NotFound,
    "artifact_missing": NotFound,
    "root_changed": Conflict,
    "root_missing": Conflict,
}
"""What the caller changes when a command could not be started; everything else is for the operator."""


async def run_place_of(work: WorkService, operation: str, arguments: Any, context: Context) -> RunPlace:
    """Return where an operation's command runs, once the gate has granted its skill. Raises as `WorkService.run_place`."""
    told = arguments.model_dump(mode="json", exclude={"skill_name"})
    return await work.run_place(context.identity, arguments.skill_name, operation, arguments.session_id, told)


async def activate(work: WorkService, arguments: ActivateInput, context: Context) -> ActivateOutput:
    """Make a skill's files ready where commands run."""
    run_place = await run_place_of(work, "skills.activate", arguments, context)
    placement = run_place.placement
    remote = run_place.level == IsolationLevel.VM
    if remote:  # the engine delivers the files into the session's sandbox, and checks their digest there
        command = Command(argv=("/bin/true",), timeout_s=arguments.timeout_sec)
        scope, session_id = scope_of(context.identity), arguments.session_id
        spec = TaskSpec(scope=scope, session_id=session_id, command=command, placement=placement)
        head = await work.run(context, spec, None, "")
        if head.status != "succeeded":
            require_ran(head)
            raise ExecFailed(
                f"the skill could not be delivered: {head.error_message or head.error_code or head.status}",
                code=head.error_code or "executor_failed",
            )
    path = f"/skills/{placement.skill_name}"
    return ActivateOutput.of(placement, arguments, mode="remote" if remote else "local", active_path=path)


async def run_cmd(work: WorkService, arguments: RunInput, context: Context) -> RunOutput:
    """Run a command and return what it did."""
    run_place = await run_place_of(work, "skills.run_cmd", arguments, context)
    spec = task_spec(arguments, run_place, scope_of(context.identity), work.limits, sync=True)
    body = body_hash("skills.run_cmd", arguments, spec.scope)
    head = await work.run(context, spec, context.idempotency_key, body)
    require_ran(head)
    return run_output(head, await work.tails(head, work.limits.result_bytes))


def require_ran(head: TaskHead) -> None:
    """Raise when the program was never started: that is an error with a code, not a result."""
    if head.started_at is None and head.status == "failed":
        code = head.error_code or "executor_failed"  # the row keeps but code and words: the kind says who must act
        kind = CALLERS_ERRORS.get(code, ExecRefused)
        raise kind(head.error_message or "the command could not be started", code=code)


async def run_cmd_async(work: WorkService, arguments: RunAsyncInput, context: Context) -> StartedOutput:
    """Start a command in the background."""
    return await _started(StartedOutput, work, "skills.run_cmd_async", arguments, context)


async def run_service(work: WorkService, arguments: RunServiceInput, context: Context) -> ServiceOutput:
    """Start a program that stays up."""
    endpoints = tuple(ExposedEndpoint(port=port) for port in arguments.expose_ports)
    return await _started(ServiceOutput, work, "skills.run_service", arguments, context, exposed_endpoints=endpoints)


async def _started(
    model: type[Started],
    work: WorkService,
    operation: str,
    arguments: RunAsyncInput | RunServiceInput,
    context: Context,
    **facts: Any,
) -> Started:
    """Submit a task, and return what is told of it, *facts* among that."""
    run_place = await run_place_of(work, operation, arguments, context)
    require_service_engine(arguments, run_place)
    spec = task_spec(arguments, run_place, scope_of(context.identity), work.limits)
    body = body_hash(operation, arguments, spec.scope)
    head = await work.submit(context, spec, context.idempotency_key, body)
    facts |= {"task_id": head.id, "status": "queued", "workdir": workdir_of(head.spec.command.cwd)}
    return model.of(head, head.spec, head.spec.placement, **facts)


def require_service_engine(arguments: BaseModel, run_place: RunPlace) -> None:
    """Raise ExecRefused, `service_not_supported`, for a service whose engine is not on this machine."""
    if isinstance(arguments, RunServiceInput) and run_place.level == IsolationLevel.VM:
        raise ExecRefused(
            f"services need an engine of this machine; {run_place.placement.engine} is remote",
            code="service_not_supported",
            who="caller",
        )


async def start_job(work: WorkService, arguments: StartJobInput, context: Context) -> StartedJobOutput:
    """Start steps that run as tasks of one session."""
    run_place = await run_place_of(work, "skills.start_job", arguments, context)
    spec = job_spec(arguments, run_place, scope_of(context.identity), work.limits)
    body = body_hash("skills.start_job", arguments, spec.scope)
    head = await work.submit(context, spec, context.idempotency_key, body)
    return StartedJobOutput(job_id=head.id, status="queued", session_id=arguments.session_id)
