"""How handlers are run in sync sessions: bounded, under deadlines, whatever they do."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from kdskills.remote.dispatch import CallOutcome
from kdskills.remote.journal import MemoryJournal, strong_key
from kdskills.remote.ports import RemoteCall
from kdskills.session.threads import HandlerThreads, on_waiting_thread, shared_loop


def drive(coroutine):
    """Wait for a coroutine as a sync facade does."""
    return shared_loop().run(lambda: coroutine)


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


def text(outcome: CallOutcome) -> str:
    """The one text of an outcome's payload."""
    (item,) = outcome.response_payload["contentItems"]
    return item["text"]


def eventually(truth: Any) -> None:
    """Wait until *truth* holds."""
    done = threading.Event()
    for _ in range(3000):
        if truth():
            return
        done.wait(0.01)
    pytest.fail("it did not happen")


class Odd(BaseException):
    """An exception that is none of `Exception`."""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, ((), {})),
        ({}, ((), {})),
        ({"a": 1}, ((), {"a": 1})),
        ([1], (([1],), {})),
        (5, ((5,), {})),
        ("x", (("x",), {})),
    ],
)
def test_arguments_are_handed_over(make_dispatcher, make_skill, make_call, arguments, expected) -> None:
    """An object by keywords, nothing as nothing, anything else as one value."""
    skill = make_skill(lambda *args, **keywords: (args, keywords))
    assert drive(make_dispatcher().call(skill, make_call.weak(), arguments)).result == expected


def test_arguments_are_coerced(make_dispatcher, make_skill, make_call) -> None:
    """What the skill makes of its arguments reaches the handler; its refusal is a failure of the arguments."""

    def coerce(arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments["n"] == 13:
            raise ValueError("$.n: not that one")
        return {"n": [arguments["n"]]}

    skill = make_skill(lambda n: n, coerce=coerce)
    assert drive(make_dispatcher().call(skill, make_call.weak("1"), {"n": 1})).result == [1]
    assert text(drive(make_dispatcher().call(skill, make_call.weak("2"), {"n": 13}))) == (
        "remote skill ship failed: $.n: not that one"
    )


@pytest.mark.parametrize("deadline", [None, 60.0])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no stock"), "no stock"),
        (SystemExit("bye"), "bye"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError(), "CancelledError"),
        (Odd("odd"), "odd"),
        (StopIteration(3), "3"),
        (MemoryError(), "MemoryError"),
        (RecursionError("deep"), "deep"),
        (RuntimeError("token=abcdef at https://bob:pw@host/"), "token=*** at https://***@host/"),
    ],
)
def test_whatever_is_raised_is_answered(make_dispatcher, make_skill, make_call, error, said, deadline) -> None:
    """Every exception becomes an answer, with secrets redacted; none leaves the dispatcher."""

    def fails() -> None:
        raise error

    outcome = drive(make_dispatcher().call(make_skill(fails, deadline_seconds=deadline), make_call.strong(), None))
    assert text(outcome) == f"remote skill ship failed: {said}"
    assert (outcome.handled, outcome.response_payload["success"], outcome.reraise) == (False, False, None)
    assert outcome.state == "done"


@pytest.mark.parametrize("deadline", [None, 60.0])
def test_an_interrupt_is_answered_and_handed_on(make_dispatcher, make_skill, make_call, deadline) -> None:
    """`KeyboardInterrupt` is answered like any other, and the caller gets it to raise it again."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    journal = MemoryJournal()
    skill = make_skill(interrupted, deadline_seconds=deadline)
    outcome = drive(make_dispatcher(journal).call(skill, make_call.strong(), None))
    assert isinstance(outcome.reraise, KeyboardInterrupt)
    assert text(outcome) == "remote skill ship failed: KeyboardInterrupt"
    assert journal.get(strong_key(make_call.strong())).state == "done"
    assert drive(make_dispatcher(journal).call(skill, make_call.strong(), None)).reraise is None


class Lying:
    """A value whose text fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("no words"), SystemExit("bye"), Odd("odd")])
def test_values_that_cannot_be_told_are_answered(make_dispatcher, make_skill, make_call, error) -> None:
    """A value's own methods are the handler's code, too."""
    outcome = drive(make_dispatcher().call(make_skill(lambda: Lying(error)), make_call.strong(), None))
    assert text(outcome) == f"remote skill ship failed: {error}"
    assert outcome.result is None


def test_awaitables_are_closed_in_sync_sessions(make_dispatcher, make_skill, make_call) -> None:
    """A sync session cannot wait for a coroutine: it is closed, never run, and the answer says what to use."""
    ran: list[int] = []

    async def handler() -> None:
        ran.append(1)

    outcome = drive(make_dispatcher().call(make_skill(handler), make_call.strong(), None))
    assert text(outcome) == "remote skill ship failed: got an awaitable; use AsyncCodexClient (or AsyncCodexManager)"
    assert (outcome.handled, outcome.response_payload["success"], ran) == (False, False, [])


def test_handlers_without_deadline_run_inline(make_dispatcher, make_skill, make_call) -> None:
    """Without a deadline a handler runs on the caller's own thread, outside any event loop."""

    def handler() -> str:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return threading.current_thread().name

    here = drive(make_dispatcher().call(make_skill(handler, deadline_seconds=None), make_call.strong(), None))
    there = drive(make_dispatcher().call(make_skill(handler), make_call.strong(), None))
    assert here.result == threading.current_thread().name
    assert there.result == "kdskills-handler"


@pytest.mark.parametrize("deadline", [None, 60.0])
def test_context_variables_are_the_callers(make_dispatcher, make_skill, make_call, deadline) -> None:
    """A handler sees the caller's variables; what it sets is its own."""

    def handler() -> str:
        seen = VARIABLE.get()
        VARIABLE.set("changed")
        return seen

    token = VARIABLE.set("mine")
    try:
        skill = make_skill(handler, deadline_seconds=deadline)
        assert drive(make_dispatcher().call(skill, make_call.strong(), None)).result == "mine"
        assert VARIABLE.get() == "mine"
    finally:
        VARIABLE.reset(token)


@pytest.mark.parametrize(("seconds", "written"), [(0.02, "0.02"), (0.05, "0.05")])
def test_a_deadline_is_answered(make_dispatcher, make_skill, make_call, seconds, written) -> None:
    """A handler that takes too long is told so; what it returns later is kept as late, and a replay says the same."""
    gate, journal = threading.Event(), MemoryJournal()
    calls: list[RemoteCall] = []

    def slow(call: RemoteCall) -> str:
        calls.append(call)
        assert gate.wait(60)
        return "at last"

    dispatcher = make_dispatcher(journal)
    skill = make_skill(slow, deadline_seconds=seconds, call_parameter="call")
    outcome = drive(dispatcher.call(skill, make_call.strong(), None))
    expected = f"remote skill ship failed: no result within {written} s; it may still finish"
    assert (text(outcome), outcome.state, outcome.handled, outcome.late) == (expected, "overdue", False, False)
    gate.set()
    key = strong_key(make_call.strong())
    if calls:  # a busy machine may have passed the deadline before the handler began
        assert calls[0].cancelled
        eventually(lambda: journal.get(key).late is not None)
        again = drive(dispatcher.call(skill, make_call.strong(), None))
        assert (text(again), again.late, again.replayed) == (expected, True, True)
        assert journal.get(key).late.payload["contentItems"][0]["text"] == "at last"


def test_whole_seconds_are_written_plainly(make_skill) -> None:
    """The text says `120 s`, not `120.0 s`."""
    from kdskills.remote.dispatch.payloads import overdue

    assert overdue("t", make_skill(print).deadline_seconds).error == (
        "remote skill t failed: no result within 120 s; it may still finish"
    )


def test_a_hanging_thread_keeps_its_slot(make_dispatcher, make_skill, make_call) -> None:
    """The deadline includes queueing: behind a hanging handler others are answered in time, and never run."""
    gate, began, effects = threading.Event(), threading.Event(), []

    def hang() -> None:
        began.set()
        gate.wait(60)

    dispatcher = make_dispatcher(max_concurrency=1)
    waiting = threading.Thread(
        target=lambda: drive(dispatcher.call(make_skill(hang, deadline_seconds=50.0), make_call.strong("c1"), None))
    )
    waiting.start()
    assert began.wait(60)
    queued = make_skill(lambda: effects.append(1), deadline_seconds=0.05)
    outcome = drive(dispatcher.call(queued, make_call.strong("c2"), None))
    assert (outcome.state, text(outcome)) == (
        "overdue",
        "remote skill ship failed: no result within 0.05 s; it may still finish",
    )
    gate.set()
    waiting.join(60)
    assert drive(dispatcher.call(make_skill(lambda: "free again"), make_call.strong("c3"), None)).result == "free again"
    assert effects == []


def test_parallel_calls_run_at_once_up_to_the_bound(make_dispatcher, make_skill, make_call) -> None:
    """Three handlers wait for one another: with three slots they meet; never are there more."""
    meet = threading.Barrier(3)
    inside, most, lock = 0, 0, threading.Lock()

    def handler() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        meet.wait(60)
        with lock:
            inside -= 1

    dispatcher = make_dispatcher(max_concurrency=3)
    skill = make_skill(handler)
    outcomes: list[CallOutcome] = []
    threads = [
        threading.Thread(
            target=lambda number=number: outcomes.append(
                drive(dispatcher.call(skill, make_call.strong(f"c{number}"), None))
            )
        )
        for number in range(9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [outcome.error for outcome in outcomes] == [None] * 9
    assert most == 3


def test_a_handler_may_dispatch_itself(make_dispatcher, make_skill, make_call) -> None:
    """A handler without deadline that calls another one does not wait for its own slot."""
    dispatcher = make_dispatcher(max_concurrency=1)
    inner = make_skill(lambda: "inner", deadline_seconds=None)
    outer = make_skill(lambda: drive(dispatcher.run(inner, make_call.strong("c2"), None)).result, deadline_seconds=None)
    assert drive(dispatcher.call(outer, make_call.strong("c1"), None)).result == "inner"


def test_a_waiter_that_is_interrupted_loses_nothing(make_dispatcher, make_skill, make_call) -> None:
    """Ctrl-C reaches the thread that waits, not the handler: what that returns is written down all the same."""
    gate, journal, began = threading.Event(), MemoryJournal(), threading.Event()
    dispatcher = make_dispatcher(journal)

    def slow() -> str:
        began.set()
        assert gate.wait(60)
        return "done"

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def interrupted() -> None:
        call = asyncio.create_task(dispatcher.call(make_skill(slow), make_call.strong(), None))
        assert await asyncio.to_thread(began.wait, 60)
        try:
            await on_waiting_thread(interrupt)
        finally:
            call.cancel()

    with pytest.raises(KeyboardInterrupt):
        shared_loop().run(interrupted)
    gate.set()
    eventually(lambda: journal.get(strong_key(make_call.strong())).state == "done")


def test_threads_are_reused_and_daemons() -> None:
    """Idle threads take the next function; none of them holds the interpreter's end."""
    threads, names = HandlerThreads(), []
    for _ in range(5):
        done = threading.Event()

        def note(done: threading.Event = done) -> None:
            names.append((threading.current_thread().ident, threading.current_thread().daemon))
            done.set()

        threads.start(note)
        assert done.wait(60)
        eventually(lambda: threads._idle == 1)
    assert len(set(names)) == 1
    assert names[0][1] is True


def test_threads_start_as_many_as_are_asked_for() -> None:
    """Functions that wait for one another all run."""
    threads, meet = HandlerThreads(), threading.Barrier(21)
    for _ in range(20):
        threads.start(lambda: meet.wait(60) and None)
    meet.wait(60)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_without_another_thread_the_call_is_answered(
    make_dispatcher, make_skill, make_call, monkeypatch, asynchronous
) -> None:
    """A process that may not have another thread says so; no slot is lost, and nothing is run later behind its back."""
    effects: list[int] = []

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    dispatcher = make_dispatcher(asynchronous=asynchronous, max_concurrency=1)
    skill = make_skill(lambda: effects.append(1))

    def call(name: str) -> CallOutcome:
        coming = dispatcher.call(skill, make_call.strong(name), None)
        return asyncio.run(coming) if asynchronous else drive(coming)

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", refused)
        outcomes = [call("c1")]  # the thread of leases is refused
        patch.setattr(dispatcher.leases, "_thread", threading.current_thread())
        outcomes += [call("c2"), call("c3")]  # the handler's own
    assert [text(outcome) for outcome in outcomes] == ["remote skill ship failed: can't start new thread"] * 3
    assert effects == []
    assert call("c4").handled
    assert effects == [1]
