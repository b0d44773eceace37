"""Messages, tool calls, requests and replies as frozen values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MessageRole = Literal["user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as offered to a model.

    Attributes:
        name: The spelling the model sees.
        description: What it does, for the model.
        input_schema: JSON Schema of the arguments, an object schema.
        tool_id: The dotted id kdskills knows it by, such as `skills.load`.
    """

    name: str
    description: str
    input_schema: Mapping[str, Any]
    tool_id: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a reply.

    Attributes:
        id: Pairs the call with its result message; unique within a turn.
        tool: Name as the model spelt it.
        arguments: The raw JSON text of the arguments, which may be malformed: the solver answers that.
    """

    id: str
    tool: str
    arguments: str

    @classmethod
    def of(cls, call_id: str, tool: str, arguments: Mapping[str, Any]) -> ToolCall:
        """Return a call with parsed arguments."""
        return cls(call_id, tool, json.dumps(arguments, ensure_ascii=False, sort_keys=False))


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the append-only history.

    Attributes:
        role: `user`, `assistant`, or `tool` for the result of one call.
        text: The text; for `tool` the JSON or text answer.
        calls: Tool calls, of assistant messages only.
        call_id: The call a `tool` message answers.
        tool: The tool that answered, as the model spelt it.
        ok: Whether the tool succeeded; of `tool` messages only.
        pin: `skill:<id>@<digest>` when the message carries a skill body a compactor must keep.
    """

    role: MessageRole
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    tool: str | None = None
    ok: bool = True
    pin: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens used, as the provider counts them."""

    input: int = 0
    output: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.input + other.input, self.output + other.output)

    @property
    def total(self) -> int:
        """Input and output together."""
        return self.input + self.output


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One model call.

    Attributes:
        role: Which part asks: `solver.react.decision`, `answer.generator.strong`, `solver.codegen`, or a bundle's own.
        instructions: Top-level (system) text.
        messages: The history, oldest first; the first is the user's.
        tools: Tools the model may call; empty means it must answer in text.
        active: Names of the active skills in load order, which cassettes compare.
        timeout_s: Seconds the provider may take.
        settings: Provider settings such as temperature.
        answer_schema: JSON Schema the text of the answer must follow, for providers that can hold a model to one.
    """

    role: str
    instructions: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    active: tuple[str, ...] = ()
    timeout_s: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    answer_schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelReply:
    """What the model answered.

    Attributes:
        text: Text of the reply, possibly empty.
        calls: Tool calls in the order given.
        usage: Tokens used by this call.
        model: Name of the model that answered.
        finish_reason: As the provider says (`stop`, `tool_call`, `length`, …), or None.
        response_id: The provider's id of the response, or None.
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    model: str = ""
    finish_reason: str | None = None
    response_id: str | None = None
