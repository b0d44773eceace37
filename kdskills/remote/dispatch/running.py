"""Runs a bounded number of handlers under deadlines: on threads, or on threads and tasks of an event loop."""

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
        """Return whether the execution ended in time; otherwise it may go on while nobody waits for it.

        Raises:
            RuntimeError: No thread could be started, so the handler did not run.
        """
        ...


class BlockingRunner:
    """Runs handlers of sync sessions: with a deadline on a thread, without one on the caller's thread.

    Args:
        slots: How many handlers with deadlines may run at the same time.
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
        if self._process != os.getpid():  # after a fork: the handlers that have slots run in the parent process
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
        slots: How many handlers may run at the same time.
    """

    def __init__(self, slots: int) -> None:
        self._count = slots
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._threads = HandlerThreads()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, execution: Execution, seconds: float | None) -> bool:
        """As `Runner.run`; after the deadline a task is cancelled, while a thread keeps its slot until it ends."""
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._count))
        slot_run = _SlotRun(execution, slots, self._threads)
        task = asyncio.create_task(slot_run.take())
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)
        try:
            done, _ = await asyncio.wait({task}, timeout=None if seconds is None else max(0.0, seconds))
        except asyncio.CancelledError:  # the caller stops waiting; a handler that began goes on
            if not slot_run.inside:
                task.cancel()
            raise
        if not done:
            slot_run.stop(task)
            execution.cancel = slot_run.cancel
            return False
        await task  # raises defects of this module, which would be lost otherwise
        return True


class _SlotRun:
    """One execution that waits for a slot and then runs in it."""

    def __init__(self, execution: Execution, slots: asyncio.Semaphore, threads: HandlerThreads) -> None:
        self._execution = execution
        self._slots = slots
        self._threads = threads
        self._handler: asyncio.Task[Any] | None = None
        self.inside = False

    def stop(self, task: asyncio.Task[None]) -> None:
        """Stop waiting for a slot; a handler that began is not stopped, see `cancel`."""
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
            except asyncio.CancelledError:  # inside a slot, only a closing event loop cancels this task
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
            value = await self._run_task(value)
        try:
            await self._threads.call(lambda: execution.complete(value))
        except RuntimeError:  # no thread could be started: block the loop rather than lose an answer
            execution.complete(value)

    async def _run_task(self, value: Awaitable[Any]) -> Any:
        self._handler = asyncio.create_task(_await_handler(value, self._execution), context=self._execution.context)
        return await asyncio.shield(self._handler)


async def _await_handler(value: Awaitable[Any], execution: Execution) -> Any:
    """Await a handler's awaitable and store what it raises, so that not even `SystemExit` reaches the loop."""
    try:
        return await value
    except BaseException as error:  # noqa: BLE001 - every exception of a handler is answered
        execution.raised = error
        return None


def _drop(awaitable: Awaitable[Any] | None) -> None:
    close = getattr(awaitable, "close", None)
    if callable(close):
        close()
