"""`client.stream`: the server's messages as signals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from kdskills.remote.client.server import TOOL_CALL
from kdskills.remote.ports import JsonObject
from kdskills.remote.signals import AppServerSignal
from kdskills.remote.wire.pending import PendingCall

MAX_WAITING = 10_000
"""Signals a slow reader may fall behind; the oldest notifications are dropped then, calls stay in the pending store."""


def call_signal(call: PendingCall) -> AppServerSignal:
    """Return the signal of a tool call."""
    return _signal(TOOL_CALL, "request", call.params, call.handle)


def event_signal(method: str, params: JsonObject) -> AppServerSignal:
    """Return the signal of a notification."""
    return _signal(method, "notification", params, None)


def _signal(method: str, kind: str, params: JsonObject, request_id: str | None) -> AppServerSignal:
    thread_id = params.get("threadId")
    context = {key: params[key] for key in ("threadId", "turnId") if isinstance(params.get(key), str)}
    return AppServerSignal(
        event_type=f"app_server.{kind}.{method.replace('/', '.')}",
        method=method,
        signal_type=kind,
        received_at=time.time(),
        context=context,
        params=params,
        session={"id": thread_id} if isinstance(thread_id, str) else None,
        request_id=request_id,
    )


class Signals:
    """An async iterator over the signals of one session, from its creation on; ends with the connection."""

    def __init__(self, stream: SignalStream, session_id: str | None) -> None:
        self._stream = stream
        self._session_id = session_id
        self._queue: asyncio.Queue[AppServerSignal | None] = asyncio.Queue()
        self.dropped = 0

    def __aiter__(self) -> AsyncIterator[AppServerSignal]:
        return self

    async def __anext__(self) -> AppServerSignal:
        signal = await self._queue.get()
        if signal is None:
            self.close()
            raise StopAsyncIteration
        return signal

    async def next(self, timeout_seconds: float | None = None) -> AppServerSignal | None:
        """Return the next signal, or None when there is none in time or none will come."""
        try:
            async with asyncio.timeout(timeout_seconds):
                return await anext(self, None)
        except TimeoutError:
            return None

    def close(self) -> None:
        """Stop listening."""
        self._stream.remove(self)
        self._queue.put_nowait(None)

    def offer(self, signal: AppServerSignal | None) -> None:
        """Take a signal of this session; None is the end."""
        if signal is not None and self._session_id is not None:
            address = signal.session["id"] if signal.session else None
            if address != self._session_id:
                return
        if signal is not None and self._queue.qsize() >= MAX_WAITING:
            self._queue.get_nowait()
            self.dropped += 1
        self._queue.put_nowait(signal)


class SignalStream:
    """Distributes signals to all readers."""

    def __init__(self) -> None:
        self._readers: list[Signals] = []

    def signals(self, session_id: str | None = None) -> Signals:
        """Listen to one session, or to all; iterate over what is returned, and close it."""
        reader = Signals(self, session_id)
        self._readers.append(reader)
        return reader

    def publish(self, signal: AppServerSignal) -> None:
        """Offer a signal to every reader."""
        for reader in list(self._readers):
            reader.offer(signal)

    def end(self) -> None:
        """Tell every reader that the connection ended."""
        for reader in list(self._readers):
            reader.offer(None)

    def remove(self, reader: Any) -> None:
        """Forget a reader."""
        if reader in self._readers:
            self._readers.remove(reader)
