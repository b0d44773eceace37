"""How messages travel: over the pipes of a child `codex app-server`, or as text frames of a websocket.

The child has its own process group; a capability token of a websocket travels as a bearer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kdskills.errors import MissingExtra
from kdskills.remote.client.wire import MAX_LINE_BYTES, LineBuffer, LineTooLong
from kdskills.remote.ports import AppServerGone

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection


STOP_SECONDS = 5.0
_POLL_SECONDS = 0.02
_CHUNK = 1024 * 1024
_STDERR_KEPT = 64 * 1024


class StdioTransport:
    """The pipes of a child process.

    npm's `codex` is a node launcher around a native child, so stopping signals the whole group, and the end of the
    connection is the end of the pipe, not the end of the launcher.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines = LineBuffer()
        self._ready: deque[bytes] = deque()
        self._stderr: deque[bytes] = deque()
        self._stderr_size = 0
        self._send_lock = asyncio.Lock()
        self._closing = False
        self._reason = ""
        self._ended = asyncio.Event()
        self._drain = asyncio.get_running_loop().create_task(self._drain_stderr(), name="kdskills-app-server-stderr")
        self._stopped: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(
        cls, command: Sequence[str], *, env: Mapping[str, str], cwd: str | os.PathLike[str] | None = None
    ) -> StdioTransport:
        """Start the command in a process group of its own.

        Raises:
            AppServerGone: It cannot be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        except (OSError, ValueError) as problem:
            raise AppServerGone(f"{command[0]} cannot be started: {problem}", command=command[0]) from problem
        return cls(process)

    @property
    def pid(self) -> int:
        """The launcher's process id, which is also the group's."""
        return self._process.pid

    def stderr_tail(self) -> str:
        """Return the newest 64 KiB of the child's error stream."""
        return b"".join(self._stderr).decode("utf-8", "replace")

    async def send(self, payload: bytes) -> None:
        """Write one line; waits while the pipe is full.

        Raises:
            AppServerGone: The pipe is broken.
        """
        stdin = self._process.stdin
        assert stdin is not None
        async with self._send_lock:
            if self._closing or stdin.is_closing():
                raise AppServerGone(f"the app-server is gone ({self.why_closed()})")
            try:
                stdin.write(payload + b"\n")
                await stdin.drain()
            except (BrokenPipeError, ConnectionResetError, RuntimeError) as problem:
                raise AppServerGone(f"the app-server is gone ({self.why_closed()})") from problem

    async def receive(self) -> bytes | None:
        """Return the next line, or None at the end; half a line at the end is dropped."""
        stdout = self._process.stdout
        assert stdout is not None
        while not self._ready:
            if self._ended.is_set():
                return None
            try:
                chunk = await stdout.read(_CHUNK)
                self._ready.extend(self._lines.feed(chunk))
            except (LineTooLong, ConnectionResetError) as problem:
                self._reason, chunk = str(problem), b""
            if not chunk:
                self._reason = self._reason or (
                    f"it ended within a line of {self._lines.pending_bytes} bytes" if self._lines.pending_bytes else ""
                )
                self._ended.set()
        return self._ready.popleft()

    async def close(self) -> None:
        """Close stdin, wait up to 5 s for the end, then signal the group; a second call waits for the first."""
        if self._stopped is None:
            self._closing = True
            self._stopped = asyncio.get_running_loop().create_task(self._stop(), name="kdskills-app-server-stop")
        await asyncio.shield(self._stopped)

    def why_closed(self) -> str:
        """Say how the child ended, with the last line of its error stream."""
        code = self._process.returncode
        how = self._reason or ("it is still running" if code is None else f"it ended with {code}")
        last = self.stderr_tail().strip().rsplit("\n", 1)[-1][-300:]
        return f"{how}; stderr: {last}" if last else how

    async def _stop(self) -> None:
        process, stdin = self._process, self._process.stdin
        assert stdin is not None
        stdin.close()
        if not await self._gone_within(STOP_SECONDS):
            self._signal(signal.SIGTERM)
            await self._gone_within(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        # A program that left the group may keep the pipes open for ever, so this side is closed without waiting for it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.wait()
        self._drain.cancel()
        await asyncio.wait({self._drain})
        self._ended.set()
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()
        await asyncio.sleep(0)

    async def _gone_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._process.wait()
                # the launcher's end says nothing of its child: the group has to be empty
                while not self._ended.is_set() and self._signal(0):  # noqa: ASYNC110 - the kernel sends no event for an empty group
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            return False
        return True

    def _signal(self, number: int) -> bool:
        """Signal the process group; return False when it has no process any more."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    async def _drain_stderr(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        while chunk := await stderr.read(_CHUNK):
            self._stderr.append(chunk[-_STDERR_KEPT:])
            self._stderr_size += len(self._stderr[-1])
            while self._stderr_size > _STDERR_KEPT and len(self._stderr) > 1:
                self._stderr_size -= len(self._stderr.popleft())


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
