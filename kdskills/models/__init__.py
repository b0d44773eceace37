"""What is said to a model and what it answers, independent of any provider.

Messages, tool calls, tool specs, requests and replies are frozen values; `ModelProvider` is the protocol that shipped
and foreign providers implement; a model string such as `openai:gpt-5@http://localhost:8000/v1`, `replay` or
`json:ollama:qwen3` names one. `cassette` is the form of recorded replies, `redact` keeps secrets out of what is written
down. Nothing here talks to a network.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from kdskills.errors import BadRequest
from kdskills.models.redact import Redactor

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


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of text of a reply that is still being written."""

    text: str


@runtime_checkable
class ModelProvider(Protocol):
    """Answers model requests.

    Failures are raised as `ModelFailed`: with `retryable` for timeouts, lost connections and the statuses 408, 409,
    429 and 5xx (`retry_after` in seconds when the server says so), with code `context_full` when the request does not
    fit the model's window. Retrying is the solver's business, never the provider's.

    Attributes:
        name: `provider:model`, as shown in results and spans.
        context_window: Tokens the model takes, or None when unknown.
        replayed: Whether replies come from a recording.
    """

    name: str
    context_window: int | None
    replayed: bool

    async def reply(self, request: ModelRequest) -> ModelReply:
        """Answer *request* as a whole.

        Raises:
            ModelFailed: The provider could not answer.
            ReplayError: A recording does not fit the request.
        """

    def stream(self, request: ModelRequest) -> AsyncIterator[TextDelta | ModelReply]:
        """Answer *request* in pieces; the last item is the whole `ModelReply`. Raises as `reply`."""

    async def aclose(self) -> None:
        """Release connections; for recordings, check for leftovers (`replay_unused`)."""


ModelFactory = Callable[[str], ModelProvider]


class ModelFactories(Protocol):
    """What names are looked up in: the register of `kdskills_register_models`, or a plain dict."""

    def __getitem__(self, name: str) -> ModelFactory:
        """Return the factory of a prefix; an unknown one raises `UnknownName`."""


@dataclass(frozen=True, slots=True)
class ModelAddress:
    """The part of a model string after its prefix: a model's name and, after `@`, the URL it is served from."""

    model: str
    base_url: str | None = None


def split_name(name: str) -> tuple[str, str]:
    """Return prefix and rest of a model string: `openai:gpt-5` gives `("openai", "gpt-5")`.

    Raises:
        BadRequest: The string has no prefix.
    """
    prefix, _, target = name.strip().partition(":")
    if not prefix:
        raise BadRequest(f"{name!r} is no model: write provider:model, such as openai:gpt-5", model=name)
    return prefix, target


def parse_address(target: str, *, base_url: str | None = None) -> ModelAddress:
    """Return model and base URL of the part after the prefix.

    Only an `@` followed by `http://` or `https://` begins a URL: model names may hold an `@` of their own.

    Raises:
        BadRequest: No model is named.
    """
    model, url = target, base_url
    for scheme in ("@http://", "@https://"):
        position = target.find(scheme)
        if position >= 0:
            model, url = target[:position], target[position + 1 :]
            break
    if not model.strip():
        raise BadRequest("the model string names a provider but no model", model=target)
    return ModelAddress(model.strip(), url)


def open_model(factories: ModelFactories, name: str) -> ModelProvider:
    """Return the provider a model string names.

    Raises:
        BadRequest: The string is malformed.
        UnknownName: No plugin registered its prefix.
    """
    prefix, target = split_name(name)
    return factories[prefix](target)


__all__ = [
    "Message",
    "ModelAddress",
    "ModelFactory",
    "ModelProvider",
    "ModelReply",
    "ModelRequest",
    "Redactor",
    "TextDelta",
    "ToolCall",
    "ToolSpec",
    "Usage",
    "open_model",
    "parse_address",
    "split_name",
]
