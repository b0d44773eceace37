"""Recorded replies: the form of a cassette, and whether a request fits what was recorded.

Pure but for `read_cassette` and `write_cassette`. The replaying and the recording provider are plugins
(`kdskills.builtin.models`); both speak this form.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kdskills.errors import ReplayError
from kdskills.models import Message, ModelReply, ModelRequest, OutputMode, ToolCall, Usage

SCHEMA = "kdskills.cassette/1"
Match = Literal["exact", "shape", "order"]

MAX_DEPTH: Final = 100
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_TURN_FOLDER = "/kdskills-turn-"
_TURN = re.compile(rf"{_TURN_FOLDER}[\w-]+")
_PATH = re.compile(r"(?:/[^\s\"'/]+)+")

_VOLATILE = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"\b\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(?:\.\d+)?(?:Z|[+-]\d{2}:\d{2})"), "<time>"),
    (re.compile(r"(\"duration(?:_ms|_s)?\":\s*)[\d.]+"), r"\1<time>"),
)


class _Dumper(yaml.SafeDumper):
    """Writes texts so that every character comes back: YAML folds U+0085 and its like unless they are escaped."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = '"' if any(c in "\x85\u2028\u2029\ufeff\r" for c in data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class RecordedCall(_Form):
    """A tool call of a recorded reply. `arguments` is a mapping, or the raw text a model really wrote."""

    tool: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)
    id: str | None = None


class RecordedUsage(_Form):
    """Tokens as the provider counted them."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0


class RecordedReply(_Form):
    """What the model answered."""

    text: str = ""
    calls: tuple[RecordedCall, ...] = ()
    usage: RecordedUsage = RecordedUsage()
    model: str | None = None
    finish_reason: str | None = None
    response_id: str | None = None

    def to_reply(self, number: int, model: str) -> ModelReply:
        """Return the reply; calls without an id are numbered after the reply's place *number* on the cassette."""
        calls = tuple(
            ToolCall(
                call.id or f"call_{number}_{index}",
                call.tool,
                call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, ensure_ascii=False),
            )
            for index, call in enumerate(self.calls, 1)
        )
        usage = Usage(**dict(self.usage))
        return ModelReply(self.text, calls, usage, self.model or model, self.finish_reason, self.response_id)


class When(_Form):
    """What a request must look like; a field left out is not compared.

    A result is written `skills.load`, or `skills.load failed`; `[skills.load, true]` and `{tool, ok}` are read, too.
    """

    user: str | None = None
    results: tuple[str, ...] | None = None
    active: tuple[str, ...] | None = None
    digest: str | None = None

    @field_validator(
        "results", mode="before", json_schema_input_type=list[str | list[str | bool] | dict[str, str | bool]] | None
    )
    @classmethod
    def _read_results(cls, value: Any) -> Any:
        results = [*value] if isinstance(value, list) else value
        for number, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, dict) and "tool" in item:
                item = [item["tool"], item.get("ok", True)]
            if isinstance(item, list) and len(item) == 2:
                results[number] = f"{item[0]}{'' if item[1] else ' failed'}"
        return results


class CassetteEntry(_Form):
    """One reply and the request it answers; `lane` is that of the request."""

    role: str
    lane: str = ""
    when: When = When()
    reply: RecordedReply


class Cassette(BaseModel):
    """Replies in the order they are used; `request`, `files` and `expect` describe the demo they belong to.

    Attributes:
        match: How strictly requests are compared: `exact`, `shape` or `order`.
        replies: The entries.
        request: What the user asks, for `kdskills demo`.
        files: Files handed in with the request, relative to the cassette.
        output_mode: How the recorded model says it is held to the type of an answer.
        expect: What the demo's outcome should hold, such as `skills`; checked by `kdskills demo`. `extras` names the
            optional part of kdskills that a file takes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_: Literal["kdskills.cassette/1"] = Field(alias="schema")
    match: Match = "shape"
    request: str = ""
    files: tuple[str, ...] = ()
    output_mode: OutputMode = "tool"
    expect: dict[str, Any] = Field(default_factory=dict)
    replies: tuple[CassetteEntry, ...] = ()


def parse_cassette(text: str, *, name: str = "cassette") -> Cassette:
    """Return the cassette written in *text*.

    Raises ReplayError (`cassette_invalid`) when it is none; the message names what is wrong where.
    """
    try:
        depth = 0
        for event in yaml.parse(
            text, _LOADER
        ):  # loading recurses, and libyaml's loader ends the process where that is deep
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                message = f"{name} is no {SCHEMA} file: it is nested deeper than {MAX_DEPTH}"
                line = getattr(event.start_mark, "line", 0) + 1
                raise ReplayError(message, code="cassette_invalid", path=name, line=line)
        return Cassette.model_validate(yaml.load(text, _LOADER))  # noqa: S506 - both are safe loaders
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = None if mark is None else mark.line + 1
        raise ReplayError(f"{name} is not YAML: {error}", code="cassette_invalid", path=name, line=line) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field_path = "/".join(str(part) for part in first["loc"]) or "top"
        message = f"{name} is no {SCHEMA} file: {field_path}: {first['msg']}"
        raise ReplayError(message, code="cassette_invalid", path=name, place=field_path) from None
    except ValueError as error:  # a date that is none
        raise ReplayError(f"{name} is not YAML: {error}", code="cassette_invalid", path=name) from None


def read_cassette(path: Path) -> Cassette:
    """Read a cassette file. Raises `ReplayError` when it is missing or malformed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read the recording {path}: {error}"
        raise ReplayError(message, code="cassette_missing", path=str(path)) from error
    return parse_cassette(text, name=str(path))


def write_cassette(path: Path, cassette: Cassette) -> None:
    """Write a cassette file in one step: readers see the old or the new one."""
    form = cassette.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    ordered = {"schema": SCHEMA, "match": cassette.match} | form
    text = yaml.dump(ordered, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:  # raised again: nothing half-written stays
        Path(temporary).unlink(missing_ok=True)
        raise


def describe(request: ModelRequest, *, exact: bool = False) -> When:
    """Return what a recording keeps of *request*; with *exact* its digest, too."""
    tool_ids = {tool.name: tool.tool_id for tool in request.tools}
    answers = [(tool_ids.get(m.tool or "", m.tool or ""), m.ok) for m in request.messages if m.role == "tool"]
    return When(
        user=next((m.text for m in reversed(request.messages) if m.role == "user"), ""),
        results=tuple(tool if ok else f"{tool} failed" for tool, ok in answers),
        active=request.active,
        digest=request_digest(request) if exact else None,
    )


def request_digest(request: ModelRequest) -> str:
    """Return a digest over instructions and messages, with ids, times and workspace paths replaced."""
    ids: dict[str, str] = {}

    def stable(call_id: str | None) -> str | None:
        return None if call_id is None else ids.setdefault(call_id, f"call-{len(ids) + 1}")

    def row(m: Message) -> list[Any]:
        calls = [[stable(c.id), c.tool, stable_text(c.arguments)] for c in m.calls]
        images = [hashlib.sha256(image.data).hexdigest() for image in m.images]
        return [m.role, stable_text(m.text), calls, stable(m.call_id), m.tool, m.ok, *images]

    rows = [row(m) for m in request.messages]
    text = json.dumps([stable_text(request.instructions), rows], ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def stable_text(text: str) -> str:
    """Return *text* with ids, times, durations and the paths of turn folders replaced."""
    if _TURN_FOLDER in text:  # path by path: one pattern for all of it takes time that grows with the square
        text = _PATH.sub(_without_turn_folder, text)
    for pattern, instead in _VOLATILE:
        text = pattern.sub(instead, text)
    return text


def _without_turn_folder(path: re.Match[str]) -> str:
    folders = list(_TURN.finditer(path[0]))
    return "<turn>" + path[0][folders[-1].end() :] if folders else path[0]


def check_fit(
    entry: CassetteEntry, request: ModelRequest, match: Match, index: int, *, mask: Callable[[str], str] = str
) -> None:
    """Compare a request with the recorded one, as strictly as *match* says; *index* the entry's place on the cassette.

    *mask* is what the recording did to texts that hold secrets. Raises ReplayError: `replay_diverged`, with `index`,
    `field`, `expected` and `got`.
    """
    if match == "order":
        return
    described = describe(request, exact=match == "exact")
    described = described.model_copy(update={"user": mask(described.user or "")})
    fields = ("user", "results", "active", "digest") if match == "exact" else ("user", "results", "active")
    for name in fields:
        expected, actual = getattr(entry.when, name), getattr(described, name)
        if name == "results" and expected is not None:
            expected = tuple(safe_spelling(item) for item in expected)
            actual = tuple(safe_spelling(item) for item in actual)
        if expected is not None and expected != actual:
            raise _diverged(index, entry.role, name, expected, actual)
    offered = {safe_spelling(tool.name) for tool in request.tools} | {safe_spelling(t.tool_id) for t in request.tools}
    for call in entry.reply.calls:
        if safe_spelling(call.tool) not in offered:
            raise _diverged(index, entry.role, "tools", call.tool, tuple(sorted(offered)))


def safe_spelling(tool: str) -> str:
    """Return a tool's name in its safe spelling, by which both spellings compare equal."""
    return tool.replace(".", "_")


def _diverged(index: int, role: str, field: str, expected: object, actual: object) -> ReplayError:
    message = f"reply {index} ({role}) was recorded for another request: {field} was {expected!r}, is now {actual!r}"
    return ReplayError(message, code="replay_diverged", index=index, field=field, expected=expected, got=actual)
