"""Steps that a caller who goes away cannot interrupt in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def whole(step: Coroutine[Any, Any, T]) -> T:
    """Return what *step* returns; a cancellation takes effect when it is over.

    A thread cannot be interrupted: cleaning up while it still works would take away what it has just put in place.
    """
    task = asyncio.ensure_future(step)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen, and of no use to who went away
        raise cancelled
    return task.result()
