"""Seeing one job through: submit the tasks of its steps, wait for them, write its end (spec work §3)."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from kdskills.jobs.database import micros, utc_now
from kdskills.jobs.heads import JobHead
from kdskills.jobs.model import TaskSpec
from kdskills.jobs.plan import Plan, decide, step_task_id
from kdskills.jobs.queues import TASK, host_queue, steps_queue
from kdskills.jobs.records import new_task
from kdskills.jobs.roster import Roster
from kdskills.jobs.worker.desk import Desk

if TYPE_CHECKING:
    import sqlalchemy as sa

_LOOK_S: Final = 0.25


class JobRun:
    """One job in the hands of this worker.

    Args:
        desk: The worker.
        item: Id of the job.
    """

    def __init__(self, desk: Desk, item: str) -> None:
        self._desk = desk
        self._item = item

    async def run(self) -> None:
        """See the job through; returns once it is over, or is another host's. Raises Buried."""
        async with self._desk.holding("job", self._item):
            if not await self._desk.claim("job", self._item) or not await self._begin():
                return
            changed = self._desk.changed(self._item)
            while True:
                changed.clear()
                head = await self._desk.read(lambda link: self._desk.records.job(link, self._item))
                if head is None or head.terminal or await self._step(head):
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), _LOOK_S)

    async def _begin(self) -> bool:
        """Hold the session and move the job to `running`; False when there is nothing to do here."""
        pause = 0.05
        while True:
            said = await self._desk.write(self._begin_row)
            if said == "begun":
                return True
            if said == "elsewhere":
                return False
            if said == "over":
                await self._desk.require_alive()
                if await self._desk.over("job", self._item):
                    return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _begin_row(self, link: sa.Connection) -> str:
        desk, records = self._desk, self._desk.records
        head = records.job(link, self._item)
        if head is None or head.terminal:
            return "over"
        host = desk.work.host
        known = records.session_host(link, head.session_key)
        if known not in (None, host) and Roster(desk.work).alive_hosts(link, {known or ""}):
            if records.release(link, "job", head.id, desk.executor):
                desk.work.queues.requeue(link, head.id, host_queue(known or ""))
            return "elsewhere" if head.executor in (desk.executor, None) else "over"
        if not records.take_session(link, head.session_key, head.id, host):
            return "busy"
        values: dict[str, str | int] = {"host": host}
        if head.started_at is None:
            values |= {"started_at": micros(utc_now())}
        return "begun" if records.move(link, "job", head.id, "running", desk.executor, **values) else "over"

    async def _step(self, head: JobHead) -> bool:
        """Do what the plan says; whether the job is over."""
        tasks = await self._desk.read(lambda link: self._desk.records.tasks_of_jobs(link, [head.id]))
        now, pause = utc_now(), timedelta(seconds=self._desk.work.settings.retry_backoff_s)
        overdue = (now - (head.started_at or now)).total_seconds() > head.spec.max_wall_time_s
        resting = {task.id for task in tasks if task.finished_at is not None and now - task.finished_at < pause}
        plan = decide(head.spec, tasks, canceled=head.cancel_at is not None, overdue=overdue, resting=resting)
        for index, number in plan.start:
            await self._desk.write(partial(self._submit, head=head, index=index, number=number))
        if plan.cancel:
            reason = "its job was canceled" if head.cancel_at is not None else "its job's time is over"
            gone = await self._desk.write(lambda link: self._cancel(link, plan, reason))
            await asyncio.to_thread(self._desk.work.queues.cancel, gone)
            for item in plan.cancel:
                self._desk.asked(item).set()
        if plan.status is None:
            return False
        values = {"error_code": plan.error_code, "error_message": plan.error_message, "finished_at": micros(utc_now())}
        to = plan.status
        moved = await self._desk.write(
            lambda link: self._desk.records.move(link, "job", head.id, to, self._desk.executor, **values)
        )
        if not moved:
            await self._desk.require_alive()
        return True

    def _submit(self, link: sa.Connection, *, head: JobHead, index: int, number: int) -> None:
        """Add a step's task, pinned to this host, where its session's files are; doing it again changes nothing.

        Nothing is added to a job that was canceled since, or that somebody else has by now.
        """
        if not self._desk.records.goes_on(link, "job", head.id, self._desk.executor):
            return
        step, item = head.spec.steps[index], step_task_id(head.id, index, number)
        spec = TaskSpec(
            scope=head.scope, session_id=head.spec.session_id, command=step.command, placement=head.spec.placement
        )
        row = new_task(item, spec, head.session_key, body_hash="", home=head.home)
        if self._desk.records.add_task(link, row | {"job_id": head.id, "step": index, "try": number}):
            self._desk.work.queues.enqueue(link, TASK, item, steps_queue(self._desk.work.host), None)

    def _cancel(self, link: sa.Connection, plan: Plan, reason: str) -> list[str]:
        said = {item: self._desk.records.ask_cancel(link, "task", item, reason) for item in plan.cancel}
        return [item for item, state in said.items() if state == "canceled"]
