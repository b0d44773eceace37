"""The outcome of a call, the texts of all refusals, and what a model is told of earlier calls whose answers it did not get."""

from __future__ import annotations

from collections.abc import Sequence
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


CONTEXT_NAME: Final = "kdskills_outcomes"
MAX_CALLS: Final = 20
MAX_WORDS: Final = 600

INTRODUCTION: Final = (
    "Outcomes of earlier tool calls. The history may show these calls as aborted or without a result; "
    "this is what became of them. Do not repeat a call only because its result is missing there."
)


@dataclass(frozen=True, slots=True)
class OutcomesContext:
    """The text for the next turn and the keys of its calls; call `CallJournal.tell` with them once it was sent."""

    text: str
    keys: tuple[str, ...]


def outcomes_context(rows: Sequence[JournalRow]) -> OutcomesContext | None:
    """Return the rows of `CallJournal.outcomes` as text for the model; None without rows.

    One line a call: `recorded` with the answer, `late` with the answer that came after the deadline, `unknown`. The
    newest calls are told; of the others only their number.
    """
    if not rows:
        return None
    listed_rows = list(rows)[-MAX_CALLS:]
    lines = [INTRODUCTION, *(_line(row) for row in listed_rows)]
    if len(listed_rows) < len(rows):
        lines.insert(1, f"({len(rows) - len(listed_rows)} earlier calls are not listed.)")
    return OutcomesContext("\n".join(lines), tuple(row.key for row in rows))


def _line(row: JournalRow) -> str:
    name = f"{row.namespace}.{row.tool}" if row.namespace else row.tool
    call = f"{name} (call {row.call_id or '-'}, turn {row.turn_id or '-'})"
    if row.late is not None:
        return f"- {call}: late: {_words(row.late)}"
    if row.answer is None or row.state == "unknown":
        return f"- {call}: unknown: {OUTCOME_UNKNOWN}"
    return f"- {call}: recorded: {_words(row.answer)}"


def _words(answer: StoredAnswer) -> str:
    items: list[JsonObject] = answer.payload["contentItems"]
    text = " ".join(" ".join(str(item.get("text") or f"[{item.get('type')}]") for item in items).split())
    return text if len(text) <= MAX_WORDS else f"{text[:MAX_WORDS]}…"
