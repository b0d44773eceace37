"""What a call came to, and the words of every refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kdskills.remote.ports import CallState, JournalRow, JsonObject, StoredAnswer

AWAITABLE: Final = "got an awaitable; use AsyncCodexClient (or AsyncCodexManager)"
OUTCOME_UNKNOWN: Final = "outcome unknown: the worker stopped before recording a result"
NOT_RECORDED: Final = "outcome unknown: the result could not be recorded"
NO_JOURNAL: Final = "not run: the journal of calls does not answer"


class NotRegistered(LookupError):
    """Raised by a handler of ours whose skill is not there any more: the call is answered as one for an unknown skill."""


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What the model is to be answered, and what the program may know beside it.

    Attributes:
        response_payload: `{"contentItems": [...], "success": bool}`, fit for the wire; the caller's own copy.
        success: The payload's own word.
        handled: Whether a handler's own answer it is.
        result: What the handler returned; None for a replay.
        error: The text again, when it tells of a failure.
        key: The call's key in the journal; None when nothing was written down.
        state: Where the journal's row stands; None when nothing was written down.
        replayed: The answer was read, not made: the handler did not run for this delivery.
        late: A result came after the model had been answered otherwise.
        duplicate: The answer was accepted on this very connection before: submit nothing.
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
    """Return the outcome that says *answer*."""
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
    """Return the payload of one text."""
    return {"contentItems": [{"type": "inputText", "text": text}], "success": success}


def refusal(text: str) -> StoredAnswer:
    """Return the answer that tells the model of a failure."""
    return StoredAnswer(text_payload(text, success=False), handled=False, error=text)


def failed(tool: str, reason: str) -> StoredAnswer:
    """Return `remote skill <tool> failed: <what>`."""
    return refusal(f"remote skill {tool} failed: {reason}")


def unregistered(tool: str) -> StoredAnswer:
    """Return the answer for a skill nobody has."""
    return refusal(f"no remote skill registered for {tool}")


def overdue(tool: str, deadline_seconds: float) -> StoredAnswer:
    """Return the answer given when a deadline passed."""
    return failed(tool, f"no result within {deadline_seconds:g} s; it may still finish")
