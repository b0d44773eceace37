"""Arguments of the work operations, and the rules about them that need no look at settings or at the database."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kdskills.app.operations.models import MAX_PAGE, Input, PageInput
from kdskills.execution.check import MAX_ARGS, MAX_GLOBS, MAX_INPUTS, path_problem
from kdskills.jobs.model import SESSION_ID, graph_problem
from kdskills.session.scripts import call_env_problems

MAX_ENV: Final = 256
MAX_TAIL: Final = 1024 * 1024
DAY: Final = 86_400.0

SessionId = Annotated[
    str,
    StringConstraints(pattern=f"^{SESSION_ID.pattern}$"),
    Field(description="Commands of one session share a folder and never overlap; letters, digits and . _ : -"),
]
TaskId = Annotated[str, StringConstraints(min_length=1, max_length=128), Field(description="Id of a task.")]
JobId = Annotated[str, StringConstraints(min_length=1, max_length=128), Field(description="Id of a job.")]
StepName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
SkillName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=255),
    Field(description="The skill the command belongs to: full id, bare id or short id."),
]
Seconds = Annotated[float, Field(gt=0, le=DAY, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=1, le=65535, strict=True)]
Tail = Annotated[int, Field(ge=0, le=MAX_TAIL, description="Bytes of the end of each stream to show.")]

CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


class Arguments(Input):
    """Arguments of a work operation; the content of a file that is given as text may be any text."""

    MAY_HOLD_NUL: ClassVar[tuple[str, ...]] = ("/inputs/*/text", "/steps/*/inputs/*/text")


class Part(BaseModel):
    """A value inside arguments; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class InputFile(Part):
    """A file put into the session's folder before the command starts; exactly one way to say its content."""

    path: str = Field(description="Relative to the session's folder.")
    text: str | None = Field(None, description="Content as text, in UTF-8.")
    content_base64: str | None = Field(None, description="Content as bytes, in base64.")
    artifact_id: str | None = Field(None, description="An artifact of the same project.")

    @field_validator("path")
    @classmethod
    def _path(cls, value: str) -> str:
        return _clean(value)

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        sources = [name for name in ("text", "content_base64", "artifact_id") if getattr(self, name) is not None]
        if len(sources) != 1:
            listed = " and ".join(sources) or "none of them"
            raise problem(f"exactly one of text, content_base64 and artifact_id must be given, not {listed}")
        return self


class HttpReady(Part):
    """A GET of this path on this port answers below 500."""

    port: Port
    path: str = Field("/", max_length=1024)

    @field_validator("path")
    @classmethod
    def _path(cls, value: str) -> str:
        if not value.startswith("/") or CONTROL.search(value) or " " in value:
            raise problem("must begin with / and hold no blanks or control characters")
        return value


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
]
Workdir = Annotated[
    str,
    Field(
        description="`skill`: the skill's own folder; `session`: the session's folder; else a folder inside that one."
    ),
]
Env = Annotated[dict[str, str], Field(description="Environment variables, byte-exact; nothing expands them.")]
Globs = Annotated[
    tuple[str, ...],
    Field(max_length=MAX_GLOBS, description="Paths or globs in the session's folder to keep as artifacts."),
]
Files = Annotated[
    tuple[InputFile, ...], Field(max_length=MAX_INPUTS, description="Files put into the session's folder first.")
]


class Program(BaseModel):
    """The rules every command obeys, wherever it stands."""

    @field_validator("command", "query_command", check_fields=False)
    @classmethod
    def _command(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if value is not None and not (value if isinstance(value, str) else value[0]).strip():
            raise problem("is empty")
        return value

    @field_validator("env", check_fields=False)
    @classmethod
    def _env(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        for path, text in call_env_problems(value or {}, MAX_ENV):
            raise problem(f"{path.removeprefix('/env').lstrip('/') or 'it'} {text}")
        return value

    @field_validator("workdir", check_fields=False)
    @classmethod
    def _workdir(cls, value: str | None) -> str | None:
        return value if value is None or value in {"skill", "session", "."} else _clean(value)

    @field_validator("outputs", check_fields=False)
    @classmethod
    def _outputs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            _clean(pattern)
        return value

    @field_validator("inputs", check_fields=False)
    @classmethod
    def _inputs(cls, value: tuple[InputFile, ...]) -> tuple[InputFile, ...]:
        for text in _clashes([item.path for item in value]):
            raise problem(text)
        return value


def problem(text: str) -> PydanticCustomError:
    """Return a finding about an argument whose text holds nothing but *text*."""
    return PydanticCustomError("work", "{text}", {"text": text})


def _clean(path: str) -> str:
    text = path_problem(path)
    if text:
        raise problem(f"{path[:80]!r} {text}")
    return path


def _clashes(paths: list[str]) -> Iterator[str]:
    unique = set(paths)
    if len(unique) != len(paths):
        yield f"a path is given twice: {next(path for path in paths if paths.count(path) > 1)!r}"
    for path in sorted(unique):
        parts = path.split("/")
        for depth in range(1, len(parts)):
            above = "/".join(parts[:depth])
            if above in unique:
                yield f"{above!r} is both a file and a folder"


MAX_STEPS: Final = 256
MAX_LOG_PIECE: Final = 1024 * 1024


class RunInput(Program, Arguments):
    """A command of a skill."""

    skill_name: SkillName
    command: CommandWords
    session_id: SessionId | None = Field(
        None, description="Session whose folder it runs in; none means one of its own."
    )
    workdir: Workdir = "skill"
    env: Env = Field(default_factory=dict)
    inputs: Files = ()
    outputs: Globs = ()
    timeout_sec: Seconds | None = Field(None, description="Seconds it may take; none means the setting.")
    on_busy: Literal["wait", "refuse"] = Field(
        "wait", description="What happens when the session is busy: wait for it, or be refused with `conflict`."
    )


class RunAsyncInput(RunInput):
    """A command that goes on in the background."""

    retry_on_lost: bool = Field(False, description="Whether it is run again when its machine died under it.")  # fmt: skip


class RunServiceInput(Program, Arguments):
    """A program that stays up and is reached through ports."""

    skill_name: SkillName
    command: CommandWords
    session_id: SessionId
    workdir: Workdir = "skill"
    env: Env = Field(default_factory=dict)
    inputs: Files = ()
    outputs: Globs = ()
    ready: Ready | None = Field(None, description="When it counts as running; none means as soon as it has started.")
    startup_timeout_sec: float = Field(
        30.0, gt=0, le=600, allow_inf_nan=False, description="Seconds until it must be ready."
    )
    restart: int = Field(0, ge=0, le=100, description="How often it is started again when it ends by itself.")
    expose_ports: tuple[Port, ...] = Field(
        (), max_length=16, description="Ports inside the sandbox to reach from this host."
    )
    on_busy: Literal["wait", "refuse"] = Field("wait", description="As for a command.")

    @field_validator("expose_ports")
    @classmethod
    def _once(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise problem("names a port twice")
        return value


class Step(Program, Part):
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


class StartJobInput(Program, Arguments):
    """Steps of one skill in one session."""

    skill_name: SkillName
    session_id: SessionId
    steps: tuple[Step, ...] = Field(
        min_length=1, max_length=MAX_STEPS, description="What is run, in order or as a graph."
    )
    workdir: Workdir = "skill"
    env: Env = Field(default_factory=dict)
    max_concurrency: int = Field(1, ge=1, le=64, description="Steps that may run at the same time.")
    max_wall_time_sec: Seconds = Field(1800.0, description="Seconds the whole job may take.")
    on_busy: Literal["wait", "refuse"] = Field("wait", description="As for a command.")

    @field_validator("steps")
    @classmethod
    def _graph(cls, value: tuple[Step, ...]) -> tuple[Step, ...]:
        text = graph_problem([(step.name, step.needs) for step in value])
        if text is not None:
            raise problem(text)
        return value


class ActivateInput(Arguments):
    """A skill to make ready."""

    skill_name: SkillName
    session_id: SessionId | None = Field(None, description="Session the files are made ready for.")
    timeout_sec: float = Field(60.0, gt=0, le=600, allow_inf_nan=False, description="Seconds it may take.")


class TaskStatusInput(Program, Arguments):
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
    limit: int = Field(50, ge=1, le=MAX_PAGE, description="How many at most.")


class TaskListInput(ListInput):
    """Which of the project's tasks, the newest first."""

    job_id: JobId | None = Field(None, description="Steps of this job only.")
    steps: bool = Field(True, description="Whether tasks that are steps of jobs are listed.")  # fmt: skip
