"""Commands that open other doors: `serve` and `mcp`. Doors do not import each other; entry points bring them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated, Any, Final

import typer

from kdskills.doors.cli.output import failing
from kdskills.doors.cli.within import host_of
from kdskills.errors import MissingExtra

GROUP: Final = "kdskills.doors"

#: The extra that brings what a door needs.
EXTRAS: Final = {"serve": "service", "mcp": "mcp", "nats": "service"}


def door(name: str) -> Callable[..., Any]:
    """Return what opens a door.

    Raises:
        MissingExtra: What it needs is not installed.
    """
    try:
        return next(iter(entry_points(group=GROUP, name=name))).load()  # type: ignore[no-any-return]  # of importlib
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "kdskills":
            raise
        raise MissingExtra(f"kdskills {name}", EXTRAS[name]) from error


def serve(
    ctx: typer.Context,
    listen: Annotated[str | None, typer.Option("--listen", help="HOST:PORT; the setting when omitted.")] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Ask for no token; on loopback only.")] = False,
    nats: Annotated[
        str | None, typer.Option("--nats", help="Also answer the command bus at this URL; the setting when omitted.")
    ] = None,
) -> None:
    """Run the service: HTTP, MCP under /mcp, and the command bus that is named; TERM lets running requests finish."""
    with failing(as_json=False):
        host = host_of(ctx)
        url = host.settings.bus.url if nats is None else nats
        door("serve")(host, listen=listen, no_auth=no_auth, nats=None if url is None else (door("nats"), url))


def mcp(
    ctx: typer.Context,
    http: Annotated[str | None, typer.Option("--http", help="Serve HOST:PORT instead of standard input.")] = None,
    project: Annotated[str, typer.Option("--project", help="Project whose skills are served.")] = "local",
    agent: Annotated[str, typer.Option("--agent", help="Consumer that the policy of skills is asked for.")] = "local",
    profile: str = "skills",
    tools: tuple[str, ...] | None = None,
) -> None:
    """Serve MCP to one client on standard input and output, or to many over HTTP."""
    with failing(as_json=False):
        door("mcp")(host_of(ctx), http=http, project=project, agent=agent, profile=profile, tools=tools)
