"""The MCP server: tools and skills of one Host, over stdio or streamable HTTP."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final
from urllib.parse import parse_qs

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import RequestBodyLimitMiddleware
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kdskills.app import Host
from kdskills.app.authentication import (
    RequestLimits,
    Unauthenticated,
    address,
    answered_names,
    of_header,
    on_loopback,
    require_own_origin,
)
from kdskills.app.connections import BoundedServer, Crowd, serve, server_config
from kdskills.app.identity import PROFILES, Identity, Profile, own_client
from kdskills.app.wire import json_facts
from kdskills.doors.mcp.skills import Skills, WhoAsks
from kdskills.doors.mcp.tools import Tools
from kdskills.errors import BadRequest, CallRefused, KdskillsError


def profile_of(name: str) -> Profile:
    """Return the profile with this name. Raises BadRequest, `profile_unknown`."""
    for profile in PROFILES:
        if name == profile:
            return profile
    raise BadRequest(f"profiles are {', '.join(PROFILES)}; not {name!r}", code="profile_unknown")


def profile_of_query(query: bytes, otherwise: Profile) -> Profile:
    """Return the profile that the query of an address names, as in `/mcp?profile=author`; more than one are unknown."""
    names = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("profile")
    if names is None:
        return otherwise
    return profile_of(names[0] if len(names) == 1 else " and ".join(names))


def within(identity: Identity, profile: Profile) -> Identity:
    """Return a caller narrowed to a profile.

    Raises:
        CallRefused: `scope_missing`; the operator's profile needs a token with the scope `admin`. `not_in_profile`; the
            profile is wider than the one the caller is served.
    """
    if profile == "operator" and not (identity.token is not None and identity.may("admin")):
        words = (
            "the profile operator needs a token with the scope admin; on standard input that is the setting stdio_token"
        )
        raise CallRefused(words, code="scope_missing", scope="admin")
    if PROFILES.index(profile) > PROFILES.index(identity.profile):
        words = f"without a token this service serves the profile {identity.profile!r}, not {profile!r}"
        raise CallRefused(words, code="not_in_profile", profile=profile)
    return replace(identity, door="mcp", profile=profile)


async def client_identity(host: Host, client: Identity) -> Identity:
    """Return who the client on standard input is: *client* without a token, else whose the setting `stdio_token` is.

    An author's client and an operator's work on files of this machine.

    Raises:
        Unauthenticated: The token is not known.
        CallRefused: `scope_missing`, as `within`.
    """
    secret = host.settings.stdio_token
    if secret is None:
        return within(client, client.profile)
    identity = await host.tokens.authenticate(secret.get_secret_value())
    if identity is None:
        raise Unauthenticated("the token of the setting stdio_token is not known")
    return within(replace(identity, local=client.local), client.profile)


def build_server(host: Host, caller_of: WhoAsks, *, session: str | None = None) -> Server[Any]:
    """Return an MCP server over *host*; tools use *session* when a call names none: a connection's own on stdio."""
    tools = Tools(host.operations, host.invoke, caller_of, session)
    server: Server[Any] = Server(
        "kdskills",
        version=host.version,
        instructions="Load a skill with skills_load before you use it; read its files with skills_read.",
        on_list_tools=tools.list,
        on_call_tool=tools.call,
    )
    Skills(host.operations, host.publication, caller_of).add_to(server)
    return server


async def serve_stdio(host: Host, identity: Identity) -> None:
    """Serve one client on standard input and output until it closes them."""
    server = build_server(host, lambda _: identity, session=f"mcp-{secrets.token_hex(8)}")
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


IDENTITY: Final = "kdskills.identity"
STATUS: Final = {"rate_limited": 429, "host_refused": 421}

Authenticate = Callable[[str | None], Awaitable[Identity]]
"""Takes the Authorization header and returns who calls, or raises."""


class McpHttp:
    """An ASGI application; `running` must be entered while it serves.

    Args:
        names: Host names clients may use beside those of loopback; other `Host` and `Origin` headers are refused.
        profile: Tools a client is offered whose address names no other, as `?profile=author` does.
    """

    def __init__(
        self, host: Host, authenticate: Authenticate, names: frozenset[str] = frozenset(), profile: Profile = "skills"
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


mount = McpHttp
"""Makes what the HTTP service serves under `/mcp`; entry point `mcp` of the group `kdskills.mounts`."""


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


def command(
    host: Host,
    *,
    http: str | None = None,
    project: str = "local",
    agent: str = "local",
    profile: str = "skills",
    tools: Collection[str] | None = None,
) -> None:
    """Serve until the client closes standard input, or until TERM.

    Args:
        http: `HOST:PORT`; on loopback without tokens, elsewhere with them only.
        project: Project whose skills are served to a client without a token.
        agent: Consumer that the policy of skills is asked for, of a client without a token.
        profile: Tools that are served: `skills`, `author` or `operator`.
        tools: Ids of the tools a client without a token holds; None when skills are not asked what they need.

    Raises:
        ListenRefused: The address is none.
        BadRequest: `profile_unknown`.
        CallRefused: `scope_missing`; the profile needs a token of an administrator.
    """
    client = own_client(profile_of(profile), project, agent, None if tools is None else frozenset(tools))

    async def stdio() -> None:
        await serve_stdio(host, await client_identity(host, client))

    if http is None:
        asyncio.run(stdio())
        return
    name, port = address(http)
    settings, app = host.settings, http_app(host, name, client)
    crowd = Crowd(most=settings.connections, header_s=settings.header_timeout_s, body_s=settings.body_timeout_s)
    config = server_config(app, name, port, crowd)
    asyncio.run(serve(BoundedServer(config), crowd))


def http_app(host: Host, listen: str, client: Identity) -> Starlette:
    """Return the application that many clients reach; a token's own limits hold here as at every door.

    Where *listen*, the host it listens on, is loopback, who brings no token is *client*, though without files of this machine.
    """
    limits = RequestLimits(host.settings.requests_per_minute)

    async def authenticate(header: str | None) -> Identity:
        caller = await of_header(host.storage, header, open_on_loopback=on_loopback(listen))
        caller = replace(client, local=False) if header is None else caller
        limits.count(caller)
        return caller

    app = McpHttp(host, authenticate, answered_names(listen, host.settings.host_names), client.profile)
    return Starlette(routes=[Route("/mcp", app), Route("/", app)], lifespan=lambda _: app.running())
