"""What an attempt is told, and what it tells: the values in its folder's files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from kdskills.errors import BadRequest
from kdskills.execution.request import Status
from kdskills.jobs.model import MIB, Endpoint, OutputError, TaskSpec, Value

VerdictStatus = Status | Literal["startup_timeout", "lost"]
AttemptState = Literal["starting", "running", "ended", "lost"]
LogStream = Literal["stdout", "stderr"]

BACKSTOP_S: Final = 300.0
"""How long after its own timeout an attempt is ended by its shim, should the engine have failed to do it."""
_TASK_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


class OrderInput(Value):
    """An input that lies on this host, such as an artifact: an absolute path that nobody else writes to."""

    path: str
    file: Path


class OutputBounds(Value):
    """How much of what a program leaves is kept; sizes in bytes."""

    files: int = 256
    each: int = 20 * MIB
    total: int = 50 * MIB


class AttemptOrder(Value):
    """Everything an attempt needs; written once into its folder.

    Attributes:
        task_id: The task.
        attempt: Number of the attempt, from 1.
        spec: What was submitted.
        session_dir: Folder that keeps the session's files between commands; None when nothing is kept.
        inputs: The spec's inputs that are artifacts, found on this host; bytes given inline stay in the spec.
        log_limit: Bytes of each stream kept on disk.
        outputs: Bounds of declared outputs.
        session_files: Most files a session keeps.
        host_ports: Host ports a service would like for its exposed ports, as an earlier attempt had them.
        lease_file: For work another host may take over: where this host's worker writes until when it is ours; None for ever.
    """

    task_id: str
    attempt: int = Field(ge=1)
    spec: TaskSpec
    session_dir: Path | None = None
    inputs: tuple[OrderInput, ...] = ()
    log_limit: int = Field(64 * MIB, ge=MIB)
    outputs: OutputBounds = OutputBounds()
    session_files: int = Field(4000, ge=1, le=4000)
    host_ports: dict[int, int] = Field(default_factory=dict)
    lease_file: Path | None = None

    @property
    def backstop_s(self) -> float | None:
        """Seconds after which the shim ends it; None for services."""
        timeout = self.spec.command.timeout_s
        return None if timeout is None else timeout + BACKSTOP_S

    def to_json(self) -> dict[str, object]:
        """Return what `order.json` holds: the order, and what the shim reads of it."""
        lease = None if self.lease_file is None else str(self.lease_file)
        return {"backstop_s": self.backstop_s, "lease_file": lease, "order": self.model_dump(mode="json")}


class ProcessIdentity(Value):
    """A process told from every other that ever had its number."""

    pid: int = 0
    started: str = ""
    boot: str = ""


class AttemptFacts(Value):
    """What a running attempt says of itself; times are seconds since the epoch.

    Attributes:
        started_at: When the program was started.
        ready_at: When a service was found ready; for batch work the same as `started_at`.
        engine: Engine it runs on.
        endpoints: Where its exposed ports are reached.
        forwarder: The process that carries them.
        runner: The process that runs the engine.
    """

    started_at: float
    engine: str
    ready_at: float | None = None
    endpoints: tuple[Endpoint, ...] = ()
    forwarder: ProcessIdentity | None = None
    runner: ProcessIdentity = ProcessIdentity()


class OutFile(Value):
    """A declared output: `file` is its name below the attempt's folder, where its bytes are."""

    path: str
    size: int
    sha256: str
    mode: int
    file: str


class Verdict(Value):
    """How an attempt ended; final once written.

    Attributes:
        status: The engine's status, or `startup_timeout`, or `lost` when it died without telling.
        exit_code: The program's own; None when it gave none.
        error_code: One word for machines when it did not end by itself with code 0 or another.
        enforced: Limits the engine held.
    """

    status: VerdictStatus
    exit_code: int | None = None
    signal: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    started_at: float | None = None
    finished_at: float = 0.0
    duration_ms: int = 0
    stdout_total: int = 0
    stderr_total: int = 0
    artifacts: tuple[OutFile, ...] = ()
    output_errors: tuple[OutputError, ...] = ()
    enforced: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        """Whether the program ended by itself with exit code 0."""
        return self.status == "ok"


def require_task_id(task_id: str) -> str:
    """Return *task_id* when it is a safe folder name. Raises BadRequest."""
    if not _TASK_ID.fullmatch(task_id):
        raise BadRequest(f"{task_id[:80]!r} is no task id", errors=["task_id: not letters, digits, '-' and '_'"])
    return task_id


def sha256(data: bytes) -> str:
    """Return the digest of *data* in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
