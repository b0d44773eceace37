"""Values of background work: what is submitted, heads of tasks and jobs as read from the tables, and their states."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from kdskills.errors.traces import Trace
from kdskills.execution.request import EnvironmentMount, Limits, SkillMount

Kind = Literal["task", "job"]
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
    """A program by execve and how it runs; a command given as text is `("/bin/sh", "-c", text)`.

    `cwd` is relative to the session's folder, or absolute below `/skills`; `inputs` are placed into that folder first,
    and `outputs` are globs relative to it, kept as artifacts. Nothing expands `env`. Only services have no `timeout_s`.
    """

    argv: tuple[str, ...]
    cwd: str = "."
    env: dict[str, str] = {}
    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[str, ...] = ()
    timeout_s: float | None = None


class Placement(Value):
    """Where and with which skills it runs; pinned when it is submitted, its engine chosen and probed.

    `version_hash` is the id that archives and activation know; of a skill that was not uploaded, the digest of its
    files. `skills` are the skill and what it imports, read-only and hash-addressed, `environment` the packages its commands
    find, `network` rules of the hosts they may reach, which a worker's own settings must grant, too, `uploaded` the versions
    of the uploaded ones among the skills by name. `unsafe_local` is the caller's half of the double opt-in of the bare engine.
    With `evals` no program is started: the command's one word is an order of evaluations, which asks models and so is run by
    kdskills itself, outside of the sandbox; `engine` is what it runs scripts in. Only `evals.start` says so, never a caller.
    """

    engine: str
    skill_name: str
    version_hash: str
    tree_digest: str = ""
    uploaded: dict[str, str] = {}
    skills: tuple[SkillMount, ...] = ()
    environment: EnvironmentMount | None = None
    network: tuple[str, ...] = ()
    limits: Limits = Limits()
    unsafe_local: bool = False
    evals: bool = False


class ServiceSpec(Value):
    """What a service has beside a command."""

    ready: Ready | None = None
    startup_timeout_s: float = Field(30.0, gt=0, le=600)
    restart: int = Field(0, ge=0, le=100)
    expose_ports: tuple[int, ...] = ()


class Traced(Value):
    """What a request began: `traceparent` is the step of its trace that did, empty in rows of older releases."""

    traceparent: str = ""

    @property
    def trace_id(self) -> str | None:
        """The trace it belongs to."""
        trace = Trace.read(self.traceparent)
        return None if trace is None else trace.trace_id


class TaskSpec(Traced):
    """One task: a command in a sandbox.

    Commands of one session never overlap and share a folder; without `session_id` it has a session of its own.
    `on_busy` says whether it waits for a busy session or is refused with `conflict`, `retry_on_lost` whether an attempt
    that died without a verdict is run again.
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
    """One step of a job: a command that runs as a child task, tried again `retry` times when it fails.

    It needs the previous step when no step of the job names any; with `continue_on_error`, failing is as succeeding.
    `retry_on_lost` is as for tasks.
    """

    name: str
    command: Command
    needs: tuple[str, ...] = ()
    retry: int = Field(0, ge=0, le=10)
    continue_on_error: bool = False
    retry_on_lost: bool = False


class JobSpec(Traced):
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

TERMINAL: Final = frozenset({"succeeded", "failed", "canceled", "skipped"})
"""A terminal state is final: later facts never change status, exit code or output."""

OPEN: Final = tuple(sorted(TASKS.keys() - TERMINAL))
"""The states of what is not over, named one by one: no database finds rows by what they are not."""

ACTIVE: Final = frozenset({"starting", "running"})
"""A task in one of these may have a program."""


def before(table: Table, status: str) -> tuple[str, ...]:
    """Return the states *status* may follow, sorted: what a compare-and-set compares with."""
    return tuple(sorted(state for state, following in table.items() if status in following))


OCTETS: Final = "application/octet-stream"

MIMES: Final = {
    "bmp": "image/bmp", "bz2": "application/x-bzip2", "css": "text/css", "csv": "text/csv", "doc": "application/msword",
    "docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document", "gif": "image/gif",
    "gz": "application/gzip", "htm": "text/html", "html": "text/html", "ipynb": "application/x-ipynb+json",
    "jpeg": "image/jpeg", "jpg": "image/jpeg", "js": "text/javascript", "json": "application/json",
    "jsonl": "application/jsonl", "log": "text/plain", "md": "text/markdown", "mp3": "audio/mpeg", "mp4": "video/mp4",
    "parquet": "application/vnd.apache.parquet", "pdf": "application/pdf", "png": "image/png",
    "pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation", "py": "text/x-python",
    "rtf": "application/rtf", "sh": "application/x-sh", "sqlite": "application/vnd.sqlite3", "svg": "image/svg+xml",
    "tar": "application/x-tar", "toml": "application/toml", "tsv": "text/tab-separated-values", "txt": "text/plain",
    "wav": "audio/wav", "webp": "image/webp", "xls": "application/vnd.ms-excel",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet", "xml": "application/xml",
    "yaml": "application/yaml", "yml": "application/yaml", "zip": "application/zip",
}  # fmt: skip
"""Media types by suffix: a table of our own, because the one of the machine differs from host to host."""


def mime_of(path: str) -> str:
    """Return the media type a file's suffix stands for; nothing looks into the file."""
    name = path.rpartition("/")[2]
    _, dot, suffix = name.rpartition(".")
    return MIMES.get(suffix.lower(), OCTETS) if dot else OCTETS


def artifact_id(task_id: str, path: str) -> str:
    """Return the id of what a task left at *path*: the same however often a worker stores it."""
    parts = b"".join(
        f"{len(part)}:".encode() + part for part in (task_id.encode(), path.encode("utf-8", "surrogatepass"))
    )
    digest = hashlib.sha256(parts).digest()[:16]
    return "art_" + base64.b32encode(digest).decode().rstrip("=").lower()


class ArtifactRef(Value):
    """A kept output of a task, read back by its id; the path is relative to the session's folder."""

    artifact_id: str
    path: str
    size: int
    sha256: str
    mime: str = OCTETS
    mode: int = 0o644


ARTIFACTS: Final = TypeAdapter(tuple[ArtifactRef, ...])
OUTPUT_ERRORS: Final = TypeAdapter(tuple[OutputError, ...])
ENDPOINTS: Final = TypeAdapter(tuple[Endpoint, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkHead:
    """A task or job as its row tells it; a terminal head never changes.

    `home` is the host it is pinned to, None for work any host of the pool may take; `executor` is the worker that holds
    it, or held it last; `started_at` is when its first program was started, whatever attempts follow. `repeat_of` is the task
    or job it does again.
    """

    KIND: ClassVar[Kind]
    SPEC: ClassVar[type[TaskSpec | JobSpec]]

    id: str
    spec: TaskSpec | JobSpec
    status: TaskStatus
    session_key: str
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
    repeat_of: str | None = None

    @property
    def scope(self) -> Scope:
        """Whose work it is."""
        return self.spec.scope

    @property
    def terminal(self) -> bool:
        """Whether it is over."""
        return self.status in TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHead(WorkHead):
    """One task; `step` and `try_`, both from 0, are of tasks of jobs.

    `attempt` is 0 before the first, `ready_at` is of the latest; tails and totals of output are filled when it is over.
    """

    KIND = "task"
    SPEC = TaskSpec

    spec: TaskSpec
    mode: Mode
    attempt: int = 0
    restarts: int = 0
    job_id: str | None = None
    step: int | None = None
    try_: int | None = None
    ready_at: datetime | None = None
    exit_code: int | None = None
    signal: int | None = None
    stdout_tail: bytes = b""
    stderr_tail: bytes = b""
    stdout_total: int | None = None
    stderr_total: int | None = None
    artifacts: tuple[ArtifactRef, ...] = ()
    output_errors: tuple[OutputError, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHead:
    """One step of a job, as the task of its latest try tells it; there is none while none was submitted, or skipped."""

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
class JobHead(WorkHead):
    """One job and its steps."""

    KIND = "job"
    SPEC = JobSpec

    spec: JobSpec
    status: JobStatus
    steps: tuple[StepHead, ...] = ()

    @property
    def current_step_index(self) -> int:
        """Index of the latest step that began, also one that waits for its next try; -1 before the first."""
        return max((step.index for step in self.steps if step.begun), default=-1)


Head = TypeVar("Head", bound=WorkHead)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What follows from the state of a job: steps to start, as (index, try), tasks to cancel, how it ended if it did."""

    start: tuple[tuple[int, int], ...] = ()
    cancel: tuple[str, ...] = ()
    status: JobStatus | None = None
    error_code: str | None = None
    error_message: str | None = None


def step_task_id(job_id: str, index: int, number: int) -> str:
    """Return the id of try *number* of a step: derived, so that submitting it twice is submitting it once."""
    return "task_" + hashlib.sha256(f"{job_id}/{index}/{number}".encode()).hexdigest()[:32]


def step_spec(spec: JobSpec, index: int) -> TaskSpec:
    """Return what a step of a job is submitted as."""
    step = spec.steps[index]
    return TaskSpec(
        scope=spec.scope,
        session_id=spec.session_id,
        command=step.command,
        placement=spec.placement,
        retry_on_lost=step.retry_on_lost,
        traceparent=spec.traceparent,
    )


def needs_of(spec: JobSpec) -> tuple[tuple[int, ...], ...]:
    """Return, for each step, the indexes of those it needs: the one before it when no step of the job names any."""
    if not any(step.needs for step in spec.steps):
        return tuple((index - 1,) if index else () for index in range(len(spec.steps)))
    index_of = {step.name: index for index, step in enumerate(spec.steps)}
    return tuple(tuple(sorted({index_of[name] for name in step.needs})) for step in spec.steps)


def graph_problem(steps: Sequence[tuple[str, Sequence[str]]]) -> str | None:
    """Return what is wrong with steps, each a name and its needs: a name twice, a need that is no step, a ring."""
    if not steps:
        return "a job has at least one step"
    names = [name for name, _ in steps]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return f"steps have one name: {', '.join(twice)}"
    for name, needs in steps:
        unknown = [need for need in needs if need not in names]
        if unknown:
            return f"step {name} needs {', '.join(unknown)}, which is no step of this job"
    waiting = dict(steps)
    while waiting:
        free = [name for name, needs in waiting.items() if waiting.keys().isdisjoint(needs)]
        if not free:
            return f"steps need one another in a ring: {', '.join(sorted(waiting))}"
        for name in free:
            del waiting[name]
    return None


def steps_of(spec: JobSpec, tasks: Sequence[TaskHead], *, over: bool = False) -> tuple[StepHead, ...]:
    """Return the steps as the tasks of their latest tries tell them; once the job is *over*, none gets another."""
    latest = _latest(tasks)
    states = _states(spec, latest, over=over)
    return tuple(
        StepHead(
            index=index,
            name=step.name,
            status=states[index],
            tries=0 if index not in latest else (latest[index].try_ or 0) + 1,
            task=latest.get(index),
        )
        for index, step in enumerate(spec.steps)
    )


def decide(
    spec: JobSpec,
    tasks: Sequence[TaskHead],
    *,
    canceled: bool = False,
    overdue: bool = False,
    resting: Collection[str] = (),
) -> JobPlan:
    """Return what a job does next. A cancel comes before everything, the wall time before failures.

    After the failed tasks among *tasks* that are *resting*, the step's next try does not begin yet.
    """
    latest = _latest(tasks)
    states = _states(spec, latest)
    living = [task for task in tasks if not task.terminal]
    if canceled or overdue:
        in_time = all(state in TERMINAL and state != "canceled" for state in states)
        if in_time and not canceled:
            return _ended(spec, states)
        if living:
            return JobPlan(cancel=tuple(task.id for task in living if task.cancel_at is None))
        if canceled:
            return JobPlan(status="canceled", error_code="canceled")
        return JobPlan(status="failed", error_code="timeout", error_message=f"not done in {spec.max_wall_time_s:g} s")
    room = spec.max_concurrency - len(living)
    needs = needs_of(spec)
    start: list[tuple[int, int]] = []
    paused = False
    for index, step in enumerate(spec.steps):
        ready = states[index] == "queued" and all(_passed(spec, states, needed) for needed in needs[index])
        if room > len(start) and ready:
            task = latest.get(index)
            number = 0 if task is None else (task.try_ or 0) + 1
            if task is not None and task.id in resting:
                paused = True
            elif task is None or (task.status == "failed" and number <= step.retry):
                start.append((index, number))
    if start or living or paused:
        return JobPlan(start=tuple(start))
    return _ended(spec, states)


def _ended(spec: JobSpec, states: Sequence[StepStatus]) -> JobPlan:
    for step, state in zip(spec.steps, states, strict=True):
        if state in ("failed", "canceled") and not step.continue_on_error:
            message = f"step {step.name!r} did not succeed"
            return JobPlan(status="failed", error_code="step_failed", error_message=message)
    return JobPlan(status="succeeded")


def _latest(tasks: Sequence[TaskHead]) -> Mapping[int, TaskHead]:
    return {task.step: task for task in sorted(tasks, key=lambda task: task.try_ or 0) if task.step is not None}


def _passed(spec: JobSpec, states: Sequence[StepStatus], index: int) -> bool:
    """Whether a step lets those that need it begin."""
    passing = ("succeeded", "failed", "canceled") if spec.steps[index].continue_on_error else ("succeeded",)
    return states[index] in passing


def _states(spec: JobSpec, latest: Mapping[int, TaskHead], *, over: bool = False) -> list[StepStatus]:
    """Return the steps' states; a step is skipped once one it needs is over and does not let it begin."""
    states: list[StepStatus] = ["queued"] * len(spec.steps)
    for index, task in latest.items():
        retryable = task.status == "failed" and (task.try_ or 0) < spec.steps[index].retry and not over
        states[index] = "queued" if retryable else task.status
    needs = needs_of(spec)
    changed = True
    while changed:
        changed = False
        for index in range(len(spec.steps)):
            blocked = any(states[n] in TERMINAL and not _passed(spec, states, n) for n in needs[index])
            if states[index] == "queued" and index not in latest and (blocked or over):
                states[index] = "skipped"
                changed = True
    return states
