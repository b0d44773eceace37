"""OpenTelemetry spans of a turn; every name of the developing conventions stands here.

Only the API is used: without the extra `otel`, or without a configured SDK, nothing happens. Texts are recorded only
where `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT` is `true`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from kdskills.errors import KdskillsError

if TYPE_CHECKING:
    from kdskills.models import ModelProvider, ModelReply, ModelRequest
    from kdskills.session.receipts import ActiveSkill

TRACER = "kdskills.solver"
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
AGENT = "gen_ai.agent.name"
CONVERSATION = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL_ID = "gen_ai.tool.call.id"
SKILL_NAME = "gen_ai.skill.name"
SKILL_URI = "gen_ai.skill.source.uri"
SKILL_RESOURCE = "gen_ai.skill.resource.name"
SKILL_DIGEST = "kdskills.skill.digest"
EXIT_CODE = "kdskills.script.exit_code"
ERROR_TYPE = "error.type"
OUTPUT_MESSAGES = "gen_ai.output.messages"
WRAPPERS = frozenset({"json", "json-schema"})
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


class Span:
    """A span, or nothing where OpenTelemetry is not installed."""

    def __init__(self, raw: Any = None, failed: Any = None) -> None:
        self._raw = raw
        self._failed = failed

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes; those that are None are left out."""
        if self._raw is not None:
            for key, value in attributes.items():
                if value is not None:
                    self._raw.set_attribute(key, value)

    def failed(self, code: str) -> None:
        """Record our error code; messages may hold content and stay out."""
        self.set({ERROR_TYPE: code})
        if self._raw is not None:
            self._raw.set_status(self._failed)

    def used(self, input_tokens: int, output_tokens: int) -> None:
        """Record tokens."""
        self.set({INPUT_TOKENS: input_tokens, OUTPUT_TOKENS: output_tokens})

    def replied(self, reply: ModelReply) -> None:
        """Record what is known of a reply."""
        shows_texts = os.environ.get(CAPTURE, "").strip().lower() == "true"
        self.set({RESPONSE_ID: reply.response_id, RESPONSE_MODEL: reply.model or None})
        self.set({FINISH_REASONS: [reply.finish_reason] if reply.finish_reason else None})
        self.set({OUTPUT_MESSAGES: reply.text if shows_texts else None})
        self.used(reply.usage.input, reply.usage.output)

    def skill_result(self, result: Mapping[str, Any], active: Sequence[ActiveSkill]) -> None:
        """Record the skill a skill tool was about: the one it names, else the one loaded last."""
        name = result.get("skill")
        receipt = next((skill.receipt for skill in reversed(active) if name in {None, skill.name}), None)
        self.set({SKILL_NAME: name, SKILL_RESOURCE: result.get("path"), EXIT_CODE: result.get("exit_code")})
        if receipt is not None:
            self.set({SKILL_NAME: receipt.name, SKILL_URI: receipt.location, SKILL_DIGEST: receipt.digest})


@contextmanager
def open_span(name: str, attributes: Mapping[str, Any]) -> Iterator[Span]:
    """Open a span below the current one for the length of the block."""
    try:
        from opentelemetry import trace
    except ImportError:
        yield Span()
        return
    # Exceptions are recorded by their code alone: their texts may hold what only the capture variable lets in.
    tracer = trace.get_tracer(TRACER)
    with tracer.start_as_current_span(name, record_exception=False, set_status_on_exception=False) as raw:
        span = Span(raw, trace.Status(trace.StatusCode.ERROR))
        span.set(attributes)
        try:
            yield span
        except BaseException as error:
            span.failed(code_of(error))
            raise


def code_of(error: BaseException) -> str:
    """Return the word an error is known by: our code, `cancelled`, or the name of its class."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return error.code if isinstance(error, KdskillsError) else type(error).__name__


def company_and_model(name: str) -> tuple[str, str]:
    """Return provider and model of `provider:model`, without what wraps them."""
    company, _, model = name.partition(":")
    while company in WRAPPERS and model:
        company, _, model = model.partition(":")
    return company, model or company


def agent_span(consumer: str, session_id: str, provider: ModelProvider) -> AbstractContextManager[Span]:
    """Open the span of a turn."""
    return _model_span("invoke_agent", consumer, consumer, session_id, provider)


def chat_span(provider: ModelProvider, request: ModelRequest, session_id: str) -> AbstractContextManager[Span]:
    """Open the span of a model call."""
    return _model_span("chat", company_and_model(provider.name)[1], request.role, session_id, provider)


def _model_span(
    operation: str, subject: str, agent: str, session_id: str, provider: ModelProvider
) -> AbstractContextManager[Span]:
    company, model = company_and_model(provider.name)
    attributes = {OPERATION: operation, AGENT: agent, CONVERSATION: session_id, PROVIDER: company, REQUEST_MODEL: model}
    return open_span(f"{operation} {subject}", attributes)


def tool_span(tool: str, call_id: str) -> AbstractContextManager[Span]:
    """Open the span of a tool call."""
    attributes = {OPERATION: "execute_tool", TOOL_NAME: tool, TOOL_TYPE: "function", TOOL_CALL_ID: call_id}
    return open_span(f"execute_tool {tool}", attributes)
