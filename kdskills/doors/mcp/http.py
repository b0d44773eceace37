"""MCP over streamable HTTP, behind the same tokens as every other route."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from mcp.server.context import ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import RequestBodyLimitMiddleware
from starlette.types import Receive, Scope, Send

from kdskills.app import Host
from kdskills.app.authentication import require_own_origin
from kdskills.app.identity import Identity, Profile
from kdskills.app.wire import json_facts
from kdskills.doors.mcp.profiles import profile_of_query, within
from kdskills.doors.mcp.server import build_server
from kdskills.errors import BadRequest, CallRefused, KdskillsError

IDENTITY: Final = "kdskills.identity"
STATUS: Final = {"rate_limited": 429, "host_refused": 421}

Authenticate = Callable[[str | None], Awaitable[Identity]]
"""Takes the Authorization header and returns who calls, or raises."""


class McpHttp:
    """An ASGI application; `running` must be entered while it serves.

    Args:
        host: What operations run on.
        authenticate: Tells who calls.
        names: Host names clients may use beside those of loopback; other `Host` and `Origin` headers are refused.
        profile: Tools a client is offered whose address names no other, as `?profile=author` does.
    """

    def __init__(
        self,
        host: Host,
        authenticate: Authenticate,
        names: frozenset[str] = frozenset(),
        profile: Profile = "skills",
    ) -> None:
        self._authenticate = authenticate
        self._names = names
        self._profile = profile
        self._server = build_server(host, _caller_of)
        self._manager = StreamableHTTPSessionManager(self._server, json_response=True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve while this is open."""
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of a caller with a token."""
        header = dict(scope["headers"]).get(b"authorization")
        try:
            require_own_origin(scope, self._names)
            identity = await self._authenticate(None if header is None else header.decode("latin-1"))
            identity = within(identity, profile_of_query(scope.get("query_string", b""), self._profile))
        except KdskillsError as error:
            await _refuse(send, error)
            return
        most, serve = identity.limits.body_bytes, self._manager.asgi_app
        if most is not None:
            serve = RequestBodyLimitMiddleware(serve, most)
        await serve({**scope, IDENTITY: identity}, receive, send)


def mount(host: Host, authenticate: Authenticate, names: frozenset[str]) -> McpHttp:
    """Return what the HTTP service serves under `/mcp`; entry point `mcp` of the group `kdskills.mounts`."""
    return McpHttp(host, authenticate, names)


def _caller_of(ctx: ServerRequestContext[Any, Any]) -> Identity:
    """Return who sent the request, as the token told before anything was read."""
    assert ctx.request is not None
    identity = ctx.request.scope[IDENTITY]
    assert isinstance(identity, Identity)
    return identity


async def _refuse(send: Send, error: KdskillsError) -> None:
    body = json_facts(error.to_json()).encode()
    class_status = 403 if isinstance(error, CallRefused) else 400 if isinstance(error, BadRequest) else 401
    status = STATUS.get(error.code, class_status)
    headers = [(b"content-type", b"application/json")]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
