"""What to run, within which limits, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

from kdskills.errors import path_argument

MIB = 1024 * 1024

Status = Literal["ok", "nonzero", "timeout", "oom", "limit", "cancelled", "refused", "infra_error"]


class IsolationLevel(IntEnum):
    """How strong the wall is, weakest first."""

    NONE = 0
    RLIMIT = 1
    LANDLOCK = 2
    NAMESPACE = 3
    CONTAINER = 4
    KERNEL = 5
    VM = 6


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run; sizes in bytes, times in seconds. An engine that cannot enforce one refuses
    (`limit_not_enforceable`) unless the operator lists it as best effort.
    """

    wall_s: float = 30.0
    cpu_s: float | None = None  # None: as wall_s
    memory: int = 256 * MIB
    pids: int = 64
    nofile: int = 256
    fsize: int = 64 * MIB
    work_size: int = 64 * MIB
    tmp_size: int = 64 * MIB
    stdout: int = MIB
    stderr: int = MIB
    stdin: int = 8 * MIB
    arg_size: int = 128 * 1024
    output_files: int = 256
    output_size: int = 64 * MIB


MAX_WALL_S = 600.0
MAX_BACKGROUND_S = 10 * 366 * 86_400.0
"""Upper bound of background runs, ten years; tasks and services have shorter bounds of their own."""


@dataclass(frozen=True, slots=True)
class SkillMount:
    """A skill whose files the program sees read-only at `/skills/<full id>`, without its evaluations.

    Attributes:
        id: Its full id.
        root: Its folder.
        tree: Digest that the copy of its files is held to: `tree_digest(root, shown=True)`.
    """

    id: str
    root: Path
    tree: str

    def __post_init__(self) -> None:
        """Accept the folder as a path or as text. Raises TypeError for anything else."""
        object.__setattr__(self, "root", path_argument(self.root, "root"))


@dataclass(frozen=True, slots=True)
class EnvironmentMount:
    """Packages the program sees read-only at `/env/<digest>`: folders `python`, `bin` and `node_modules`, any of which may be
    missing. *digest* has 16 to 64 hexadecimal digits; *root* is an absolute folder of ours that all may read.
    """

    digest: str
    root: Path

    def __post_init__(self) -> None:
        """Accept the folder as a path or as text. Raises TypeError for anything else."""
        object.__setattr__(self, "root", path_argument(self.root, "root"))


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file copied into the workdir before the run: bytes, or a host file; programs may execute it when told so."""

    path: str
    content: bytes | Path
    executable: bool = False

    def __post_init__(self) -> None:
        """Accept a host file as a path or as text. Raises TypeError for what is neither bytes nor a path."""
        if not isinstance(self.content, bytes):
            object.__setattr__(self, "content", path_argument(self.content, "content"))


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """A skill's own script: `path` is relative to the skill's root and begins with `scripts/`."""

    skill: str
    path: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose run it is; labels of processes and containers, and what `reap` looks for."""

    tenant: str = "local"
    project: str = "local"
    agent: str = "local"
    conversation: str = ""


@dataclass(frozen=True, slots=True)
class LogFiles:
    """Files of the host that a run's output is appended to as it comes; `limit` bytes of each are kept."""

    stdout: Path
    stderr: Path
    limit: int = 64 * MIB

    def __post_init__(self) -> None:
        """Accept the files as paths or as text. Raises TypeError for anything else."""
        for name in ("stdout", "stderr"):
            object.__setattr__(self, name, path_argument(getattr(self, name), name))


@dataclass(frozen=True, slots=True)
class EgressBounds:
    """Bounds of what one run may do over the network."""

    connections: int = 16  # at one time
    size: int = 256 * MIB  # bytes of all connections, there and back
    seconds: float = 300.0  # one connection


@dataclass(frozen=True, slots=True)
class NetworkConnection:
    """A connection a program made or tried to make to a host.

    Attributes:
        host: Name or address the program named; empty when it named none that is one.
        port: Port the program named; 0 likewise.
        outcome: `ok`, or why it was refused or ended: `bad_request`, `not_granted`, `address_refused`, `name_unknown`,
            `unreachable`, `too_many`, `too_slow`, `bytes_exceeded`, `bad_answer`, `server_untrusted`, `tls_failed`, `broken`,
            `run_over`.
        address: Address it was made to, which was checked; empty when none was.
        sent: Bytes of the program.
        received: Bytes of the server.
        duration_s: Seconds it lasted.
        secret_headers: Names of the headers that were put in.
    """

    host: str
    port: int
    outcome: str
    address: str = ""
    sent: int = 0
    received: int = 0
    duration_s: float = 0.0
    secret_headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """One program to run behind the wall. Exactly one of `argv`, `script`, `code` is given.

    Attributes:
        argv: Program and arguments, by execve; no shell in between.
        script: A skill's script, started by `interpreter`.
        code: Python source: a file of its own, run by `kdskills_runtime.py_code_exec_entry`.
        interpreter: Argument list with `{path}` for `script`; None means python3.
        globals: JSON-able names set in generated code before it starts, `SKILLS_DESCRIPTOR` among them.
        stdin: Bytes on standard input, of `argv` and `script`.
        env: Variables applied inside, byte-exact.
        skills: Skills visible at `/skills/<full id>`.
        environment: Packages of this program alone.
        inputs: Files copied in before the run.
        outputs: Globs relative to the workdir, collected once the program is dead.
        workdir: Directory the program starts in, relative to `/work`, or absolute below `/skills`.
        network: `"none"`, or rules of the hosts it may reach, such as `pypi.org` or `*.example.net:443`.
        network_skills: Full ids of the skills it runs for, whose secrets the proxy puts into its requests.
        profile: Named set-up; `"unsafe-local"` is what the bare engine asks for.
        request_id: For logs and labels; made when empty.
        logs: Where output also goes, for runs that are followed while they last.
        terminal: Descriptor of a terminal that takes the place of the standard streams, of `argv`.
        background: A task's or service's run, which has more time and may bring the many files of a session's folder.
    """

    argv: tuple[str, ...] | None = None
    script: ScriptCall | None = None
    code: str | None = None
    interpreter: tuple[str, ...] | None = None
    globals: Mapping[str, Any] = field(default_factory=dict)
    stdin: bytes = b""
    env: Mapping[str, str] = field(default_factory=dict)
    skills: tuple[SkillMount, ...] = ()
    environment: EnvironmentMount | None = None
    inputs: tuple[InputFile, ...] = ()
    outputs: tuple[str, ...] = ()
    workdir: str = "."
    limits: Limits = Limits()
    network: Literal["none"] | tuple[str, ...] = "none"
    network_skills: tuple[str, ...] = ()
    profile: str | None = None
    request_id: str = ""
    owner: Owner = Owner()
    logs: LogFiles | None = None
    background: bool = False
    terminal: int | None = None

    @property
    def executable(self) -> tuple[str, ...]:
        """Paths of inputs that may be executed."""
        return tuple(item.path for item in self.inputs if item.executable)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A collected output file. `content` holds its bytes until the caller stores them."""

    path: str
    size: int
    sha256: str
    mode: int
    content: bytes = field(repr=False, default=b"")


@dataclass(frozen=True, slots=True)
class ArtifactError:
    """An output that was not collected, and why."""

    path: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ExecError:
    """What went wrong: in the program (`stage="program"`), or in setting it up. `exception` and `traceback` describe
    the program's own exception, with line numbers of its own file.
    """

    stage: str
    code: str
    message: str
    exception: str | None = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """One output stream: the tail that was kept, how many bytes came, and whether some were dropped."""

    data: bytes = b""
    total: int = 0
    truncated: bool = False

    @property
    def text(self) -> str:
        """The kept tail as text; bad UTF-8 becomes U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What came of a run. `exit_code` is never invented: None when the program gave none."""

    status: Status
    exit_code: int | None
    signal: int | None
    stdout: Stream
    stderr: Stream
    duration_s: float
    engine: str
    level: IsolationLevel
    limits_enforced: frozenset[str]
    artifacts: tuple[Artifact, ...] = ()
    artifact_errors: tuple[ArtifactError, ...] = ()
    error: ExecError | None = None
    connections: tuple[NetworkConnection, ...] = ()  # the first 256, in the order of their ends
    value: Any = None  # what generated code reported with `kdskills_runtime`'s report, JSON-able
