"""Runs each call once and always answers it.

`RemoteDispatcher` exists once per facade: it identifies the call, asks the journal whether to run, wait or replay, checks
the arguments, runs the handler in a bounded pool under its deadline, and commits the answer before it is submitted.
"""

from kdskills.remote.dispatch.dispatcher import RemoteDispatcher
from kdskills.remote.dispatch.payloads import (
    CallOutcome,
    NotRegistered,
    OutcomesContext,
    Spool,
    as_text,
    outcomes_context,
    redact,
)

__all__ = [
    "CallOutcome",
    "NotRegistered",
    "OutcomesContext",
    "RemoteDispatcher",
    "Spool",
    "as_text",
    "outcomes_context",
    "redact",
]
