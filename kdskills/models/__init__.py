"""What is said to a model and what it answers, independent of any provider.

Messages, tool calls, tool specs, requests and replies are frozen values; `ModelProvider` is the protocol that shipped
and foreign providers implement; a model string such as `openai:gpt-5@http://localhost:8000/v1`, `replay` or
`json:ollama:qwen3` names one. `cassette` is the form of recorded replies, a `Redactor` keeps secrets out of what is written
down: `***` stands for them. Nothing here talks to a network.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Annotated, Any, Final, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from kdskills.errors import BadRequest
from kdskills.exports import tell_homes

__all__ = [
    "Message",
    "ModelAddress",
    "ModelFactory",
    "ModelImage",
    "ModelPrice",
    "ModelProvider",
    "ModelReply",
    "ModelRequest",
    "OutputMode",
    "Redactor",
    "TextDelta",
    "ToolCall",
    "ToolSpec",
    "Usage",
    "open_model",
    "parse_address",
    "server_of",
    "split_name",
]


MASK = "***"
MAX_NESTING = 64
"""Levels of objects and lists a JSON value may have."""
_ENV = re.compile(r'"env"\s*:')
MIN_TEXT = 6
"""Shorter values of a call's `env` are masked where they stand only: replacing `1` everywhere would spoil the text."""


class Redactor:
    """Replaces secrets in texts and JSON values.

    A secret declared by the caller is replaced wherever it occurs. The values under a call's `env` are masked in place;
    those of at least `MIN_TEXT` characters are then replaced wherever they occur, too.

    Args:
        secrets: Values known from the start, of any length but empty.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets: tuple[str, ...] = ()
        self._spellings: tuple[str, ...] = ()
        self.add(*secrets)

    def add(self, *secrets: str) -> None:
        """Mark further values as secret; blank ones are ignored."""
        secret_set = {*self._secrets, *(s for s in secrets if s.strip() and s != MASK)}
        # Longest first, so that no part of a secret is left beside the mask of a shorter one.
        self._secrets = tuple(sorted(secret_set, key=lambda s: (-len(s), s)))
        escaped = {secret: json.dumps(secret, ensure_ascii=False)[1:-1] for secret in self._secrets}
        self._spellings = tuple(word for secret in self._secrets for word in dict.fromkeys((secret, escaped[secret])))

    def learn(self, arguments: Mapping[str, Any]) -> None:
        """Take the values of a call's `env` as secrets."""
        env = arguments.get("env")
        if isinstance(env, Mapping):
            self.add(*(v for v in env.values() if isinstance(v, str) and len(v) >= MIN_TEXT))

    def text(self, text: str) -> str:
        """Return *text* with every secret replaced, in its plain and its JSON-escaped spelling."""
        for spelling in self._spellings:
            text = text.replace(spelling, MASK)
        return text

    def safe_length(self, text: str) -> int:
        """Return how many characters of a growing *text* can be shown: those after them may begin a secret."""
        end = len(text)
        for secret in self._spellings:
            for size in range(min(len(secret) - 1, len(text)), 0, -1):
                if text.endswith(secret[:size]):
                    end = min(end, len(text) - size)
                    break
        before = -1
        while before != end:  # no secret may reach over the end
            before = end
            for secret in self._spellings:
                start = text.find(secret, max(0, end - len(secret) + 1), end + len(secret) - 1)
                end = min(end, start) if start >= 0 else end
        return end

    def value(self, value: Any, *, keys: bool = True) -> Any:
        """Return a JSON value with secrets replaced; the values of any mapping named `env` are masked whole.

        Without *keys* the keys of mappings stay as they are.
        """
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(k)) if keys else k: dict.fromkeys(map(str, v), MASK)
                if k == "env" and isinstance(v, Mapping)
                else self.value(v, keys=keys)
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(item, keys=keys) for item in value]
        return value

    def arguments(self, text: str) -> str:
        """Return the raw JSON text of a call's arguments, redacted; what is not a JSON object is treated as text."""
        parsed = parse_object(text)
        if parsed is None:  # cut off, perhaps in the middle of a secret: what follows `env` is not shown
            env_key = _ENV.search(text)
            return self.text(text if env_key is None else text[: env_key.end()] + MASK)
        self.learn(parsed)
        redacted = self.value(parsed)
        return text if redacted == parsed else json.dumps(redacted, ensure_ascii=False)


def finite_number(text: str) -> float:
    """Return the number that *text* is in JSON; raises ValueError for one that JSON has none of, such as NaN or 1e999."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return number


def parse_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object in *text*, or None when it is anything else, however broken or deep.

    What is nested deeper than `MAX_NESTING` counts as broken: recursive readers would run out of stack. So do numbers that
    JSON does not have: nobody could be sent them.
    """
    try:
        value = json.loads(text, parse_float=finite_number, parse_constant=finite_number)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _flat_enough(value) else None


def _flat_enough(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return True
    return False


MessageRole = Literal["user", "assistant", "tool"]
OutputMode = Literal["native", "tool", "text"]
"""How a model is held to the type of an answer: by `ModelRequest.answer_schema`, by a tool whose arguments are the answer, or
by words alone."""


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


ImageType = Literal["image/png", "image/jpeg", "image/gif", "image/webp"]
IMAGE_TOKENS: Final = 1_600
"""What providers count for an image of about a megapixel; smaller ones cost less."""


@dataclass(frozen=True, slots=True)
class ModelImage:
    """An image that a tool shows the model: its bytes, and one of the media types all providers take."""

    media_type: ImageType
    data: bytes


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
        images: Images beside the text, of `tool` messages only.
    """

    role: MessageRole
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    tool: str | None = None
    ok: bool = True
    pin: str | None = None
    images: tuple[ModelImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens used, as the provider counts them.

    Of `input`, `cache_read` came from the provider's cache and `cache_write` went into it; of `output`, `reasoning` is not in
    the text. 0 where a provider does not tell.
    """

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> int:
        """Input and output together."""
        return self.input + self.output


Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ModelPrice(BaseModel):
    """What a model costs: US dollars for a million tokens of each kind; of the cache, as `input` where None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Rate
    output: Rate
    cache_read: Rate | None = None
    cache_write: Rate | None = None

    def cost(self, usage: Usage) -> float:
        """Return the US dollars that *usage* costs."""
        read, write = (self.input if rate is None else rate for rate in (self.cache_read, self.cache_write))
        fresh = max(0, usage.input - usage.cache_read - usage.cache_write)
        dollars = fresh * self.input + usage.cache_read * read + usage.cache_write * write + usage.output * self.output
        return round(dollars / 1_000_000, 10)


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
        lane: Which agent's turn within a turn asks, as the numbers of the calls that handed over: `3`, or `3.1`; empty for
            the turn itself.
        steady: Characters at the beginning of `instructions` that stay as they are while skills come and go; 0 when unknown.
    """

    role: str
    instructions: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    active: tuple[str, ...] = ()
    timeout_s: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    answer_schema: Mapping[str, Any] | None = None
    lane: str = ""
    steady: int = 0


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
        cost: US dollars of this call, or None where the provider does not know.
    """

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    model: str = ""
    finish_reason: str | None = None
    response_id: str | None = None
    cost: float | None = None


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

    A provider that has `takes_images = True` beside these attributes is sent the images of messages; `output_mode` says how
    it is held to the type of an answer, `tool` where it is not there.

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


OLLAMA_URL: Final = "http://localhost:11434/v1"


def server_of(provider: str, target: str) -> tuple[ModelAddress, str]:
    """Return where `NAME[@URL]` of a provider is served, and the key. Raises BadRequest: no model, or no key."""
    variable, default = f"{provider.upper()}_API_KEY", OLLAMA_URL if provider == "ollama" else None
    address = parse_address(target, base_url=os.environ.get(f"{provider.upper()}_BASE_URL") or default)
    key = os.environ.get(variable) or ("unused" if address.base_url else None)
    if key is None:
        words = f"set {variable}, or name a server with {provider}:NAME@URL"
        raise BadRequest(words, model=provider, variable=variable)
    return address, key


def open_model(factories: ModelFactories, name: str) -> ModelProvider:
    """Return the provider a model string names.

    Raises:
        BadRequest: The string is malformed.
        UnknownName: No plugin registered its prefix.
    """
    prefix, target = split_name(name)
    return factories[prefix](target)


tell_homes(__name__)
