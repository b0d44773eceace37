"""Asking for the end of work: a worker passes it on; where none is alive, the caller does it alone."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from kdskills.jobs.attempts import Attempt
from kdskills.jobs.attempts.order import OutputError
from kdskills.jobs.heads import TaskHead
from kdskills.jobs.opening import Work
from kdskills.jobs.outcome import began, ending, printed, readiness
from kdskills.jobs.records import dump
from kdskills.jobs.roster import Roster
from kdskills.jobs.states import TERMINAL

if TYPE_CHECKING:
    import sqlalchemy as sa

Kind = Literal["task", "job"]


async def cancel(work: Work, kind: Kind, item: str, reason: str) -> bool:
    """Ask for the end of a task or job; False when it was over.

    What waits in a queue is canceled by the asking. What runs is left to its worker, if that lives; else its programs on
    this host are ended here, and its state after them. What had ended by itself keeps its result, for the next worker.
    """

    def change(link: sa.Connection) -> str | None:
        row_state = work.records.ask_cancel(link, kind, item, reason)
        if row_state is not None:  # whoever has it in hand ends it; what it kept waiting may begin
            work.queue.announce(link, "queue" if row_state == "canceled" else f"cancel {item}")
        return row_state

    outcome = await work.database.write(change)
    if outcome == "asked":
        await _cancel_orphan(work, kind, item, reason)
    return outcome is not None


async def unfinished(work: Work, kind: Kind, item: str) -> bool:
    """Whether a task or job is not over."""
    table = work.records.table(kind)
    status = table.select().with_only_columns(table.c.status).where(table.c.id == item)
    return await work.database.read(lambda link: link.execute(status).scalar()) not in (None, *TERMINAL)


async def _cancel_orphan(work: Work, kind: Kind, item: str, reason: str) -> None:
    """End what no live worker holds, a job with its steps; nothing when somebody alive does."""
    await asyncio.to_thread(Roster(work).bury)
    orphans = await work.database.write(lambda link: _orphans(work, link, kind, item, reason))
    if orphans is None:
        return
    ended = await asyncio.gather(*(_end_program(work, task, reason) for task in orphans))
    ends = [(task, values) for task, values in zip(orphans, ended, strict=True) if values is not None]
    await work.database.write(lambda link: _end_rows(work, link, kind, item, ends))


def _orphans(work: Work, link: sa.Connection, kind: Kind, item: str, reason: str) -> list[TaskHead] | None:
    """Return tasks nobody alive holds, canceling steps that were still queued; None when a live worker holds *item*."""
    records, live = work.records, {row.executor for row in Roster(work).live(link)}
    head = records.task(link, item) if kind == "task" else records.job(link, item)
    if head is None or head.terminal or head.executor in live:
        return None
    if isinstance(head, TaskHead):
        return [head]
    living = [step.task for step in head.steps if step.task is not None and not step.task.terminal]
    answers = {task.id: records.ask_cancel(link, "task", task.id, reason) for task in living}
    return [task for task in living if answers[task.id] == "asked" and task.executor not in live]


async def _end_program(work: Work, head: TaskHead, reason: str) -> dict[str, Any] | None:
    """End a task's program on this host and return the columns of its end; None for one that had ended by itself."""
    plain: dict[str, Any] = {"error_code": "canceled"}
    if head.host != work.host or not head.attempt:
        return plain
    attempt = await asyncio.to_thread(work.attempts.find, head.id, head.attempt)
    if attempt is None:
        return plain
    await asyncio.to_thread(attempt.cancel, reason)
    verdict = await attempt.wait()
    current_head = await work.database.read(
        partial(work.records.task, item=head.id)
    )  # with its cancel, and what a worker wrote
    status, values = ending(current_head or head, verdict)
    if status != "canceled":
        return None
    lost = [
        OutputError(path=artifact.path, code="not_kept", message="it was canceled while no worker lived to keep it")
        for artifact in verdict.artifacts
    ]
    values |= {"output_errors": dump([*verdict.output_errors, *lost])}
    return values | await asyncio.to_thread(_attempt_columns, work, head, attempt)


def _attempt_columns(work: Work, head: TaskHead, attempt: Attempt) -> dict[str, Any]:
    """Return the columns of what an attempt was and printed."""
    facts = attempt.facts()
    return began(head, facts) | readiness(facts) | printed(attempt, work.settings.result_bytes)


def _end_rows(
    work: Work, link: sa.Connection, kind: Kind, item: str, ends: list[tuple[TaskHead, dict[str, Any]]]
) -> None:
    """End the rows, a job's after all of its tasks; what somebody took meanwhile is left to them."""
    records = work.records
    for task, values in ends:
        records.force(link, "task", task.id, "canceled", executor=task.executor, **values)
    job = records.job(link, item) if kind == "job" else None
    if job is not None and all(step.task is None or step.task.terminal for step in job.steps):
        records.force(link, "job", item, "canceled", executor=job.executor, error_code="canceled")
    work.queue.announce(link)
