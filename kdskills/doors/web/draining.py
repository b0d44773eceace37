"""Stopping in order: no new requests, those that run get their time, streams end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Drain:
    """Counts what runs, and knows whether the service is being stopped."""

    def __init__(self) -> None:
        self._running = 0
        self._started = False
        self._waiting: set[asyncio.Event] = set()

    @property
    def started(self) -> bool:
        """Whether the service is being stopped."""
        return self._started

    @property
    def idle(self) -> bool:
        """Whether nothing runs any more."""
        return self._running == 0

    def start(self) -> None:
        """Take nothing new, and tell streams to end."""
        self._started = True
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
        if self._started:
            event.set()
        self._waiting.add(event)
        try:
            yield event
        finally:
            self._waiting.discard(event)
