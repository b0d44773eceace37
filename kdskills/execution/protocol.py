"""The protocol an execution engine implements, and what the operator decides about engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict, runtime_checkable

from pydantic import SecretStr

from kdskills.errors import path_argument
from kdskills.execution.request import EgressBounds, ExecRequest, ExecResult, IsolationLevel


@dataclass(frozen=True, slots=True)
class ProbeCheck:
    """One question the canary answered."""

    name: str
    ok: bool
    found: str


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Whether an engine works here, told by running a canary through its real argument builder. `cure` is one sentence
    for the operator when it does not.
    """

    engine: str
    level: IsolationLevel
    ok: bool
    checks: tuple[ProbeCheck, ...] = ()
    limits: frozenset[str] = frozenset()
    cure: str | None = None


@dataclass(frozen=True, slots=True)
class ReapReport:
    """What `reap` found and ended: one line per leftover."""

    ended: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


@runtime_checkable
class Handle(Protocol):
    """A started run."""

    async def wait(self) -> ExecResult:
        """Wait for the end and collect the outputs."""

    async def cancel(self) -> None:
        """End the whole tree: TERM, grace, KILL; `wait` then gives `cancelled`."""

    def signal(self, number: int) -> None:
        """Send a signal to the program."""

    def tail(self, limit: int = 8192) -> tuple[bytes, bytes]:
        """Return the last *limit* bytes of stdout and stderr so far."""


@runtime_checkable
class Reachable(Protocol):
    """A `Handle` whose program's network can be entered from this host, so that its ports can be reached."""

    def network_namespace(self) -> int | None:
        """Return the host pid of a process inside the run's network; None when the run is not there."""


@runtime_checkable
class Preparable(Protocol):
    """An engine that can do ahead of time what all its runs share, for processes that fork one runner per run.
    `prepare` starts no thread and opens nothing that two processes may not share.
    """

    def prepare(self) -> None:
        """Do that work now. Raises ExecRefused."""


@runtime_checkable
class Executor(Protocol):
    """Runs programs behind a wall. Engines are shipped plugins; `kdskills.testing.executors` checks any of them."""

    name: str
    level: IsolationLevel

    async def probe(self) -> ProbeReport:
        """Run the canary. Cached by the engine; never raises for a missing engine."""

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run to the end. The whole tree is gone when CancelledError is raised. Raises ExecRefused: nothing was run."""

    async def start(self, request: ExecRequest) -> Handle:
        """Start and return at once. Raises as `run`."""

    async def reap(self) -> ReapReport:
        """End what dead owners left: process trees, cgroups, containers, workdirs."""


@dataclass(frozen=True, slots=True)
class E2bOptions:
    """How to reach E2B, and how long its sandboxes live; addresses are the SDK's own when None."""

    api_key: SecretStr | None = None  # None: the variable `E2B_API_KEY` is read
    template: str = "base"
    api_url: str | None = None
    sandbox_url: str | None = None
    idle_ttl_s: float = 300.0  # a sandbox nobody used for so long is ended
    hard_ttl_s: float = 3600.0  # no sandbox is used for longer than this after it was made


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """Which cluster pods run in, and from what; see `docs/how-to/run-on-kubernetes.md`."""

    image: str | None = None  # by digest: `registry/name@sha256:…`
    namespace: str = "kdskills-runs"
    config: Path | None = None  # None: the cluster we are in, else the user's kubeconfig
    context: str | None = None
    runtime_class: str | None = None
    start_s: float = 120.0  # what scheduling, pulling and starting may take


SecretHeaders = Mapping[str, Mapping[str, Mapping[str, SecretStr]]]
"""Values by header, by origin, by namespace or full id of the skills whose programs they are for."""


class ImageParts(TypedDict):
    """What the prepared tree has beyond its base: installed distributions, and kept lists by name."""

    packages: tuple[str, ...]
    profiles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """The operator's settings for engines.

    Attributes:
        sandbox_uid: Dedicated uid programs run as when kdskills itself runs as root; never 0.
        best_effort: Names of limits that may go unenforced where an engine cannot hold them.
        allow_unisolated: The operator's half of the double opt-in of the bare engine.
        image_packages: Further installed distributions to copy into the prepared tree, with what they require.
        image_profiles: Names of the kept lists of programs and distributions that the tree has beside.
        cache_dir: Folder of prepared trees; None for the default of `kdskills.execution.dirs`.
        state_dir: Folder of run records; None for the default.
        pool: Sandboxes the bubblewrap engine keeps ready ahead of time, each for one run; 0 makes each when asked.
        egress: Bounds of what a run that is granted hosts may do over the network.
        network_secrets: What the proxy puts into requests to granted hosts.
        e2b: The own settings of that engine.
        kubernetes: The own settings of that engine.
    """

    sandbox_uid: int = 10001
    best_effort: frozenset[str] = frozenset()
    allow_unisolated: bool = False
    image_packages: tuple[str, ...] = ()
    image_profiles: tuple[str, ...] = ()
    cache_dir: Path | None = None
    state_dir: Path | None = None
    pool: int = 0
    egress: EgressBounds = field(default_factory=EgressBounds)
    network_secrets: SecretHeaders = field(default_factory=dict)
    e2b: E2bOptions = E2bOptions()
    kubernetes: KubernetesOptions = KubernetesOptions()

    def __post_init__(self) -> None:
        """Accept folders as paths or as text. Raises TypeError for anything else."""
        for name in ("cache_dir", "state_dir"):
            if (folder := getattr(self, name)) is not None:
                object.__setattr__(self, name, path_argument(folder, name))

    @property
    def image(self) -> ImageParts:
        """What the prepared tree is asked to have."""
        return {"packages": self.image_packages, "profiles": self.image_profiles}


ExecutorFactory = Callable[[ExecutionOptions], Executor]
