"""Coroutines used by blocking callers: which thread runs what, and that no wait is for ever."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading

import pytest

from kdskills.session.threads import Blocking, LoopThread, blocking, discard, on_waiting_thread, shared_loop

WORD = contextvars.ContextVar("WORD", default="unset")
LONG = 60


class Gone(Exception):
    """The loop has ended."""


@pytest.fixture
def loop():
    """A loop thread, ended afterwards."""
    made = LoopThread("threads-test", Gone)
    yield made
    made.stop()


async def value(word):
    return word


def test_values_and_errors_come_back_as_they_are(loop):
    """Whatever the work raises reaches its caller, and the loop goes on: not even an interrupt ends it."""

    async def failing(error):
        raise error

    assert loop.run(lambda: value("x")) == "x"
    for error in (KeyError("mine"), KeyboardInterrupt(), SystemExit(1), GeneratorExit()):
        with pytest.raises(type(error)) as caught:
            loop.run(lambda error=error: failing(error))
        assert caught.value is error
    assert loop.call(threading.current_thread).name == "threads-test"


def test_blocking_functions_run_on_the_thread_that_waits(loop):
    """With its context variables, which they may change; in tasks of their own they run on other threads."""

    async def work():
        here = await on_waiting_thread(threading.current_thread)
        await on_waiting_thread(lambda: WORD.set("changed"))
        return here, WORD.get(), await asyncio.gather(on_waiting_thread(threading.current_thread))

    token = WORD.set("caller")
    try:
        here, seen, (elsewhere,) = loop.run(work)
        assert (here, seen, WORD.get()) == (threading.current_thread(), "caller", "changed")
    finally:
        WORD.reset(token)
    assert elsewhere not in (threading.current_thread(), here)


def test_a_function_may_wait_for_the_same_loop(loop):
    """A handler that uses its own blocking session finds no lock in its way."""

    async def outer():
        return await on_waiting_thread(lambda: loop.run(lambda: value("inner")))

    assert loop.run(outer) == "inner"


@pytest.mark.parametrize("error", [StopIteration(1), KeyError("mine")], ids=lambda error: type(error).__name__)
def test_errors_of_functions_reach_the_work(loop, error):
    """As themselves, or as what a coroutine makes of them; nobody is left waiting."""

    def fails():
        raise error

    async def work():
        with pytest.raises(RuntimeError if isinstance(error, StopIteration) else KeyError):
            await on_waiting_thread(fails)
        return "went on"

    assert loop.run(work) == "went on"


def test_an_interrupted_wait_ends_its_work_first(loop):
    """Ctrl-C cancels the coroutine, whose clean-up may still use the waiting thread, and is raised afterwards."""
    steps = []

    def interrupt():
        raise KeyboardInterrupt

    async def work():
        try:
            await on_waiting_thread(interrupt)
        finally:
            await on_waiting_thread(lambda: steps.append(threading.current_thread()))

    with pytest.raises(KeyboardInterrupt):
        loop.run(work)
    assert steps == [threading.current_thread()]


def test_a_loop_that_ends_leaves_nobody_waiting(loop):
    """Work under way is cancelled and its caller told; later work is refused; ending twice is fine."""
    begun, told = threading.Event(), []

    async def hang():
        begun.set()
        await asyncio.Event().wait()

    def wait():
        try:
            loop.run(hang)
        except Gone as error:
            told.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert begun.wait(LONG)
    loop.stop()
    waiting.join(LONG)
    assert told == ["the client was closed meanwhile"]
    loop.stop()
    with pytest.raises(Gone, match="closed"):
        loop.run(hang)


def test_the_loops_own_thread_cannot_wait_for_it(loop):
    """It would wait for itself."""
    with pytest.raises(RuntimeError, match="own event loop"):
        loop.call(lambda: loop.run(lambda: value("x")))


def test_proxies_keep_signature_and_docstring():
    """The shared loop serves those without a loop of their own."""

    class Target:
        async def say(self, word: str, *, twice: bool = False) -> str:
            """Say it."""
            return word * (2 if twice else 1)

    class Proxy(Blocking[Target]):
        say = blocking(Target.say)

    assert Proxy(Target()).say("a", twice=True) == "aa"
    assert inspect.signature(Proxy.say) == inspect.signature(Target.say)
    assert Proxy.say.__doc__ == "Say it."
    assert not inspect.iscoroutinefunction(Proxy.say)
    assert shared_loop() is shared_loop()


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
