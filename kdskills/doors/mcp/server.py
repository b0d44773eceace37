"""The MCP server: tools and skills of one Host, over stdio or streamable HTTP."""

from __future__ import annotations

import secrets
from typing import Any

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from kdskills.app import Host
from kdskills.app.identity import Identity
from kdskills.doors.mcp.skills import Skills, WhoAsks
from kdskills.doors.mcp.tools import Tools


def build_server(host: Host, caller_of: WhoAsks, *, session: str | None = None) -> Server[Any]:
    """Return an MCP server over *host*.

    Args:
        host: What operations run on, and whose skills are published.
        caller_of: Tells who asks, from the request's context.
        session: Session that tools use when a call names none; a connection's own on stdio.
    """
    tools = Tools(host, caller_of, session)
    server: Server[Any] = Server(
        "kdskills",
        version=host.version,
        instructions="Load a skill with skills_load before you use it; read its files with skills_read.",
        on_list_tools=tools.list,
        on_call_tool=tools.call,
    )
    Skills(host, caller_of).add_to(server)
    return server


async def serve_stdio(host: Host, identity: Identity) -> None:
    """Serve one client on standard input and output until it closes them."""

    def caller_of(ctx: ServerRequestContext[Any, Any]) -> Identity:
        return identity

    server = build_server(host, caller_of, session=f"mcp-{secrets.token_hex(8)}")
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())
