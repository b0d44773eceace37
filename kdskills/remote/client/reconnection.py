"""How a client reconnects after its connection was lost: the pauses, and the limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from kdskills.remote.ports import AppServerError, AppServerGone

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
LEAST_ATTEMPT_S: Final = 1.0
"""The least time an attempt gets, even when the budget is nearly used up."""


class ReconnectBudget:
    """The pauses between attempts: doubled each time, within one budget of seconds.

    A connection that lasted as long as the whole budget starts a new budget. One that is lost earlier continues the old budget,
    so that a server that dies at every start is not restarted for ever.

    Args:
        seconds: The budget; with 0 there are no attempts.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._opened = float("-inf")
        self._end: float | None = None
        self._pause = FIRST_PAUSE_S

    def opened(self, now: float) -> None:
        """Record that a connection was opened."""
        self._opened = now

    def lost(self, now: float) -> None:
        """Record that a connection was lost."""
        if self._end is None or now - self._opened >= self._seconds:
            self._end, self._pause = now + self._seconds, FIRST_PAUSE_S

    def seconds_left(self, now: float) -> float:
        """Return the seconds that remain for attempts, 0 when the budget is used up."""
        return 0.0 if self._end is None else max(0.0, self._end - now)

    def pause(self, now: float) -> float:
        """Return how long to wait before the next attempt; each pause is twice the last one."""
        pause = min(self._pause, self.seconds_left(now))
        self._pause = min(self._pause * 2, LONGEST_PAUSE_S)
        return pause


class Reconnector:
    """Reconnects by itself after a loss, while the budget lasts; used on one event loop only.

    Args:
        seconds: The budget after each loss; with 0 the program itself must reconnect.
        disconnected: Returns whether there is no connection.
        attempt: Makes one attempt to connect again.
    """

    def __init__(
        self, seconds: float, disconnected: Callable[[], bool], attempt: Callable[[], Awaitable[None]]
    ) -> None:
        self._seconds = seconds
        self._disconnected = disconnected
        self._attempt = attempt
        self._budget = ReconnectBudget(seconds)
        self._task: asyncio.Task[None] | None = None
        self._failure = ""

    @property
    def active(self) -> bool:
        """Whether attempts are being made."""
        return self._task is not None and not self._task.done()

    def words(self) -> str:
        """Return the end of the error message for requests while there is no connection."""
        return "; the client is reconnecting, try again in a moment" if self.active else self._failure

    def forget(self) -> None:
        """Start a new budget, because the program itself reconnects."""
        self._budget, self._failure = ReconnectBudget(self._seconds), ""

    def opened(self) -> None:
        """Record that a connection was opened."""
        self._budget.opened(asyncio.get_running_loop().time())
        self._failure = ""

    def lost(self) -> None:
        """Record that a connection was lost, and start to reconnect if there is a budget."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._budget.lost(now)
        if not self.active and self._budget.seconds_left(now) > 0:
            self._task = loop.create_task(self._reconnect(), name="kdskills-app-server-return")

    async def stop(self) -> None:
        """Stop reconnecting."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _reconnect(self) -> None:
        loop = asyncio.get_running_loop()
        while self._disconnected():
            try:
                async with asyncio.timeout(max(LEAST_ATTEMPT_S, self._budget.seconds_left(loop.time()))):
                    await self._attempt()
            except (AppServerError, AppServerGone, TimeoutError) as problem:
                if self._budget.seconds_left(loop.time()) <= 0:
                    last = str(problem) or "no answer in time"
                    self._failure = f"; reconnecting was given up after {self._seconds:g} s: {last}"
                    return
                await asyncio.sleep(self._budget.pause(loop.time()))
