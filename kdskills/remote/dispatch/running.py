"""Bounded running under a deadline: threads for sync sessions, tasks and threads for async ones."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Awaitable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from kdskills.remote.dispatch.execution import Execution
from kdskills.remote.dispatch.threads import HandlerThreads


class Runner(Protocol):
    """Gives an execution a slot and waits for its end."""

    async def run(self, execution: Execution, seconds: float | None) -> bool:
        """Return True when it ended in time; otherwise its waiter gives up, and it may go on.

        Raises:
            RuntimeError: There is no thread to run it on; it did not begin.
        """
        ...


class BlockingRunner:
    """Runs handlers of sync sessions: on threads under a deadline, without one right here.

    Args:
        slots: Handlers that run at once under deadlines.
    """

    def __init__(self, slots: int) -> None:
        self._count = slots
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._slots = threading.BoundedSemaphore(self._count)
        self._threads = HandlerThreads()

    async def run(self, execution: Execution, seconds: float | None) -> bool:
        """As `Runner.run`; never suspends."""
        if seconds is None:
            execution.run()
            return True
        if self._process != os.getpid():  # forked: the handlers that had slots run in the other process
            self._begin()
        until = time.monotonic() + seconds
        slots = self._slots
        if not slots.acquire(timeout=max(0.0, seconds)):
            return False

        def work() -> None:
            try:
                execution.run()
            finally:
                slots.release()

        try:
            self._threads.start(work)
        except RuntimeError:
            slots.release()
            raise
        return execution.ended.wait(max(0.0, until - time.monotonic()))


class LoopRunner:
    """Runs handlers of async sessions: coroutine functions as tasks, plain functions on threads.

    Args:
        slots: Handlers that run at once, of both kinds together.
    """

    def __init__(self, slots: int) -> None:
        self._count = slots
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._threads = HandlerThreads()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, execution: Execution, seconds: float | None) -> bool:
        """As `Runner.run`; a task whose waiter gave up is cancelled, a thread keeps its slot until it ends."""
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._count))
        slot_run = _SlotRun(execution, slots, self._threads)
        task = asyncio.create_task(slot_run.take())
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)
        try:
            done, _ = await asyncio.wait({task}, timeout=None if seconds is None else max(0.0, seconds))
        except asyncio.CancelledError:  # the waiter goes; what began goes on and is written down
            if not slot_run.inside:
                task.cancel()
            raise
        if not done:
            slot_run.stop(task)
            execution.cancel = slot_run.cancel
            return False
        await task  # a defect of ours is raised here, not lost
        return True


class _SlotRun:
    """One execution's way through a slot."""

    def __init__(self, execution: Execution, slots: asyncio.Semaphore, threads: HandlerThreads) -> None:
        self._execution = execution
        self._slots = slots
        self._threads = threads
        self._handler: asyncio.Task[Any] | None = None
        self.inside = False

    def stop(self, task: asyncio.Task[None]) -> None:
        """Give up the place in the queue; a handler that began is left to `cancel`."""
        if not self.inside:
            task.cancel()

    def cancel(self) -> None:
        """Cancel the handler's own task."""
        if self._handler is not None:
            self._handler.cancel()

    async def take(self) -> None:
        """Wait for a slot, run, give the slot back."""
        async with self._slots:
            self.inside = True
            try:
                await self._run()
            except asyncio.CancelledError:  # nobody cancels this task once it is inside but a loop that closes
                if self._execution.on_loop and not self._execution.ended.is_set():
                    self._execution.abandon()
                raise

    async def _run(self) -> None:
        execution = self._execution
        if not execution.on_loop:
            value = await self._threads.call(execution.run, on_loop_closed=_drop)
            if value is None:
                return
        elif not await self._threads.call(execution.begin):
            return
        else:
            value = execution.invoke()
        if execution.raised is None and inspect.isawaitable(value):
            value = await self._awaited(value)
        try:
            await self._threads.call(lambda: execution.complete(value))
        except RuntimeError:  # no thread to be had: the loop waits for the disk rather than losing an answer
            execution.complete(value)

    async def _awaited(self, value: Awaitable[Any]) -> Any:
        self._handler = asyncio.create_task(_caught(value, self._execution), context=self._execution.context)
        return await asyncio.shield(self._handler)


async def _caught(value: Awaitable[Any], execution: Execution) -> Any:
    """Await a handler's awaitable; what it raises is kept, so that not even `SystemExit` reaches the loop."""
    try:
        return await value
    except BaseException as error:  # noqa: BLE001 - every exception of a handler is answered
        execution.raised = error
        return None


def _drop(awaitable: Awaitable[Any] | None) -> None:
    close = getattr(awaitable, "close", None)
    if callable(close):
        close()
