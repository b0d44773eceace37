"""Messages of a connection, one JSON object per line or frame without a `jsonrpc` member, and how they travel.

They travel over the pipes of a child `codex app-server`, or as text frames of a websocket. Nothing here knows what a tool is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from kdskills.errors import MissingExtra
from kdskills.remote.ports import AppServerError, AppServerGone, JsonObject, WaitTimeoutError

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

MAX_LINE_BYTES = 256 * 1024 * 1024
"""A line longer than this is not a message: the connection is closed instead of filling memory."""

METHOD_NOT_FOUND = -32601
INVALID_REQUEST = -32600

RawId = int | str
"""An id as it stands on the wire. Ids are strict about their type: `"0"` is not `0`, and a bool is none."""


def encode(message: JsonObject) -> bytes:
    """Return the message as one line without its end; line breaks inside strings are escaped by JSON itself."""
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def decode(line: bytes | str) -> JsonObject | None:
    """Return a line's request, notification (without `id`) or reply (without `method`); None for what is no message."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    raw_id, method = message.get("id"), message.get("method")
    if "id" in message and (isinstance(raw_id, bool) or not isinstance(raw_id, RawId)):
        return None
    if method is None:
        return message if "id" in message and ("result" in message or message.get("error") is not None) else None
    params = {} if message.get("params") is None else message["params"]
    return {**message, "params": params} if method and isinstance(method, str) and isinstance(params, dict) else None


class Peer:
    """One connection, driven by one reading task.

    Callbacks run on the reading task in the order of the wire and must not wait: *on_message* with each notification of the
    server and each request, which the callee must answer, and once *on_closed*, when the connection ended.
    """

    def __init__(
        self, transport: Transport, *, on_message: Callable[[JsonObject], None], on_closed: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._on_message, self._on_closed = on_message, on_closed
        self._waiting: dict[RawId, tuple[str, asyncio.Future[Any]]] = {}
        self._next = 0
        self.closed = False
        self.malformed = 0  # messages that are none; they are never fatal
        self.unexpected_replies = 0
        self._loop = asyncio.get_running_loop()
        self._reader = self._loop.create_task(self._read(), name="kdskills-app-server-reader")

    async def request(self, method: str, params: JsonObject | None = None, *, timeout_s: float | None = 120.0) -> Any:
        """Ask the server and return its result.

        Raises `AppServerError`, `AppServerGone` when the connection ends first, `WaitTimeoutError`, and `RuntimeError` on an event
        loop that is not the connection's.
        """
        self._check_usable(method)
        self._next += 1
        own_id, future = self._next, self._loop.create_future()
        self._waiting[own_id] = (method, future)
        try:
            await self.send({"id": own_id, "method": method, "params": params or {}})
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as problem:
            if isinstance(problem, WaitTimeoutError):
                raise
            words = f"the app-server did not answer {method} within {timeout_s:g} s"
            raise WaitTimeoutError(words, method=method) from None
        finally:
            del self._waiting[own_id]
            if future.done() and not future.cancelled():
                future.exception()  # retrieves an error that nobody awaits after a cancellation, so that asyncio does not warn

    async def send(self, message: JsonObject) -> None:
        """Send a notification, or the reply to a request of the server under exactly its id; raises `AppServerGone`."""
        self._check_usable(str(message.get("method", "answer")))
        await self._transport.send(encode(message))

    async def close(self) -> None:
        """Close the connection; pending requests raise `AppServerGone`."""
        await self._transport.close()
        await asyncio.wait({self._reader})
        self._end()

    def gone_error(self, method: str) -> AppServerGone:
        """Return the error of a request that has no answer because the connection ended."""
        why = self._transport.why_closed()
        return AppServerGone(f"the app-server is gone ({why}): {method} was not answered", method=method)

    def _check_usable(self, method: str) -> None:
        if self.closed:
            raise self.gone_error(method)
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "this client was opened on another event loop and works on that one only; "
                "use CodexClient to share a client between threads"
            )

    async def _read(self) -> None:
        try:
            while (payload := await self._transport.receive()) is not None:
                message = decode(payload)
                if message is None:
                    self.malformed += 1
                elif message.get("method") is None:
                    self._settle(message)
                else:
                    self._on_message(message)
        finally:
            self._end()

    def _settle(self, reply: JsonObject) -> None:
        method, future = self._waiting.get(reply["id"], ("", None))
        error = reply.get("error")
        if future is None or future.done():
            self.unexpected_replies += 1  # repeated, late or unknown
        elif error is None:
            future.set_result(reply["result"])
        else:
            error = error if isinstance(error, dict) else {"message": str(error)}
            message = str(error.get("message") or "no message")
            facts: JsonObject = {"rpc_code": error.get("code"), "server_message": message, "data": error.get("data")}
            words = f"the app-server refused {method}: {message}"
            future.set_exception(AppServerError(words, method=method, **facts))

    def _end(self) -> None:
        if self.closed:
            return
        self.closed = True
        for method, future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(self.gone_error(method))
        self._on_closed()


MAX_RESOLVED = 4096
"""How many answered calls of a connection are remembered at least (twice as many at most), so that late answers get `not_found`."""


@dataclass(slots=True)
class PendingCall:
    """One tool call of the server."""

    handle: str  # connection epoch and raw id; the `request_id` of signals and rows
    raw_id: RawId  # as it goes back on the wire
    params: JsonObject
    state: Literal["pending", "responding", "resolved"] = "pending"
    claimed: bool = False  # the client itself is answering the call, so that `rows` leaves it out


class PendingCalls:
    """The pending calls of one connection, of which the server has no list; safe to use from several threads."""

    def __init__(self) -> None:
        self.epoch = secrets.token_hex(6)  # names the connection, because raw ids start at 0 again with every server
        self._calls: dict[str, PendingCall] = {}
        self._lock = threading.Lock()

    def add(self, raw_id: RawId, params: JsonObject) -> PendingCall | None:
        """Add a call; return None when its id, of the same type, was added before (a repeated delivery)."""
        handle = f"{self.epoch}:{json.dumps(raw_id)}"
        with self._lock:
            if handle in self._calls:
                return None
            call = self._calls[handle] = PendingCall(handle, raw_id, params)
            if len(self._calls) > 2 * MAX_RESOLVED:
                resolved = [old_handle for old_handle, old_call in self._calls.items() if old_call.state == "resolved"]
                for old in resolved[:-MAX_RESOLVED]:
                    del self._calls[old]
            return call

    def rows(self, session_id: str) -> list[JsonObject]:
        """Return the rows of a thread's pending calls that are not claimed, oldest first."""
        keys = ("tool", "arguments", "callId", "threadId", "turnId", "namespace")
        with self._lock:
            return [
                {"requestId": call.handle, **{key: call.params.get(key) for key in keys}}
                for call in self._calls.values()
                if call.state == "pending" and not call.claimed and call.params.get("threadId") == session_id
            ]

    def begin(self, handle: str) -> PendingCall | JsonObject:
        """Reserve a pending call for answering; return a report when it cannot be answered now."""
        with self._lock:
            call = self._calls.get(handle)
            if call is None or call.state == "resolved":
                return {"status": "not_found", "requestId": handle}
            if call.state == "responding":
                return {"status": "conflict", "code": "in_flight", "requestId": handle}
            call.state = "responding"
            return call

    def end(self, call: PendingCall, *, sent: bool) -> None:
        """End the answering that `begin` started: resolved when sent, else pending again."""
        with self._lock:
            call.state = "resolved" if sent else "pending"

    def expire(self, thread_id: str | None = None, turn_id: str | None = None) -> None:
        """Resolve the calls of a thread, or of one turn; all calls when the connection ended and its ids are invalid."""
        names = {"threadId": thread_id, "turnId": turn_id}
        with self._lock:
            for call in self._calls.values():
                if all(name is None or call.params.get(key) == name for key, name in names.items()):
                    call.state = "resolved"


STOP_SECONDS = 5.0
_POLL_SECONDS = 0.02
_STDERR_KEPT = 64 * 1024


class StdioTransport:
    """The pipes of a child process.

    npm's `codex` is a node launcher around a native child, so stopping signals the whole group, and the end of the
    connection is the end of the pipe, not the end of the launcher.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None  # noqa: PT018
        self._process, self._stdin, self._stdout, self._stderr = process, process.stdin, process.stdout, process.stderr
        self.pid = process.pid  # the launcher's, which is also the group's
        self.stderr = b""  # the newest 64 KiB
        self._send_lock = asyncio.Lock()
        self._reason = ""
        self._ended = asyncio.Event()
        self._drain = asyncio.get_running_loop().create_task(self._drain_stderr(), name="kdskills-app-server-stderr")
        self._stopping: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(
        cls, command: Sequence[str], *, env: Mapping[str, str], cwd: str | os.PathLike[str] | None = None
    ) -> StdioTransport:
        """Start the command in a process group of its own; raises `AppServerGone` when it cannot be started."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        except (OSError, ValueError) as problem:
            raise AppServerGone(f"{command[0]} cannot be started: {problem}", command=command[0]) from problem
        return cls(process)

    async def send(self, payload: bytes) -> None:
        """Write one line; waits while the pipe is full, and raises `AppServerGone` when it is broken."""
        async with self._send_lock:
            if self._stopping is not None or self._stdin.is_closing():
                raise AppServerGone(f"the app-server is gone ({self.why_closed()})")
            try:
                self._stdin.write(payload + b"\n")
                await self._stdin.drain()
            except (BrokenPipeError, ConnectionResetError, RuntimeError) as problem:
                raise AppServerGone(f"the app-server is gone ({self.why_closed()})") from problem

    async def receive(self) -> bytes | None:
        """Return the next line that is not blank, or None at the end; half a line at the end is dropped."""
        while not self._ended.is_set():
            try:
                line = await self._stdout.readline()
            except ValueError:
                self._reason, line = f"more than {MAX_LINE_BYTES} bytes without an end of line", b""
            except ConnectionResetError as problem:
                self._reason, line = str(problem), b""
            if line.endswith(b"\n"):
                if line.strip():
                    return line[:-1]
                continue
            self._reason = self._reason or (f"it ended within a line of {len(line)} bytes" if line else "")
            self._ended.set()
        return None

    async def close(self) -> None:
        """Close stdin, wait up to 5 s for the end, then signal the group; a second call waits for the first."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(), name="kdskills-app-server-stop")
        await asyncio.shield(self._stopping)

    def why_closed(self) -> str:
        """Say how the child ended, with the last line of its error stream."""
        code = self._process.returncode
        how = self._reason or ("it is still running" if code is None else f"it ended with {code}")
        last = self.stderr.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1][-300:]
        return f"{how}; stderr: {last}" if last else how

    async def _stop(self) -> None:
        self._stdin.close()
        if not await self._gone_within(STOP_SECONDS):
            self._signal(signal.SIGTERM)
            await self._gone_within(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        # A program that left the group may keep the pipes open for ever, so this side is closed without waiting for it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._process.wait()
        self._drain.cancel()
        await asyncio.wait({self._drain})
        self._ended.set()
        transport = getattr(self._process, "_transport", None)
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
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    async def _drain_stderr(self) -> None:
        while chunk := await self._stderr.read(_STDERR_KEPT):
            self.stderr = (self.stderr + chunk)[-_STDERR_KEPT:]


class WebsocketTransport:
    """A client connection to `codex app-server --listen ws://…`."""

    def __init__(self, connection: ClientConnection, closed: type[Exception]) -> None:
        self._connection, self._closed = connection, closed  # what it raises when it is closed
        self._reason = ""

    @classmethod
    async def connect(cls, url: str, *, token: str | None = None) -> WebsocketTransport:
        """Open the connection, without the environment's proxies; raises `AppServerGone`, also for a URL of another scheme."""
        try:
            from websockets.asyncio.client import connect
            from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
        except ImportError:
            words = "websockets is not installed: run pip install 'kdskills[codex]'"
            raise MissingExtra(words, extra="codex") from None
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            words = "the URL of an app-server begins with ws:// or wss:// and names a host"
            raise AppServerGone(words, scheme=parts.scheme)
        origin = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
        try:
            connection = await connect(
                url,
                additional_headers={"Authorization": f"Bearer {token}"} if token is not None else {},
                max_size=MAX_LINE_BYTES,
                open_timeout=30.0,
                close_timeout=STOP_SECONDS,
                proxy=None,
                compression=None,
            )
        except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as problem:
            words = f"no app-server at {origin}: {type(problem).__name__}: {problem}"
            raise AppServerGone(words, url=origin) from problem
        return cls(connection, ConnectionClosed)

    async def send(self, payload: bytes) -> None:
        """Send one text frame; raises `AppServerGone` when the connection is closed."""
        try:
            await self._connection.send(payload, text=True)
        except self._closed as problem:
            raise AppServerGone(f"the app-server is gone ({self.why_closed()})") from problem

    async def receive(self) -> bytes | None:
        """Return the next frame's bytes, or None when the connection ended."""
        try:
            return await self._connection.recv(decode=False)
        except self._closed as problem:
            self._reason = str(problem)
            return None

    async def close(self) -> None:
        """Close the connection; the server and its threads stay."""
        try:
            async with asyncio.timeout(2 * STOP_SECONDS):
                await self._connection.close()
        except TimeoutError:
            self._connection.transport.abort()

    def why_closed(self) -> str:
        """Say how the connection ended."""
        return self._reason or "the connection is closed"


Transport = StdioTransport | WebsocketTransport
