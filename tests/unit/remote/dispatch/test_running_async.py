"""How handlers are run in async sessions: tasks and threads, cancelled or kept."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from dataclasses import replace
from typing import Any

import pytest

from kdskills.remote.dispatch import CallOutcome
from kdskills.remote.journal import MemoryJournal, strong_key

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


def text(outcome: CallOutcome) -> str:
    """The one text of an outcome's payload."""
    (item,) = outcome.response_payload["contentItems"]
    return item["text"]


async def eventually(truth: Any) -> None:
    """Wait until *truth* holds."""
    for _ in range(3000):
        if truth():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not happen")


class Odd(BaseException):
    """An exception that is none of `Exception`."""


async def coroutine(**_: Any) -> str:
    """A coroutine function."""
    await asyncio.sleep(0)
    return f"task on {threading.current_thread().name}"


def plain(**_: Any) -> str:
    """A plain function."""
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
    return f"on {threading.current_thread().name}"


async def overdue_after_it_began(dispatcher: Any, skill: Any, identity: Any, began: Any) -> CallOutcome:
    """Call with growing deadlines until one passes after the handler began: a busy machine may be slow to begin it."""
    for attempt, seconds in enumerate((0.3, 3.0, 30.0)):
        named = replace(identity, call_id=f"{identity.call_id}-{attempt}")
        outcome = await dispatcher.call(replace(skill, deadline_seconds=seconds), named, None)
        assert outcome.state == "overdue"
        if began.is_set():
            return outcome
    pytest.fail("the handler was never begun")


class Callable:
    """An object with an async `__call__`."""

    async def __call__(self, **_: Any) -> str:
        return await coroutine()


HANDLERS = {
    "coroutine": (coroutine, "task on MainThread"),
    "partial": (functools.partial(coroutine, x=1), "task on MainThread"),
    "object": (Callable(), "task on MainThread"),
    "lambda": (lambda **_: coroutine(), "task on MainThread"),
    "plain": (plain, "on kdskills-handler"),
}


@pytest.mark.parametrize("kind", sorted(HANDLERS))
@pytest.mark.parametrize("deadline", [None, 60.0])
async def test_each_kind_runs_where_it_belongs(make_dispatcher, make_skill, make_call, kind, deadline) -> None:
    """Coroutine functions run as tasks of the loop, plain functions on threads without one."""
    handler, expected = HANDLERS[kind]
    skill = make_skill(handler, deadline_seconds=deadline)
    dispatcher = make_dispatcher(asynchronous=True)
    outcome = await dispatcher.call(skill, make_call.strong(), {"a": 1})
    again = await dispatcher.call(skill, make_call.strong(arguments={"a": 1}), {"a": 1})
    assert outcome.result == expected
    assert (outcome.state, again.state) == ("done", "done")


@pytest.mark.parametrize("awaited", [True, False])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no stock"), "no stock"),
        (SystemExit("bye"), "bye"),
        (asyncio.CancelledError(), "CancelledError"),
        (GeneratorExit(), "GeneratorExit"),
        (Odd("odd"), "odd"),
    ],
)
async def test_whatever_is_raised_is_answered(make_dispatcher, make_skill, make_call, error, said, awaited) -> None:
    """Not even `SystemExit` reaches the loop, and a handler that cancels itself is answered."""

    async def task() -> None:
        await asyncio.sleep(0)
        raise error

    def function() -> None:
        raise error

    skill = make_skill(task if awaited else function)
    outcome = await make_dispatcher(asynchronous=True).call(skill, make_call.strong(), None)
    assert text(outcome) == f"remote skill ship failed: {said}"
    assert (outcome.state, outcome.reraise) == ("done", None)


@pytest.mark.parametrize("awaited", [True, False])
async def test_an_interrupt_is_answered_and_handed_on(make_dispatcher, make_skill, make_call, awaited) -> None:
    """`KeyboardInterrupt` does not tear the loop down; the caller gets it to raise it again."""

    async def task() -> None:
        raise KeyboardInterrupt

    def function() -> None:
        raise KeyboardInterrupt

    skill = make_skill(task if awaited else function)
    outcome = await make_dispatcher(asynchronous=True).call(skill, make_call.strong(), None)
    assert isinstance(outcome.reraise, KeyboardInterrupt)
    assert text(outcome) == "remote skill ship failed: KeyboardInterrupt"


@pytest.mark.parametrize("kind", sorted(HANDLERS))
async def test_context_variables_are_the_callers(make_dispatcher, make_skill, make_call, kind) -> None:
    """Tasks and threads see the caller's variables; what they set is their own."""
    seen: list[str] = []

    def look() -> None:
        seen.append(VARIABLE.get())
        VARIABLE.set("changed")

    async def task() -> None:
        look()

    handler = {"plain": look, "lambda": functools.partial(task)}.get(kind, task)
    token = VARIABLE.set("mine")
    try:
        await make_dispatcher(asynchronous=True).call(make_skill(handler), make_call.strong(), None)
        assert (seen, VARIABLE.get()) == (["mine"], "mine")
    finally:
        VARIABLE.reset(token)


async def test_an_overdue_task_is_cancelled(make_dispatcher, make_skill, make_call) -> None:
    """A task whose deadline passed is cancelled; that it was is kept as the late answer, and its slot is free again."""
    journal, cancelled = MemoryJournal(), asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    dispatcher = make_dispatcher(journal, asynchronous=True, max_concurrency=1)
    outcome = await dispatcher.call(make_skill(slow, deadline_seconds=0.2), make_call.strong(), None)
    assert text(outcome) == "remote skill ship failed: no result within 0.2 s; it may still finish"
    assert outcome.state == "overdue"
    free = await dispatcher.call(make_skill(coroutine), make_call.strong("c2"), None)
    assert free.handled


async def test_what_a_cancelled_task_says_is_not_the_answer(make_dispatcher, make_skill, make_call) -> None:
    """The deadline's answer is written down before the task is cancelled, however long the writing takes."""
    ended = threading.Event()

    class Slow(MemoryJournal):
        """A journal that takes its time over deadlines."""

        shared = True

        def overdue(self, key: str, owner: str, answer: Any) -> Any:
            ended.wait(0.2)
            return super().overdue(key, owner, answer)

    async def hangs() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    class Elsewhere:
        """The same journal where the loop does not wait for it."""

        shared = True

        def __init__(self) -> None:
            self._inner = Slow()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    dispatcher = make_dispatcher(Elsewhere(), asynchronous=True)
    outcome = await dispatcher.call(make_skill(hangs, deadline_seconds=0.2), make_call.strong(), None)
    assert text(outcome) == "remote skill ship failed: no result within 0.2 s; it may still finish"
    assert outcome.state == "overdue"


async def test_a_task_that_will_not_be_cancelled_keeps_its_slot(make_dispatcher, make_skill, make_call) -> None:
    """A handler that swallows its cancellation goes on, and what it returns is late."""
    journal, gate, began = MemoryJournal(), asyncio.Event(), asyncio.Event()

    async def stubborn() -> str:
        began.set()
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue
        return "finished anyway"

    dispatcher = make_dispatcher(journal, asynchronous=True, max_concurrency=1)
    outcome = await overdue_after_it_began(dispatcher, make_skill(stubborn), make_call.strong(), began)
    queued = await dispatcher.call(make_skill(coroutine, deadline_seconds=0.05), make_call.strong("c2"), None)
    assert queued.state == "overdue"
    gate.set()
    await eventually(lambda: journal.get(outcome.key).late is not None)
    assert journal.get(outcome.key).late.payload["contentItems"][0]["text"] == "finished anyway"
    assert journal.get(queued.key).late is None


async def test_an_overdue_thread_keeps_its_slot_and_finishes_late(make_dispatcher, make_skill, make_call) -> None:
    """A thread cannot be cancelled: others wait behind it, and what it returns is kept."""
    journal, gate, began = MemoryJournal(), threading.Event(), threading.Event()

    def slow() -> str:
        began.set()
        gate.wait(60)
        return "at last"

    dispatcher = make_dispatcher(journal, asynchronous=True, max_concurrency=1)
    outcome = await overdue_after_it_began(dispatcher, make_skill(slow), make_call.strong(), began)
    queued = await dispatcher.call(make_skill(coroutine, deadline_seconds=0.05), make_call.strong("c2"), None)
    assert queued.state == "overdue"
    gate.set()
    await eventually(lambda: journal.get(outcome.key).late is not None)
    assert (await dispatcher.call(make_skill(coroutine), make_call.strong("c3"), None)).handled


async def test_parallel_calls_meet(make_dispatcher, make_skill, make_call) -> None:
    """Calls of one step run at once: tasks and threads together fill the slots."""
    inside = 0
    together = asyncio.Event()

    async def handler() -> None:
        nonlocal inside
        inside += 1
        if inside == 4:
            together.set()
        await asyncio.wait_for(together.wait(), 60)

    dispatcher = make_dispatcher(asynchronous=True, max_concurrency=4)
    skill = make_skill(handler)
    outcomes = await asyncio.gather(*(dispatcher.call(skill, make_call.strong(f"c{n}"), None) for n in range(4)))
    assert [outcome.error for outcome in outcomes] == [None] * 4


async def test_a_handler_that_blocks_the_loop_does_not_stop_leases(
    sql_journal, make_dispatcher, make_skill, make_call
) -> None:
    """The lease is renewed by a thread of its own while a handler blocks the loop."""
    from kdskills.remote.dispatch.dispatcher import CallLeases

    renewed = threading.Event()
    began: list[float] = []
    key = strong_key(make_call.strong())

    class Watched:
        """A journal that tells of renewals."""

        shared = True

        def __getattr__(self, name: str) -> Any:
            return getattr(sql_journal, name)

        def renew(self, keys: dict[str, str], lease_s: float) -> None:
            sql_journal.renew(keys, lease_s)
            if began:
                renewed.set()

    async def blocks() -> str:
        began.append(sql_journal.get(key).lease_until)
        assert renewed.wait(60)
        return "done"

    dispatcher = make_dispatcher(Watched(), asynchronous=True, leases=CallLeases(lease_s=30.0, renew_s=0.05))
    assert text(await dispatcher.call(make_skill(blocks), make_call.strong(), None)) == "done"


@pytest.mark.parametrize("awaited", [True, False])
async def test_a_caller_that_leaves_stops_nothing(make_dispatcher, make_skill, make_call, awaited) -> None:
    """Cancelling the one who waits does not undo what began: it ends, and its answer is there for the next delivery."""
    journal, began, gate = MemoryJournal(), threading.Event(), threading.Event()

    async def task() -> str:
        began.set()
        await eventually(gate.is_set)
        return "done"

    def function() -> str:
        began.set()
        gate.wait(60)
        return "done"

    dispatcher = make_dispatcher(journal, asynchronous=True)
    skill = make_skill(task if awaited else function)
    call = asyncio.create_task(dispatcher.call(skill, make_call.strong(), None))
    await eventually(began.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.set()
    assert text(await dispatcher.call(skill, make_call.strong(), None)) == "done"


async def test_a_caller_that_leaves_the_queue_runs_nothing(make_dispatcher, make_skill, make_call) -> None:
    """Cancelled before it began, a handler is not run behind everybody's back."""
    gate, effects = asyncio.Event(), []

    async def hold() -> None:
        await gate.wait()

    dispatcher = make_dispatcher(asynchronous=True, max_concurrency=1)
    holding = asyncio.create_task(dispatcher.call(make_skill(hold), make_call.strong("c1"), None))
    await asyncio.sleep(0)
    queued = asyncio.create_task(dispatcher.call(make_skill(lambda: effects.append(1)), make_call.strong("c2"), None))
    for _ in range(20):
        await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    gate.set()
    await holding
    assert (await dispatcher.call(make_skill(coroutine), make_call.strong("c3"), None)).handled
    assert effects == []


def test_a_loop_that_closes_leaves_an_unknown_outcome(make_dispatcher, make_skill, make_call) -> None:
    """A program that ends inside a handler writes down that nobody will know, before its lease says so."""
    journal = MemoryJournal()
    dispatcher = make_dispatcher(journal, asynchronous=True)

    async def forever() -> None:
        await asyncio.sleep(600)

    async def main() -> None:
        call = asyncio.create_task(dispatcher.call(make_skill(forever), make_call.strong(), None))
        key = strong_key(make_call.strong())
        await eventually(lambda: (row := journal.get(key)) is not None and row.state == "running")
        assert not call.done()

    asyncio.run(main())
    row = journal.get(strong_key(make_call.strong()))
    assert row.state in {"unknown", "done"}
    assert row.answer.payload["success"] is False


def test_a_thread_outlives_its_loop(make_dispatcher, make_skill, make_call) -> None:
    """A plain function that ends after the loop still writes its answer down."""
    journal, began, gate = MemoryJournal(), threading.Event(), threading.Event()
    dispatcher = make_dispatcher(journal, asynchronous=True)

    def slow() -> str:
        began.set()
        gate.wait(60)
        return "done"

    async def main() -> None:
        call = asyncio.create_task(dispatcher.call(make_skill(slow), make_call.strong(), None))
        await eventually(began.is_set)
        assert not call.done()

    asyncio.run(main())
    gate.set()
    key = strong_key(make_call.strong())
    asyncio.run(eventually(lambda: journal.get(key).state == "done"))


def test_one_dispatcher_serves_loops_one_after_the_other(make_dispatcher, make_skill, make_call) -> None:
    """A facade may be used by several `asyncio.run` in turn: slots belong to the loop that runs."""
    dispatcher = make_dispatcher(asynchronous=True, max_concurrency=1)

    async def main(run: int) -> list[bool]:
        calls = (dispatcher.call(make_skill(coroutine), make_call.strong(f"{run}-{n}"), None) for n in range(4))
        return [outcome.handled for outcome in await asyncio.gather(*calls)]

    for run in range(3):
        assert asyncio.run(main(run)) == [True] * 4
