"""What a turn tells while it runs and what comes of it: frozen values whose JSON reads back equal, and transcripts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Generic, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import TypeVar

from kdskills.errors import BadRequest, Diagnostic, StrPath, path_argument
from kdskills.models import Usage

OutputT = TypeVar("OutputT", default=Any)
TurnStatus = Literal["final", "unverified", "partial", "budget", "stuck", "failed"]
TRANSCRIPT_SCHEMA = "kdskills.transcript/1"


class Form(BaseModel):
    """A frozen value that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TokenUsage(Form):
    """Tokens as the provider counted them; `cache_read` and `cache_write` are part of `input`, `reasoning` of `output`.

    `estimated` tells that a provider did not count, and that some are estimates. `cost` is in US dollars, None where the
    price of a call is not known.
    """

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0
    estimated: bool = False
    cost: float | None = None

    @classmethod
    def of(cls, usage: Usage, *, estimated: bool = False, cost: float | None = None) -> TokenUsage:
        """Return what a provider reported, or what is estimated."""
        return cls(**asdict(usage), estimated=estimated, cost=cost)


class CallRecord(Form):
    """One tool call and what came of it.

    `tool` is its dotted id, or the spelling asked for when there is none; in `arguments` secrets are masked. `result`
    is the text the model got when ok, `error` the code when not, `artifacts` are files it left in the turn's folder.
    """

    id: str
    tool: str
    arguments: str
    ok: bool
    result: str | None = None
    error: str | None = None
    duration_ms: int = 0
    artifacts: tuple[str, ...] = ()


class Step(Form):
    """One model call with the tool calls it led to.

    `role` is who asked, `duration_ms` of model and tools, `retries` tries before the one that answered. `active_before`
    and `active_after` name the skills when the model was asked and after the calls; `prompt_digest` is of its text.
    """

    index: int
    role: str
    duration_ms: int
    text: str = ""
    calls: tuple[CallRecord, ...] = ()
    usage: TokenUsage = TokenUsage()
    retries: int = 0
    active_before: tuple[str, ...] = ()
    active_after: tuple[str, ...] = ()
    prompt_digest: str = ""


class CitationIssue(Form):
    """A citation that does not resolve: its number, where it stands in `text`, and what is wrong."""

    sid: int
    span: tuple[int, int]
    kind: Literal["unknown"] = "unknown"


class SkillUse(Form):
    """A skill that took part: how it came in (`code`, `model`, `import`, `generator`), and the digest of its text."""

    id: str
    name: str
    digest: str
    how: str


class TurnFile(Form):
    """A file the turn produced; `location` is where it lies on this host."""

    path: str
    size: int
    digest: str
    media_type: str
    location: str


class AgentRun(Form):
    """The turn of an agent that a call handed over to: the call, its tool, whose turn it was, and what came of it.

    `usage` holds its tokens and those of agents it handed over to itself, `steps` counts its own model calls.
    """

    call_id: str
    tool: str
    consumer: str
    turn_id: str
    status: TurnStatus
    stop_reason: str
    steps: int
    usage: TokenUsage = TokenUsage()
    duration_ms: int = 0


class ContextCut(Form):
    """Something that a model no longer reads as it was said.

    `kind` is what was done: `receipts` (results of earlier turns are one line each), `summary` (a text stands for the turns),
    `results` (old results, for one model call). `turns` are the turns that are read shortened, of `results` the one that is
    going on; tokens are estimates for all messages.
    """

    kind: Literal["receipts", "summary", "results"]
    turns: tuple[str, ...]
    tokens_before: int
    tokens_after: int


class TurnResult(Form, Generic[OutputT]):
    """What came of a turn.

    Attributes:
        status: `final`; `unverified` (the answer still names files that are not there, or successes that failed); `partial` (out of steps or calls), `budget` (out of tokens or time), `stuck`, `failed`.
        stop_reason: Why it ended: `answer`, a bound's name, or an error's code.
        text: The answer, citations as `[[S:1]]`; of a typed answer its JSON.
        output: The answer as a value of the type asked for, or None: no type was asked for, or no answer of it came. In events,
            transcripts and `from_json` it is the JSON of that.
        rendered: The answer with citations as links, unknown ones as `[?7]`.
        sources: Rows of the conversation's pool, by sid.
        cited: The sids `text` cites that resolve, in order.
        citation_issues: Citations that do not resolve.
        model: The decision model, `provider:model`.
        replayed: Whether replies came from a recording.
        usage: Tokens of all model calls, those of agents handed over to among them.
        context: What of the conversation the model read shortened.
        agents: Turns of agents that were handed over to, in the order of the calls.
        diagnostics: What was left out, cut or found odd.
    """

    turn_id: str
    session_id: str
    status: TurnStatus
    stop_reason: str
    text: str = ""
    output: OutputT | None = None
    rendered: str = ""
    sources: tuple[dict[str, Any], ...] = ()
    cited: tuple[int, ...] = ()
    citation_issues: tuple[CitationIssue, ...] = ()
    skills_used: tuple[SkillUse, ...] = ()
    files: tuple[TurnFile, ...] = ()
    steps: tuple[Step, ...] = ()
    usage: TokenUsage = TokenUsage()
    duration_ms: int = 0
    model: str = ""
    replayed: bool = False
    context: tuple[ContextCut, ...] = ()
    agents: tuple[AgentRun, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the turn came to an answer of its own accord."""
        return self.status == "final"

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TurnResult:
        """Return the result written by `to_json`."""
        return cls.model_validate(value)

    @classmethod
    def from_transcript(cls, path: StrPath) -> TurnResult:
        """Return the result a transcript ends with; it equals the one the turn gave.

        Raises:
            BadRequest: The file is missing (`transcript_missing`) or no transcript (`transcript_invalid`), or the turn
                did not end (`transcript_incomplete`).
        """
        last_events = [row for row in transcript_rows(path) if row is not None and row.get("type") == "turn.finished"]
        if not last_events:
            raise BadRequest(f"the turn of {path} did not end", code="transcript_incomplete", path=str(path))
        try:
            return cls.from_json(last_events[-1]["result"])
        except (KeyError, ValueError):
            raise _no_transcript(path) from None


def transcript_rows(path: StrPath, opened: IO[str] | None = None) -> Iterator[dict[str, Any] | None]:
    """Give the events of a transcript as they stand in its lines; a last line cut by a crash is given as None.

    With *opened* they are read from there, and *path* is what errors call it. Raises BadRequest: the file is missing (`transcript_missing`) or no transcript (`transcript_invalid`).
    """
    try:
        file = path_argument(path, "path")
        with file.open(encoding="utf-8", newline="\n") if opened is None else nullcontext(opened) as lines:
            if _line(lines.readline(), path).get("schema") != TRANSCRIPT_SCHEMA:
                raise _no_transcript(path)
            for text in lines:
                yield _line(text, path) if text.endswith("\n") else None
    except OSError as error:
        message = f"cannot read the transcript {path}: {error.strerror}"
        raise BadRequest(message, code="transcript_missing", path=str(path)) from error
    except UnicodeDecodeError:
        raise _no_transcript(path) from None


def _line(text: str, path: StrPath) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _no_transcript(path)
    return value


def _no_transcript(path: StrPath) -> BadRequest:
    return BadRequest(f"{path} is no {TRANSCRIPT_SCHEMA} file", code="transcript_invalid", path=str(path))


class Event(Form):
    """Something that happened in a turn: `seq` is 1, 2, 3… without gaps, `ts` UTC time in ISO-8601 with `Z`.

    `step` is the index of the step it belongs to, 0 before the first. `merged` says how many further events of the same
    kind, directly before this one, were merged into it for a slow reader: only `model.delta` and `tool.output` are.
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

    `available` are the names in the catalog, of `total` skills. `tokens` estimates text, tools and history together. `text` is
    given the first time it is used in the turn; `asked` is the last user message where it is not the turn's request.
    """

    type: Literal["prompt.built"] = "prompt.built"
    role: str
    digest: str
    tokens: int
    available: tuple[str, ...] = ()
    total: int = 0
    active: tuple[str, ...] = ()
    text: str = ""
    asked: str = ""


class CatalogTruncated(Event):
    """Not all skills fit the catalog's budget: it lists `shown` of `total`, and `gone` that it listed before no longer."""

    type: Literal["catalog.truncated"] = "catalog.truncated"
    level: int
    shown: int = 0
    total: int = 0
    gone: int = 0


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
    """Sources joined the turn's pool: the sids added and merged, and citations that were dropped.

    `skill` is the skill they are of, or the tool of the agent that found them.
    """

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


class ScriptConnected(Event):
    """A program made a connection to a host, or tried to; `outcome` is `ok` or why it was refused or ended."""

    type: Literal["script.connection"] = "script.connection"
    skill: str | None
    path: str | None
    host: str
    port: int
    outcome: str
    address: str = ""
    sent: int = 0
    received: int = 0
    duration_s: float = 0.0
    secret_headers: tuple[str, ...] = ()


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


class AgentEvent(Event):
    """Something that happened in the turn of an agent, which the call `call_id` of the tool `tool` handed over to.

    `event` is the agent's own event as JSON, with its own `seq`, `step` and `turn_id`. Of an agent further down it is an
    `agent.event` again.
    """

    type: Literal["agent.event"] = "agent.event"
    call_id: str
    tool: str
    consumer: str
    event: dict[str, Any]

    def opened(self) -> Event | None:
        """Return the agent's event, or None when it is of no known type or form."""
        return event_of(self.event)


class AnswerChecked(Event):
    """An answer that reports files or successes was held against the turn's: `missing` files are not there, what `failed`
    names did not succeed. With either it is sent back once.
    """

    type: Literal["answer_checked"] = "answer_checked"
    claimed: tuple[str, ...]
    missing: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    sent_back: bool = False


class HistoryElided(Event):
    """Old results were shortened to fit the model's window."""

    type: Literal["history.elided"] = "history.elided"
    messages: int


class HistoryCut(Event):
    """Earlier turns are read shortened from now on, because they no longer fit their share of the model's window."""

    type: Literal["history.cut"] = "history.cut"
    cut: ContextCut


class DiagnosticRaised(Event):
    """Something was left out, cut or found odd."""

    type: Literal["diagnostic"] = "diagnostic"
    diagnostic: Diagnostic


EVENT_TYPES: tuple[type[Event], ...] = tuple(Event.__subclasses__())
"""Every type of event, in the order of the reference page."""
_KINDS: Mapping[str, type[Event]] = {str(kind.model_fields["type"].default): kind for kind in EVENT_TYPES}


def event_of(row: Mapping[str, Any]) -> Event | None:
    """Return the event of its JSON, or None when it is of no known type or form."""
    kind = _KINDS.get(str(row.get("type")))
    try:
        return None if kind is None else kind.model_validate(row)
    except ValidationError:
        return None


@dataclass(frozen=True)
class Transcript:
    """What a transcript tells: `started` is None when the turn broke off before it, `result` when it did not end.

    `diagnostics` say what is odd about the file: lines cut, missing or of a newer version.
    """

    started: TurnStarted | None
    events: tuple[Event, ...]
    result: TurnResult | None
    diagnostics: tuple[Diagnostic, ...] = ()


def read_transcript(path: str | Path, opened: IO[str] | None = None) -> Transcript:
    """Read a transcript, whole or broken off; arguments as `transcript_rows`; raises as `transcript_rows`, and for a row that is no event."""
    events: list[Event] = []
    findings: list[Diagnostic] = []
    expected = 1
    for number, row in enumerate(transcript_rows(path, opened), 2):
        if row is None:
            message = "the last line is cut: the turn broke off while it was written"
            findings.append(_odd("transcript_cut", message, path))
            break
        kind = _KINDS.get(str(row.get("type")))
        if kind is None:
            message = f"line {number} holds an event of an unknown type, {row.get('type')!r}"
            findings.append(_odd("transcript_unknown_event", message, path, number))
            expected += 1
            continue
        try:
            event = kind.model_validate(row)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = "/".join(str(part) for part in first["loc"])
            message = f"line {number} of {path} is no {row['type']} event: {field}: {first['msg']}"
            raise BadRequest(message, code="transcript_invalid", path=str(path), line=number) from None
        if event.seq != expected:
            message = f"line {number} holds event {event.seq} where {expected} was due"
            findings.append(_odd("transcript_gap", message, path, number))
        expected = event.seq + 1
        events.append(event)
    started = next((event for event in events if isinstance(event, TurnStarted)), None)
    result = next((event.result for event in reversed(events) if isinstance(event, TurnFinished)), None)
    return Transcript(started, tuple(events), result, tuple(findings))


def _odd(code: str, message: str, path: str | Path, line: int | None = None) -> Diagnostic:
    return Diagnostic(code, "warning", message, path=str(path), line=line)
