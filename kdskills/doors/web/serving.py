"""Running the HTTP service until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from kdskills.app import Host
from kdskills.app.authentication import ListenRefused, address, on_loopback
from kdskills.app.connections import BoundedServer, Crowd, server_config
from kdskills.app.connections import serve as serve_connections
from kdskills.app.identity import LOCAL
from kdskills.app.logs import be_called, json_logs
from kdskills.doors.web.application import build_app
from kdskills.doors.web.events import Drain
from kdskills.errors import KdskillsError

if TYPE_CHECKING:
    from kdskills.app.tokens import Tokens

FIRST_TOKEN: Final = "first-token"  # noqa: S105 - the name of a file in the state folder
CUT_OFF_S: Final = 2
"""Seconds the server gives connections that are left after the drain."""

Bus = tuple[Callable[[Host, str], Coroutine[Any, Any, None]], str]
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
    be_called(f"serve {name}:{port}")
    with json_logs():
        try:
            asyncio.run(_serve(host, name, port, nats, open_on_loopback=no_auth))
        except BaseExceptionGroup as several:
            raise _first(several) from several


class DrainingServer(BoundedServer):
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
        await _first_token(host.tokens, host.settings.state_dir / FIRST_TOKEN)
    settings = host.settings
    crowd = Crowd(most=settings.connections, header_s=settings.header_timeout_s, body_s=settings.body_timeout_s)
    config = server_config(app, name, port, crowd, timeout_graceful_shutdown=CUT_OFF_S)
    server = DrainingServer(config, app.state.drain, settings.drain_s)
    try:
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(host.upkeep.run())]
            if nats is not None:
                serve_bus, url = nats
                background.append(group.create_task(serve_bus(host, url)))
            await serve_connections(server, crowd)
            for task in background:
                task.cancel()
    finally:
        await host.work.aclose()
        await host.storage.aclose()


def _first(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that tells the operator what to do, if that is all that went wrong; else everything."""
    ours, foreign = several.split(KdskillsError)
    if ours is None or foreign is not None:
        return several
    error: BaseException = ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _first_token(tokens: Tokens, path: Path) -> None:
    """Make a token when there is none yet: shown to a terminal, else written where only this account reads it.

    What is written to standard error of a service is kept in a journal that others read.
    """
    if await tokens.list():
        return
    on_terminal = sys.stderr.isatty()
    file = -1 if on_terminal else _private_file(path)
    try:
        _, text = await tokens.create(LOCAL.project, LOCAL.agent, LOCAL.scopes, who="serve")
        if on_terminal:
            sys.stderr.write(f"kdskills: this token is shown once; it opens project {LOCAL.project!r}: {text}\n")
            return
        os.write(file, f"{text}\n".encode())
        where = f"is in {path}: read it once and delete the file"
        sys.stderr.write(f"kdskills: a token for project {LOCAL.project!r} {where}\n")
    finally:
        if file >= 0:
            os.close(file)


def _private_file(path: Path) -> int:
    """Return a new file that this account alone reads and writes, in place of one of that name. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
