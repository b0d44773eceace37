"""Ending programs whose task is over or is another host's by now: nobody would look at what they do."""

from __future__ import annotations

import asyncio
from functools import partial

from kdskills.jobs.attempts.attempt import attempt_alive
from kdskills.jobs.attempts.store import RUNS
from kdskills.jobs.opening import Work
from kdskills.jobs.worker.context import LOG


async def end_leftovers(work: Work) -> int:
    """End programs on this host whose tasks are over or another host's; return how many attempts were asked to end.

    They are left by a cancel on another host, by a worker that was given up while this host was cut off, or by one that
    was killed between a terminal head and the end of the program.
    """
    ended = 0
    for item in await asyncio.to_thread(_living, work):
        head = await work.database.read(partial(work.records.task, item=item))
        attempt = await asyncio.to_thread(work.attempts.latest, item)
        if attempt is None or (head is not None and not head.terminal and head.host == work.host):
            continue
        if await asyncio.to_thread(attempt.cancel, "its task is over, or another host's"):
            LOG.warning("ended a program of task %s, which is not this host's to run any more", item)
            ended += 1
    return ended


def _living(work: Work) -> list[str]:
    """Return ids of tasks with a living attempt on this host."""
    top = work.state_dir / RUNS
    return [item for item in work.attempts.tasks() if any(attempt_alive(path) for path in (top / item).iterdir())]
