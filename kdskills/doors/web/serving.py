"""Running the HTTP service until it is told to stop (spec service, head and §5)."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Final

import uvicorn

from kdskills.app import Host
from kdskills.app.authentication import ListenRefused, address, on_loopback
from kdskills.app.identity import LOCAL
from kdskills.app.logs import json_logs
from kdskills.app.upkeep import upkeep
from kdskills.doors.web.application import build_app
from kdskills.doors.web.draining import Drain
from kdskills.errors import KdskillsError

CUT_OFF_S: Final = 2
"""Seconds the server gives connections that are left after the drain."""

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
    with json_logs():
        try:
            asyncio.run(_serve(host, name, port, nats, open_on_loopback=no_auth))
        except BaseExceptionGroup as several:
            raise _first(several) from several


class _Server(uvicorn.Server):
    """A server that drains before it stops: nothing new is begun, what runs gets its time, health says so."""

    def __init__(self, config: uvicorn.Config, drain: Drain, drain_s: float) -> None:
        super().__init__(config)
        self._drain = drain
        self._drain_s = drain_s
        self._until = float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take nothing new; the second signal ends what still runs."""
        if self._drain.started:
            super().handle_exit(sig, frame)
            return
        self._drain.start()
        self._until = time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        """Tell whether it is time to stop."""
        if self._drain.started and (self._drain.idle or time.monotonic() >= self._until):
            return True
        return await super().on_tick(counter)


async def _serve(host: Host, name: str, port: int, nats: Bus | None, *, open_on_loopback: bool) -> None:
    app = build_app(host, open_on_loopback=open_on_loopback, listen=name)
    if not open_on_loopback:
        await _first_token(host)
    config = uvicorn.Config(
        app,
        host=name,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=CUT_OFF_S,
        lifespan="on",
    )
    server = _Server(config, app.state.drain, host.settings.drain_s)
    try:
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(upkeep(host))]
            if nats is not None:
                beside.append(group.create_task(_bus(nats[0], host, nats[1])))
            await server.serve()
            for task in beside:
                task.cancel()
    except SystemExit as error:  # uvicorn leaves so when it cannot listen
        raise ListenRefused(f"cannot listen on {name}:{port}: the address is taken or not of this machine") from error
    finally:
        await host.work.aclose()
        await host.storage.aclose()


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that tells the operator what to do, if that is all that went wrong; else everything."""
    ours, others = several.split(KdskillsError)
    if ours is None or others is not None:
        return several
    found: BaseException = ours
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


async def _bus(serve: Callable[[Host, str], Awaitable[None]], host: Host, url: str) -> None:
    await serve(host, url)


async def _first_token(host: Host) -> None:
    """Make a token and print it, once, when there is none yet."""
    if await host.tokens.list():
        return
    made = await host.tokens.create(LOCAL.project, LOCAL.agent, LOCAL.scopes, who="serve")
    sys.stderr.write(f"kdskills: this token is shown once; it opens project {LOCAL.project!r}: {made[1]}\n")
