"""Attempts: one run of one task, watched by a shim that outlives everybody.

`Attempts` starts and finds them, `Attempt` is what a folder says of one, `AttemptOrder` what it was told and `Verdict`
how it ended. The shim is `shim.py`; the runner, which knows engines, is `kdskills.app.worker.launcher`.
"""

from kdskills.execution.streams import LogPiece
from kdskills.jobs.attempts.attempt import Attempt, Attempts, Starter, WarmStarter
from kdskills.jobs.attempts.order import (
    AttemptFacts,
    AttemptOrder,
    AttemptState,
    LogStream,
    OrderInput,
    OutFile,
    OutputBounds,
    ProcessIdentity,
    Verdict,
    VerdictStatus,
)
from kdskills.jobs.attempts.sessions import SessionFolder

__all__ = [
    "Attempt",
    "AttemptFacts",
    "AttemptOrder",
    "AttemptState",
    "Attempts",
    "LogPiece",
    "LogStream",
    "OrderInput",
    "OutFile",
    "OutputBounds",
    "ProcessIdentity",
    "SessionFolder",
    "Starter",
    "Verdict",
    "VerdictStatus",
    "WarmStarter",
]
