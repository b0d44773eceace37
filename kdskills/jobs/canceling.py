"""Asking for the end of work: a worker passes it on; where none is alive, the caller does it alone (spec work §2, §3)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from kdskills.jobs.heads import TaskHead
from kdskills.jobs.opening import Work
from kdskills.jobs.roster import Roster

if TYPE_CHECKING:
    import sqlalchemy as sa

Kind = Literal["task", "job"]


async def cancel(work: Work, kind: Kind, item: str, reason: str) -> bool:
    """Ask for the end of a task or job; False when it was over.

    What waits in a queue is canceled by the asking. What runs is left to its worker, if that lives; else its state is
    ended first and its programs on this host right after.
    """
    said = await work.database.write(lambda link: work.records.ask_cancel(link, kind, item, reason))
    if said == "canceled":
        await asyncio.to_thread(work.queues.cancel, [item])
    elif said == "asked":
        await _cancel_orphan(work, kind, item, reason)
    return said is not None


async def _cancel_orphan(work: Work, kind: Kind, item: str, reason: str) -> None:
    """End what no live worker holds, a job with its steps; nothing when somebody alive does."""
    await asyncio.to_thread(Roster(work).bury)
    gone = await work.database.write(lambda link: _end_rows(work, link, kind, item, reason))
    if gone is None:
        return
    await asyncio.to_thread(work.queues.cancel, [item, *(task.id for task in gone if task.id != item)])
    for task in gone:
        if task.host == work.host and task.attempt and not task.terminal:
            attempt = await asyncio.to_thread(work.attempts.find, task.id, task.attempt)
            if attempt is not None and attempt.cancel(reason):
                await attempt.wait()


def _end_rows(work: Work, link: sa.Connection, kind: Kind, item: str, reason: str) -> list[TaskHead] | None:
    """End the rows and return the tasks as they were; None when a live worker holds them, or they are over."""
    records = work.records
    if kind == "task":
        task = records.task(link, item)
        if task is None or not records.force(link, "task", item, "canceled", executor=task.executor):
            return None
        return [task]
    job = records.job(link, item)
    if job is None or not records.force(link, "job", item, "canceled", executor=job.executor):
        return None
    tasks = [step.task for step in job.steps if step.task is not None]
    for task in tasks:
        records.ask_cancel(link, "task", task.id, reason)
        records.force(link, "task", task.id, "canceled", executor=task.executor)
    return tasks
