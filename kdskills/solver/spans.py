"""OpenTelemetry spans of a turn; every name of the developing conventions stands here (spec runtime §4).

Only the API is used: without the extra `otel`, or without a configured SDK, nothing happens. Texts are recorded only
where `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT` is `true`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kdskills.models import ModelProvider, ModelReply, ModelRequest

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
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


class RawSpan(Protocol):
    """What is used of an OpenTelemetry span."""

    def set_attribute(self, key: str, value: Any) -> None:
        """Set one attribute."""
        ...


class Span:
    """A span, or nothing where OpenTelemetry is not installed."""

    def __init__(self, raw: RawSpan | None) -> None:
        self._raw = raw

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes; those that are None are left out."""
        if self._raw is not None:
            for key, value in attributes.items():
                if value is not None:
                    self._raw.set_attribute(key, value)

    def failed(self, code: str) -> None:
        """Record our error code."""
        self.set({ERROR_TYPE: code})

    def replied(self, reply: ModelReply) -> None:
        """Record what is known of a reply."""
        self.set(
            {
                RESPONSE_ID: reply.response_id,
                RESPONSE_MODEL: reply.model or None,
                FINISH_REASONS: [reply.finish_reason] if reply.finish_reason else None,
                INPUT_TOKENS: reply.usage.input,
                OUTPUT_TOKENS: reply.usage.output,
                OUTPUT_MESSAGES: reply.text if captures_content() else None,
            }
        )

    def skill_result(self, result: Mapping[str, Any]) -> None:
        """Record the skill a skill tool was about, out of the tool's answer."""
        receipts = result.get("active_skills")
        last = receipts[-1] if isinstance(receipts, list) and receipts else result
        if not isinstance(last, Mapping):
            return
        self.set(
            {
                SKILL_NAME: last.get("name") or last.get("skill"),
                SKILL_URI: last.get("location"),
                SKILL_RESOURCE: result.get("path"),
                SKILL_DIGEST: last.get("digest"),
                EXIT_CODE: result.get("exit_code"),
            }
        )


def captures_content() -> bool:
    """Whether the operator wants texts in spans."""
    return os.environ.get(CAPTURE, "").strip().lower() == "true"


@contextmanager
def open_span(name: str, attributes: Mapping[str, Any]) -> Iterator[Span]:
    """Open a span below the current one for the length of the block."""
    try:
        from opentelemetry import trace
    except ImportError:
        yield Span(None)
        return
    with trace.get_tracer(TRACER).start_as_current_span(name, record_exception=False) as raw:
        span = Span(raw)
        span.set(attributes)
        yield span


@contextmanager
def agent_span(consumer: str, session_id: str) -> Iterator[Span]:
    """Open the span of a turn."""
    attributes = {OPERATION: "invoke_agent", AGENT: consumer, CONVERSATION: session_id}
    with open_span(f"invoke_agent {consumer}", attributes) as span:
        yield span


@contextmanager
def chat_span(provider: ModelProvider, request: ModelRequest) -> Iterator[Span]:
    """Open the span of a model call."""
    company, _, model = provider.name.partition(":")
    attributes = {OPERATION: "chat", PROVIDER: company, REQUEST_MODEL: model or company, AGENT: request.role}
    with open_span(f"chat {model or company}", attributes) as span:
        yield span


@contextmanager
def tool_span(tool: str, call_id: str) -> Iterator[Span]:
    """Open the span of a tool call."""
    attributes = {OPERATION: "execute_tool", TOOL_NAME: tool, TOOL_TYPE: "function", TOOL_CALL_ID: call_id}
    with open_span(f"execute_tool {tool}", attributes) as span:
        yield span
