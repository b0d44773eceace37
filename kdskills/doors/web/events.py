"""Server-sent events: what a watch tells, as it tells it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from kdskills.app.operations.table import Emit
from kdskills.app.wire import json_facts, json_text
from kdskills.errors import BadRequest, KdskillsError


class Drain:
    """Counts what runs, and knows whether the service is being stopped: `started` is True then."""

    def __init__(self) -> None:
        self._running = 0
        self.started = False
        self._waiting: set[asyncio.Event] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing runs any more."""
        return self._running == 0

    def start(self) -> None:
        """Take nothing new, and tell streams to end."""
        self.started = True
        for event in self._waiting:
            event.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count one request for the length of the block."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @contextmanager
    def stop_event(self) -> Iterator[asyncio.Event]:
        """Give a stream the event that is set when it must end."""
        event = asyncio.Event()
        if self.started:
            event.set()
        self._waiting.add(event)
        try:
            yield event
        finally:
            self._waiting.discard(event)


WAITING: Final = 1024
"""Events a reader may be behind; a slower one is cut off, and comes back with the last number it has."""
RETRY: Final = b"retry: 2000\n\n"
"""Milliseconds after which a reader who was cut off comes back."""
WAITING_STILL: Final = b": waiting\n\n"
"""A comment, which keeps what lies between from closing a quiet connection."""

CHECK_S: Final = 10.0
"""Seconds between two looks whether the reader may still read: a token that is revoked ends its streams, too."""

T = TypeVar("T")
Allowed = Callable[[], Awaitable[None]]
"""Returns while the reader may go on, and raises a KdskillsError then."""
Watch = Callable[[Emit], Awaitable[BaseModel]]


def frame(event: str, data: str, number: int | None = None) -> bytes:
    """Return one event; *data* is JSON, which has no line breaks."""
    first = "" if number is None else f"id: {number}\n"
    return f"{first}event: {event}\ndata: {data}\n\n".encode()


def failed(error: KdskillsError) -> bytes:
    """Return an error as an event, in the words of every door."""
    return frame("error", json_facts(error.to_json()))


def last_seen(headers: Mapping[str, str], number: int | None = None) -> int:
    """Return the number of the last event a reader has: the header browsers send beats the query. Raises BadRequest."""
    text = headers.get("last-event-id", "").strip()
    if not text:
        return number or 0
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise BadRequest(
            "Last-Event-ID is the number of an event", errors=[{"path": "Last-Event-ID", "problem": "no number"}]
        )
    return int(text)


def stream_of(pieces: AsyncIterator[bytes]) -> StreamingResponse:
    """Answer with a stream of events."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(pieces, media_type="text/event-stream", headers=headers)


async def event_frames(
    watch: Watch, drain: Drain, allowed: Allowed | None = None, *, check_s: float = CHECK_S
) -> AsyncIterator[bytes]:
    """Run *watch* and give its events, then `end` with its answer; a service that stops ends the stream before.

    A reader who leaves ends the watch. Errors are an event of their own, with the words of every door.

    Who reads is asked to be *allowed* every *check_s* seconds, so that nobody reads on with a token that was revoked.
    """
    queue: asyncio.Queue[BaseModel] = asyncio.Queue(WAITING)
    clock = asyncio.get_running_loop().time
    with drain.stop_event() as stopping:
        running: asyncio.Future[BaseModel] = asyncio.ensure_future(watch(queue.put_nowait))
        stopped = asyncio.ensure_future(stopping.wait())
        getting = asyncio.ensure_future(queue.get())
        checked = clock()
        try:
            yield RETRY
            while not stopped.done():
                waiting: list[asyncio.Future[Any]] = [getting, running, stopped]
                patience = None if allowed is None else max(0.0, checked + check_s - clock())
                await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if allowed is not None and clock() >= checked + check_s:
                    checked = clock()
                    await allowed()
                if getting.done():
                    yield _event(getting.result())
                    getting = asyncio.ensure_future(queue.get())
                elif running.done():
                    while not queue.empty():
                        yield _event(queue.get_nowait())
                    yield _end(running)
                    return
        except KdskillsError as error:
            yield failed(error)
        finally:
            tasks: tuple[asyncio.Future[Any], ...] = (running, stopped, getting)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def unless(stopping: asyncio.Event, doing: Awaitable[T]) -> T | None:
    """Return what *doing* comes to, or None when the service stops first."""
    running = asyncio.ensure_future(doing)
    stopped = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return await running if running.done() else None
    finally:
        for task in (running, stopped):
            task.cancel()
        await asyncio.gather(running, stopped, return_exceptions=True)


def _event(event: BaseModel) -> bytes:
    return frame(str(getattr(event, "kind", "event")), json_text(event), getattr(event, "seq", None))


def _end(running: asyncio.Future[Any]) -> bytes:
    error = running.exception()
    if error is None:
        answer: BaseModel = running.result()
        return frame("end", json_text(answer))
    if isinstance(error, KdskillsError):
        return failed(error)
    if isinstance(error, asyncio.QueueFull):
        return frame("behind", "{}")
    raise error
