"""One model call: timeouts, tries, and the events about it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kdskills.errors import ModelFailed
from kdskills.models import ModelProvider, ModelReply, ModelRequest, TextDelta
from kdskills.solver.events import ModelDelta, ModelReplied, ModelRequested, ModelRetry
from kdskills.solver.result import TokenUsage
from kdskills.solver.running import whole_text
from kdskills.solver.spans import chat_span

if TYPE_CHECKING:
    from kdskills.solver.bus import EventBus
    from kdskills.solver.parts import Pacing
    from kdskills.solver.settings import SolverSettings

BASE_S, CAP_S = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class TimedReply:
    """A reply of a model, how often the call was tried again, and how long all tries took together."""

    reply: ModelReply
    retries: int
    duration_ms: int


class Asker:
    """Asks models on behalf of a turn.

    Args:
        settings: Timeouts and tries.
        bus: Gets the events of the call.
        pacing: How to wait between tries.
        streaming: Whether the reply is read piece by piece and each piece emitted.
        step: Index of the step that the events belong to.
    """

    def __init__(self, settings: SolverSettings, bus: EventBus, pacing: Pacing, *, streaming: bool, step: int) -> None:
        self._step = step
        self._settings = settings
        self._bus = bus
        self._pacing = pacing
        self._streaming = streaming

    async def ask(self, provider: ModelProvider, request: ModelRequest) -> TimedReply:
        """Return the reply; a call that failed with a retryable error is tried again.

        Raises:
            ModelFailed: The provider failed for good; `context_full` when the request does not fit.
            ReplayError: A recording does not fit.
        """
        request = replace(request, timeout_s=self._settings.model_timeout_s, settings=self._settings.model_settings)
        tools = tuple(tool.tool_id for tool in request.tools)
        self._bus.emit(
            ModelRequested,
            step=self._step,
            role=request.role,
            model=provider.name,
            messages=len(request.messages),
            tools=tools,
        )
        started_at = time.monotonic()
        with chat_span(provider, request, self._bus.session_id) as span:
            attempt = 0
            while True:
                try:
                    reply = await self._once(provider, request)
                    break
                except ModelFailed as error:
                    if not error.retryable or attempt >= self._settings.model_retries:
                        raise self._masked(error) from None
                    attempt += 1
                    await self._wait(request.role, attempt, error)
            reply = _encodable(reply)
            # Before any event about the reply: its text may repeat what its calls give away.
            for call in reply.calls:
                self._bus.redactor.arguments(call.arguments)
            span.replied(replace(reply, text=self._bus.redactor.text(reply.text)))
        self._emit_reply(request.role, provider, reply)
        return TimedReply(reply, attempt, round((time.monotonic() - started_at) * 1000))

    async def _once(self, provider: ModelProvider, request: ModelRequest) -> ModelReply:
        limit = self._settings.model_timeout_s
        try:
            async with asyncio.timeout(limit):
                if not self._streaming:
                    return await provider.reply(request)
                return await self._read(provider, request)
        except TimeoutError:
            message = f"{provider.name} gave no answer within {limit:g} s"
            raise ModelFailed(message, code="model_timeout", retryable=True, model=provider.name) from None

    def _masked(self, error: ModelFailed) -> ModelFailed:
        """Return a failure with its secrets masked: servers repeat in errors what they were sent."""
        redactor = self._bus.redactor
        return ModelFailed(
            redactor.text(error.message),
            code=error.code,
            retryable=error.retryable,
            retry_after=error.retry_after,
            **redactor.value(error.details),
        )

    async def _read(self, provider: ModelProvider, request: ModelRequest) -> ModelReply:
        answer: ModelReply | None = None
        unsent = ""  # the end of the text so far, while it may be the beginning of a secret
        async for item in provider.stream(request):
            if isinstance(item, TextDelta):
                unsent += whole_text(item.text)
                end = self._bus.redactor.safe_length(unsent)
                delta, unsent = unsent[:end], unsent[end:]
            else:
                answer, delta, unsent = item, unsent, ""
            if delta:
                self._bus.emit(ModelDelta, step=self._step, role=request.role, text=delta)
        if answer is None:
            raise ModelFailed(f"{provider.name} broke off its answer", retryable=True, model=provider.name)
        return answer

    async def _wait(self, role: str, attempt: int, error: ModelFailed) -> None:
        backoff = min(CAP_S, BASE_S * 2 ** (attempt - 1)) * self._pacing.jitter()
        delay = backoff if error.retry_after is None else max(0.0, error.retry_after)
        self._bus.emit(
            ModelRetry,
            step=self._step,
            role=role,
            attempt=attempt,
            code=error.code,
            message=error.message,
            delay_s=round(delay, 3),
        )
        await self._pacing.sleep(delay)

    def _emit_reply(self, role: str, provider: ModelProvider, reply: ModelReply) -> None:
        self._bus.emit(
            ModelReplied,
            step=self._step,
            role=role,
            model=reply.model or provider.name,
            text=reply.text,
            calls=tuple(call.tool for call in reply.calls),
            usage=TokenUsage(input=reply.usage.input, output=reply.usage.output),
            finish_reason=reply.finish_reason,
        )


def _encodable(reply: ModelReply) -> ModelReply:
    """Return *reply* with texts every transport can encode: as part of the history they are sent with each request."""
    calls = tuple(
        replace(call, id=whole_text(call.id), tool=whole_text(call.tool), arguments=whole_text(call.arguments))
        for call in reply.calls
    )
    return replace(reply, text=whole_text(reply.text), calls=calls)
