"""Messages of a connection: one JSON object per line or frame, without a `jsonrpc` member.

`Peer` matches replies to requests and counts unexpected ones. `PendingCalls` keeps the server's calls until they are answered,
because the server has no list of them. Nothing here knows what a thread or a tool is.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kdskills.remote.ports import AppServerError, AppServerGone, JsonObject, WaitTimeoutError

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


def is_id(value: object) -> bool:
    """Return whether this can be an id: text or a whole number; a bool is neither."""
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def encode(message: JsonObject) -> bytes:
    """Return the message as one line without its end; line breaks inside strings are escaped by JSON itself."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "surrogatepass"
    )


def decode(line: bytes | str) -> Message:
    """Decode a line; one that is no message becomes `Malformed`, not an exception."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as problem:
        return Malformed(f"not JSON: {type(problem).__name__}")
    if not isinstance(value, dict):
        return Malformed("not an object")
    method, has_id = value.get("method"), "id" in value
    if has_id and not is_id(value["id"]):
        return Malformed("an id that is neither text nor a whole number")
    if method is not None:
        if not isinstance(method, str) or not method:
            return Malformed("a method that is no text")
        params = value.get("params")
        if params is None:
            params = {}
        if not isinstance(params, dict):
            return Malformed("params that are no object")
        return Request(value["id"], method, params) if has_id else Notification(method, params)
    return _answer(value) if has_id else Malformed("neither method nor id")


def _answer(value: JsonObject) -> Message:
    error = value.get("error")
    if error is not None:
        return Reply(value["id"], None, error if isinstance(error, dict) else {"message": str(error)})
    if "result" not in value:
        return Malformed("an answer without result or error")
    return Reply(value["id"], value["result"], None)


class LineTooLong(ValueError):
    """The other side sent more than `MAX_LINE_BYTES` without ending the line."""


class LineBuffer:
    """Splits a stream of bytes into lines of any length, in time linear to their size.

    Args:
        limit: Longest line in bytes.
    """

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._parts: list[bytes] = []
        self._pending_bytes = 0
        self._limit = limit

    @property
    def pending_bytes(self) -> int:
        """How many bytes of an unfinished line are buffered."""
        return self._pending_bytes

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
            self._parts, self._pending_bytes = [], 0
            if len(line) > self._limit:
                raise LineTooLong(f"a line of {len(line)} bytes")
            if line.strip():
                lines.append(line)
        if tail:
            self._parts.append(tail)
            self._pending_bytes += len(tail)
        if self._pending_bytes > self._limit:
            raise LineTooLong(f"more than {self._limit} bytes without an end of line")
        return lines


METHOD_NOT_FOUND = -32601
INVALID_REQUEST = -32600


class Transport(Protocol):
    """Carries whole messages; `receive` returns None once, at the end."""

    async def send(self, payload: bytes) -> None:
        """Send one message.

        Raises:
            AppServerGone: The other side is not there any more.
        """
        ...

    async def receive(self) -> bytes | None:
        """Return the next message, or None when none will come."""
        ...

    async def close(self) -> None:
        """Close for good; may be called twice."""
        ...

    def why_closed(self) -> str:
        """Return what is known about the end of the connection, for error messages."""
        ...


class Peer:
    """One connection, driven by one reading task.

    Callbacks run on the reading task in the order of the wire; they must not wait.

    Args:
        transport: What carries the messages.
        on_request: Called with each request of the server, which the callee must answer.
        on_notification: Called with each notification.
        on_closed: Runs once, when the connection ended.
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
        self._on_request = on_request
        self._on_notification = on_notification
        self._on_closed = on_closed
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
        own_id = self._next
        key = id_key(own_id)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[key] = (method, future)
        try:
            await self._send({"id": own_id, "method": method, "params": params or {}})
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as problem:
            if isinstance(problem, WaitTimeoutError):
                raise
            raise WaitTimeoutError(
                f"the app-server did not answer {method} within {timeout_s:g} s", method=method
            ) from None
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
                self._take(payload)
        finally:
            self._end()

    def _take(self, payload: bytes) -> None:
        match decode(payload):
            case Reply() as answer:
                self._settle(answer)
            case Request() as request:
                self._on_request(request)
            case Notification() as notification:
                self._on_notification(notification)
            case Malformed():
                self.malformed += 1

    def _settle(self, answer: Reply) -> None:
        method, future = self._waiting.get(id_key(answer.id), ("", None))
        if future is None or future.done():
            self.unexpected_replies += 1  # repeated, late or unknown
            return
        if answer.error is None:
            future.set_result(answer.result)
            return
        error = answer.error
        message = str(error.get("message") or "no message")
        future.set_exception(
            AppServerError(
                f"the app-server refused {method}: {message}",
                method=method,
                rpc_code=error.get("code"),
                server_message=message,
                data=error.get("data"),
            )
        )

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
    """One tool call of the server.

    Attributes:
        handle: Connection epoch and raw id; the `request_id` of signals and rows.
        raw_id: The id as it goes back on the wire.
        params: The call's params.
        state: The state of its answer.
        claimed: Whether the client itself is answering the call, so that `rows` leaves it out.
    """

    handle: str
    raw_id: RawId
    params: JsonObject
    state: PendingState = field(default="pending")
    claimed: bool = False

    @property
    def thread_id(self) -> str:
        """The thread that asks."""
        return str(self.params.get("threadId") or "")

    @property
    def turn_id(self) -> str:
        """The turn that asks."""
        return str(self.params.get("turnId") or "")

    def row(self) -> JsonObject:
        """Return the row of `sessions.tool_calls`."""
        keys = ("tool", "arguments", "callId", "threadId", "turnId", "namespace")
        return {"requestId": self.handle, **{key: self.params.get(key) for key in keys}}


class PendingCalls:
    """The pending calls of one connection; safe to use from several threads.

    Args:
        epoch: The connection's name.
    """

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
            return [call.row() for call in waiting if call.thread_id == session_id]

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
