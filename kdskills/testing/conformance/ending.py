"""How runs end: time, cancelling, signals, whole trees."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

from kdskills.execution import Executor, Handle, Limits
from kdskills.testing.conformance.common import Promise, ask, program, run, same, sh

SLACK_S = 2.0


async def timeout(executor: Executor) -> None:
    """A program over its time is ended, with no exit code, within limit + 2 s."""
    await _within(executor, argv=("sleep", "60"))


async def stubborn_timeout(executor: Executor) -> None:
    """A program that ignores TERM is killed in time."""
    await _within(executor, code=program("stubborn.py"))


async def timeout_with_children(executor: Executor) -> None:
    """Children that hold the pipes do not hold the result."""
    await _within(executor, argv=("sh", "-c", "sleep 61 & sleep 62 & sleep 63"))


async def daemon_does_not_hold_the_result(executor: Executor) -> None:
    """A daemon left behind is ended; the result comes when the program itself is over."""
    started = time.monotonic()
    result = await run(executor, code=program("daemon.py"), limits=Limits(wall_s=30))
    same(("ok", b"parent done\n"), (result.status, result.stdout.data), result)
    assert time.monotonic() - started < 10, result


async def output_before_a_timeout(executor: Executor) -> None:
    """What was printed and written before the end is not lost."""
    script = "echo printed; echo kept > out.txt; sleep 60"
    # Long enough for an engine to start the program on a busy machine, for what was not begun prints nothing.
    result = await sh(executor, script, outputs=("out.txt",), limits=Limits(wall_s=5))
    same(("timeout", b"printed\n"), (result.status, result.stdout.data), result)
    same([("out.txt", b"kept\n")], [(item.path, item.content) for item in result.artifacts], result)


async def cancelling_the_task(executor: Executor) -> None:
    """Cancelling `run` ends the tree before CancelledError arrives, and soon."""
    task = asyncio.create_task(run(executor, argv=("sleep", "60")))
    await asyncio.sleep(0.7)
    started = time.monotonic()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled(), "the task was not cancelled"
    assert time.monotonic() - started < SLACK_S + 1, "cancelling took too long"


async def cancelling_the_handle(executor: Executor) -> None:
    """`cancel` ends the run; `wait` then says `cancelled`, with no exit code."""
    handle = await executor.start(ask(executor, code=program("stubborn.py")))
    await _until(lambda: b"waiting" in handle.tail()[0])
    await handle.cancel()
    result = await handle.wait()
    same(("cancelled", None), (result.status, result.exit_code), result)


async def signals_and_tail(executor: Executor) -> None:
    """A running program's output can be looked at, and it gets signals."""
    script = "trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep 0.05; done"
    handle = await executor.start(ask(executor, argv=("sh", "-c", script), limits=Limits(wall_s=20)))
    await _until(lambda: b"ready" in handle.tail()[0])
    handle.signal(signal.SIGUSR1)
    result = await handle.wait()
    same(("nonzero", 5, b"ready\ncaught\n"), (result.status, result.exit_code, result.stdout.data), result)


async def waiting_can_be_given_up(executor: Executor) -> None:
    """Giving up a wait does not end the run."""
    handle = await _waits_for_a_signal(executor)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(handle.wait(), 0.1)
    handle.signal(signal.SIGUSR1)
    result = await handle.wait()
    same(("ok", b"ready\ndone\n"), (result.status, result.stdout.data), result)


async def many_at_once(executor: Executor) -> None:
    """Runs at the same time do not mix."""
    results = await asyncio.gather(*(sh(executor, f"echo {n} > f; cat f", outputs=("f",)) for n in range(6)))
    for n, result in enumerate(results):
        same((f"{n}\n".encode(), f"{n}\n".encode()), (result.stdout.data, result.artifacts[0].content), result)


async def reap_leaves_the_living(executor: Executor) -> None:
    """`reap` reports, and touches nothing a living owner uses."""
    handle = await _waits_for_a_signal(executor)
    await executor.reap()
    handle.signal(signal.SIGUSR1)
    result = await handle.wait()
    same(("ok", b"ready\ndone\n"), (result.status, result.stdout.data), result)


async def _waits_for_a_signal(executor: Executor) -> Handle:
    """Start a program that says `done` and ends when it gets USR1."""
    script = "trap 'echo done; exit 0' USR1; echo ready; while :; do sleep 0.05; done"
    handle = await executor.start(ask(executor, argv=("sh", "-c", script), limits=Limits(wall_s=60)))
    await _until(lambda: b"ready" in handle.tail()[0])
    return handle


async def _within(executor: Executor, **request: object) -> None:
    await run(executor, argv=("true",))  # staging and images are not what is timed
    started = time.monotonic()
    result = await run(executor, limits=Limits(wall_s=1), **request)
    same(("timeout", None), (result.status, result.exit_code), result)
    assert time.monotonic() - started < 1 + SLACK_S, f"took {time.monotonic() - started:.2f} s: {result!r}"


async def _until(true: object) -> None:
    assert callable(true)
    for _ in range(400):
        if true():
            return
        await asyncio.sleep(0.025)
    raise AssertionError("the program did not get so far in 10 s")


PROMISES = (
    Promise("timeout", "Ending", timeout),
    Promise("stubborn_timeout", "Ending", stubborn_timeout),
    Promise("timeout_with_children", "Ending", timeout_with_children),
    Promise("daemon_does_not_hold_the_result", "Ending", daemon_does_not_hold_the_result),
    Promise("output_before_a_timeout", "Ending", output_before_a_timeout),
    Promise("cancelling_the_task", "Ending", cancelling_the_task),
    Promise("cancelling_the_handle", "Ending", cancelling_the_handle),
    Promise("signals_and_tail", "Asking for a run", signals_and_tail),
    Promise("waiting_can_be_given_up", "Asking for a run", waiting_can_be_given_up),
    Promise("many_at_once", "Asking for a run", many_at_once),
    Promise("reap_leaves_the_living", "Ending", reap_leaves_the_living),
)
