"""Messages of a connection, one JSON object per line or frame without a `jsonrpc` member, and how they travel.

They travel over the pipes of a child `codex app-server`, which has its own process group, or as text frames of a websocket. `Peer`
matches replies to requests and counts unexpected ones. `PendingCalls` keeps the server's calls until they are answered, because the
server has no list of them. Nothing here knows what a thread or a tool is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import threading
from collections import OrderedDict, deque
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

RawId = int | str
"""An id as it stands on the wire. Ids are strict about their type: `"0"` is not `0`."""

IdKey = tuple[type, RawId]


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the other side: it must be answered under exactly this id."""

    id: RawId
    method: str
    params: JsonObject


@dataclass(frozen=True, slots=True)
class Notification:
    """A message that needs no reply."""

    method: str
    params: JsonObject


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request of this client: `result`, or `error` with `code`, `message`, perhaps `data`."""

    id: RawId
    result: Any
    error: JsonObject | None


@dataclass(frozen=True, slots=True)
class Malformed:
    """A line that is no message, with the reason; such lines are counted, never fatal."""

    reason: str


Message = Request | Notification | Reply | Malformed


def id_key(raw_id: RawId) -> IdKey:
    """Return a dictionary key under which `0`, `"0"` and `False` differ."""
    return (type(raw_id), raw_id)


def encode(message: JsonObject) -> bytes:
    """Return the message as one line without its end; line breaks inside strings are escaped by JSON itself."""
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def decode(line: bytes | str) -> Message:
    """Decode a line; one that is no message becomes `Malformed`, not an exception."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as problem:
        return Malformed(f"not JSON: {type(problem).__name__}")
    if not isinstance(value, dict):
        return Malformed("not an object")
    method, has_id = value.get("method"), "id" in value
    if has_id and (isinstance(value["id"], bool) or not isinstance(value["id"], (int, str))):
        return Malformed("an id that is neither text nor a whole number")
    if method is not None:
        if not isinstance(method, str) or not method:
            return Malformed("a method that is no text")
        params = {} if value.get("params") is None else value["params"]
        if not isinstance(params, dict):
            return Malformed("params that are no object")
        return Request(value["id"], method, params) if has_id else Notification(method, params)
    if not has_id:
        return Malformed("neither method nor id")
    error = value.get("error")
    if error is not None:
        return Reply(value["id"], None, error if isinstance(error, dict) else {"message": str(error)})
    if "result" not in value:
        return Malformed("an answer without result or error")
    return Reply(value["id"], value["result"], None)


class LineTooLong(ValueError):
    """The other side sent more than `MAX_LINE_BYTES` without ending the line."""


class LineBuffer:
    """Splits a stream of bytes into lines of at most *limit* bytes, in time linear to their size."""

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._parts: list[bytes] = []
        self.pending_bytes = 0  # of an unfinished line
        self._limit = limit

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines this chunk completes, without their ends; blank ones are left out.

        Raises:
            LineTooLong: No end of line within the limit.
        """
        *ended, tail = chunk.split(b"\n")
        lines: list[bytes] = []
        for piece in ended:
            self._parts.append(piece)
            line = b"".join(self._parts)
            self._parts, self.pending_bytes = [], 0
            if len(line) > self._limit:
                raise LineTooLong(f"a line of {len(line)} bytes")
            if line.strip():
                lines.append(line)
        if tail:
            self._parts.append(tail)
            self.pending_bytes += len(tail)
        if self.pending_bytes > self._limit:
            raise LineTooLong(f"more than {self._limit} bytes without an end of line")
        return lines


METHOD_NOT_FOUND = -32601
INVALID_REQUEST = -32600


class Peer:
    """One connection, driven by one reading task.

    Callbacks run on the reading task in the order of the wire and must not wait: *on_request* with each request of the server,
    which the callee must answer, *on_notification* with each notification, and once *on_closed*, when the connection ended.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        on_request: Callable[[Request], None],
        on_notification: Callable[[Notification], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._on_request, self._on_notification, self._on_closed = on_request, on_notification, on_closed
        self._waiting: dict[IdKey, tuple[str, asyncio.Future[Any]]] = {}
        self._next = 0
        self._reader: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closed = False
        self.malformed = 0
        self.unexpected_replies = 0

    def start(self) -> None:
        """Begin reading."""
        self._loop = asyncio.get_running_loop()
        self._reader = self._loop.create_task(self._read(), name="kdskills-app-server-reader")

    async def request(self, method: str, params: JsonObject | None = None, *, timeout_s: float | None = 120.0) -> Any:
        """Ask the server and return its result.

        Raises:
            AppServerError: It answered with an error.
            AppServerGone: The connection ended first.
            WaitTimeoutError: No answer within `timeout_s`.
            RuntimeError: Called on another event loop than the connection's.
        """
        if self.closed:
            raise self.gone_error(method)
        self._check_loop()
        self._next += 1
        own_id, key = self._next, id_key(self._next)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[key] = (method, future)
        try:
            await self._send({"id": own_id, "method": method, "params": params or {}})
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as problem:
            if isinstance(problem, WaitTimeoutError):
                raise
            words = f"the app-server did not answer {method} within {timeout_s:g} s"
            raise WaitTimeoutError(words, method=method) from None
        finally:
            self._waiting.pop(key, None)
            if future.done() and not future.cancelled():
                future.exception()  # retrieves an error that nobody awaits after a cancellation, so that asyncio does not warn

    async def notify(self, method: str, params: JsonObject | None = None) -> None:
        """Send a notification."""
        await self._send({"method": method} if params is None else {"method": method, "params": params})

    async def answer(self, raw_id: RawId, result: JsonObject) -> None:
        """Answer a request of the server under exactly its id."""
        await self._send({"id": raw_id, "result": result})

    async def refuse(self, raw_id: RawId, code: int, message: str) -> None:
        """Answer a request of the server with an error."""
        await self._send({"id": raw_id, "error": {"code": code, "message": message}})

    async def close(self) -> None:
        """Close the connection; pending requests raise `AppServerGone`."""
        await self._transport.close()
        if self._reader is not None:
            await asyncio.wait({self._reader})
        self._end()

    def _check_loop(self) -> None:
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise RuntimeError(
                "this client was opened on another event loop and works on that one only; "
                "use CodexClient to share a client between threads"
            )

    async def _send(self, message: JsonObject) -> None:
        if self.closed:
            raise self.gone_error(str(message.get("method", "answer")))
        self._check_loop()
        await self._transport.send(encode(message))

    async def _read(self) -> None:
        try:
            while (payload := await self._transport.receive()) is not None:
                match decode(payload):
                    case Reply() as answer:
                        self._settle(answer)
                    case Request() as request:
                        self._on_request(request)
                    case Notification() as notification:
                        self._on_notification(notification)
                    case Malformed():
                        self.malformed += 1
        finally:
            self._end()

    def _settle(self, answer: Reply) -> None:
        method, future = self._waiting.get(id_key(answer.id), ("", None))
        if future is None or future.done():
            self.unexpected_replies += 1  # repeated, late or unknown
        elif (error := answer.error) is None:
            future.set_result(answer.result)
        else:
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

    def why(self) -> str:
        """Return what is known about the end of the connection."""
        return self._transport.why_closed()

    def gone_error(self, method: str) -> AppServerGone:
        """Return the error of a request that has no answer because the connection ended."""
        return AppServerGone(f"the app-server is gone ({self.why()}): {method} was not answered", method=method)


PendingState = Literal["pending", "responding", "resolved"]

MAX_RESOLVED = 4096
"""How many answered calls of a connection are remembered at least (twice as many at most), so that late answers get `not_found`."""


def new_epoch() -> str:
    """Return a name no other connection has: raw ids start at 0 again with every server."""
    return secrets.token_hex(6)


@dataclass(slots=True)
class PendingCall:
    """One tool call of the server."""

    handle: str  # connection epoch and raw id; the `request_id` of signals and rows
    raw_id: RawId  # as it goes back on the wire
    params: JsonObject
    state: PendingState = "pending"
    claimed: bool = False  # the client itself is answering the call, so that `rows` leaves it out

    @property
    def thread_id(self) -> str:
        """The thread that asks."""
        return str(self.params.get("threadId") or "")

    @property
    def turn_id(self) -> str:
        """The turn that asks."""
        return str(self.params.get("turnId") or "")


class PendingCalls:
    """The pending calls of one connection, which *epoch* names; safe to use from several threads."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self._calls: OrderedDict[str, PendingCall] = OrderedDict()
        self._lock = threading.Lock()

    def handle(self, raw_id: RawId) -> str:
        """Return the handle of a raw id; `0` and `"0"` have different ones."""
        return f"{self.epoch}:{json.dumps(raw_id)}"

    def add(self, raw_id: RawId, params: JsonObject) -> PendingCall | None:
        """Add a call; return None when its id was added before (a repeated delivery)."""
        with self._lock:
            handle = self.handle(raw_id)
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
        with self._lock:
            waiting = [call for call in self._calls.values() if call.state == "pending" and not call.claimed]
            keys = ("tool", "arguments", "callId", "threadId", "turnId", "namespace")
            return [
                {"requestId": call.handle, **{key: call.params.get(key) for key in keys}}
                for call in waiting
                if call.thread_id == session_id
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

    def expire(self, *, thread_id: str, turn_id: str | None = None) -> list[str]:
        """Resolve the calls of an ended turn, or of a deleted thread; returns their handles."""
        with self._lock:
            expired = [
                call
                for call in self._calls.values()
                if call.thread_id == thread_id and turn_id in (None, call.turn_id) and call.state != "resolved"
            ]
            for call in expired:
                call.state = "resolved"
            return [call.handle for call in expired]

    def expire_all(self) -> None:
        """Resolve all calls, because the connection ended and its ids are invalid."""
        with self._lock:
            for call in self._calls.values():
                call.state = "resolved"


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
        """Start the command in a process group of its own; raises `AppServerGone` when it cannot be started."""
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
        """Write one line; waits while the pipe is full, and raises `AppServerGone` when it is broken."""
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
            words = "websockets is not installed: run pip install 'kdskills[codex]'"
            raise MissingExtra(words, extra="codex") from None
        parts = urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            words = "the URL of an app-server begins with ws:// or wss:// and names a host"
            raise AppServerGone(words, scheme=parts.scheme)
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
            words = f"no app-server at {origin}: {type(problem).__name__}: {problem}"
            raise AppServerGone(words, url=origin) from problem
        return cls(connection)

    async def send(self, payload: bytes) -> None:
        """Send one text frame; raises `AppServerGone` when the connection is closed."""
        from websockets.exceptions import ConnectionClosed

        try:
            await self._connection.send(payload, text=True)
        except ConnectionClosed as problem:
            raise AppServerGone(f"the app-server is gone ({self.why_closed()})") from problem

    async def receive(self) -> bytes | None:
        """Return the next frame's bytes, or None when the connection ended."""
        from websockets.exceptions import ConnectionClosed

        try:
            return await self._connection.recv(decode=False)
        except ConnectionClosed as problem:
            self._reason = str(problem)
            return None

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


Transport = StdioTransport | WebsocketTransport
