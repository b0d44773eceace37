"""A transcript read back: the events of a turn, and what came of it if it ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kdskills.errors import BadRequest, Diagnostic
from kdskills.solver.events import EVENT_TYPES, Event, TurnFinished, TurnStarted
from kdskills.solver.result import TurnResult, transcript_rows


@dataclass(frozen=True)
class Transcript:
    """What a transcript tells.

    Attributes:
        started: The first event, or None when the turn broke off before it.
        events: All events in the order they were written.
        result: What came of the turn, or None when it did not end.
        diagnostics: What is odd about the file: lines cut, missing or of a newer version.
    """

    started: TurnStarted | None
    events: tuple[Event, ...]
    result: TurnResult | None
    diagnostics: tuple[Diagnostic, ...] = ()


def read_transcript(path: str | Path) -> Transcript:
    """Read a transcript, whole or broken off.

    Raises:
        BadRequest: The file is missing (`transcript_missing`) or no transcript (`transcript_invalid`).
    """
    kinds = {str(kind.model_fields["type"].default): kind for kind in EVENT_TYPES}
    events: list[Event] = []
    findings: list[Diagnostic] = []
    expected = 1
    for number, row in enumerate(transcript_rows(path), 2):
        if row is None:
            findings.append(
                _odd("transcript_cut", "the last line is cut: the turn broke off while it was written", path)
            )
            break
        kind = kinds.get(str(row.get("type")))
        if kind is None:
            message = f"line {number} holds an event of an unknown type, {row.get('type')!r}"
            findings.append(_odd("transcript_unknown_event", message, path, number))
            expected += 1
            continue
        event = _event(kind, row, path, number)
        if event.seq != expected:
            message = f"line {number} holds event {event.seq} where {expected} was due"
            findings.append(_odd("transcript_gap", message, path, number))
        expected = event.seq + 1
        events.append(event)
    started = next((event for event in events if isinstance(event, TurnStarted)), None)
    result = next((event.result for event in reversed(events) if isinstance(event, TurnFinished)), None)
    return Transcript(started, tuple(events), result, tuple(findings))


def _event(kind: type[Event], row: dict[str, Any], path: str | Path, number: int) -> Event:
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = "/".join(str(part) for part in first["loc"])
        message = f"line {number} of {path} is no {row['type']} event: {field}: {first['msg']}"
        raise BadRequest(message, code="transcript_invalid", path=str(path), line=number) from None


def _odd(code: str, message: str, path: str | Path, line: int | None = None) -> Diagnostic:
    return Diagnostic(code, "warning", message, path=str(path), line=line)
