"""What is submitted: tasks, jobs and their parts, as the tables keep them."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from kdskills.execution.request import Limits, SkillMount

Mode = Literal["batch", "service"]
SESSION_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")

MIB: Final = 1024 * 1024


class Value(BaseModel):
    """A frozen value that travels as JSON; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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
