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
    from kdskills.models import ModelProvider, ModelReply, ModelRequest, Usage
    from kdskills.session.receipts import ActiveSkill

TRACER = "kdskills.solver"
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
        self.set({"error.type": code})
        if self._raw is not None:
            self._raw.set_status(self._failed)

    def used(self, usage: Usage, cost: float | None) -> None:
        """Record tokens, and US dollars; of those that not every provider tells, what there were."""
        self.set({"kdskills.usage.cost": cost})
        self.set({"gen_ai.usage.input_tokens": usage.input, "gen_ai.usage.output_tokens": usage.output})
        further = {
            "cache_read.input_tokens": usage.cache_read,
            "cache_creation.input_tokens": usage.cache_write,
            "reasoning.output_tokens": usage.reasoning,
        }
        self.set({f"gen_ai.usage.{name}": count or None for name, count in further.items()})

    def replied(self, reply: ModelReply) -> None:
        """Record what is known of a reply."""
        shows_texts = os.environ.get(CAPTURE, "").strip().lower() == "true"
        facts = {
            "gen_ai.response.id": reply.response_id,
            "gen_ai.response.model": reply.model or None,
            "gen_ai.response.finish_reasons": [reply.finish_reason] if reply.finish_reason else None,
            "gen_ai.output.messages": reply.text if shows_texts else None,
        }
        self.set(facts)
        self.used(reply.usage, reply.cost)

    def skill_result(self, result: Mapping[str, Any], active: Sequence[ActiveSkill]) -> None:
        """Record the skill a skill tool was about: the one it names, else the one loaded last."""
        name = result.get("skill")
        receipt = next((skill.receipt for skill in reversed(active) if name in {None, skill.name}), None)
        facts = {"skill.name": name, "skill.resource.name": result.get("path")}
        if receipt is not None:
            facts |= {"skill.name": receipt.name, "skill.source.uri": receipt.location}
            self.set({"kdskills.skill.digest": receipt.digest})
        self.set({f"gen_ai.{key}": value for key, value in facts.items()})
        self.set({"kdskills.script.exit_code": result.get("exit_code")})


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


def agent_span(
    consumer: str, session_id: str, provider: ModelProvider, user_id: str | None = None
) -> AbstractContextManager[Span]:
    """Open the span of a turn, for the user of that id."""
    return _model_span("invoke_agent", consumer, consumer, session_id, provider, user_id)


def chat_span(
    provider: ModelProvider, request: ModelRequest, session_id: str, user_id: str | None = None
) -> AbstractContextManager[Span]:
    """Open the span of a model call."""
    return _model_span("chat", company_and_model(provider.name)[1], request.role, session_id, provider, user_id)


def _model_span(
    operation: str, subject: str, agent: str, session_id: str, provider: ModelProvider, user_id: str | None
) -> AbstractContextManager[Span]:
    company, model = company_and_model(provider.name)
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.agent.name": agent,
        "gen_ai.conversation.id": session_id,
        "gen_ai.provider.name": company,
        "gen_ai.request.model": model,
        "user.id": user_id,
    }
    return open_span(f"{operation} {subject}", attributes)


def tool_span(tool: str, call_id: str, user_id: str | None = None) -> AbstractContextManager[Span]:
    """Open the span of a tool call."""
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": tool,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": call_id,
        "user.id": user_id,
    }
    return open_span(f"execute_tool {tool}", attributes)
