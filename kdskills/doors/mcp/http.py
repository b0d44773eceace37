"""MCP over streamable HTTP, behind the same tokens as every other route (spec runtime §5, spec service §3)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from mcp.server.context import ServerRequestContext
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.types import Receive, Scope, Send

from kdskills.app import Host
from kdskills.app.identity import Identity
from kdskills.doors.mcp.server import build_server
from kdskills.errors import KdskillsError

IDENTITY: Final = "kdskills.identity"
LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")

Authenticate = Callable[[str | None], Awaitable[Identity]]
"""Takes the Authorization header and returns who calls, or raises."""


class McpHttp:
    """An ASGI application; `running` must be entered while it serves.

    Args:
        host: What operations run on.
        authenticate: Tells who calls.
        names: Host names clients may use beside those of loopback; other `Host` and `Origin` headers are refused.
    """

    def __init__(self, host: Host, authenticate: Authenticate, names: Sequence[str] = ()) -> None:
        hosts = [*(f"{name}:*" for name in (*LOOPBACK, *names)), *LOOPBACK, *names]
        security = TransportSecuritySettings(
            enable_dns_rebinding_protection=True,
            allowed_hosts=hosts,
            allowed_origins=[f"{scheme}://{name}" for scheme in ("http", "https") for name in hosts],
        )
        self._authenticate = authenticate
        self._server = build_server(host, _who)
        self._manager = StreamableHTTPSessionManager(self._server, security_settings=security, json_response=True)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve while this is open."""
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request of a caller with a token."""
        header = dict(scope["headers"]).get(b"authorization")
        try:
            identity = replace(
                await self._authenticate(None if header is None else header.decode("latin-1")), door="mcp"
            )
        except KdskillsError as error:
            await _refuse(send, error)
            return
        await self._manager.asgi_app({**scope, IDENTITY: identity}, receive, send)


def mount(host: Host, authenticate: Authenticate) -> McpHttp:
    """Return what the HTTP service serves under `/mcp`; entry point `mcp` of the group `kdskills.mounts`."""
    return McpHttp(host, authenticate, host.settings.host_names)


def _who(ctx: ServerRequestContext[Any, Any]) -> Identity:
    """Return who sent the request, as the token told before anything was read."""
    assert ctx.request is not None
    found = ctx.request.scope[IDENTITY]
    assert isinstance(found, Identity)
    return found


async def _refuse(send: Send, error: KdskillsError) -> None:
    body = json.dumps(error.to_json()).encode()
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    status = 429 if error.code == "rate_limited" else 401
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
