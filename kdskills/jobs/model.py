"""Values of background work: what is submitted, heads of tasks and jobs as read from the tables, and their states."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from kdskills.execution.request import Limits, SkillMount

Mode = Literal["batch", "service"]
SESSION_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")

MIB: Final = 1024 * 1024


class Value(BaseModel):
    """A frozen value that travels as JSON; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Endpoint(Value):
    """Where a port of a service is reached on its host."""

    port: int
    host_port: int
    url: str


class OutputError(Value):
    """A declared output that was not kept, or a session file that was not stored, and why."""

    path: str
    code: str
    message: str


class Scope(Value):
    """Whose work it is. Every record carries it, and every read checks it."""

    tenant: str = "local"
    project: str = "local"
    agent: str = "local"
    alias: str = ""

    def session_key(self, session_id: str) -> str:
        """Return the key of a session of this scope: a hash over length-prefixed parts, so that no two scopes meet."""
        parts = (self.tenant, self.project, self.agent, self.alias, session_id)
        text = b"".join(f"{len(part.encode())}:".encode() + part.encode() for part in parts)
        return hashlib.sha256(text).hexdigest()[:40]


class Inline(Value):
    """An input file given as bytes, in base64."""

    path: str
    content_base64: str


class FromArtifact(Value):
    """An input file that is an artifact of the same project."""

    path: str
    artifact_id: str


class OnPattern(Value):
    """A service is ready once a line of its output matches this regular expression."""

    pattern: str


class OnPort(Value):
    """A service is ready once something listens on this port inside its sandbox."""

    tcp_port: int = Field(ge=1, le=65535)


class OnHttp(Value):
    """A service is ready once a GET of this path on this port answers below 500."""

    port: int = Field(ge=1, le=65535)
    path: str = "/"


Ready = OnPattern | OnPort | OnHttp
InputSpec = Annotated[Inline | FromArtifact, Field(union_mode="left_to_right")]


class Command(Value):
    """A program and everything decided about how it runs.

    Attributes:
        argv: Program and arguments by execve; a command given as text is `("/bin/sh", "-c", text)`.
        cwd: Where it starts: relative to the session's folder, or absolute below `/skills`.
        env: Variables, byte-exact; nothing expands them.
        inputs: Files placed into the session's folder first.
        outputs: Globs relative to the session's folder, kept as artifacts.
        timeout_s: Seconds it may run; None for services only.
    """

    argv: tuple[str, ...]
    cwd: str = "."
    env: dict[str, str] = {}
    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[str, ...] = ()
    timeout_s: float | None = None


class Placement(Value):
    """Where and with which skills it runs; pinned when it is submitted.

    Attributes:
        engine: Name of the execution engine, already chosen and probed.
        skill_name: Full id of the skill asked for.
        version_hash: Its version, by the id that archives and activation know; of a skill that was not uploaded, the digest of
            its files.
        tree_digest: The digest of its files.
        uploaded: Versions of the uploaded skills among *skills*, by name.
        skills: The skill and what it imports, read-only and hash-addressed.
        limits: Bounds of every run.
        unsafe_local: The caller's half of the double opt-in of the bare engine.
    """

    engine: str
    skill_name: str
    version_hash: str
    tree_digest: str = ""
    uploaded: dict[str, str] = {}
    skills: tuple[SkillMount, ...] = ()
    limits: Limits = Limits()
    unsafe_local: bool = False


class ServiceSpec(Value):
    """What a service has beside a command."""

    ready: Ready | None = None
    startup_timeout_s: float = Field(30.0, gt=0, le=600)
    restart: int = Field(0, ge=0, le=100)
    expose_ports: tuple[int, ...] = ()


class TaskSpec(Value):
    """One task: a command in a sandbox.

    Attributes:
        session_id: Commands of one session never overlap and share a folder; None makes a session of its own.
        on_busy: Whether a second command of a busy session waits or is refused with `conflict`.
        retry_on_lost: Whether an attempt that died without a verdict is run again.
        service: Given for mode `service`.
    """

    scope: Scope
    session_id: str | None
    command: Command
    placement: Placement
    mode: Mode = "batch"
    on_busy: Literal["wait", "refuse"] = "wait"
    retry_on_lost: bool = False
    service: ServiceSpec | None = None


class StepSpec(Value):
    """One step of a job: a command that runs as a child task.

    Attributes:
        needs: Steps that must have succeeded; the previous step when no step of the job names any.
        retry: How often a failed step is tried again.
        continue_on_error: Whether the job goes on as if the step had succeeded.
    """

    name: str
    command: Command
    needs: tuple[str, ...] = ()
    retry: int = Field(0, ge=0, le=10)
    continue_on_error: bool = False


class JobSpec(Value):
    """A job: steps in one session, in order or as a graph."""

    scope: Scope
    session_id: str
    steps: tuple[StepSpec, ...]
    placement: Placement
    max_concurrency: int = Field(1, ge=1, le=64)
    max_wall_time_s: float = Field(1800.0, gt=0)
    on_busy: Literal["wait", "refuse"] = "wait"


TaskStatus = Literal["queued", "starting", "running", "succeeded", "failed", "canceled"]
JobStatus = Literal["queued", "running", "succeeded", "failed", "canceled"]
StepStatus = Literal["queued", "starting", "running", "succeeded", "failed", "canceled", "skipped"]

Table = Mapping[str, frozenset[str]]

TASKS: Final[Table] = {
    "queued": frozenset({"starting", "failed", "canceled"}),
    "starting": frozenset({"starting", "running", "succeeded", "failed", "canceled"}),
    "running": frozenset({"starting", "running", "succeeded", "failed", "canceled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "canceled": frozenset(),
}
"""A task goes back to `starting` with a new attempt only: a service restarted, or a lost attempt tried again."""

JOBS: Final[Table] = {
    "queued": frozenset({"running", "failed", "canceled"}),
    "running": frozenset({"running", "succeeded", "failed", "canceled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "canceled": frozenset(),
}

STEPS: Final[Table] = {
    "queued": frozenset({"starting", "failed", "canceled", "skipped"}),
    "starting": frozenset({"starting", "running", "succeeded", "failed", "canceled", "queued"}),
    "running": frozenset({"starting", "running", "succeeded", "failed", "canceled", "queued"}),
    "succeeded": frozenset(),
    "failed": frozenset({"queued"}),
    "canceled": frozenset(),
    "skipped": frozenset(),
}
"""A step that failed is queued again while it has tries left, each of them a task of its own."""

TERMINAL: Final = frozenset({"succeeded", "failed", "canceled", "skipped"})
"""A terminal state is final: later facts never change status, exit code or output."""

OPEN: Final = tuple(sorted(TASKS.keys() - TERMINAL))
"""The states of what is not over, named one by one: no database finds rows by what they are not."""

ACTIVE: Final = frozenset({"starting", "running"})
"""A task in one of these may have a program."""


def before(table: Table, status: str) -> tuple[str, ...]:
    """Return the states *status* may follow, sorted: what a compare-and-set compares with."""
    return tuple(sorted(state for state, following in table.items() if status in following))


def may(table: Table, status: str, following: str) -> bool:
    """Whether *following* may come after *status*."""
    return following in table[status]


def is_task_status(text: str) -> bool:
    """Whether *text* names a state of tasks."""
    return text in get_args(TaskStatus)


class ArtifactRef(Value):
    """A kept output of a task.

    Attributes:
        artifact_id: What it is read back by.
        path: Where the program left it, relative to the session's folder.
        mode: Its permission bits.
    """

    artifact_id: str
    path: str
    size: int
    sha256: str
    mime: str = "application/octet-stream"
    mode: int = 0o644


ARTIFACTS: Final = TypeAdapter(tuple[ArtifactRef, ...])
OUTPUT_ERRORS: Final = TypeAdapter(tuple[OutputError, ...])
ENDPOINTS: Final = TypeAdapter(tuple[Endpoint, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHead:
    """One task as its row tells it; a terminal head never changes.

    Attributes:
        attempt: Number of the latest attempt; 0 before the first.
        home: Host the task is pinned to; None for work any host of the pool may take.
        host: Host it runs on or ran on.
        executor: The worker that holds it, or held it last.
        started_at: When its first program was started; attempts that follow change nothing.
        ready_at: When the program of the latest attempt was ready; None while it is not.
        stdout_tail: Last bytes of the output; filled when the task is over.
        stdout_total: How much was printed; None before the task is over.
        cancel_at: When a cancel was asked for.
        step: Index of the job's step, for tasks of jobs, whose `try_` counts from 0.
    """

    id: str
    spec: TaskSpec
    status: TaskStatus
    mode: Mode
    session_key: str
    attempt: int = 0
    restarts: int = 0
    job_id: str | None = None
    step: int | None = None
    try_: int | None = None
    home: str | None = None
    host: str | None = None
    executor: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    ready_at: datetime | None = None
    finished_at: datetime | None = None
    exit_code: int | None = None
    signal: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    stdout_tail: bytes = b""
    stderr_tail: bytes = b""
    stdout_total: int | None = None
    stderr_total: int | None = None
    artifacts: tuple[ArtifactRef, ...] = ()
    output_errors: tuple[OutputError, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    cancel_at: datetime | None = None
    cancel_reason: str | None = None

    @property
    def scope(self) -> Scope:
        """Whose task it is."""
        return self.spec.scope

    @property
    def terminal(self) -> bool:
        """Whether the task is over."""
        return self.status in TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHead:
    """One step of a job, as its latest try tells it.

    Attributes:
        task: The task of the latest try; None while none was submitted, and for skipped steps.
        tries: How many tasks the step has had.
    """

    index: int
    name: str
    status: StepStatus
    tries: int = 0
    task: TaskHead | None = None

    @property
    def begun(self) -> bool:
        """Whether a program of it was ever begun: a step canceled while it was queued never was."""
        return self.tries > 1 or (self.task is not None and self.task.attempt > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHead:
    """One job and its steps; the fields are those of `TaskHead`."""

    id: str
    spec: JobSpec
    status: JobStatus
    session_key: str
    steps: tuple[StepHead, ...] = ()
    home: str | None = None
    host: str | None = None
    executor: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    error_code: str | None = None
    error_message: str | None = None
    cancel_at: datetime | None = None
    cancel_reason: str | None = None

    @property
    def scope(self) -> Scope:
        """Whose job it is."""
        return self.spec.scope

    @property
    def terminal(self) -> bool:
        """Whether the job is over."""
        return self.status in TERMINAL

    @property
    def current_step_index(self) -> int:
        """Index of the latest step that began, also one that waits for its next try; -1 before the first."""
        begun = [step.index for step in self.steps if step.begun]
        return max(begun, default=-1)
