"""The outcome of a call, and the texts of all refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kdskills.remote.ports import CallState, JournalRow, JsonObject, StoredAnswer

AWAITABLE: Final = "got an awaitable; use AsyncCodexClient (or AsyncCodexManager)"
OUTCOME_UNKNOWN: Final = "outcome unknown: the worker stopped before recording a result"
NOT_RECORDED: Final = "outcome unknown: the result could not be recorded"
NO_JOURNAL: Final = "not run: the journal of calls does not answer"


class NotRegistered(LookupError):
    """Raised by the handler of a published skill that was revoked: the model reads the answer for an unknown skill."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The answer for the model, and further facts for the program.

    Attributes:
        response_payload: `{"contentItems": [...], "success": bool}`, fit for the wire; the caller's own copy.
        success: `success` of the payload.
        handled: Whether the answer comes from a handler.
        result: What the handler returned; None for a replay.
        error: The text of the answer if it reports a failure.
        key: The call's key in the journal; None when nothing was recorded.
        state: The state of the journal's row; None when nothing was recorded.
        replayed: The answer was read from the journal; the handler did not run for this delivery.
        late: A result came after the model had got another answer.
        duplicate: The answer was accepted on this connection before, so nothing must be submitted.
        reraise: A `KeyboardInterrupt` to raise again once the answer is submitted.
    """

    response_payload: JsonObject
    success: bool
    handled: bool
    result: Any = None
    error: str | None = None
    key: str | None = None
    state: CallState | None = None
    replayed: bool = False
    late: bool = False
    duplicate: bool = False
    reraise: BaseException | None = None


def outcome_of(
    answer: StoredAnswer,
    *,
    row: JournalRow | None = None,
    key: str | None = None,
    result: Any = None,
    replayed: bool = False,
    duplicate: bool = False,
    reraise: BaseException | None = None,
) -> CallOutcome:
    """Return the outcome with this answer."""
    payload = {**answer.payload, "contentItems": [dict(item) for item in answer.payload["contentItems"]]}
    return CallOutcome(
        payload,
        payload["success"],
        answer.handled,
        result,
        answer.error,
        key,
        None if row is None else row.state,
        replayed,
        row is not None and row.late is not None,
        duplicate,
        reraise,
    )


def text_payload(text: str, *, success: bool) -> JsonObject:
    """Return a payload with one text."""
    return {"contentItems": [{"type": "inputText", "text": text}], "success": success}


def refusal(text: str) -> StoredAnswer:
    """Return the answer that reports a failure to the model."""
    return StoredAnswer(text_payload(text, success=False), handled=False, error=text)


def failed(tool: str, reason: str) -> StoredAnswer:
    """Return `remote skill <tool> failed: <reason>`."""
    return refusal(f"remote skill {tool} failed: {reason}")


def unregistered(tool: str) -> StoredAnswer:
    """Return the answer for a skill that is not registered."""
    return refusal(f"no remote skill registered for {tool}")


def overdue(tool: str, deadline_seconds: float) -> StoredAnswer:
    """Return the answer for a missed deadline."""
    return failed(tool, f"no result within {deadline_seconds:g} s; it may still finish")
