"""A model that says what a test tells it to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

from kdskills.errors import ReplayError
from kdskills.models import ModelReply, ModelRequest, TextDelta, ToolCall, Usage

Scripted = ModelReply | Exception | Callable[[ModelRequest], ModelReply]
"""A reply, an error to raise, or a function of the request."""

_USAGE = Usage(100, 10)


def say(text: str, *, usage: Usage = _USAGE) -> ModelReply:
    """Return a reply of text alone."""
    return ModelReply(text=text, usage=usage, model="scripted", finish_reason="stop")


def call(tool: str, /, **arguments: object) -> ModelReply:
    """Return a reply that calls one tool."""
    return call_raw(tool, json.dumps(arguments, ensure_ascii=False))


def call_raw(tool: str, arguments: str) -> ModelReply:
    """Return a reply that calls one tool with *arguments* as they are written, malformed JSON included."""
    return ModelReply(calls=(ToolCall("", tool, arguments),), usage=_USAGE, model="scripted", finish_reason="tool_call")


def together(*replies: ModelReply) -> ModelReply:
    """Return one reply with the calls of all, and their texts joined."""
    calls = tuple(one for reply in replies for one in reply.calls)
    text = "\n".join(reply.text for reply in replies if reply.text)
    return replace(replies[0], text=text, calls=calls)


class ScriptedModel:
    """Answers with the given replies, in order, and keeps the requests it got.

    Args:
        replies: Replies, errors to raise, or functions of the request.
        roles: Further replies for single roles, such as `answer.generator.strong`; these come from there first.
        context_window: Tokens the model pretends to take.
    """

    name = "scripted"
    replayed = True

    def __init__(
        self,
        replies: Sequence[Scripted],
        *,
        roles: Mapping[str, Sequence[Scripted]] | None = None,
        context_window: int | None = None,
    ) -> None:
        self.context_window = context_window
        self.requests: list[ModelRequest] = []
        self._left = list(replies)
        self._roles = {role: list(entries) for role, entries in (roles or {}).items()}
        self._calls = 0
        self._closed = False

    async def reply(self, request: ModelRequest) -> ModelReply:
        """Return the next reply.

        Raises:
            ReplayError: `replay_exhausted`: nothing is left for the request's role.
        """
        self.requests.append(request)
        left = self._roles.get(request.role, self._left)
        if not left:
            message = f"the script holds no reply for request {len(self.requests)} ({request.role})"
            raise ReplayError(message, code="replay_exhausted", role=request.role)
        given = left.pop(0)
        if isinstance(given, Exception):
            raise given
        return self._numbered(given if isinstance(given, ModelReply) else given(request))

    async def stream(self, request: ModelRequest) -> AsyncIterator[TextDelta | ModelReply]:
        """Give the text word by word, then the reply."""
        answer = await self.reply(request)
        for word in answer.text.splitlines(keepends=True):
            yield TextDelta(word)
        yield answer

    async def aclose(self) -> None:
        """Check that everything was used. Closing twice is harmless.

        Raises:
            ReplayError: `replay_unused`.
        """
        unused = len(self._left) + sum(map(len, self._roles.values()))
        if unused and not self._closed:
            self._closed = True
            raise ReplayError(f"{unused} replies of the script were not asked for", code="replay_unused", unused=unused)
        self._closed = True

    def _numbered(self, reply: ModelReply) -> ModelReply:
        """Return *reply* with an id for each call that has none."""
        calls = []
        for one in reply.calls:
            self._calls += 1
            calls.append(one if one.id else replace(one, id=f"call_{self._calls}"))
        return replace(reply, calls=tuple(calls))
