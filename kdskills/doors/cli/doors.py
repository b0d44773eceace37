"""Commands that stay up: `serve` and `mcp`, which open other doors, and `worker`.

Doors do not import each other: entry points bring them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated, Any, Final

import typer

from kdskills.doors.cli.output import failing
from kdskills.doors.cli.within import host_of, split
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
    profile: Annotated[
        str, typer.Option("--profile", help="Tools that are served: `skills`, `author` or `operator`.")
    ] = "skills",
    tools: Annotated[
        str | None,
        typer.Option("--tools", help="Tools a client without a token holds, comma-separated; '' means none."),
    ] = None,
) -> None:
    """Serve MCP to one client on standard input and output, or to many over HTTP; or do what a further word says."""
    if ctx.invoked_subcommand is None:
        with failing(as_json=False):
            serve_mcp, tool_ids = door("mcp"), None if tools is None else split(tools)
            serve_mcp(host_of(ctx), http=http, project=project, agent=agent, profile=profile, tools=tool_ids)


def worker(
    ctx: typer.Context,
    slot: Annotated[int, typer.Option("--slot", help="Which of this host's workers; each slot has one.", min=0)] = 0,
    idle: Annotated[
        float | None, typer.Option("--idle", help="Seconds without work after which it ends; none means never.", min=0)
    ] = None,
) -> None:
    """Run background work until told to stop; programs it started outlive it, and the next worker takes them over."""
    with failing(as_json=False):
        from kdskills.app.worker.main import run  # starting any other command must not cost what a worker imports

        run(host_of(ctx).settings, slot=slot, idle_s=idle)
