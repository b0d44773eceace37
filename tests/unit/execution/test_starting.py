"""Cancelling while a run is being started."""

import asyncio
import threading

import pytest

from kdskills.errors import ExecRefused
from kdskills.execution import ExecRequest, IsolationLevel, Limits
from kdskills.execution.protocol import ExecutionOptions
from kdskills.execution.run import ExecutionEngine, ExecutionRun, ProgramEnd, in_thread


class Run:
    """A run that notes its end."""

    def __init__(self):
        self.over = asyncio.Event()

    async def wait(self):
        """Wait for the cancel."""
        await self.over.wait()
        return "result"

    async def cancel(self):
        """End it."""
        self.over.set()


class Slow:
    """A start that stands in its thread until it is let go."""

    def __init__(self, answer):
        self.answer = answer
        self.begun = threading.Event()
        self.go = threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.go.wait(60)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def reached(self):
        """Wait until the start stands in its thread."""
        assert await asyncio.to_thread(self.begun.wait, 60)


async def test_a_start_gives_its_run():
    """Nothing cancelled, the run comes back as it is, not ended."""
    run = Run()
    assert await in_thread(lambda: run, Run.cancel) is run
    assert not run.over.is_set()


async def test_a_start_raises_what_it_meets():
    """The error of a start reaches the caller."""
    slow = Slow(ExecRefused("no room", engine="x"))
    slow.go.set()
    with pytest.raises(ExecRefused, match="no room"):
        await in_thread(slow, Run.cancel)


async def test_who_is_cancelled_leaves_no_run():
    """The cancel waits for the start, ends the run, and only then goes on."""
    slow = Slow(Run())
    task = asyncio.create_task(in_thread(slow, Run.cancel))
    await slow.reached()
    task.cancel()
    await asyncio.wait([task], timeout=0.05)
    assert (task.done(), slow.answer.over.is_set()) == (False, False)
    slow.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow.answer.over.is_set()


async def test_a_start_that_fails_after_the_cancel_is_nobodys():
    """The cancel wins over an error nobody waits for any more."""
    slow = Slow(ExecRefused("no room", engine="x"))
    task = asyncio.create_task(in_thread(slow, Run.cancel))
    await slow.reached()
    task.cancel()
    slow.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_second_cancel_does_not_save_the_run():
    """Who is cancelled twice hears it at once, and the run ends all the same."""
    slow = Slow(Run())
    task = asyncio.create_task(in_thread(slow, Run.cancel))
    await slow.reached()
    for _ in range(2):
        task.cancel()
        await asyncio.wait([task], timeout=0.05)
    assert task.cancelled()
    slow.go.set()
    await asyncio.wait_for(slow.answer.over.wait(), 60)


class HeldRun(ExecutionRun):
    """A run whose program goes on until it is stopped or let go."""

    def prepare(self):
        """Stage nothing."""
        self.ending, self.reason = threading.Event(), "exited"

    def perform(self):
        """Wait for the end."""
        self.tell_started()
        assert self.ending.wait(60)
        return self.result(ProgramEnd(self.reason, 0, None, 0.0))

    def stop(self):
        """End it."""
        self.reason = "cancelled"
        self.ending.set()

    def signal(self, number):
        """Let it go."""
        self.ending.set()


class HeldEngine(ExecutionEngine):
    """An engine that remembers its runs."""

    name = "held"
    level = IsolationLevel.VM

    def run_type(self, _engine, request, *, probing=False):
        """Make a run."""
        self.made = HeldRun(self, request, probing=probing)
        return self.made


async def test_a_run_is_ended_before_its_cancel_arrives():
    """`run` gives the result, or has ended the run when it is cancelled."""
    engine, request = HeldEngine(ExecutionOptions()), ExecRequest(argv=("x",), limits=Limits())
    task = asyncio.create_task(engine.run(request))
    await asyncio.sleep(0)
    await engine.made.begun()
    engine.made.signal(15)
    assert (await task).status == "ok"
    task = asyncio.create_task(engine.run(request))
    await asyncio.sleep(0)
    await engine.made.begun()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (engine.made.done, (await engine.made.wait()).status) == (True, "cancelled")


async def test_a_cancelled_start_ends_the_run():
    """Whoever gives up waiting for a start leaves nothing that runs."""
    engine = HeldEngine(ExecutionOptions())
    task = asyncio.create_task(engine.start(ExecRequest(argv=("x",))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.made.done
