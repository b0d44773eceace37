"""Requests and replies over one connection: matches replies to requests and counts unexpected ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from kdskills.remote.ports import AppServerError, AppServerGone, JsonObject, WaitTimeoutError
from kdskills.remote.wire.framing import IdKey, Malformed, Notification, RawId, Reply, Request, decode, encode, id_key

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
