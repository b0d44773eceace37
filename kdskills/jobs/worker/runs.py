"""Runs of a worker: a task from its attempt to its terminal head, and a job from its first step to its last."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kdskills.errors import KdskillsError
from kdskills.jobs.attempts import Attempt, AttemptFacts, AttemptOrder, OrderInput, OutputBounds, Verdict
from kdskills.jobs.model import ArtifactRef, FromArtifact, JobHead, OutputError, TaskHead, TaskSpec
from kdskills.jobs.plan import JobPlan, decide, step_task_id
from kdskills.jobs.records import began, dump, ending, follows, new_task, printed, readiness
from kdskills.jobs.services import restart_delay_s
from kdskills.jobs.worker.context import LOG, TaskOutput, WorkerContext, about
from kdskills.storage.database import micros, utc_now

if TYPE_CHECKING:
    import sqlalchemy as sa


_ENDED_BETWEEN: Final = {"status": "cancelled", "error_code": "canceled", "error_message": None, "finished_at": 0.0}


class TaskRun:
    """One task in the hands of this worker.

    Args:
        context: The worker.
        item: Id of the task.
    """

    def __init__(self, context: WorkerContext, item: str) -> None:
        self._context = context
        self._item = item
        self._settings = context.work.settings

    async def run(self, head: TaskHead | None = None) -> None:
        """See the task through; returns once it is over, or is another worker's. Raises Buried.

        Args:
            head: The task as it was claimed; read when it is None.
        """
        head = head or await self._context.head(self._item)
        if head is None or head.terminal or head.executor != self._context.executor:
            return
        try:
            with about(job=head.job_id):
                await self._see_through(head)
        finally:
            self._context.note_change(head.job_id)

    async def _see_through(self, head: TaskHead) -> None:
        """Run attempts until one decides."""
        while True:
            try:
                attempt = await self._attempt(head)
            except KdskillsError as error:
                await self._finish(head, _broken(error), None)
                return
            verdict = await self._follow(head, attempt)
            if not verdict.succeeded or verdict.artifacts:  # a success is one, whatever was asked meanwhile
                head = await self._context.head(self._item) or head
                if head.terminal:
                    return
            decision = follows(head, verdict)
            if decision == "no":
                await self._finish(head, verdict, attempt)
                return
            if not await self._next_attempt(head, attempt, verdict, restarted=decision == "restart"):
                return
            head = await self._context.head(self._item) or head

    async def _attempt(self, head: TaskHead) -> Attempt:
        """Return the attempt the head names: found if it began, else started."""
        context, attempts = self._context, self._context.work.attempts
        running = await asyncio.to_thread(attempts.find, head.id, head.attempt)
        if running is not None:
            return running
        inputs = [
            OrderInput(
                path=item.path,
                file=await context.patiently(partial(context.keeper.fetch, head.scope, item.artifact_id)),
            )
            for item in head.spec.command.inputs
            if isinstance(item, FromArtifact)
        ]
        order = AttemptOrder(
            task_id=head.id,
            attempt=head.attempt,
            spec=head.spec,
            session_dir=None if head.spec.session_id is None else attempts.session_dir(head.session_key),
            inputs=tuple(inputs),
            log_limit=self._settings.log_bytes,
            outputs=OutputBounds(each=self._settings.output_bytes, total=self._settings.files_bytes),
            host_ports={item.port: item.host_port for item in head.endpoints},
            lease_file=None if head.home is not None else context.lease_file,
        )
        return await attempts.start(order)

    async def _follow(self, head: TaskHead, attempt: Attempt) -> Verdict:
        """Wait for the end, write `running` when it runs, and pass a cancel on."""
        cancel_event = self._context.cancel_event(head.id)
        if head.cancel_at is not None:
            cancel_event.set()
        over = asyncio.ensure_future(attempt.wait())
        running = asyncio.ensure_future(self._report_running(head, attempt))
        cancel = asyncio.ensure_future(cancel_event.wait())
        try:
            await asyncio.wait({over, cancel}, return_when=asyncio.FIRST_COMPLETED)
            if not over.done():
                now = await self._context.head(head.id)
                reason = "" if now is None else now.cancel_reason or ""
                await asyncio.to_thread(attempt.cancel, reason)
            return await over
        finally:
            for task in (over, running, cancel):
                task.cancel()
            for outcome in await asyncio.gather(over, running, cancel, return_exceptions=True):
                if isinstance(outcome, Exception):
                    LOG.error("following %s: %s", head.id, outcome)

    async def _report_running(self, head: TaskHead, attempt: Attempt) -> None:
        if head.status == "running":
            return
        facts = await attempt.until_running()
        if facts is not None:
            await self._context.write(lambda link: self._running_row(link, head, facts))

    def _running_row(self, link: sa.Connection, head: TaskHead, facts: AttemptFacts) -> bool:
        """Write `running` for the attempt of *head*; a late report is not taken for one of the next attempt."""
        values = began(head, facts) | readiness(facts)
        records, executor = self._context.records, self._context.executor
        return records.move(link, "task", head.id, "running", executor, of_attempt=head.attempt, **values)

    async def _next_attempt(self, head: TaskHead, attempt: Attempt, verdict: Verdict, *, restarted: bool) -> bool:
        """Move to the next attempt after the service's pause; False when the task is over or was canceled meanwhile."""
        cancel_event, settings = self._context.cancel_event(head.id), self._settings
        if restarted:
            pause = restart_delay_s(head.restarts, settings.restart_backoff_s, settings.restart_backoff_max_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await cancel_event.wait()
        if cancel_event.is_set():
            await self._finish(head, verdict.model_copy(update=_ENDED_BETWEEN), attempt)
            return False
        facts = await asyncio.to_thread(attempt.facts)  # what it was is kept, whether it was seen to run or not
        moments = readiness(facts) | began(head, facts) | {"ready_at": None}
        values = moments | {"attempt": head.attempt + 1, "restarts": head.restarts + restarted}
        executor = self._context.executor
        moved = await self._context.write(
            lambda link: self._context.records.move(link, "task", head.id, "starting", executor, **values)
        )
        if not moved:
            await self._context.require_alive()
        return moved

    async def _finish(self, head: TaskHead, verdict: Verdict, attempt: Attempt | None) -> None:
        """Keep what it left and write the terminal head."""
        refs: tuple[ArtifactRef, ...] = ()
        errors = list(verdict.output_errors)
        if attempt is not None and verdict.artifacts:
            files = [
                TaskOutput(output.path, output.size, output.sha256, output.mode, attempt.output(output.file))
                for output in verdict.artifacts
            ]
            try:
                refs = await self._context.patiently(partial(self._context.keeper.keep, head, files))
            except KdskillsError as error:
                errors += [OutputError(path=output.path, code=error.code, message=error.message) for output in files]
        status, values = ending(head, verdict)
        values |= {"artifacts": dump(refs), "output_errors": dump(errors)}
        if attempt is not None:
            facts = await asyncio.to_thread(attempt.facts)
            values |= began(head, facts) | readiness(facts)  # it may be over before it was seen to run
            values |= await asyncio.to_thread(printed, attempt, self._settings.result_bytes)
        if not await self._context.write(lambda link: self._end_row(link, head, status, values)):
            await self._context.require_alive()

    def _end_row(self, link: sa.Connection, head: TaskHead, status: str, values: dict[str, Any]) -> bool:
        """Write the end, and wake whoever waited for it on other workers; this one looks anyway."""
        context = self._context
        moved = context.records.move(link, "task", head.id, status, context.executor, **values)
        if moved and head.job_id is not None:
            context.work.queue.announce(link, f"job {head.job_id}")
        if moved and self._settings.global_concurrency is not None:
            context.work.queue.announce(link)
        return moved


def _broken(error: KdskillsError) -> Verdict:
    """Return the verdict on an attempt that could not be started."""
    return Verdict(status="infra_error", error_code=error.code, error_message=error.message)


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
