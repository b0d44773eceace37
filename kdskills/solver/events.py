"""What a turn tells while it runs: one frozen model per type, and a transcript of them read back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from kdskills.errors import BadRequest, Diagnostic
from kdskills.solver.result import Form, TokenUsage, TurnResult, transcript_rows


class Event(Form):
    """Something that happened in a turn.

    Attributes:
        seq: 1, 2, 3… without gaps.
        ts: UTC time, ISO-8601 with `Z`.
        type: The kind of event.
        turn_id: The turn.
        session_id: Its session.
        step: Index of the step it belongs to; 0 before the first.
        merged: How many further events of the same kind, directly before this one, were merged into it for a slow
            reader. Only `model.delta` and `tool.output` are ever merged.
    """

    seq: int
    ts: str
    type: str
    turn_id: str
    session_id: str
    step: int = 0
    merged: int = 0


class TurnStarted(Event):
    """The turn is active: its request, consumer, model, engine and the files handed in."""

    type: Literal["turn.started"] = "turn.started"
    request: str
    consumer: str
    model: str
    replayed: bool = False
    engine: str | None = None
    files: tuple[str, ...] = ()


class TurnFinished(Event):
    """The last event of every turn."""

    type: Literal["turn.finished"] = "turn.finished"
    result: TurnResult


class PromptBuilt(Event):
    """What the next model call sends: the digest of its top-level text, the skills on offer and those active.

    Attributes:
        tokens: Estimate of all that is sent: text, tools and history.
        text: The text itself, the first time it is used in the turn; later events with the same digest leave it out.
        asked: The last user message, where it is not the turn's request.
    """

    type: Literal["prompt.built"] = "prompt.built"
    role: str
    digest: str
    tokens: int
    available: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    text: str = ""
    asked: str = ""


class CatalogTruncated(Event):
    """The catalog did not fit its budget in full; `level` says how far it was cut."""

    type: Literal["catalog.truncated"] = "catalog.truncated"
    level: int


class ModelRequested(Event):
    """A model is asked."""

    type: Literal["model.requested"] = "model.requested"
    role: str
    model: str
    messages: int
    tools: tuple[str, ...] = ()


class ModelDelta(Event):
    """A piece of a reply's text."""

    type: Literal["model.delta"] = "model.delta"
    role: str
    text: str


class ModelRetry(Event):
    """A failure that may pass: the next try follows after `delay_s`."""

    type: Literal["model.retry"] = "model.retry"
    role: str
    attempt: int
    code: str
    message: str
    delay_s: float


class ModelReplied(Event):
    """A model answered."""

    type: Literal["model.replied"] = "model.replied"
    role: str
    model: str
    text: str
    calls: tuple[str, ...] = ()
    usage: TokenUsage = TokenUsage()
    finish_reason: str | None = None


class ToolCalled(Event):
    """A tool call is taken up."""

    type: Literal["tool.called"] = "tool.called"
    call_id: str
    tool: str
    arguments: str


class ToolOutput(Event):
    """Output a tool gave, such as a script's stdout."""

    type: Literal["tool.output"] = "tool.output"
    call_id: str
    tool: str
    stream: Literal["stdout", "stderr"]
    text: str


class ToolFinished(Event):
    """A tool call has its answer."""

    type: Literal["tool.finished"] = "tool.finished"
    call_id: str
    tool: str
    ok: bool
    error: str | None = None
    text: str = ""
    duration_ms: int = 0
    artifacts: tuple[str, ...] = ()


class SkillLoaded(Event):
    """A skill is active now; `by` says who loaded it (`model`, `code`, `import`)."""

    type: Literal["skill.loaded"] = "skill.loaded"
    skill: str
    name: str
    digest: str
    by: str


class SkillUnloaded(Event):
    """A skill is no longer active."""

    type: Literal["skill.unloaded"] = "skill.unloaded"
    skill: str


class SkillStale(Event):
    """An active skill's file has changed since it was loaded."""

    type: Literal["skill.stale"] = "skill.stale"
    skill: str


class SkillPruned(Event):
    """The gate no longer grants an active skill."""

    type: Literal["skill.pruned"] = "skill.pruned"
    skill: str


class SkillRefused(Event):
    """The gate refused a skill; this is for people, the model reads `skill_not_found`."""

    type: Literal["skill.refused"] = "skill.refused"
    ref: str
    code: str
    reason: str


class SourcesMerged(Event):
    """Sources of a skill joined the turn's pool: the sids added and merged, and citations that were dropped."""

    type: Literal["sources.merged"] = "sources.merged"
    skill: str
    added: tuple[int, ...] = ()
    merged_sids: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


class ApprovalRequested(Event):
    """A person is asked."""

    type: Literal["approval.requested"] = "approval.requested"
    skill: str | None
    path: str | None


class ApprovalDecided(Event):
    """A person, or the memory of an answer, decided."""

    type: Literal["approval.decided"] = "approval.decided"
    skill: str | None
    path: str | None
    allowed: bool
    reason: str = ""


class ScriptStarted(Event):
    """A program goes behind the wall."""

    type: Literal["script.started"] = "script.started"
    skill: str | None
    path: str | None
    engine: str


class ScriptFinished(Event):
    """What came of it, and which limits really held."""

    type: Literal["script.finished"] = "script.finished"
    skill: str | None
    path: str | None
    engine: str
    level: str
    status: str
    exit_code: int | None = None
    duration_ms: int = 0
    limits: tuple[str, ...] = ()


class FileWritten(Event):
    """A file of the turn was written."""

    type: Literal["file.written"] = "file.written"
    path: str
    size: int
    tool: str


class AnswerChecked(Event):
    """An answer that reports files was held against the turn's files; with `missing` ones it is sent back once."""

    type: Literal["answer_checked"] = "answer_checked"
    claimed: tuple[str, ...]
    missing: tuple[str, ...] = ()
    sent_back: bool = False


class HistoryElided(Event):
    """Old results were shortened to fit the model's window."""

    type: Literal["history.elided"] = "history.elided"
    messages: int


class DiagnosticRaised(Event):
    """Something was left out, cut or found odd."""

    type: Literal["diagnostic"] = "diagnostic"
    diagnostic: Diagnostic


EVENT_TYPES: tuple[type[Event], ...] = (
    TurnStarted,
    TurnFinished,
    PromptBuilt,
    CatalogTruncated,
    ModelRequested,
    ModelDelta,
    ModelRetry,
    ModelReplied,
    ToolCalled,
    ToolOutput,
    ToolFinished,
    SkillLoaded,
    SkillUnloaded,
    SkillStale,
    SkillPruned,
    SkillRefused,
    SourcesMerged,
    ApprovalRequested,
    ApprovalDecided,
    ScriptStarted,
    ScriptFinished,
    FileWritten,
    AnswerChecked,
    HistoryElided,
    DiagnosticRaised,
)
"""Every type of event, in the order of the reference page."""


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
