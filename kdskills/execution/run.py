"""What runs of every engine share: starting so that a cancelled caller leaves nothing behind, and how a run ended."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from kdskills.errors import RootChanged, RootMissing
from kdskills.execution.protocol import Executor
from kdskills.execution.request import ExecError, ExecRequest, ExecResult, IsolationLevel, Status, Stream

T = TypeVar("T")


async def in_thread(make: Callable[[], T], undo: Callable[[T], Awaitable[object]]) -> T:
    """Run the blocking *make* in a thread of its own and return its result.

    A thread cannot be stopped halfway: when the caller is cancelled, its result is undone as soon as it is there, and
    only then is the cancellation raised. Raises what *make* raises.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.shield(_undone(making, undo))
        raise


async def _undone(making: asyncio.Future[T], undo: Callable[[T], Awaitable[object]]) -> None:
    await asyncio.wait([making])
    if making.exception() is None:  # a failed *make* left nothing to undo
        await undo(making.result())


async def to_the_end(engine: Executor, request: ExecRequest) -> ExecResult:
    """Start *request* and wait for its end; the whole tree is gone when CancelledError is raised. Raises as `start`."""
    handle = await engine.start(request)
    try:
        return await handle.wait()
    except asyncio.CancelledError:
        await asyncio.shield(handle.cancel())
        raise


class FinishedRun:
    """A handle of a run that was over before anything started."""

    def __init__(self, result: ExecResult) -> None:
        self._result = result

    async def wait(self) -> ExecResult:
        """Return the result."""
        return self._result

    async def cancel(self) -> None:
        """Do nothing: the run is over."""

    def signal(self, number: int) -> None:
        """Do nothing: no program is running."""

    def tail(self, limit: int = 8192) -> tuple[bytes, bytes]:
        """Return two empty outputs: nothing was written."""
        return b"", b""


def skills_mismatch(error: RootChanged | RootMissing, engine: str, level: IsolationLevel) -> FinishedRun:
    """Return the run of a request whose skills are not the ones that were checked."""
    result = ExecResult(
        status="refused",
        exit_code=None,
        signal=None,
        stdout=Stream(),
        stderr=Stream(),
        duration_s=0.0,
        engine=engine,
        level=level,
        limits_enforced=frozenset(),
        error=ExecError("skills", "skills_mismatch", error.message),
    )
    return FinishedRun(result)


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """What an engine saw of a program's end.

    Attributes:
        reason: `exited`, or why we ended it: `timeout` or `cancelled`.
        code: Exit code of a program that exited.
        signal: Signal a program died by.
        duration_s: Wall time from start to end.
        trouble: Why the program could not be started.
    """

    reason: str
    code: int | None
    signal: int | None
    duration_s: float
    trouble: ExecError | None = None


def status_of(end: ProgramEnd) -> tuple[Status, int | None, int | None, ExecError | None]:
    """Return (status, exit code, signal, error) of an end, memory aside.

    Death by signal n has exit code 128 + n, as every shell says it. A program we ended, or that never started, has none.
    """
    if end.reason == "cancelled":
        return "cancelled", None, None, None
    if end.reason == "timeout":
        return "timeout", None, None, None
    if end.trouble is not None:
        return "infra_error", None, None, end.trouble
    if end.signal is None:
        return "ok" if end.code == 0 else "nonzero", end.code, None, None
    code = 128 + end.signal
    if end.signal in {signal.SIGXCPU, signal.SIGXFSZ}:
        kind = "cpu" if end.signal == signal.SIGXCPU else "fsize"
        return "limit", code, end.signal, ExecError("program", kind, "the program hit its limit")
    return "nonzero", code, end.signal, None
