"""Starting runs and preparing what they need, so that a cancelled caller leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kdskills.execution.protocol import Executor
from kdskills.execution.request import ExecRequest, ExecResult

T = TypeVar("T")


async def in_thread(make: Callable[[], T], undo: Callable[[T], Awaitable[object]]) -> T:
    """Run the blocking *make* in a thread of its own and return its result.

    A thread cannot be stopped halfway: when the caller is cancelled, its result is undone as soon as it is there, and
    only then is the cancellation raised. Raises what *make* raises.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.shield(_undone(making, undo))
        raise


async def _undone(making: asyncio.Future[T], undo: Callable[[T], Awaitable[object]]) -> None:
    await asyncio.wait([making])
    if making.exception() is None:  # a failed *make* left nothing to undo
        await undo(making.result())


async def to_the_end(engine: Executor, request: ExecRequest) -> ExecResult:
    """Start *request* and wait for its end; the whole tree is gone when CancelledError is raised. Raises as `start`."""
    handle = await engine.start(request)
    try:
        return await handle.wait()
    except asyncio.CancelledError:
        await asyncio.shield(handle.cancel())
        raise
