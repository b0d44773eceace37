"""Seeing one job through: submit the tasks of its steps, wait for them, write its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kdskills.jobs.database import micros, utc_now
from kdskills.jobs.heads import JobHead
from kdskills.jobs.model import TaskSpec
from kdskills.jobs.plan import JobPlan, decide, step_task_id
from kdskills.jobs.records import new_task
from kdskills.jobs.worker.context import WorkerContext

if TYPE_CHECKING:
    import sqlalchemy as sa

_LOOK_S: Final = 0.5


class JobRun:
    """One job in the hands of this worker.

    Args:
        context: The worker.
        item: Id of the job.
    """

    def __init__(self, context: WorkerContext, item: str) -> None:
        self._context = context
        self._item = item

    async def run(self) -> None:
        """See the job through; returns once it is over, or is another worker's. Raises Buried."""
        changed = self._context.change_event(self._item)
        while True:
            changed.clear()
            head = await self._context.read(lambda link: self._context.records.job(link, self._item))
            if head is None or head.terminal or head.executor != self._context.executor or await self._step(head):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await changed.wait()

    async def _step(self, head: JobHead) -> bool:
        """Do what the plan says; whether the job is over."""
        tasks = await self._context.read(lambda link: self._context.records.tasks_of_jobs(link, [head.id]))
        now, pause = utc_now(), timedelta(seconds=self._context.work.settings.retry_backoff_s)
        overdue = (now - (head.started_at or now)).total_seconds() > head.spec.max_wall_time_s
        resting = {task.id for task in tasks if task.finished_at is not None and now - task.finished_at < pause}
        plan = decide(head.spec, tasks, canceled=head.cancel_at is not None, overdue=overdue, resting=resting)
        if plan.start:
            await self._context.write(partial(self._submit, head=head, start=plan.start))
            self._context.wake.set()
        if plan.cancel:
            reason = "its job was canceled" if head.cancel_at is not None else "its job's time is over"
            await self._context.write(lambda link: self._cancel(link, plan, reason))
            for item in plan.cancel:
                self._context.note_cancel(item)
        if plan.status is None:
            return False
        values: dict[str, Any] = {
            "error_code": plan.error_code,
            "error_message": plan.error_message,
            "finished_at": micros(utc_now()),
        }
        final_status = plan.status
        moved = await self._context.write(
            lambda link: self._context.records.move(
                link, "job", head.id, final_status, self._context.executor, **values
            )
        )
        if not moved:
            await self._context.require_alive()
        return True

    def _submit(self, link: sa.Connection, *, head: JobHead, start: Sequence[tuple[int, int]]) -> None:
        """Add the tasks of steps, which run on the job's host, where its session's files are; doing it again changes nothing.

        Nothing is added to a job that was canceled since, or that somebody else has by now.
        """
        if not self._context.records.goes_on(link, "job", head.id, self._context.executor):
            return
        for index, number in start:
            step, item = head.spec.steps[index], step_task_id(head.id, index, number)
            spec = TaskSpec(
                scope=head.scope, session_id=head.spec.session_id, command=step.command, placement=head.spec.placement
            )
            row = new_task(item, spec, head.session_key, body_hash="", home=head.home)
            self._context.records.add_task(link, row | {"job_id": head.id, "step": index, "try": number})
        self._context.work.queue.announce(link)  # another worker of this host may have room for them

    def _cancel(self, link: sa.Connection, plan: JobPlan, reason: str) -> None:
        for item in plan.cancel:
            if self._context.records.ask_cancel(link, "task", item, reason) == "asked":
                self._context.work.queue.announce(link, f"cancel {item}")
