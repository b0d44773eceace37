"""Operations about turns that are kept: the list, one turn in full, two turns side by side."""

from __future__ import annotations

import base64
import difflib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from pydantic import Field, StringConstraints

from kdskills.app.operations.models import Output, PageInput, PageOutput, ProjectInput, decode_cursor, encode_cursor
from kdskills.app.operations.turns import ShowTurnOutput, turn_facts
from kdskills.app.turns import TurnRow, TurnState
from kdskills.errors import FileRefused, NotFound
from kdskills.solver.events import (
    AgentEvent,
    DiagnosticRaised,
    Event,
    ModelReplied,
    ModelRequested,
    PromptBuilt,
    SkillLoaded,
    SkillRefused,
    TokenUsage,
    Transcript,
    TurnFinished,
    TurnResult,
)

if TYPE_CHECKING:
    from kdskills.app.identity import Identity
    from kdskills.app.operations.table import Context
    from kdskills.app.turns import TurnArchive

MAX_DIFF: Final = 200_000
MAX_DIFF_LINES: Final = 4_000
"""Characters and lines of texts that are compared line by line; comparing takes the square of them."""

E = TypeVar("E", bound=Event)

TurnId = Annotated[str, StringConstraints(min_length=1, max_length=128), Field(description="Id of a turn.")]


class TurnsInput(PageInput, ProjectInput):
    """Which of the project's turns, the newest first."""

    status: TurnState | None = Field(None, description="In this state only.")


class TurnsOutput(PageOutput):
    """Turns, the newest first."""

    turns: tuple[TurnRow, ...]


class TurnInput(ProjectInput):
    """Which turn."""

    turn_id: TurnId


class TurnFileInput(TurnInput):
    """Which piece of which file."""

    path: str = Field(min_length=1, max_length=4096, description="Path of the file, as the turn's result lists it.")
    offset: int = Field(0, ge=0, description="Byte to begin at.")
    limit: int = Field(256 * 1024, ge=1, le=1024 * 1024, description="Bytes at most.")


class TurnFileOut(Output):
    """A piece of a file of `size` bytes, in base64; `next_offset` is null at the end."""

    turn_id: str
    path: str
    size: int
    media_type: str
    offset: int
    next_offset: int | None = None
    data_base64: str


class TurnPairInput(TurnInput):
    """Which two turns."""

    second_id: TurnId = Field(description="Id of the turn to compare it with.")


class TurnStepOut(Output):
    """A model call of a turn: what was sent, what it took, and which skills were in play.

    Attributes:
        role: Who asked: the consumer that decides, or a generator.
        prompt: The top-level text as it was sent; empty where the transcript does not hold it.
        digest: Of that text.
        prompt_tokens: An estimate for text, tools and history together.
        asked: The last user message, where it was not the request.
        considered: Names of the skills in the catalog, of `total`.
        active: Skills whose instructions the prompt had.
        loaded: Full ids of skills that were loaded in this step.
        tools: What tools were offered.
        usage: Tokens as the model's provider counted them.
    """

    index: int
    role: str
    model: str = ""
    prompt: str = ""
    digest: str = ""
    prompt_tokens: int = 0
    asked: str = ""
    considered: tuple[str, ...] = ()
    total: int = 0
    active: tuple[str, ...] = ()
    loaded: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    usage: TokenUsage = TokenUsage()
    duration_ms: int | None = None


class TurnOutput(ShowTurnOutput):
    """A turn that was kept: as `turns.show` shows one, its row, and each of its model calls."""

    row: TurnRow
    steps: tuple[TurnStepOut, ...] = ()


class TurnDifference(Output):
    """Something that is not alike in two turns: a fact with both values, or texts with what differs line by line.

    `step` is the index of the step it belongs to, 0 for the turn. Texts too large to compare have no `diff`.
    """

    name: str
    step: int = 0
    first: str = ""
    second: str = ""
    diff: str = ""


class TurnPairOutput(Output):
    """Two turns and what is not alike in them."""

    first: TurnRow
    second: TurnRow
    differences: tuple[TurnDifference, ...]


def readable_row(turns: TurnArchive, arguments: TurnInput, context: Context, turn_id: str | None = None) -> TurnRow:
    """Return the row of a turn that the caller may see. Raises NotFound."""
    turn_id = arguments.turn_id if turn_id is None else turn_id
    row = turns.row(arguments.project_of(context), turn_id)
    if not _may_see(row, context.identity):
        raise NotFound(f"there is no turn {turn_id[:64]!r}", turn_id=turn_id[:64])
    return row


def _may_see(row: TurnRow, identity: Identity) -> bool:
    """Whether a caller is told of a turn: its own agent's, and all of the project where it sees everything."""
    return identity.account or (row.tenant == identity.tenant and (identity.sees_all or row.agent == identity.agent))


def list_turns(turns: TurnArchive, arguments: TurnsInput, context: Context) -> TurnsOutput:
    """List the caller's turns; administrators see those of every agent."""
    before = None if arguments.cursor is None else str(decode_cursor(arguments.cursor, str)[0])
    rows: Iterator[TurnRow] = turns.rows(arguments.project_of(context), before)
    mine = (row for row in rows if _may_see(row, context.identity) and arguments.status in {None, row.status})
    page = list(islice(mine, arguments.limit + 1))  # one row more tells whether there is a next page
    following = encode_cursor(page[arguments.limit - 1].turn_id) if len(page) > arguments.limit else None
    return TurnsOutput(turns=tuple(page[: arguments.limit]), next_cursor=following)


def get_turn(turns: TurnArchive, arguments: TurnInput, context: Context) -> TurnOutput:
    """Show a turn that was kept, with the prompt of each step."""
    row, read = _read(turns, arguments, context)
    facts = turn_facts(f"{row.turn_id}.jsonl", read) | {"turn_id": row.turn_id}
    if not context.identity.sees_all:
        facts["diagnostics"] = ()
    return TurnOutput.of(row=row, steps=steps_of(read), **facts)


def _read(
    turns: TurnArchive, arguments: TurnInput, context: Context, turn_id: str | None = None
) -> tuple[TurnRow, Transcript]:
    row = readable_row(turns, arguments, context, turn_id)
    read = turns.read(arguments.project_of(context), row.turn_id)
    events = tuple(events_for(context.identity, read.events))
    result = None if read.result is None else told_result(context.identity, read.result)
    return row, replace(read, events=events, result=result)


def events_for(identity: Identity, events: Iterable[E]) -> Iterator[E]:
    """Give events as a caller may read them.

    What the gate keeps from a caller elsewhere does not exist for it: reasons of refusals and findings are for those who
    see everything. Where files lie is for callers on this machine.
    """
    for event in events:
        if isinstance(event, TurnFinished):
            yield event.model_copy(update={"result": told_result(identity, event.result)})
        elif identity.sees_all:
            yield event
        elif isinstance(event, SkillRefused):
            yield event.model_copy(update={"code": "skill_not_found", "reason": ""})
        elif isinstance(event, AgentEvent):
            inner = event.opened()
            for inner_event in events_for(identity, () if inner is None else (inner,)):
                yield event.model_copy(update={"event": inner_event.model_dump(mode="json")})
        elif not isinstance(event, DiagnosticRaised):
            yield event


def told_result(identity: Identity, result: TurnResult) -> TurnResult:
    """Return a result as a caller may read it; as `events_for`."""
    if not identity.local:
        files = tuple(file.model_copy(update={"location": ""}) for file in result.files)
        result = result.model_copy(update={"files": files})
    return result if identity.sees_all else result.model_copy(update={"diagnostics": ()})


def steps_of(read: Transcript) -> tuple[TurnStepOut, ...]:
    """Return the model calls of a turn, in order."""
    texts = {event.digest: event.text for event in read.events if isinstance(event, PromptBuilt) and event.text}
    steps: dict[int, dict[str, Any]] = {}
    for event in read.events:
        facts = steps.setdefault(event.step, {"index": event.step, "role": "", "loaded": ()}) if event.step else {}
        if isinstance(event, PromptBuilt):
            facts |= {name: getattr(event, name) for name in ("role", "digest", "asked", "total", "active")}
            facts |= {
                "considered": event.available,
                "prompt_tokens": event.tokens,
                "prompt": texts.get(event.digest, ""),
            }
        elif isinstance(event, ModelRequested):
            facts |= {"tools": event.tools, "model": event.model}
        elif isinstance(event, ModelReplied):
            facts |= {"usage": event.usage, "model": event.model}
        elif isinstance(event, SkillLoaded) and facts:
            facts["loaded"] = (*facts["loaded"], event.skill)
    for step in () if read.result is None else read.result.steps:
        if step.index in steps:
            steps[step.index]["duration_ms"] = step.duration_ms
    return tuple(TurnStepOut(**facts) for _, facts in sorted(steps.items()))


def read_turn_file(turns: TurnArchive, arguments: TurnFileInput, context: Context) -> TurnFileOut:
    """Give a piece of a file that a turn made; files that its result does not list do not exist. Raises NotFound."""
    row, read = _read(turns, arguments, context)
    listed = () if read.result is None else read.result.files
    file = next((file for file in listed if file.path == arguments.path), None)
    missing = NotFound("the turn made no such file, or it is gone", code="path_not_found", path=arguments.path[:200])
    if file is None:
        raise missing
    try:
        with turns.opened_file(arguments.project_of(context), row.turn_id, file.path) as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(arguments.offset)
            piece = stream.read(arguments.limit)
    except FileRefused:
        raise missing from None
    after = arguments.offset + len(piece)
    return TurnFileOut(
        turn_id=row.turn_id,
        path=file.path,
        size=size,
        media_type=file.media_type,
        offset=arguments.offset,
        next_offset=after if after < size and piece else None,
        data_base64=base64.b64encode(piece).decode("ascii"),
    )


def compare_turns(turns: TurnArchive, arguments: TurnPairInput, context: Context) -> TurnPairOutput:
    """Tell what is not alike in two turns: request, model, skills, tokens, the prompt of each step, the answer."""
    pair = [_read(turns, arguments, context, turn_id) for turn_id in (arguments.turn_id, arguments.second_id)]
    (first, first_read), (second, second_read) = pair
    return TurnPairOutput(
        first=first, second=second, differences=tuple(_differences(first, first_read, second, second_read))
    )


def _differences(
    first: TurnRow, first_read: Transcript, second: TurnRow, second_read: Transcript
) -> Iterator[TurnDifference]:
    names = ("status", "stop_reason", "bundle", "consumer", "model", "steps", "files", "skills")
    pairs: list[tuple[str, int, object, object]] = [
        (name, 0, getattr(first, name), getattr(second, name)) for name in names
    ]
    pairs += [
        (f"{name}_tokens", 0, getattr(first.usage, name), getattr(second.usage, name)) for name in ("input", "output")
    ]
    requests = [read.started.request if read.started else "" for read in (first_read, second_read)]
    answers = [read.result.text if read.result else "" for read in (first_read, second_read)]
    texts = [("request", 0, requests[0], requests[1]), ("answer", 0, answers[0], answers[1])]
    first_steps, right = ({step.index: step for step in steps_of(read)} for read in (first_read, second_read))
    for index in sorted(first_steps.keys() | right.keys()):
        blank = TurnStepOut(index=index, role="")
        a, b = first_steps.get(index, blank), right.get(index, blank)
        pairs += [
            (name, index, getattr(a, name), getattr(b, name)) for name in ("role", "considered", "active", "loaded")
        ]
        texts.append(("prompt", index, a.prompt, b.prompt))
    for name, step, value, instead in pairs:
        if value != instead:
            yield TurnDifference(name=name, step=step, first=_words(value), second=_words(instead))
    for name, step, text, second_text in texts:
        if text != second_text:
            yield TurnDifference(name=name, step=step, diff=text_diff(text, second_text))


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def text_diff(first: str, second: str) -> str:
    """Return what differs in two texts, line by line; nothing for texts that are too large to compare."""
    old, new = first.splitlines(), second.splitlines()
    if max(len(first), len(second)) > MAX_DIFF or max(len(old), len(new)) > MAX_DIFF_LINES:
        return ""
    return "\n".join(difflib.unified_diff(old, new, "first", "second", lineterm=""))
