"""The emulated app-server as a program: `python -m kdskills.testing.app_server_main [--profile P] app-server [-c k=v] [--listen URL]`.

It takes the same arguments as the real one and speaks the same two transports: one JSON object a line on stdio, or one a text
frame on a websocket. What is no JSON object is ignored.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import sys
import tomllib
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from kdskills.testing.app_server_methods import Methods
from kdskills.testing.app_server_profiles import PROFILES, JsonObject
from kdskills.testing.app_server_state import Connection, World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

MAX_LINE: Final = 256 * 2**20


def merge(into: JsonObject, more: JsonObject) -> None:
    """Put settings into others, tables into tables."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def read_config(home: Path, pairs: Sequence[str]) -> JsonObject:
    """Return the settings of `config.toml` in *home*, then those of the command line (`key=value`, value in TOML or bare)."""
    path = home / "config.toml"
    config: JsonObject = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            found = tomllib.loads(f"{key}={value}")
        except tomllib.TOMLDecodeError:
            found = tomllib.loads(f"{key}={json.dumps(value)}")
        merge(config, found)
    return config


class Served:
    """One world and those who talk to it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._methods = Methods(world)

    def join(self, connection: Connection) -> None:
        """Take a connection in."""
        self._world.connections.append(connection)

    def leave(self, connection: Connection) -> None:
        """Let a connection go."""
        self._world.disconnected(connection)

    def take(self, connection: Connection, raw: bytes | str) -> None:
        """Take one message."""
        try:
            message = json.loads(raw)
        except ValueError:
            return
        if not isinstance(message, dict):
            return
        if "method" in message and "id" in message:
            connection.send(self._methods.answer(connection, message))
        elif "method" not in message:
            self._world.answered(message)


async def serve_stdio(served: Served) -> None:
    """Speak lines on stdin and stdout until stdin ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    out = sys.stdout.buffer

    def send(message: JsonObject) -> None:
        out.write(json.dumps(message, ensure_ascii=False).encode() + b"\n")
        out.flush()

    connection = Connection(send)
    served.join(connection)
    while line := await reader.readline():
        served.take(connection, line)


async def serve_websocket(served: Served, url: str, token: str | None) -> None:
    """Speak text frames on a websocket until the process is ended; with a token, only to those who show it."""
    from websockets.asyncio.server import serve
    from websockets.exceptions import ConnectionClosed

    def guard(socket: ServerConnection, request: Request) -> Response | None:
        shown = request.headers.get("Authorization", "")
        if token is None or hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
            return None
        return socket.respond(HTTPStatus.UNAUTHORIZED, "a token is needed\n")

    async def talk(socket: ServerConnection) -> None:
        queue: asyncio.Queue[JsonObject] = asyncio.Queue()

        async def drain() -> None:
            while True:
                try:
                    await socket.send(json.dumps(await queue.get()))
                except ConnectionClosed:
                    return

        connection = Connection(queue.put_nowait)
        served.join(connection)
        sender = asyncio.create_task(drain())
        try:
            async for raw in socket:
                served.take(connection, raw)
        except ConnectionClosed:
            pass  # a client that hangs up has left, whichever way
        finally:
            served.leave(connection)
            sender.cancel()

    where = urlsplit(url)
    async with serve(
        talk, where.hostname, where.port or 0, max_size=None, compression=None, process_request=guard
    ) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        sys.stderr.write(f"codex app-server (WebSockets)\n  listening on: ws://{where.hostname}:{port}\n")
        sys.stderr.flush()
        await asyncio.get_running_loop().create_future()


async def _run(served: Served, listen: str, token: str | None) -> None:
    if listen.startswith("ws://"):
        await serve_websocket(served, listen, token)
    else:
        await serve_stdio(served)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the emulator; return its exit status."""
    parser = argparse.ArgumentParser(prog="codex")
    parser.add_argument("--profile", default="0.169", choices=sorted(PROFILES))
    parser.add_argument("--version", action="store_true")
    parser.add_argument("command", nargs="?", choices=["app-server"])
    parser.add_argument("-c", "--config", action="append", default=[])
    parser.add_argument("--enable", action="append", default=[])
    parser.add_argument("--disable", action="append", default=[])
    parser.add_argument("--listen", default="stdio://")
    parser.add_argument("--ws-auth", choices=["capability-token"])
    parser.add_argument("--ws-token-file", type=Path)
    args = parser.parse_args(argv)
    profile = PROFILES[args.profile]
    if args.version:
        sys.stdout.write(f"codex-cli {profile.version}\n")
        return 0
    if args.command is None:
        parser.error("a command is needed: app-server")
    if (args.ws_auth is None) is not (args.ws_token_file is None):
        parser.error("--ws-auth and --ws-token-file belong together")
    home = Path(os.environ.get("CODEX_HOME", ""))
    if not home.is_absolute() or not home.is_dir():
        parser.error("CODEX_HOME must name a folder")
    token = args.ws_token_file.read_text("utf-8").strip() if args.ws_token_file else None
    world = World(home, profile, read_config(home, args.config))
    asyncio.run(_run(Served(world), args.listen, token))
    return 0


if __name__ == "__main__":
    sys.exit(main())
