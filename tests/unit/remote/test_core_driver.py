"""One core, two drivers: what each waits for, and what it never does."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading

import pytest

from kdskills.remote.core import BlockingDriver, LoopDriver, discard, drive
from kdskills.remote.turns import Turnstile

WORD = contextvars.ContextVar("WORD", default="unset")


async def value(word):
    return word


async def failing(error):
    raise error


def test_drive_returns_the_value_of_a_coroutine_that_never_suspends():
    """No loop is made or needed."""
    assert drive(value("x")) == "x"
    with pytest.raises(KeyError, match="mine"):
        drive(failing(KeyError("mine")))


def test_drive_refuses_a_coroutine_that_waits():
    """It is closed, so its `finally` runs, and the message names the other facade."""
    closed = []

    async def waits():
        try:
            await asyncio.sleep(0)
        finally:
            closed.append(True)

    with pytest.raises(RuntimeError, match="AsyncRemoteSkillsFacade"):
        drive(waits())
    assert closed == [True]


def test_an_awaitable_nobody_waits_for_is_ended():
    """Coroutines are closed, futures cancelled, anything else left alone."""
    coroutine = value("x")
    discard(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    discard(future)
    assert future.cancelled()
    loop.close()
    discard(object())


def test_parts_of_a_sync_session_run_on_threads_with_the_callers_context():
    """At once, in order of the parts, each with the context variables of the caller."""
    together = threading.Barrier(3)

    def part(number):
        async def run():
            together.wait(60)
            return number, WORD.get(), threading.current_thread() is threading.main_thread()

        return run

    token = WORD.set("caller")
    try:
        found = drive(BlockingDriver().gather([part(number) for number in range(3)]))
    finally:
        WORD.reset(token)
    assert found == [(0, "caller", False), (1, "caller", False), (2, "caller", False)]


def test_a_single_part_runs_right_here():
    """No thread is spent on one call."""

    async def where():
        return threading.current_thread()

    assert drive(BlockingDriver().gather([where])) == [threading.current_thread()]
    assert drive(BlockingDriver().gather([])) == []


@pytest.mark.parametrize("error", [KeyError("one"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_of_one_part_waits_for_the_others(error):
    """It is raised when all have ended."""
    ended = []

    async def slow():
        ended.append(True)

    with pytest.raises(type(error)):
        drive(BlockingDriver().gather([lambda: failing(error), slow, slow]))
    assert ended == [True, True]


async def test_an_error_of_one_task_waits_for_the_others():
    """The async driver does the same."""
    ended = []

    async def slow():
        await asyncio.sleep(0)
        ended.append(True)

    with pytest.raises(KeyError, match="one"):
        await LoopDriver().gather([lambda: failing(KeyError("one")), slow])
    assert ended == [True]
    assert await LoopDriver().gather([lambda: value(1), lambda: value(2)]) == [1, 2]


async def test_the_async_driver_takes_answers_of_both_kinds():
    """A client may answer some calls at once."""
    driver = LoopDriver()
    assert await driver.call(lambda word: word, word="plain") == "plain"
    assert await driver.call(value, "coroutine") == "coroutine"
    assert await driver.blocking(threading.current_thread) is not threading.current_thread()


async def test_what_must_not_break_goes_on_after_its_caller():
    """A cancelled caller sees its cancellation; the part still ends."""
    driver = LoopDriver()
    gate, ended = asyncio.Event(), asyncio.Event()

    async def part():
        await gate.wait()
        ended.set()

    task = asyncio.create_task(driver.unbroken(part))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await asyncio.wait_for(ended.wait(), 60)
    assert drive(BlockingDriver().unbroken(lambda: value("x"))) == "x"


def test_a_turnstile_lets_one_through_at_a_time():
    """Threads with one key follow each other; nothing is kept afterwards."""
    turnstile = Turnstile(BlockingDriver())
    inside, seen = [], []

    async def through():
        async with turnstile.turn("key"):
            inside.append(1)
            seen.append(len(inside))
            inside.pop()

    threads = [threading.Thread(target=lambda: [drive(through()) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(seen) == {1}
    assert len(seen) == 800
    assert turnstile._open == {}


async def test_a_turnstile_of_tasks_survives_errors_and_cancelling():
    """Whoever leaves by an error lets the next one in; other keys do not wait."""
    turnstile = Turnstile(LoopDriver())

    async def fails():
        async with turnstile.turn("key"):
            await asyncio.sleep(0)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await fails()
    async with turnstile.turn("key"):
        waiting = asyncio.create_task(fails())
        await asyncio.sleep(0)
        async with asyncio.timeout(60), turnstile.turn("other"):
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert turnstile._open == {}
