"""`kdskills mcp`: one client on standard input and output, or many over HTTP (spec runtime §5)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from kdskills.app import Host
from kdskills.app.authentication import address, of_header, on_loopback
from kdskills.app.identity import LOCAL, Identity
from kdskills.doors.mcp.http import McpHttp
from kdskills.doors.mcp.server import serve_stdio


def command(host: Host, *, http: str | None = None, project: str = "local", agent: str = "local") -> None:
    """Serve until the client closes standard input, or until TERM.

    Args:
        host: What is served.
        http: `HOST:PORT`; on loopback without tokens, elsewhere with them only.
        project: Project whose skills are served on stdio.
        agent: Consumer that the policy of skills is asked for on stdio.

    Raises:
        ListenRefused: The address is none.
    """
    identity = replace(LOCAL, project=project, agent=agent, door="mcp")
    if http is None:
        asyncio.run(serve_stdio(host, identity))
        return
    name, port = address(http)

    async def authenticate(header: str | None) -> Identity:
        found = await of_header(host, header, open_on_loopback=on_loopback(name))
        return found if header is not None else replace(found, project=project, agent=agent)

    app = McpHttp(host, authenticate, (name, *host.settings.host_names))
    routes = [Route("/mcp", app), Route("/", app)]
    uvicorn.run(
        Starlette(routes=routes, lifespan=lambda _: app.running()), host=name, port=port, log_config=None, lifespan="on"
    )
