"""Waiting for foreign code that may hang, block a thread, or ignore being cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import re
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_HALVES = re.compile("[\ud800-\udfff]")


class TookTooLong(Exception):
    """The time is up; unlike `TimeoutError`, nothing but `within` raises it."""


def whole_text(text: str) -> str:
    """Return *text* with halves of surrogate pairs replaced: no transport can encode them."""
    return _HALVES.sub("\ufffd", text)


async def within(work: Coroutine[Any, Any, T], limit: float, grace: float) -> T:
    """Return what *work* gives within *limit* seconds.

    When the time is up or the caller is cancelled, *work* is cancelled and waited for at most *grace* seconds: what
    ignores its cancellation is left behind.

    Raises:
        TookTooLong: The time is up.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=limit)
        if task.done():
            return task.result()
        raise TookTooLong
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=grace)
        if task.done() and not task.cancelled():
            task.exception()  # marks it as retrieved, so that asyncio does not warn about it later


async def in_thread(function: Callable[[], T]) -> T:
    """Return what *function* gives, run in a thread of its own that sees this context.

    The loop's own pool is small and shared: functions that never return would use it up, and the end of the process
    would wait for them.
    """
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()
    outcome: list[T] = []
    failure: list[BaseException] = []
    finished = loop.create_future()

    def settle() -> None:
        if not finished.done():
            finished.set_result(None)

    def work() -> None:
        try:
            outcome.append(context.run(function))
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failure.append(error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=work, name="kdskills-tool", daemon=True).start()
    await finished
    if failure:
        raise failure[0]
    return outcome[0]
