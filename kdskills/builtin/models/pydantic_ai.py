"""`openai:…`, `anthropic:…`, `ollama:…`: live models through pydantic-ai's direct requests.

The module registers names only; pydantic-ai is imported when a model is opened.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kdskills.errors import MissingExtra, ModelFailed
from kdskills.hooks import Register, hookimpl
from kdskills.models import (
    Message,
    ModelFactory,
    ModelReply,
    ModelRequest,
    OutputMode,
    Redactor,
    TextDelta,
    ToolCall,
    Usage,
    parse_object,
    server_of,
)
from kdskills.storage.database import LazyModule

if TYPE_CHECKING:
    from pydantic_ai import direct, exceptions
    from pydantic_ai import messages as parts
    from pydantic_ai.models import Model
else:
    direct, exceptions, parts = (LazyModule(f"pydantic_ai.{name}") for name in ("direct", "exceptions", "messages"))

_MODES: Mapping[str, OutputMode] = {"native": "native", "prompted": "text"}
RETRYABLE = frozenset({408, 409, 429})
_FULL = (
    *("context_length_exceeded", "context length", "maximum context", "context window", "prompt is too long"),
    "available context size",
)


class PydanticAIModel:
    """A model behind pydantic-ai. Nothing is retried here: that is the solver's business.

    *name* is `provider:model`, *context_window* in tokens; the *key* is kept out of failures whatever the server repeats;
    *takes_images* says that the model can be shown images, *marked* that requests carry marks for a cache, *priced* that the
    provider's own list of prices holds for it. How it is held to the type of an answer is what pydantic-ai takes for it when nobody says.
    """

    replayed = False

    def __init__(
        self,
        model: Model[Any],
        *,
        name: str,
        context_window: int | None = None,
        key: str | None = None,
        takes_images: bool = False,
        marked: bool = False,
        priced: bool = False,
    ) -> None:
        self.name, self.context_window, self._model = name, context_window, model
        self.takes_images, self._marked, self._priced = takes_images, marked, priced
        self.output_mode: OutputMode = _MODES.get(model.profile.get("default_structured_output_mode", "tool"), "tool")
        self._redactor = Redactor([key] if key else [])

    async def reply(self, request: ModelRequest) -> ModelReply:
        """Answer *request* as a whole. Raises `ModelFailed`."""
        with self._failures(request):
            return self._reply(await direct.model_request(self._model, **self._outgoing(request)))

    async def stream(self, request: ModelRequest) -> AsyncIterator[TextDelta | ModelReply]:
        """Answer *request* in pieces. Raises `ModelFailed`."""
        with self._failures(request):
            async with direct.model_request_stream(self._model, **self._outgoing(request)) as pieces:
                async for event in pieces:
                    if isinstance(event, parts.PartStartEvent) and isinstance(event.part, parts.TextPart):
                        if event.part.content:
                            yield TextDelta(event.part.content)
                    elif isinstance(event, parts.PartDeltaEvent) and isinstance(event.delta, parts.TextPartDelta):
                        yield TextDelta(event.delta.content_delta)
                answer = self._reply(pieces.get())
        yield answer

    def _outgoing(self, request: ModelRequest) -> dict[str, Any]:
        return _outgoing(request, self._model, marked=self._marked)

    def _reply(self, response: parts.ModelResponse) -> ModelReply:
        cost = shipped_cost(self.name, response) if self._priced else None
        return replace(incoming(response, self.name), cost=cost)

    @contextmanager
    def _failures(self, request: ModelRequest) -> Iterator[None]:
        """Turn what pydantic-ai raises into ModelFailed, without key and values of headers of one's own."""
        headers = request.settings.get("extra_headers")
        if isinstance(headers, Mapping):
            self._redactor.add(*(str(value) for value in headers.values()))
        try:
            yield
        except (exceptions.AgentRunError, exceptions.UserError) as error:
            # Without the cause: it holds headers and bodies, which a printed traceback would show.
            raise as_failure(error, self.name, self._redactor) from None

    async def aclose(self) -> None:
        """Close the HTTP client."""
        client = getattr(self._model, "client", None)
        if client is not None:
            await client.close()


def _outgoing(request: ModelRequest, model: Model[Any], *, marked: bool) -> dict[str, Any]:
    """Return the arguments of pydantic-ai's direct requests."""
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.output import OutputObjectDefinition
    from pydantic_ai.tools import ToolDefinition

    values: dict[str, Any] = dict(request.settings)
    if request.timeout_s is not None:
        values["timeout"] = request.timeout_s
    rows = ((tool.name, dict(tool.input_schema), tool.description) for tool in request.tools)
    tools = [ToolDefinition(name=n, parameters_json_schema=p, description=d, strict=False) for n, p, d in rows]
    parameters = ModelRequestParameters(function_tools=tools, allow_text_output=True)
    if request.answer_schema is not None:
        strict = None if model.system == "anthropic" else False  # Anthropic's own mode is never less than strict
        form = OutputObjectDefinition(dict(request.answer_schema), name="decision", strict=strict)
        parameters = replace(parameters, output_mode="native", output_object=form)
    mark = values.get("anthropic_cache_instructions", True)
    blocks = request.instructions[: request.steady], request.instructions[request.steady :].lstrip("\n")
    if marked and mark and all(blocks):
        # pydantic-ai marks one end of instructions, and a second only of such as it frames with words of its own
        cache = {"type": "ephemeral", "ttl": "5m" if mark is True else mark}
        system = [{"type": "text", "text": text, "cache_control": cache} for text in blocks]
        values["extra_body"] = {**(values.get("extra_body") or {}), "system": system}
    messages = history(request.instructions, request.messages)
    return {"messages": messages, "model_settings": values, "model_request_parameters": parameters}


def history(instructions: str, messages: tuple[Message, ...]) -> list[parts.ModelMessage]:
    """Return *messages* in pydantic-ai's form; neighbouring user and tool messages share one request."""
    out: list[parts.ModelMessage] = []
    for message in messages:
        if message.role == "assistant":
            calls = [parts.ToolCallPart(c.tool, _arguments(c), tool_call_id=c.id) for c in message.calls]
            text = [parts.TextPart(message.text)] if message.text or not calls else []
            out.append(parts.ModelResponse(parts=[*text, *calls]))
            continue
        part = (
            parts.UserPromptPart(message.text)
            if message.role == "user"
            else parts.ToolReturnPart(message.tool or "", _content(message), tool_call_id=message.call_id or "")
        )
        last = out[-1] if out else None
        if isinstance(last, parts.ModelRequest):
            out[-1] = parts.ModelRequest(parts=[*last.parts, part], instructions=instructions or None)
        else:
            out.append(parts.ModelRequest(parts=[part], instructions=instructions or None))
    return out


def _content(message: Message) -> parts.ToolReturnContent:
    """Return what a tool answered; providers whose answers of tools are text alone get the images right after them."""
    images = [parts.BinaryContent(image.data, media_type=image.media_type) for image in message.images]
    return [message.text, *images] if images else message.text


def _arguments(call: ToolCall) -> dict[str, Any]:
    # Providers refuse a history whose arguments are no JSON object; the model's own words are kept inside one.
    parsed = parse_object(call.arguments)
    return {"invalid_json": call.arguments} if parsed is None else parsed


def incoming(response: parts.ModelResponse, name: str) -> ModelReply:
    """Return pydantic-ai's response as a reply; thinking and other parts are not part of it."""
    text = "".join(part.content for part in response.parts if isinstance(part, parts.TextPart))
    called = [part for part in response.parts if isinstance(part, parts.ToolCallPart)]
    raw = [part.args if isinstance(part.args, str) else part.args_as_json_str() for part in called]
    calls = tuple(ToolCall(p.tool_call_id, p.tool_name, words) for p, words in zip(called, raw, strict=True))
    counts = response.usage
    cache = counts.cache_read_tokens, counts.cache_write_tokens
    usage = Usage(counts.input_tokens, counts.output_tokens, *cache, counts.output_reasoning_tokens)
    model = response.model_name or name
    return ModelReply(text, calls, usage, model, response.finish_reason, response.provider_response_id)


def shipped_cost(name: str, response: parts.ModelResponse) -> float | None:
    """Return what a response of `provider:model` costs by the list of prices that is installed; None for a model not in it."""
    from genai_prices import calc_price

    provider, _, model = name.partition(":")
    try:
        price = calc_price(response.usage, response.model_name or model, provider_id=provider)
    except (LookupError, ValueError):
        return None
    return float(price.total_price) or None  # what costs nothing has no price in that list


def as_failure(error: Exception, name: str, redactor: Redactor) -> ModelFailed:
    """Return the failure a provider's exception stands for; headers and bodies stay out of it but for a short text."""
    if not isinstance(error, exceptions.ModelAPIError):
        return ModelFailed(f"{name} gave no usable answer: {_short(redactor.text(str(error)))}", model=name)
    text = f"{error.provider_error_code} {_body_message(error.body)}".lower()
    full = getattr(error, "status_code", 400) in {400, 413} and any(words in text for words in _FULL)
    if full or isinstance(error, exceptions.ModelContextWindowExceededError):
        return ModelFailed(f"the request does not fit the window of {name}", code="context_full", model=name)
    retry_after = error.retry_after
    if isinstance(error, exceptions.ModelHTTPError):
        status = error.status_code
        retryable = (status in RETRYABLE or status >= 500) and not isinstance(error, exceptions.ModelQuotaExceededError)
        message = f"{name} answered with status {status}: {_short(redactor.text(_body_message(error.body)))}"
        return ModelFailed(message, retryable=retryable, retry_after=retry_after, model=name, status=status)
    retryable = isinstance(error, exceptions.ModelConnectionError | exceptions.ModelRequestTimeout)
    message = f"{name} could not be asked: {_short(redactor.text(error.message))}"
    return ModelFailed(message, retryable=retryable, retry_after=retry_after, model=name)


def _body_message(body: object) -> str:
    if isinstance(body, dict):
        inner = body.get("error", body)
        message = inner.get("message") if isinstance(inner, dict) else inner
        return str(message or "")
    return str(body or "")


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:299] + "…"


def open_live(provider: str, target: str) -> PydanticAIModel:
    """Open `NAME[@URL]`: of Anthropic, of Ollama, or of OpenAI and any server speaking its chat completions.

    The key comes from `<PROVIDER>_API_KEY`, and the URL also from `<PROVIDER>_BASE_URL`; Ollama is by default on this
    machine. A server of one's own needs no key.
    """
    address, key = server_of(provider, target)
    how: dict[str, Any] = {"api_key": key, "base_url": address.base_url, "max_retries": 0}
    model: Model[Any]
    try:
        if provider == "anthropic":
            from anthropic import AsyncAnthropic
            from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
            from pydantic_ai.providers.anthropic import AnthropicProvider

            anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(**how))
            # Its cache works by marks: at the ends of tools, of rules and active skills, and of what was said.
            marks = AnthropicModelSettings(
                anthropic_cache_tool_definitions=True, anthropic_cache_instructions=True, anthropic_cache_messages=True
            )
            model = AnthropicModel(address.model, provider=anthropic, settings=marks)
        else:
            from openai import AsyncOpenAI
            from pydantic_ai.models.ollama import OllamaModel
            from pydantic_ai.models.openai import OpenAIChatModel
            from pydantic_ai.providers.ollama import OllamaProvider
            from pydantic_ai.providers.openai import OpenAIProvider

            client = AsyncOpenAI(**how)
            if provider == "ollama":
                model = OllamaModel(address.model, provider=OllamaProvider(openai_client=client))
            else:
                model = OpenAIChatModel(address.model, provider=OpenAIProvider(openai_client=client))
    except ImportError:
        raise MissingExtra("a live model", "models") from None
    # What stands behind an address of one's own, nobody can tell: SolverSettings.images says it.
    images = provider == "anthropic" or (provider == "openai" and address.base_url is None)
    window = 200_000 if provider == "anthropic" else None
    name = f"{provider}:{address.model}"
    marked, priced = provider == "anthropic", provider != "ollama" and address.base_url is None
    return PydanticAIModel(
        model, name=name, context_window=window, key=key, takes_images=images, marked=marked, priced=priced
    )


@hookimpl
def kdskills_register_models(register: Register[ModelFactory]) -> None:
    """Add the prefixes `openai`, `anthropic` and `ollama`."""
    for provider in ("openai", "anthropic", "ollama"):
        register(provider, partial(open_live, provider))
