"""What comes of a turn: frozen values with a JSON form that reads back equal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kdskills.errors import BadRequest, Diagnostic, StrPath, path_argument

TurnStatus = Literal["final", "unverified", "partial", "budget", "stuck", "failed"]
TRANSCRIPT_SCHEMA = "kdskills.transcript/1"


class Form(BaseModel):
    """A frozen value that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TokenUsage(Form):
    """Tokens as the provider counted them."""

    input: int = 0
    output: int = 0


class CallRecord(Form):
    """One tool call and what came of it.

    Attributes:
        id: The call's id.
        tool: Dotted id of the tool, or the spelling asked for when there is none.
        arguments: The arguments as the model wrote them, secrets masked.
        ok: Whether the tool did what was asked.
        result: The text the model got, when ok.
        error: The code, when not.
        duration_ms: Time it took.
        artifacts: Files it left in the turn's folder.
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

    Attributes:
        index: 1, 2, 3…
        role: Who asked: the decision, a generator.
        duration_ms: Time of model and tools.
        text: What the model said.
        calls: Its tool calls, in order.
        usage: Tokens of the model call.
        retries: Tries before the one that answered.
        active_before: Names of the active skills when the model was asked.
        active_after: The same after the calls.
        prompt_digest: Digest of the top-level text.
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


class TurnResult(Form):
    """What came of a turn.

    Attributes:
        turn_id: Id of the turn.
        session_id: Its session.
        status: `final`; `unverified` (the answer still names files that are not there); `partial` (out of steps or calls), `budget` (out of tokens or time), `stuck`, `failed`.
        stop_reason: Why it ended: `answer`, a bound's name, or an error's code.
        text: The answer, citations as `[[S:1]]`.
        rendered: The answer with citations as links, unknown ones as `[?7]`.
        sources: Rows of the turn's pool, by sid.
        cited: The sids `text` cites that resolve, in order.
        citation_issues: Citations that do not resolve.
        skills_used: Skills that took part.
        files: Files the turn produced.
        steps: Model calls and their tool calls.
        usage: Tokens of all model calls.
        duration_ms: Time of the whole turn.
        model: The decision model, `provider:model`.
        replayed: Whether replies came from a recording.
        diagnostics: What was left out, cut or found odd.
    """

    turn_id: str
    session_id: str
    status: TurnStatus
    stop_reason: str
    text: str = ""
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


def transcript_rows(path: StrPath) -> Iterator[dict[str, Any] | None]:
    """Give the events of a transcript as they stand in its lines; a last line cut by a crash is given as None.

    Raises:
        BadRequest: The file is missing (`transcript_missing`) or no transcript (`transcript_invalid`).
    """
    try:
        with path_argument(path, "path").open(encoding="utf-8", newline="\n") as lines:
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
