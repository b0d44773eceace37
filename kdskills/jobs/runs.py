"""Runs of a worker: a task from its attempt to its terminal head, a job from its first step to its last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from pydantic import ValidationError

from kdskills.errors import ExecFailed, ExecRefused, KdskillsError
from kdskills.errors.traces import Trace, current_trace
from kdskills.jobs import shim
from kdskills.jobs.artifacts import ArtifactKeeper
from kdskills.jobs.attempts import Attempt, AttemptOrder, OrderInput, OutputBounds, Verdict
from kdskills.jobs.model import (
    OPEN,
    ArtifactRef,
    FromArtifact,
    JobHead,
    Kind,
    OutputError,
    TaskHead,
    decide,
    step_spec,
    step_task_id,
)
from kdskills.jobs.queue import Capacity, Work
from kdskills.jobs.records import dump, ending, follows, in_states, new_row, observed, outcome, without_room
from kdskills.jobs.session_folders import SessionFolders
from kdskills.storage.database import DatabaseUnavailable, micros, utc_now

if TYPE_CHECKING:
    import sqlalchemy as sa


T = TypeVar("T")
WorkKind = Literal["batch", "service", "job"]

LOG: Final = logging.getLogger("kdskills.jobs")
_PAUSE_S: Final = 0.1
_PAUSE_MAX_S: Final = 2.0
_READ_ONLY: Final = "25006"
"""PostgreSQL's word for a write to a server that takes none."""


class Buried(BaseException):
    """This worker was given up by the others: whatever it does next would be done twice."""

    def __init__(self, reason: str = "the others gave it up") -> None:
        super().__init__(reason)
        self.reason = reason


Span = Callable[[str, Trace], AbstractContextManager[object]]
"""Does a block as a step, which has a name, of the trace of another."""


class WorkerContext:
    """Shared by the parts of one worker; used on one event loop. *executor* is a name nobody had before, *span* records traces."""

    def __init__(self, work: Work, executor: str, keeper: ArtifactKeeper, span: Span | None = None) -> None:
        self.work = work
        self.span = span
        self.executor = executor
        self.keeper = keeper
        self.folders = SessionFolders(work, keeper, self.read)
        self.records = work.records
        self.lease_file = work.state_dir / "lease" if work.pooled else None
        self.lease_until = math.inf
        """Until when the lease file lets this host's programs run, by the clock that also counts sleep."""
        self.cancel_events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Set once a cancel of the item was requested."""
        self.change_events: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Set whenever a task of the job ended in this worker."""
        self.active: dict[str, WorkKind] = {}
        """What this worker has in hand, from its claim on."""
        self.busy_at = time.monotonic()
        self.wake = asyncio.Event()
        """Set whenever there may be work to claim, or a cancel to pass on."""
        self._full_since: int | None = None
        self._full_until = 0.0
        self._proved_until: dict[str, float] = {}
        self._is_low = False

    async def read(self, question: Callable[[sa.Connection], T]) -> T:
        """Return what *question* reads; waits for a database that is away."""
        return await self.patiently(lambda: self.work.database.read(question))

    async def write(self, change: Callable[[sa.Connection], T]) -> T:
        """Do *change* in one transaction; waits for a database that is away, so *change* may happen twice."""
        return await self.patiently(lambda: self.work.database.write(change))

    async def head(self, item: str) -> TaskHead | None:
        """Return a task's head."""
        return await self.read(lambda link: self.records.head(link, TaskHead, item))

    async def move(
        self, kind: Kind, item: str, status: str, then: Callable[[sa.Connection], None] | None = None, **values: Any
    ) -> bool:
        """Move a row this worker holds, and do *then* in the same transaction; False when its state forbids it.

        Raises Buried when the row is another worker's, because this one was given up.
        """

        def change(link: sa.Connection) -> bool:
            moved = self.records.move(link, kind, item, status, self.executor, **values)
            if moved and then is not None:
                then(link)
            return moved

        moved = await self.write(change)
        if not moved and await self.read(
            lambda link: self.executor not in {row.executor for row in self.work.roster.live(link)}
        ):
            raise Buried  # nothing it would write is accepted any more
        return moved

    def note_change(self, job: str | None) -> None:
        """Wake the job a task belongs to."""
        if job is not None and job in self.change_events:
            self.change_events[job].set()

    def note_cancel(self, item: str) -> None:
        """Pass a cancel on to the run of *item*, if this worker has it in hand."""
        if item in self.active:
            self.cancel_events[item].set()
            self.change_events[item].set()

    def capacity(self) -> Capacity:
        """Return how much more this worker has room for: nothing while the disk of its state folder is full.

        A host without room would fail whatever it takes, at once, and so would soon have had everything that waits.
        """
        settings, kinds = self.work.settings, list(self.active.values())
        if self.full_since() is not None:
            return Capacity(0, 0, 0)
        broken = bool(self.work.queue.broken)  # steps of a job run where it does
        return Capacity(
            batch=max(0, settings.slots - kinds.count("batch")),
            service=max(0, settings.services - kinds.count("service")),
            job=0 if broken else max(0, settings.held - len(kinds)),
        )

    async def prove(self, engine: str) -> None:
        """Leave the tasks of *engine* to other hosts until a probe shows that it starts programs here; one at a time.

        What this host took it would fail, and so would soon have had everything that waits in the pool.
        """
        broken = self.work.queue.broken
        if not self.work.queue.pooled or engine in broken or time.monotonic() < self._proved_until.get(engine, 0.0):
            return
        broken[engine] = set()
        try:
            while words := await self.work.attempts.probe(engine):
                LOG.error("work for %s is left to other hosts, as it starts no program here: %s", engine, words)
                await asyncio.sleep(PROBE_S)
        finally:
            del broken[engine]
        self._proved_until[engine] = time.monotonic() + PROBE_S
        self.wake.set()

    async def leased(self) -> None:
        """Wait until programs may run here: what begins under a lease that is over is ended at once, and was lost then."""
        while time.clock_gettime(time.CLOCK_BOOTTIME) >= self.lease_until:  # noqa: ASYNC110 - a clock is waited for
            await asyncio.sleep(_LEASE_LOOK_S)

    async def leave(self, item: str) -> None:
        """Give a task that a later version began here back, for a worker of that version to adopt."""
        LOG.warning("%s is left to a worker of a later version, which began it", item)
        self.work.queue.unreadable.add(item)
        table = self.work.tables.tasks
        mine = table.update().where(table.c.id == item, table.c.executor == self.executor)
        await self.write(lambda link: link.execute(mine.values(executor=None)))

    def note_full(self) -> None:
        """Take nothing new for a while: a write found no room, whatever the disk says of itself."""
        self._full_until = time.monotonic() + FULL_S

    def full_since(self) -> int | None:
        """Return since when the disk of the state folder is too full to take anything new, in microseconds; None while it is not."""
        try:
            disk = os.statvfs(self.work.state_dir)
        except OSError:  # a folder that was taken away is found out at the next beat
            return micros(utc_now())
        free, least = disk.f_bavail * disk.f_frsize, self.work.settings.room_bytes
        if self._is_low:  # what is full is full until there is a good deal of room
            least = min(2 * least, max(least, disk.f_blocks * disk.f_frsize // 2))
        self._is_low = free < least and disk.f_blocks > 0  # some file systems tell nothing of their size
        no_files = disk.f_favail < MIN_FILES and disk.f_files > 0
        full = self._is_low or no_files or time.monotonic() < self._full_until
        if full and self._full_since is None:
            low = f"{free} bytes, of which {least} have to be, and {disk.f_favail} files are free"
            LOG.warning("nothing new is taken: a write found no room on the disk, or little is left: %s", low)
            self._full_since = micros(utc_now())
        elif not full and self._full_since is not None:
            LOG.info("work is taken again: %d bytes are free on the disk", free)
            self._full_since = None
        return self._full_since

    def let_go(self, item: str) -> None:
        """Count *item* no more: there is room for something else."""
        self.active.pop(item, None)
        self.cancel_events.pop(item, None)
        self.change_events.pop(item, None)
        self.busy_at = time.monotonic()
        self.wake.set()

    async def patiently(self, act: Callable[[], Awaitable[T]]) -> T:
        """Do *act*, again and again while the database is away, so *act* may happen twice."""
        pause = _PAUSE_S
        while True:
            try:
                return await act()
            except DatabaseUnavailable as error:
                if not passing(error):
                    raise
                LOG.warning("%s; trying again in %.1f s", error.message, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_MAX_S)


def passing(error: DatabaseUnavailable) -> bool:
    """Whether the database may answer the same statement later: it is away, restarting or locked, not at odds with it."""
    from sqlalchemy import exc

    cause = error.__cause__
    if isinstance(cause, exc.DBAPIError):
        is_standby = getattr(cause.orig, "sqlstate", None) == _READ_ONLY  # a server that is not promoted yet
        if cause.connection_invalidated or is_standby:
            return True
    return isinstance(cause, exc.OperationalError | exc.InterfaceError | exc.TimeoutError)


class OfLaterVersion(Exception):  # internal to this room: the worker leaves what it stands for
    """An attempt here was begun by a later version, whose order this one does not understand."""


_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_ABOUT: Final[ContextVar[Mapping[str, str]]] = ContextVar("kdskills_work_in_hand")


@contextmanager
def about(**ids: str | None) -> Iterator[None]:
    """Give every line that is logged in the block these facts, such as `task` or `job`; None gives none."""
    facts = {name: item for name, item in ids.items() if item is not None}
    mark = _ABOUT.set({**_ABOUT.get(_NOTHING), **facts})
    try:
        yield
    finally:
        _ABOUT.reset(mark)


class AboutWork(logging.Filter):
    """Adds to a record's facts what it is about; facts of its own come first."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True: every record passes."""
        record_facts = getattr(record, "facts", None)
        record.facts = {**_ABOUT.get(_NOTHING), **(record_facts if isinstance(record_facts, dict) else {})}
        return True


def restart_delay_s(restarts: int, first_s: float = 0.5, longest_s: float = 30.0) -> float:
    """Return how long to wait before a service's next attempt, after *restarts* restarts: doubled each time."""
    return min(longest_s, first_s * 2.0 ** min(restarts, 60))


_LEASE_LOOK_S: Final = 0.05
PROBE_S: Final = 10.0
"""Seconds after which an engine that started nothing is tried again, and for which one that did is believed."""
_ROOM_S: Final = 1.0
FULL_S: Final = 5.0
"""Seconds a disk counts as full after a write that found no room."""
MIN_FILES: Final = 256
"""Files that can be made on a disk with less of which it is full."""
_UNPROVED: Final = frozenset({ExecRefused.code, ExecFailed.code})
"""Codes of what may be no fault of the program, but of an engine that works no more."""
_SPOILT: Final = "what it was when the program ended is not on the disk any more, as after a power cut"
_ENDED_BETWEEN: Final[dict[str, Any]] = {
    "status": "cancelled",
    "error_code": "canceled",
    "error_message": None,
    "finished_at": 0.0,
}


class TaskRun:
    """One task, by its id, in the hands of this worker."""

    def __init__(self, context: WorkerContext, item: str) -> None:
        self._context = context
        self._item = item
        self._settings = context.work.settings

    async def run(self, head: TaskHead | None = None) -> None:
        """See the task through, which is read unless given; returns once it is over, or another worker's. Raises Buried."""
        head = head or await self._context.head(self._item)
        if head is None or head.terminal or head.executor != self._context.executor:
            return
        try:
            with about(job=head.job_id), self._traced(head):
                while True:
                    try:
                        attempt = await self._attempt_with_room(head)
                        if attempt is None:
                            await self._finish(head, Verdict(**_ENDED_BETWEEN), None)
                            return
                    except OfLaterVersion:
                        await self._context.leave(head.id)
                        return
                    except KdskillsError as error:
                        broken = Verdict(status="infra_error", error_code=error.code, error_message=error.message)
                        await self._finish(head, broken, None)
                        return
                    verdict = await self._follow(head, attempt)
                    if verdict.status != "ok" or verdict.artifacts:  # a success is one, whatever was asked meanwhile
                        head = await self._context.head(self._item) or head
                        if head.terminal:
                            return
                    decision = follows(head, verdict)
                    if decision == "no":
                        await self._finish(head, verdict, attempt)
                        if verdict.error_code in _UNPROVED:
                            await self._context.prove(head.spec.placement.engine)
                        return
                    if not await self._next_attempt(head, attempt, verdict, restarted=decision == "restart"):
                        return
                    head = await self._context.head(self._item) or head
        finally:
            self._context.note_change(head.job_id)

    async def _attempt_with_room(self, head: TaskHead) -> Attempt | None:
        """Return the attempt the head names, which waits for room on a full disk; None when it was canceled meanwhile."""
        while True:
            try:
                return await self._attempt(head)
            except OSError as error:
                if error.errno not in shim.FULL:
                    raise
            if not await self._room(head):  # the launcher may have begun it and died
                return await asyncio.to_thread(self._context.work.attempts.find, head.id, head.attempt)

    async def _room(self, head: TaskHead) -> bool:
        """Wait until there is room on the disk for what did not begin without it; False when it was canceled meanwhile."""
        LOG.warning("%s, which did not begin, waits for room on the disk", head.id)
        cancel_event = self._context.cancel_events[head.id]
        self._context.note_full()
        if head.cancel_at is not None:
            cancel_event.set()
        while not cancel_event.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ROOM_S):
                    await cancel_event.wait()
            if self._context.full_since() is None:
                break
        return not cancel_event.is_set()

    def _traced(self, head: TaskHead) -> AbstractContextManager[object]:
        begun, span = Trace.read(head.spec.traceparent), self._context.span
        return nullcontext() if begun is None or span is None else span("task", begun)

    async def _attempt(self, head: TaskHead) -> Attempt:
        """Return the attempt the head names: found if it began, else started."""
        context, attempts = self._context, self._context.work.attempts
        try:
            running = await asyncio.to_thread(attempts.find, head.id, head.attempt)
        except ValidationError as error:
            raise OfLaterVersion from error
        if running is not None:
            return running
        await context.folders.bring(head)
        inputs: list[OrderInput] = []
        for item in head.spec.command.inputs:
            if isinstance(item, FromArtifact):
                file = await context.patiently(partial(context.keeper.fetch, head.scope, item.artifact_id))
                inputs.append(OrderInput(path=item.path, file=file))
        order = AttemptOrder(
            task_id=head.id,
            attempt=head.attempt,
            spec=head.spec.model_copy(update={"traceparent": str(current_trace() or head.spec.traceparent)}),
            session_dir=None if head.spec.session_id is None else attempts.session_dir(head.session_key),
            inputs=tuple(inputs),
            log_limit=self._settings.log_bytes,
            outputs=OutputBounds(each=self._settings.output_bytes, total=self._settings.files_bytes),
            host_ports={item.port: item.host_port for item in head.endpoints},
            lease_file=None if head.home is not None else context.lease_file,
        )
        await context.leased()
        return await attempts.start(order)

    async def _follow(self, head: TaskHead, attempt: Attempt) -> Verdict:
        """Wait for the end, write `running` when it runs, and pass a cancel on."""
        cancel_event = self._context.cancel_events[head.id]
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
            verdict = await over
        finally:
            for task in (over, running, cancel):
                task.cancel()
            for result in await asyncio.gather(over, running, cancel, return_exceptions=True):
                if isinstance(result, Exception):
                    LOG.error("following %s: %s", head.id, result)
        for row in verdict.connections:
            facts = {"event": "script.connection", "skill": head.spec.placement.skill_name, **asdict(row)}
            words = "a command of %s connected to %s:%d: %s"
            LOG.info(words, facts["skill"], row.host, row.port, row.outcome, extra={"facts": facts})
        return verdict

    async def _report_running(self, head: TaskHead, attempt: Attempt) -> None:
        """Write `running` for the attempt of *head*; a late report is not taken for one of the next attempt."""
        facts = None if head.status == "running" else await attempt.until_running()
        if facts is not None:
            move, executor, values = self._context.records.move, self._context.executor, observed(head, facts)
            await self._context.write(
                lambda link: move(link, "task", head.id, "running", executor, of_attempt=head.attempt, **values)
            )

    async def _next_attempt(self, head: TaskHead, attempt: Attempt, verdict: Verdict, *, restarted: bool) -> bool:
        """Move to the next attempt after the service's pause; False when the task is over or was canceled meanwhile."""
        cancel_event, settings = self._context.cancel_events[head.id], self._settings
        if restarted:
            pause = restart_delay_s(head.restarts, settings.restart_backoff_s, settings.restart_backoff_max_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await cancel_event.wait()
        elif without_room(verdict):
            await self._room(head)
        if cancel_event.is_set():
            await self._finish(head, verdict.model_copy(update=_ENDED_BETWEEN), attempt)
            return False
        facts = await asyncio.to_thread(attempt.facts)  # what it was is kept, whether it was seen to run or not
        values = observed(head, facts) | {"ready_at": None}
        values |= {"attempt": head.attempt + 1, "restarts": head.restarts + restarted}
        charge = self._context.work.quotas.charge
        return await self._context.move(
            "task", head.id, "starting", lambda link: charge(link, head, verdict, micros(utc_now())), **values
        )

    async def _finish(self, head: TaskHead, verdict: Verdict, attempt: Attempt | None) -> None:
        """Keep what it left and write the terminal head."""
        refs: tuple[ArtifactRef, ...] = ()
        errors = list(verdict.output_errors)
        if attempt is not None and verdict.artifacts:
            files, keep = verdict.artifacts, partial(self._context.keeper.keep, executor=self._context.executor)
            try:
                refs = await self._context.patiently(partial(keep, head, files, attempt.folder))
            except KdskillsError as error:
                errors += [OutputError(path=output.path, code=error.code, message=error.message) for output in files]
            else:
                spoilt = {output.path for output in files} - {ref.path for ref in refs}
                errors += [OutputError(path=path, code="not_kept", message=_SPOILT) for path in sorted(spoilt)]
        status, values = ending(head, verdict)
        if attempt is not None:  # it may be over before it was seen to run
            values |= await asyncio.to_thread(outcome, head, attempt, self._settings.result_bytes)

        work = self._context.work

        def end(link: sa.Connection) -> None:
            """Count what it used, and wake whoever waited for it on other workers; this one looks anyway."""
            if head.job_id is not None:
                work.queue.announce(link, f"job {head.job_id}")
            if self._settings.global_concurrency is not None or work.quotas.bounds_running:
                work.queue.announce(link)
            work.quotas.charge(link, head, verdict, micros(utc_now()))

        async with self._context.folders.saving(head) as save:

            def settle(link: sa.Connection) -> None:
                save.settle(link)
                end(link)

            values |= {"artifacts": dump(refs), "output_errors": dump([*errors, *save.errors])}
            if await self._context.move("task", head.id, status, settle, **values):
                await save.tidy()
                if attempt is not None and not errors:  # what could not be kept elsewhere is in its folder only
                    await self._remove_silent(head)

    async def _remove_silent(self, head: TaskHead) -> None:
        """Remove the folder of a task that printed nothing: its head has all there is, and files cost a block each.

        Its shim ends a moment after its verdict; what cannot be removed by then goes with the head.
        """
        attempts = self._context.work.attempts
        try:
            if not await asyncio.to_thread(attempts.silent, head.id):
                return
            for _ in range(_SHIM_ENDS):
                if await asyncio.to_thread(attempts.remove, head.id):
                    return
                await asyncio.sleep(_SHIM_ENDS_S)
        except OSError as error:
            LOG.warning("the folder of %s stays: %s", head.id, error.strerror)


_SHIM_ENDS: Final = 20
_SHIM_ENDS_S: Final = 0.02
_LOOK_S: Final = 0.5
"""Seconds between two looks at a job on SQLite, which tells nobody of what another worker of the host did for it."""


class JobRun:
    """One job, by its id, in the hands of this worker."""

    def __init__(self, context: WorkerContext, item: str) -> None:
        self._context = context
        self._item = item

    async def run(self) -> None:
        """See the job through; returns once it is over, or is another worker's. Raises Buried.

        Whatever breaks it is raised once its steps are over: they would go on without it, and their session is not free before.
        """
        try:
            await self._advance()
        except Exception:  # raised again
            await self._end_steps()
            raise

    async def _end_steps(self) -> None:
        table, changed = self._context.work.tables.tasks, self._context.change_events[self._item]
        mine = (table.c.job_id == self._item, in_states(table, OPEN))
        query = table.select().with_only_columns(table.c.id, table.c.cancel_at).where(*mine)
        while steps := await self._context.read(lambda link: link.execute(query).all()):
            changed.clear()
            if items := [step.id for step in steps if step.cancel_at is None]:
                await self._cancel(items, "its job broke")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await changed.wait()

    async def _advance(self) -> None:
        changed, records = self._context.change_events[self._item], self._context.records
        while True:
            changed.clear()
            head = await self._context.read(lambda link: records.head(link, JobHead, self._item, brief=True))
            if head is None or head.terminal or head.executor != self._context.executor or await self._step(head):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s(head)):
                    await changed.wait()

    def _pause_s(self, head: JobHead) -> float:
        """Return for how many seconds nothing happens by itself: until its time, or a step's rest, is over."""
        work, now = self._context.work, utc_now()
        pause = timedelta(seconds=work.settings.retry_backoff_s)
        ends = [(head.started_at or now) + timedelta(seconds=head.spec.max_wall_time_s)]
        ends += [step.task.finished_at + pause for step in head.steps if step.task and step.task.finished_at]
        look_s = work.settings.poll_s if work.database.dialect == "postgresql" else _LOOK_S
        return min([look_s, *((end - now).total_seconds() for end in ends if end > now)])

    async def _step(self, head: JobHead) -> bool:
        tasks = [step.task for step in head.steps if step.task is not None]  # what tries before them were is over
        now, pause = utc_now(), timedelta(seconds=self._context.work.settings.retry_backoff_s)
        overdue = (now - (head.started_at or now)).total_seconds() > head.spec.max_wall_time_s
        resting = {task.id for task in tasks if task.finished_at is not None and now - task.finished_at < pause}
        plan = decide(head.spec, tasks, canceled=head.cancel_at is not None, overdue=overdue, resting=resting)
        if plan.start:
            await self._context.write(partial(self._submit, head=head, start=plan.start))
            self._context.wake.set()
        if plan.cancel:
            reason = "its job was canceled" if head.cancel_at is not None else "its job's time is over"
            await self._cancel(plan.cancel, reason)
        if plan.status is not None:
            values: dict[str, Any] = {"error_code": plan.error_code, "error_message": plan.error_message}
            await self._context.move("job", head.id, plan.status, **values, finished_at=micros(utc_now()))
        return plan.status is not None

    def _submit(self, link: sa.Connection, *, head: JobHead, start: Sequence[tuple[int, int]]) -> None:
        """Add the tasks of steps, which run on the job's host, where its session's files are; doing it again changes nothing.

        Nothing is added to a job that was canceled since, or that somebody else has by now.
        """
        if not self._context.records.goes_on(link, "job", head.id, self._context.executor):
            return
        for index, number in start:
            spec, item = step_spec(head.spec, index), step_task_id(head.id, index, number)
            row = new_row(item, spec, head.session_key, body_hash="", home=head.home)
            self._context.records.add(link, "task", row | {"job_id": head.id, "step": index, "try": number})
        self._context.work.queue.announce(link)  # another worker of this host may have room for them

    async def _cancel(self, items: Sequence[str], reason: str) -> None:
        def ask(link: sa.Connection) -> None:
            for item in items:
                if self._context.records.ask_cancel(link, "task", item, reason) == "asked":
                    self._context.work.queue.announce(link, f"cancel {item}")

        await self._context.write(ask)
        for item in items:
            self._context.note_cancel(item)
        self._context.note_change(self._item)  # what was still queued is over by this, of which nobody else tells
