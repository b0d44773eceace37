"""`kdskills mcp`: one client on standard input and output, or many over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

from starlette.applications import Starlette
from starlette.routing import Route

from kdskills.app import Host
from kdskills.app.authentication import RequestLimits, address, answered_names, of_header, on_loopback
from kdskills.app.connections import BoundedServer, Crowd, serve, server_config
from kdskills.app.identity import SCOPES_OF, Identity, Profile
from kdskills.doors.mcp.http import McpHttp
from kdskills.doors.mcp.profiles import client_identity, profile_of
from kdskills.doors.mcp.server import serve_stdio


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
        host: What is served.
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
    chosen, client_tools = profile_of(profile), None if tools is None else frozenset(tools)
    if http is None:
        asyncio.run(_stdio(host, chosen, project, agent, client_tools))
        return
    name, port = address(http)
    settings, app = host.settings, http_app(host, name, chosen, project, agent, client_tools)
    crowd = Crowd(most=settings.connections, header_s=settings.header_timeout_s, body_s=settings.body_timeout_s)
    config = server_config(app, name, port, crowd)
    asyncio.run(serve(BoundedServer(config), crowd))


def http_app(
    host: Host, listen: str, profile: Profile, project: str, agent: str, tools: frozenset[str] | None
) -> Starlette:
    """Return the application that many clients reach; a token's own limits hold here as at every door.

    Args:
        host: What is served.
        listen: The host it listens on; on loopback no token is asked for.
        profile: Tools that are served.
        project: The project, without a token.
        agent: The agent, without a token.
        tools: Tools a client holds, without a token; None when that is not asked for.
    """
    limits = RequestLimits(host.settings.requests_per_minute)

    async def authenticate(header: str | None) -> Identity:
        caller = await of_header(host.storage, header, open_on_loopback=on_loopback(listen))
        if header is None:
            scopes = SCOPES_OF[profile]
            caller = replace(caller, project=project, agent=agent, scopes=scopes, tools=tools, profile=profile)
        limits.count(caller)
        return caller

    app = McpHttp(host, authenticate, answered_names(listen, host.settings.host_names), profile)
    return Starlette(routes=[Route("/mcp", app), Route("/", app)], lifespan=lambda _: app.running())


async def _stdio(host: Host, profile: Profile, project: str, agent: str, tools: frozenset[str] | None) -> None:
    await serve_stdio(host, await client_identity(host, profile, project, agent, tools))
