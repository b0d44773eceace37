"""How long, and how patiently, a client tries to come back after its connection was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from kdskills.remote.ports import AppServerError, AppServerGone

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
LEAST_ATTEMPT_S: Final = 1.0
"""What an attempt may take whose budget ends."""


class ReconnectBudget:
    """The pauses between attempts: doubled each time, within one budget of seconds.

    A connection that held as long as the whole budget earns a new one. One that is lost again before that goes on with what
    is left, so that a server that dies at once whenever it is started is not started for ever.

    Args:
        seconds: The budget; 0 never comes back.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._opened = float("-inf")
        self._end: float | None = None
        self._pause = FIRST_PAUSE_S

    def opened(self, now: float) -> None:
        """Take note of a connection that was opened."""
        self._opened = now

    def lost(self, now: float) -> None:
        """Take note of a connection that was lost."""
        if self._end is None or now - self._opened >= self._seconds:
            self._end, self._pause = now + self._seconds, FIRST_PAUSE_S

    def seconds_left(self, now: float) -> float:
        """Return the seconds that are left for attempts; none is to be made when there are none."""
        return 0.0 if self._end is None else max(0.0, self._end - now)

    def pause(self, now: float) -> float:
        """Return how long to wait before the next attempt; each pause is twice the last one."""
        pause = min(self._pause, self.seconds_left(now))
        self._pause = min(self._pause * 2, LONGEST_PAUSE_S)
        return pause


class Reconnector:
    """Brings a lost connection back, unasked, while there is a budget for it; used on one event loop only.

    Args:
        seconds: The budget of each comeback; 0 leaves it to the program.
        gone: Whether there is no connection.
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
        """Return what those who ask meanwhile are told beside the loss itself."""
        return "; the client is coming back, ask again in a moment" if self.active else self._failure

    def forget(self) -> None:
        """Begin with a new budget: the program itself connects again."""
        self._budget, self._failure = ReconnectBudget(self._seconds), ""

    def opened(self) -> None:
        """Take note of a connection that was opened."""
        self._budget.opened(asyncio.get_running_loop().time())
        self._failure = ""

    def lost(self) -> None:
        """Take note of a connection that was lost, and begin to come back if there is a budget."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._budget.lost(now)
        if not self.active and self._budget.seconds_left(now) > 0:
            self._task = loop.create_task(self._reconnect(), name="kdskills-app-server-return")

    async def stop(self) -> None:
        """End the attempts."""
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
                    self._failure = f"; coming back was given up after {self._seconds:g} s: {last}"
                    return
                await asyncio.sleep(self._budget.pause(loop.time()))
