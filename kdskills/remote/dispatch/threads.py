"""Daemon threads for handlers: a handler that hangs does not keep the interpreter from ending."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

IDLE_S: Final = 10.0


class HandlerThreads:
    """Runs functions on daemon threads, reusing those that are idle; the caller bounds how many run at once.

    The functions passed to `start` must not raise.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._waiting: deque[Callable[[], None]] = deque()
        self._idle = 0
        self._ready = threading.Condition()

    def start(self, function: Callable[[], None]) -> None:
        """Run *function* on a thread at once.

        Raises:
            RuntimeError: No thread can be started; *function* will not run.
        """
        if self._process != os.getpid():  # after a fork: idle threads and the lock's owner are in the parent
            self._begin()
        with self._ready:
            self._waiting.append(function)
            if self._idle >= len(self._waiting):
                self._ready.notify()
                return
        try:
            threading.Thread(target=self._work, name="kdskills-handler", daemon=True).start()
        except RuntimeError:
            with self._ready:
                if function not in self._waiting:  # a thread that became idle has taken it
                    return
                self._waiting.remove(function)
            raise

    async def call(self, function: Callable[[], T], *, on_loop_closed: Callable[[T], None] | None = None) -> T:
        """Run *function* on a thread and wait for it on the running loop; a waiter that is cancelled does not stop it.

        Args:
            function: May raise; the waiter gets what it raises.
            on_loop_closed: Called with the value if the loop was closed meanwhile, so that it can be released.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                value, error = function(), None
            except BaseException as raised:  # noqa: BLE001 - raised again where it is waited for
                value, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, ended, value, error)
            except RuntimeError:  # the loop is closed
                if on_loop_closed is not None and error is None:
                    on_loop_closed(value)  # type: ignore[arg-type]

        self.start(work)
        return await ended

    def _work(self) -> None:
        while (function := self._next()) is not None:
            function()

    def _next(self) -> Callable[[], None] | None:
        with self._ready:
            if not self._waiting:
                self._idle += 1
                try:
                    self._ready.wait_for(lambda: self._waiting, timeout=IDLE_S)
                finally:
                    self._idle -= 1
            return self._waiting.popleft() if self._waiting else None


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
