"""Starting runs so that who is cancelled meanwhile leaves none behind (spec execution §5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kdskills.execution.protocol import Executor, Handle
from kdskills.execution.request import ExecRequest, ExecResult

H = TypeVar("H", bound=Handle)


async def in_thread(start: Callable[[], H]) -> H:
    """Return the run *start* gives, which blocks and so has a thread of its own.

    A thread cannot be stopped halfway: when the caller is cancelled the run is ended as soon as it is there, and only
    then does the cancel go on. Raises what *start* raises.
    """
    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.shield(_undone(starting))
        raise


async def _undone(starting: asyncio.Future[H]) -> None:
    await asyncio.wait([starting])
    if starting.exception() is None:  # one that failed has started nothing, and nobody waits for its words
        await starting.result().cancel()


async def to_the_end(engine: Executor, request: ExecRequest) -> ExecResult:
    """Start *request* and wait for its end; the whole tree is gone when CancelledError is raised. Raises as `start`."""
    handle = await engine.start(request)
    try:
        return await handle.wait()
    except asyncio.CancelledError:
        await asyncio.shield(handle.cancel())
        raise
