"""Running the HTTP service until it is told to stop (spec service, head and §5)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from kdskills.app import Host
from kdskills.app.authentication import ListenRefused, address, on_loopback
from kdskills.app.identity import LOCAL
from kdskills.doors.web.application import build_app

Bus = tuple[Callable[[Host, str], Awaitable[None]], str]
"""What serves the command bus until it is cancelled, and where the bus is."""


def run(host: Host, *, listen: str | None = None, no_auth: bool = False, nats: Bus | None = None) -> None:
    """Serve until TERM or INT; requests that run then get `drain_s` seconds.

    Args:
        host: What is served.
        listen: `HOST:PORT`; the setting when omitted.
        no_auth: Serve without tokens; on loopback only.
        nats: The command bus, too.

    Raises:
        ListenRefused: Without tokens on an address others reach, or the address is taken.
    """
    name, port = address(listen or host.settings.listen)
    if no_auth and not on_loopback(name):
        raise ListenRefused(f"without tokens the service listens on loopback only, not on {name}")
    asyncio.run(_serve(host, name, port, nats, open_on_loopback=no_auth))


class _Server(uvicorn.Server):
    """A server that says it is not ready from the first signal on."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop taking new work, then stop."""
        self._app.state.draining = True
        super().handle_exit(sig, frame)


async def _serve(host: Host, name: str, port: int, nats: Bus | None, *, open_on_loopback: bool) -> None:
    app = build_app(host, open_on_loopback=open_on_loopback)
    if not open_on_loopback:
        await _first_token(host)
    config = uvicorn.Config(
        app,
        host=name,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(host.settings.drain_s),
        lifespan="on",
    )
    server = _Server(config, app)
    try:
        async with asyncio.TaskGroup() as group:
            bus = None if nats is None else group.create_task(_bus(nats[0], host, nats[1]))
            await server.serve()
            if bus is not None:
                bus.cancel()
    except SystemExit as error:  # uvicorn leaves so when it cannot listen
        raise ListenRefused(f"cannot listen on {name}:{port}: the address is taken or not of this machine") from error


async def _bus(serve: Callable[[Host, str], Awaitable[None]], host: Host, url: str) -> None:
    await serve(host, url)


async def _first_token(host: Host) -> None:
    """Make a token and print it, once, when there is none yet."""
    if await host.tokens.list():
        return
    made = await host.tokens.create(LOCAL.project, LOCAL.agent, LOCAL.scopes, who="serve")
    sys.stderr.write(f"kdskills: this token is shown once; it opens project {LOCAL.project!r}: {made[1]}\n")
