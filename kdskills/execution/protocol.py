"""The protocol an execution engine implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kdskills.execution.request import ExecRequest, ExecResult, IsolationLevel


@dataclass(frozen=True, slots=True)
class ProbeCheck:
    """One question the canary answered."""

    name: str
    ok: bool
    found: str


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Whether an engine works here, told by running a canary through its real argument builder.

    `cure` is one sentence for the operator when it does not.
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
        ...

    async def cancel(self) -> None:
        """End the whole tree: TERM, grace, KILL; `wait` then gives `cancelled`."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to the program."""
        ...

    def tail(self, limit: int = 8192) -> tuple[bytes, bytes]:
        """Return the last *limit* bytes of stdout and stderr so far."""
        ...


@runtime_checkable
class Reachable(Protocol):
    """A `Handle` whose program's network can be entered from this host, so that its ports can be reached."""

    def network_namespace(self) -> int | None:
        """Return the host pid of a process inside the run's network; None when the run is not there."""
        ...


@runtime_checkable
class Preparable(Protocol):
    """An engine that can do ahead of time what all its runs share, for processes that fork one runner per run.

    `prepare` starts no thread and opens nothing that two processes may not share.
    """

    def prepare(self) -> None:
        """Do that work now. Raises ExecRefused."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Runs programs behind a wall. Engines are shipped plugins; `kdskills.testing.executors` checks any of them."""

    name: str
    level: IsolationLevel

    async def probe(self) -> ProbeReport:
        """Run the canary. Cached by the engine; never raises for a missing engine."""
        ...

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run to the end.

        Raises:
            ExecRefused: Nothing was run.
            asyncio.CancelledError: The caller cancelled; the whole tree is gone by then.
        """
        ...

    async def start(self, request: ExecRequest) -> Handle:
        """Start and return at once. Raises as `run`."""
        ...

    async def reap(self) -> ReapReport:
        """End what dead owners left: process trees, cgroups, containers, workdirs."""
        ...
