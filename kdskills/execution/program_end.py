"""How a program ended, for engines that see it themselves."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from kdskills.execution.request import ExecError, Status


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
