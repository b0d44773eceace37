"""One message per text frame of a websocket; a capability token travels as a bearer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kdskills.errors import MissingExtra
from kdskills.remote.ports import AppServerGone
from kdskills.remote.wire.framing import MAX_LINE_BYTES

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_CLOSE_SECONDS = 5.0


class WebsocketTransport:
    """A client connection to `codex app-server --listen ws://…`."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._reason = ""

    @classmethod
    async def connect(cls, url: str, *, token: str | None = None, timeout_s: float = 30.0) -> WebsocketTransport:
        """Open the connection; the proxy settings of the environment are not used.

        Raises:
            AppServerGone: It cannot be opened, or the URL is no websocket's.
            MissingExtra: `websockets` is not installed.
        """
        try:
            from websockets.asyncio.client import connect
            from websockets.exceptions import InvalidHandshake, InvalidURI
        except ImportError:
            raise MissingExtra(
                "websockets is not installed: run pip install 'kdskills[codex]'", extra="codex"
            ) from None
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise AppServerGone(
                "the URL of an app-server begins with ws:// or wss:// and names a host", scheme=parts.scheme
            )
        origin = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        try:
            connection = await connect(
                url,
                additional_headers=headers,
                max_size=MAX_LINE_BYTES,
                open_timeout=timeout_s,
                close_timeout=_CLOSE_SECONDS,
                proxy=None,
                compression=None,
            )
        except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as problem:
            raise AppServerGone(
                f"no app-server at {origin}: {type(problem).__name__}: {problem}", url=origin
            ) from problem
        return cls(connection)

    async def send(self, payload: bytes) -> None:
        """Send one text frame.

        Raises:
            AppServerGone: The connection is closed.
        """
        from websockets.exceptions import ConnectionClosed

        try:
            await self._connection.send(payload, text=True)
        except ConnectionClosed as problem:
            raise AppServerGone(f"the app-server is gone ({self.why_closed()})") from problem

    async def receive(self) -> bytes | None:
        """Return the next frame's bytes, or None when the connection ended."""
        from websockets.exceptions import ConnectionClosed

        try:
            frame = await self._connection.recv(decode=False)
        except ConnectionClosed as problem:
            self._reason = str(problem)
            return None
        return frame

    async def close(self) -> None:
        """Close the connection; the server and its threads stay."""
        try:
            async with asyncio.timeout(2 * _CLOSE_SECONDS):
                await self._connection.close()
        except TimeoutError:
            self._connection.transport.abort()

    def why_closed(self) -> str:
        """Say how the connection ended."""
        return self._reason or "the connection is closed"
