"""Runs each call once: `dispatcher` claims, runs and records calls, `payloads` makes answers of values."""

from kdskills.exports import tell_homes
from kdskills.remote.dispatch.dispatcher import CallOutcome, RemoteDispatcher
from kdskills.remote.dispatch.payloads import NotRegistered, Spool, as_text, outcomes_text, redact

__all__ = ["CallOutcome", "NotRegistered", "RemoteDispatcher", "Spool", "as_text", "outcomes_text", "redact"]

tell_homes(__name__)
