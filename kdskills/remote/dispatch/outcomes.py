"""The text that tells a model about earlier calls whose answers it did not get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kdskills.remote.dispatch.outcome import OUTCOME_UNKNOWN
from kdskills.remote.ports import JournalRow, JsonObject, StoredAnswer

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
