"""What every facade shares: work that outlives its caller, and locks that serialize what has one key."""

from __future__ import annotations

import asyncio
import gc

import pytest

from kdskills.remote.core import FacadeCore


def core_of_facade() -> FacadeCore:
    """Return the core of an async facade over a client without methods."""
    return FacadeCore(object(), asynchronous=True, profile=None, journal=None, max_concurrency=8)


async def test_what_must_not_break_goes_on_after_its_caller() -> None:
    """A cancelled caller sees its cancellation; the work still ends."""
    core, gate, ended = core_of_facade(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await gate.wait()
        ended.set()

    caller = asyncio.create_task(core.unbroken(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not ended.is_set()
    gate.set()
    await asyncio.wait_for(ended.wait(), 60)


async def test_one_key_lets_one_through_at_a_time() -> None:
    """Errors and cancelled waiters leave the lock usable; other keys do not wait, and nothing is kept afterwards."""
    core, inside, most = core_of_facade(), 0, 0

    async def enter(number: int) -> None:
        nonlocal inside, most
        async with core.turnstile("thread"):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1
            if number == 1:
                raise ValueError(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(5)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    async with core.turnstile("other"):
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    kinds = [type(end) for end in ends]
    assert (most, kinds) == (1, [type(None), ValueError, type(None), asyncio.CancelledError, type(None)])
    del tasks, ends
    gc.collect()
    assert len(core._turnstiles) == 0
