"""No body is longer than allowed, whatever its header says."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kdskills.app.identity import Identity
from kdskills.doors.web.entrance import IDENTITY
from kdskills.doors.web.problems import response_of
from kdskills.errors import CallerMustAct


class BodyTooLarge(CallerMustAct):
    """The body has more bytes than are taken."""

    code = "body_too_large"


class BodyLimit:
    """Counts a request's bytes as they come and answers 413 instead of reading on.

    Args:
        app: The application inside.
        limit: Bytes a body may have; a token may have a lower limit of its own.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit_of(scope)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            await _refuse(scope, receive, send, limit)
            return
        read, begun = 0, False

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > limit:
                raise BodyTooLarge(f"a body has at most {limit} bytes", limit=limit)
            return message

        async def noted(message: Message) -> None:
            nonlocal begun
            if begun or read <= limit:  # whoever parses bodies may answer the error in other words: ours are right
                begun = True
                await send(message)

        try:
            await self._app(scope, counted, noted)
        except BodyTooLarge:
            if begun:
                raise
        if read > limit and not begun:
            await _refuse(scope, receive, send, limit)

    def _limit_of(self, scope: Scope) -> int:
        identity = scope.get(IDENTITY)
        token_limit = identity.limits.body_bytes if isinstance(identity, Identity) else None
        return self._limit if token_limit is None else min(token_limit, self._limit)


async def _refuse(scope: Scope, receive: Receive, send: Send, limit: int) -> None:
    error = BodyTooLarge(f"a body has at most {limit} bytes", limit=limit)
    await response_of(error, Request(scope))(scope, receive, send)
