"""Runs that were over before anything started."""

from __future__ import annotations

from kdskills.errors import RootChanged, RootMissing
from kdskills.execution.request import ExecError, ExecResult, IsolationLevel, Stream


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
