"""Running a call once and always answering it.

`CallDispatcher` is made once per facade: it names the call, asks the journal whether to run, wait or replay, checks the
arguments, runs the handler in a bounded pool under its deadline, and commits the answer before anybody submits it.
"""

from kdskills.remote.dispatch.dispatcher import CallDispatcher
from kdskills.remote.dispatch.outcome import CallOutcome, NotRegistered
from kdskills.remote.dispatch.outcomes import OutcomesContext, outcomes_context
from kdskills.remote.dispatch.redaction import redact
from kdskills.remote.dispatch.spool import Spool
from kdskills.remote.dispatch.values import as_text

__all__ = [
    "CallDispatcher",
    "CallOutcome",
    "NotRegistered",
    "OutcomesContext",
    "Spool",
    "as_text",
    "outcomes_context",
    "redact",
]
