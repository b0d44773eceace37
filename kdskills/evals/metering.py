"""Model calls of evaluations: counted, spaced, and stopped before a ceiling of tokens."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from kdskills.errors import ModelFailed
from kdskills.evals.results import MAX_AMOUNT, MAX_FACTOR
from kdskills.models import ModelProvider, ModelReply, ModelRequest, TextDelta
from kdskills.skills.model import estimate_tokens


class PickSettled(Exception):
    """A skill was loaded, and the model is asked no more."""


CEILING_MET: Final = "ceiling_met"
"""Code of a row that had begun when the tokens of its iteration were spent."""


class CeilingMet(Exception):
    """The next call of a model would go over the tokens that a run may take."""

    def __init__(self) -> None:
        super().__init__("the next call of a model would go over the tokens that the iteration may take")


def request_tokens(request: ModelRequest) -> int:
    """Return an estimate, at least 1, of all that a request sends: text, history with its calls, tools, the answer's schema."""
    texts = [request.instructions, *(each.text for each in request.messages)]
    texts += [call.tool + call.arguments for each in request.messages for call in each.calls]
    shapes = [{"name": each.name, "text": each.description, "schema": each.input_schema} for each in request.tools]
    texts += [json.dumps(shape, default=dict) for shape in (*shapes, request.answer_schema) if shape]
    return max(1, sum(map(estimate_tokens, texts)))


def tokens_of(request: ModelRequest, reply: ModelReply) -> int:
    """Return what a call took, as the provider counts it; of one that does not count, an estimate."""
    return reply.usage.total or request_tokens(request) + reply_tokens(reply)


def reply_tokens(reply: ModelReply) -> int:
    """Return how long a reply is, as the provider counts it or, where it does not, as estimated."""
    return reply.usage.output or estimate_tokens(
        reply.text + "".join(call.tool + call.arguments for call in reply.calls)
    )


class Meter:
    """Counts the tokens and calls of a run, spaces the calls, and stops it before its ceiling.

    `longest` is the longest reply so far, and `factor` how much more providers counted of a request than was estimated; who goes
    on with a run hands in both, as its rows say.
    """

    def __init__(
        self, rate: float | None, ceiling: int | None, spent: int, longest: int = 0, factor: float = 1.0
    ) -> None:
        self.interval = 60 / rate if rate else 0.0
        self.calls, self.started = 0, time.monotonic()
        self._ceiling, self._spent, self._reserved = ceiling, spent, 0
        self.longest, self.factor, self._next = longest, factor, 0.0

    @asynccontextmanager
    async def call(self, request: ModelRequest) -> AsyncIterator[Callable[[ModelReply], None]]:
        """Wait until a call may begin; what is given is told the reply. Raises CeilingMet.

        The call is reckoned with the estimate of all that is sent, or as much more as providers counted of others so far, and
        with as long a reply as it may have or there was so far.
        """
        prompt = request_tokens(request)
        tokens = math.ceil(prompt * self.factor) + max(int(request.settings.get("max_tokens") or 0), self.longest)
        if self._ceiling is not None and self._spent + self._reserved + tokens > self._ceiling:
            raise CeilingMet
        self._reserved += tokens
        used = 0

        def settle(reply: ModelReply) -> None:
            nonlocal used
            self.longest = max(self.longest, min(reply_tokens(reply), MAX_AMOUNT))
            self.factor = max(self.factor, min(reply.usage.input / prompt, MAX_FACTOR))
            used = max(tokens_of(request, reply), 0)

        try:
            if self.interval:
                begins = self._next = max(time.monotonic(), self._next + self.interval)
                await asyncio.sleep(begins - time.monotonic())
            self.calls += 1
            yield settle
        finally:
            self._reserved -= tokens
            self._spent += used


class MeteredModel:
    """Passes the requests of one row on to a provider; with *picks* it ends the row once a skill was loaded.

    `version` is the model that answered last, as the provider calls it.
    """

    def __init__(self, inner: ModelProvider, meter: Meter, *, picks: bool, owned: bool) -> None:
        self.inner, self._meter, self._picks, self._owned = inner, meter, picks, owned
        self._active: tuple[str, ...] | None = None
        self.version = ""

    def __getattr__(self, name: str) -> Any:
        """Return what the provider has."""
        return getattr(self.inner, name)

    async def reply(self, request: ModelRequest) -> ModelReply:
        """Answer as the provider does. Raises PickSettled and CeilingMet."""
        if self._active is None:
            self._active = request.active
        if self._picks and not set(request.active) <= set(self._active):
            raise PickSettled
        async with self._meter.call(request) as settle:
            reply = await self.inner.reply(request)
            settle(reply)
        self.version = reply.model
        return reply

    async def stream(self, request: ModelRequest) -> AsyncIterator[TextDelta | ModelReply]:
        """Answer in one piece."""
        yield await self.reply(request)

    async def aclose(self) -> None:
        """Close the provider, if it was opened for this row."""
        if self._owned:
            await self.inner.aclose()


class JudgeModel(MeteredModel):
    """The judge of one row, whose `tokens` are counted beside those of the row; where they are spent it fails, and the turn stays."""

    tokens = 0

    async def reply(self, request: ModelRequest) -> ModelReply:
        """Answer as the provider does. Raises ModelFailed, `ceiling_met`."""
        try:
            reply = await super().reply(request)
        except CeilingMet as met:
            raise ModelFailed(str(met), code=CEILING_MET) from None
        self.tokens += tokens_of(request, reply)
        return reply
