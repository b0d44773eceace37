"""Arguments of the work operations: every rule that needs no look at the world."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from kdskills.app.operations.paging import MAX_PAGE, PageInput
from kdskills.app.operations.work_parts import (
    DAY,
    Arguments,
    CommandWords,
    Env,
    Files,
    Globs,
    JobId,
    Part,
    Port,
    Program,
    Ready,
    Seconds,
    SessionId,
    SkillName,
    StepName,
    Tail,
    TaskId,
    Workdir,
    problem,
)

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
        for text in graph_problems({step.name: step.needs for step in value}, [step.name for step in value]):
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


def graph_problems(needs: dict[str, tuple[str, ...]], names: list[str]) -> Iterator[str]:
    """Tell what is wrong with a graph of steps: names used twice, needs that are no step, rings."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield f"steps have one name: {', '.join(twice)}"
        return
    for name, needed in needs.items():
        unknown = [need for need in needed if need not in needs]
        if unknown:
            yield f"step {name} needs {', '.join(unknown)}, which is no step of this job"
            return
    waiting = {name: set(needed) for name, needed in needs.items()}
    while waiting:
        free = [name for name, needed in waiting.items() if not needed & waiting.keys()]
        if not free:
            yield f"steps need one another in a ring: {', '.join(sorted(waiting))}"
            return
        for name in free:
            del waiting[name]
