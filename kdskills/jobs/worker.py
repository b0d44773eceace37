"""The worker: the one process that holds a slot, beats, takes work from the queue and sees it through."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import select
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kdskills.errors import BadRequest, KdskillsError
from kdskills.jobs.attempts import RUNS, cancel_attempt, require_task_id
from kdskills.jobs.model import ACTIVE, TERMINAL, Kind
from kdskills.jobs.queue import CHANNEL, Work, hold_slot, slot_mark
from kdskills.jobs.quotas import needed_work, printed_bytes, project_bytes
from kdskills.jobs.runs import LOG, Buried, JobRun, Span, TaskRun, WorkerContext, WorkKind, about, passing
from kdskills.jobs.session_folders import SessionFolders
from kdskills.skills.private_files import open_private, replace_file
from kdskills.storage.database import DatabaseUnavailable, LazyModule, micros, utc_now

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.artifacts import ArtifactKeeper
    from kdskills.jobs.stream import HostStream
    from kdskills.storage.database import Database
else:
    sa = LazyModule("sqlalchemy")


@dataclass
class HeavyWork:
    """A task, or a job with its steps, and what its project keeps of it: bytes it printed, and digests and sizes of artifacts."""

    kind: Kind
    id: str
    host: str | None
    over: bool
    finished_at: int
    printed: int
    contents: list[tuple[str, int]]


@dataclass(eq=False)
class Retention:
    """Forgets tasks and jobs that have been over for long, are too many for their project, or have too many bytes.

    Artifacts and run folders go first, the head last: a round that was killed is done again.
    """

    work: Work
    artifacts: ArtifactKeeper

    async def round(self) -> int:
        """Forget everything that is due; returns how many heads went."""
        removed_heads = 0
        for kind in ("job", "task"):
            while due := await self.work.database.read(partial(self._due, kind=kind)):
                await self._forget(kind, due)
                removed_heads += len(due)
        if self.work.settings.keep_bytes_per_project:
            for kind, items in await self.work.database.read(self._heavy):
                await self._forget(kind, items)
                removed_heads += len(items)
        await self.artifacts.tend()
        await asyncio.to_thread(self._tidy)
        await SessionFolders(self.work, self.artifacts).tend()
        return removed_heads

    def _due(self, link: sa.Connection, *, kind: str) -> list[str]:
        """Return ids of heads that may go, of this host's work or nobody's, a batch at most.

        Nobody's is also what ran on a host whose workers were forgotten: it has been silent for as long as work is kept.
        """
        table, columns = self.work.records.table(kind), self.work.records.table(kind).c
        hosts = sa.select(self.work.tables.workers.c.host)
        ours = sa.or_(columns.host.is_(None), columns.host == self.work.host, columns.host.not_in(hosts))
        over = [columns.status.in_(sorted(TERMINAL)), *([] if kind == "job" else [columns.job_id.is_(None)])]
        oldest = micros(utc_now()) - round(self.work.settings.keep_s * 1_000_000)
        if expired := self._batch(link, sa.select(columns.id).where(*over, ours, columns.finished_at < oldest)):
            return expired
        most, owner = self.work.settings.keep_per_project, (columns.tenant, columns.project)
        # an index alone tells; what is over is counted only where there may be too much
        many_rows = sa.select(*owner).group_by(*owner).having(sa.func.count() > most)
        for tenant, project in link.execute(many_rows).all():
            whose = (*over, columns.tenant == tenant, columns.project == project)
            if link.execute(sa.select(sa.func.count()).select_from(table).where(*whose)).scalar_one() <= most:
                continue
            latest = sa.select(columns.finished_at, columns.id).where(*whose).offset(most).limit(1)
            row = link.execute(latest.order_by(columns.finished_at.desc(), columns.id.desc())).first()
            if row is None:  # other hosts forget at the same time
                continue
            moment, item = row
            first = sa.or_(columns.finished_at < moment, sa.and_(columns.finished_at == moment, columns.id <= item))
            if excess := self._batch(link, sa.select(columns.id).where(*whose, ours, first)):
                return excess
        return []

    def _batch(self, link: sa.Connection, query: sa.Select[Any]) -> list[str]:
        """Return ids of *query*, a batch at most, but for those whose artifacts are inputs of what is not over yet."""
        batch = self.work.settings.retention_batch
        items = _ids(link, query=query.limit(batch))
        needed = needed_work(link, self.work.tables) if items else frozenset()
        if not needed.isdisjoint(items):
            items = _ids(link, query=query.limit(batch + len(needed)))
        return [item for item in items if item not in needed][:batch]

    def _heavy(self, link: sa.Connection) -> list[tuple[str, list[str]]]:
        """Return kinds and ids, a batch at most each, of what projects beyond their bytes forget, the first to end first.

        What is over on other hosts counts like what is over here, and is forgotten there.
        """
        batch, going = self.work.settings.retention_batch, list[tuple[str, list[str]]]()
        tables, hosts = self.work.tables, sa.select(self.work.tables.workers.c.host)
        other_hosts = set(link.execute(hosts).scalars()) - {self.work.host}
        needed: frozenset[str] | None = None
        for (tenant, project), used in project_bytes(link, tables, self.work.settings.log_bytes).items():
            if used <= self.work.settings.keep_bytes_per_project:
                continue
            needed = needed_work(link, self.work.tables) if needed is None else needed
            for item in self._beyond(link, tenant, project, needed):
                if item.host in other_hosts:
                    continue
                if not going or going[-1][0] != item.kind or len(going[-1][1]) >= batch:
                    going.append((item.kind, []))
                going[-1][1].append(item.id)
        return going

    def _beyond(self, link: sa.Connection, tenant: str, project: str, needed: frozenset[str]) -> list[HeavyWork]:
        """Return work of a project that is over and does not fit into its bytes with all that ended later, the first first."""
        tables, most = self.work.tables, self.work.settings.keep_bytes_per_project
        contents: dict[str, list[tuple[str, int]]] = {}
        columns = tables.artifacts.c
        mine = (columns.tenant == tenant, columns.project == project, columns.task_id.is_not(None))
        for task, sha256, size in link.execute(sa.select(columns.task_id, columns.sha256, columns.size).where(*mine)):
            contents.setdefault(task, []).append((sha256, size))
        work = dict[str, HeavyWork]()
        kinds: tuple[tuple[sa.Table, Kind], ...] = ((tables.jobs, "job"), (tables.tasks, "task"))
        for table, kind in kinds:
            whose, column = (table.c.tenant == tenant, table.c.project == project), table.c
            printed = printed_bytes(table, self.work.settings.log_bytes) if kind == "task" else sa.literal(0)
            job = column.job_id if kind == "task" else sa.null()
            query = sa.select(column.id, column.status, column.host, column.finished_at, job, printed).where(*whose)
            for item, status, host, finished_at, job_id, size in link.execute(query):
                heavy = work.setdefault(
                    job_id or item, HeavyWork(kind, item, host, status in TERMINAL, finished_at or 0, 0, [])
                )
                heavy.printed += int(size)
                heavy.contents += contents.get(item, [])
                heavy.over = heavy.over and item not in needed
        total, digests, beyond = 0, set[str](), list[HeavyWork]()
        for heavy in sorted(work.values(), key=lambda item: (not item.over, item.finished_at, item.id), reverse=True):
            fresh = dict(heavy.contents)
            total += heavy.printed + sum(size for sha256, size in fresh.items() if sha256 not in digests)
            digests |= fresh.keys()
            if heavy.over and total > most:
                beyond.append(heavy)
        return beyond[::-1]

    async def _forget(self, kind: str, items: list[str]) -> None:
        tasks = items
        if kind == "job":
            query = sa.select(self.work.tables.tasks.c.id).where(self.work.tables.tasks.c.job_id.in_(items))
            tasks = await self.work.database.read(partial(_ids, query=query))
        await self.artifacts.forget(tasks)

        def delete(link: sa.Connection) -> None:
            for table in (self.work.tables.tasks, self.work.tables.jobs):
                link.execute(table.delete().where(table.c.id.in_({*tasks, *items})))

        def remove() -> None:
            for item in tasks:
                self.work.attempts.remove(item)
            self.work.database.change(delete)

        await asyncio.to_thread(remove)

    def _sweep(self) -> None:
        """Remove old run folders without a head: others forgot what ran here while this host was away."""
        items = [item for item in self.work.attempts.tasks() if self._old(item)]
        table, batch = self.work.tables.tasks, self.work.settings.retention_batch
        for first in range(0, len(items), batch):
            some = items[first : first + batch]
            query = sa.select(table.c.id).where(table.c.id.in_(some))
            for item in {*some}.difference(self.work.database.ask(partial(_ids, query=query))):
                self.work.attempts.remove(item)

    def _old(self, item: str) -> bool:
        try:
            touched = (self.work.state_dir / RUNS / require_task_id(item)).stat().st_mtime
        except (FileNotFoundError, BadRequest):  # somebody else removed it; or it is nothing of ours
            return False
        return time.time() - touched > self.work.settings.keep_s

    def _tidy(self) -> None:
        """Forget old workers and folders nobody knows of, and give SQLite's journal back to the disk."""
        oldest = micros(utc_now()) - round(self.work.settings.keep_s * 1_000_000)
        self.work.roster.forget(oldest)
        self.work.database.change(lambda link: self.work.quotas.forget(link, oldest))
        self._sweep()
        if self.work.database.dialect == "sqlite":
            raw: Any = self.work.database.engine.raw_connection()
            try:
                raw.driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
            finally:
                raw.close()


def _ids(link: sa.Connection, *, query: sa.Select[Any]) -> list[str]:
    return list(link.execute(query).scalars())


async def end_leftovers(work: Work) -> int:
    """End programs on this host whose tasks are over or another host's; return how many attempts were asked to end.

    They are left by a cancel on another host, by a worker that was given up while this host was cut off, or by one that
    was killed between a terminal head and the end of the program.
    """
    ended = 0

    def living() -> list[tuple[str, list[Path]]]:
        alive = ((item, work.attempts.living(item)) for item in work.attempts.tasks())
        return [(item, folders) for item, folders in alive if folders]

    def ours(link: sa.Connection, item: str) -> bool:
        """Whether a task is to run here: of one that a later version began no more is understood."""
        table = work.tables.tasks
        mine = (table.c.id == item, table.c.host == work.host, table.c.status.not_in(sorted(TERMINAL)))
        return link.execute(sa.select(table.c.id).where(*mine)).first() is not None

    for item, folders in await asyncio.to_thread(living):
        if await work.database.read(partial(ours, item=item)):
            continue
        for folder in folders:
            if await asyncio.to_thread(cancel_attempt, folder, "its task is over, or another host's"):
                LOG.warning("ended a program of task %s, which is not this host's to run any more", item)
                ended += 1
    return ended


_AGAIN_S: Final = 2.0
_FIRST_LOOK_S: Final = 0.001
_IN_MODIFY: Final = 0x2
CHANGED: Final = "changed"
"""The word for a file that changed: anything may have happened."""


class QueueWatch:
    """Calls *tell* with each word that reaches the queue, `queue`, `cancel ID`, `job ID` or `CHANGED`, in a thread of its own.

    Two commits to SQLite's file that are told are at least *look_s* seconds apart.
    """

    def __init__(self, database: Database, tell: Callable[[str], None], look_s: float) -> None:
        self._database = database
        self._tell = tell
        self._look_s = look_s
        self._closing: int | None = None
        """Writing end of a pipe whose other end, the thread's own, is told of `close` by the end of this one."""

    def start(self) -> None:
        """Begin to watch."""
        ends, self._closing = os.pipe()
        act = self._listen if self._database.dialect == "postgresql" else self._watch
        threading.Thread(target=self._keep, args=(act, ends), name="queue-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching; returns without waiting for the thread."""
        closing, self._closing = self._closing, None
        if closing is not None:
            os.close(closing)

    def _keep(self, act: Callable[[int], None], closing: int) -> None:
        """Watch for good: what breaks is begun again, and whatever was missed meanwhile is told as one change."""
        from sqlalchemy.exc import SQLAlchemyError

        failures: tuple[type[Exception], ...] = (SQLAlchemyError, sqlite3.Error, OSError, DatabaseUnavailable)
        if self._database.dialect == "postgresql":
            from psycopg import Error

            failures = (*failures, Error)
        try:
            while _goes_on(closing, 0.0):
                try:
                    act(closing)
                except failures as error:
                    LOG.warning("the queue is looked at from time to time only: %s", type(error).__name__)
                    _goes_on(closing, _AGAIN_S)
        finally:
            os.close(closing)

    def _listen(self, closing: int) -> None:
        connection = self._database.engine.raw_connection()
        try:
            driver: Any = connection.driver_connection
            connection.detach()
            driver.autocommit = True
            driver.execute(f"LISTEN {CHANNEL}")
            self._tell(CHANGED)
            going = True
            while going:
                for notice in driver.notifies(timeout=0):
                    self._tell(notice.payload)
                going = _goes_on(closing, None, driver.fileno())
        finally:
            connection.close()

    def _watch(self, closing: int) -> None:
        """Tell of each commit to SQLite's file, which a counter in its header tells without a question to the tables."""
        connection = self._database.engine.raw_connection()
        driver: Any = connection.driver_connection
        connection.detach()
        with contextlib.ExitStack() as last:
            last.callback(connection.close)
            _version(driver)  # the file's journal is there from now on
            writes = _writes_to(f"{driver.execute('PRAGMA database_list').fetchone()[2]}-wal")
            if writes is not None:
                last.callback(os.close, writes)
            before = _version(driver)
            self._tell(CHANGED)
            while _goes_on(closing, self._look_s if writes is None else None, writes):
                if writes is not None:
                    os.read(writes, 65536)
                pause = _FIRST_LOOK_S  # a commit is written first and counts a little later
                while pause <= max(self._look_s, _FIRST_LOOK_S):
                    if not _goes_on(closing, pause):
                        return
                    version = _version(driver)
                    if version == before:
                        pause *= 2
                        continue
                    before, pause = version, self._look_s
                    self._tell(CHANGED)


def _goes_on(closing: int, seconds: float | None, readable: int | None = None) -> bool:
    """Wait for *seconds*, or without end, or until *readable* can be read; False once *closing* can be."""
    poller = select.poll()
    poller.register(closing, select.POLLIN)
    if readable is not None:
        poller.register(readable, select.POLLIN)
    ready = poller.poll(None if seconds is None else seconds * 1000)
    return all(fd != closing for fd, _ in ready)


def _version(driver: sqlite3.Connection) -> int:
    version: int = driver.execute("PRAGMA data_version").fetchone()[0]
    return version


def _writes_to(path: str) -> int | None:
    """Return a descriptor that can be read once *path* was written to; None where the kernel tells of none.

    The file is not opened: closing it would take SQLite's locks on it away from this process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd >= 0 and libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) >= 0:
        return fd
    LOG.warning("writes to the queue's file are looked for all the time: %s", os.strerror(ctypes.get_errno()))
    if fd >= 0:
        os.close(fd)
    return None


BURIED: Final = 75
"""Exit code of a worker whose state folder was taken away."""
_RETRY_S: Final = 0.5
_RETRY_MAX_S: Final = 5.0


class Worker:
    """One worker: the process that runs work, one per host and slot.

    It lives as often as it must: given up by the others, or cut off from the database for longer than its lease, it lets
    go of everything and begins anew under another name, which may adopt what still runs here but nothing that was taken.
    After *idle_s* seconds without work it ends; None is for one that stays. While it holds its slot it serves *stream*;
    *span* records the traces of tasks.
    """

    def __init__(
        self,
        work: Work,
        keeper: ArtifactKeeper,
        *,
        slot: int = 0,
        idle_s: float | None = None,
        stream: HostStream | None = None,
        span: Span | None = None,
    ) -> None:
        self._work = work
        self._stream = stream
        self._span = span
        self._entry: tuple[str, str] | None = None
        self._keeper = keeper
        self._slot = slot
        self._idle_s = idle_s
        self._roster = work.roster
        self._retention = Retention(work, keeper)
        self._over = asyncio.Event()
        self._stopping = False
        self._given_up = False
        self._code = 0
        self._mark: tuple[int, int] | None = None
        self._idle = False
        self.left_work = False
        self.end_reason = "it broke"
        self._runs: set[asyncio.Task[None]] = set()
        self._look_for_cancels = False
        self._begin_life()

    def _begin_life(self) -> None:
        """Take a name nobody had, with nothing in hand."""
        self.executor = f"{self._work.host}-{self._slot}-{secrets.token_hex(6)}"
        self.context = WorkerContext(self._work, self.executor, self._keeper, self._span)
        if self.context.lease_file is not None:
            self.context.lease_until = 0.0
        self._beaten_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._given_up = False
        if not self._stopping:
            self._over.clear()

    def stop(self) -> None:
        """Ask it to end; programs go on, and the next worker adopts them."""
        self._end("it was asked to end")

    def _end(self, reason: str) -> None:
        """End for good, for *reason*; the first one counts."""
        if not self._stopping:
            self.end_reason = reason
        self._stopping = True
        self._over.set()

    async def serve(self) -> int:
        """Work until asked to end, or idle; returns the exit code, 0 at once when the slot is another's.

        `end_reason` says why it ended. The process should end right after: threads may still wait for a database.
        """
        with hold_slot(self._work.state_dir, self._slot) as acquired:
            if not acquired:
                self.end_reason = f"another worker has slot {self._slot}"
                return 0
            self._mark = slot_mark(self._work.state_dir, self._slot)
            async with contextlib.AsyncExitStack() as last:
                if self._stream is not None:
                    server = await self._stream.listen(self._slot)
                    last.push_async_callback(self._stream.close, server)
                    self._entry = self._stream.entry
                await asyncio.to_thread(self._roster.enter, self.executor, self._slot, self._entry)
                await self._live()
                while self._given_up and not self._stopping:
                    if await self._enter_again():
                        await self._live()
        # submitted while the slot was still ours: its client saw a worker, and there is none any more
        self.left_work = self._idle and await self._any_work()
        return self._code

    async def _enter_again(self) -> bool:
        """Wait for the database and enter the roster under a new name; False when asked to end meanwhile."""
        pause = _RETRY_S
        while not self._stopping:
            self._begin_life()  # also each next time: the name may have entered, and only the answer was lost
            try:
                if await asyncio.to_thread(self._folder_is_ours):
                    self._beaten_at = time.clock_gettime(time.CLOCK_BOOTTIME)
                    await asyncio.to_thread(self._roster.enter, self.executor, self._slot, self._entry)
                    await end_leftovers(self._work)  # what another host took must not go on under our new lease
                    return True
                self._end_without_folder()
            except DatabaseUnavailable as error:
                LOG.warning("%s; there is no worker here until it does", error.message)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._over.wait()
                pause = min(2 * pause, _RETRY_MAX_S)
        return False

    async def _live(self) -> None:
        settings, loop = self._work.settings, asyncio.get_running_loop()
        self._renew_lease_file()

        def tell(word: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: this worker is over
                loop.call_soon_threadsafe(self._receive, word)

        watch = QueueWatch(self._work.database, tell, settings.watch_s)
        watch.start()
        loops = [
            asyncio.ensure_future(self._every(settings.beat_s, self._beat)),
            asyncio.ensure_future(self._claim_always()),
            asyncio.ensure_future(self._every(settings.retention_every_s, self._retire)),
        ]
        try:
            LOG.info("worker %s takes work", self.executor)
            await self._over.wait()
        finally:
            watch.close()
            tasks = [*loops, *self._runs]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._given_up:
                try:
                    await asyncio.to_thread(self._roster.leave, self.executor)
                except DatabaseUnavailable as error:  # other workers bury it once the lease is over
                    LOG.warning("the row of this worker stays for the others to bury: %s", error.message)

    def _receive(self, word: str) -> None:
        """Act on a notification of the queue; called on the event loop."""
        topic, _, item = word.partition(" ")
        if topic == "cancel":
            self.context.note_cancel(item)
        elif topic == "job":
            self.context.note_change(item)
        elif topic != "queue" or self.context.capacity()._asdict().get(item, 1) > 0:  # without room, the next end looks
            self._look_for_cancels |= word == CHANGED
            self.context.wake.set()

    async def _claim_always(self) -> None:
        """Take work whenever there may be some, and look for it from time to time."""
        self.context.wake.set()
        while True:
            try:
                async with asyncio.timeout(self._work.settings.poll_s):  # `wait_for` loses a cancel that meets a wake
                    await self.context.wake.wait()
            except TimeoutError:
                self._look_for_cancels = True  # a notification may have been lost
            self.context.wake.clear()
            if not await self._round(self._claim):
                return

    async def _claim(self) -> None:
        context, queue, database = self.context, self._work.queue, self._work.database
        if self._look_for_cancels and context.active:
            self._look_for_cancels = False
            for item in await database.read(self._canceled_items):
                context.note_cancel(item)
        executor, capacity, in_hand = self.executor, context.capacity(), tuple(context.active)
        if not await database.read(lambda link: queue.candidates(link, executor, capacity, in_hand)):
            return
        claim = await database.write(lambda link: queue.claim(link, executor, capacity, in_hand))
        for head in claim.tasks:
            self._begin("task", head.id, head.mode, TaskRun(context, head.id).run(head))
        for item in claim.jobs:
            self._begin("job", item, "job", JobRun(context, item).run())
        if claim.may_continue:
            context.wake.set()

    def _begin(self, kind: Kind, item: str, mode: WorkKind, run: Coroutine[None, None, None]) -> None:
        self.context.active[item] = mode
        task = asyncio.ensure_future(self._guarded(kind, item, run))
        self._runs.add(task)
        task.add_done_callback(self._runs.discard)

    async def _guarded(self, kind: Kind, item: str, run: Coroutine[None, None, None]) -> None:
        """Await *run*; an error is written to the head, as nobody else would ever end it; a buried worker gives all up."""
        try:
            with about(**{kind: item}):
                try:
                    await run
                except Exception as error:  # noqa: BLE001 - it is told in the head of what it broke
                    LOG.exception("%s %s broke", kind, item)
                    message = error.message if isinstance(error, KdskillsError) else f"{type(error).__name__}: {error}"
                    values: dict[str, Any] = {"error_message": message.replace("\0", "")[:1000]}
                    values["finished_at"] = micros(utc_now())
                    await self.context.move(kind, item, "failed", error_code="infra_error", **values)
        except Buried as buried:
            self._bury(buried)
        finally:
            self.context.let_go(item)

    def _bury(self, buried: Buried) -> None:
        """Give this life up: whatever it would still do might be done twice."""
        if self._over.is_set():
            return
        LOG.error("worker %s begins anew once the database answers: %s", self.executor, buried.reason)
        self._given_up = True
        self._over.set()

    async def _every(self, period: float, act: Callable[[], Coroutine[None, None, None]]) -> None:
        """Do *act* again and again; nothing but its own burial stops a worker's rounds."""
        while True:
            if not await self._round(act):
                return
            await asyncio.sleep(period)

    async def _round(self, act: Callable[[], Coroutine[None, None, None]]) -> bool:
        """Do *act* once; False when this worker was buried."""
        try:
            try:
                await act()
            except DatabaseUnavailable as error:
                if passing(error):
                    LOG.warning("%s", error.message)
                else:
                    LOG.exception("the database refused a statement")
                self._fence()
            except Exception:  # noqa: BLE001 - also a driver's own error: the next round tries again
                LOG.exception("a round of the worker failed")
        except Buried as buried:
            self._bury(buried)
            return False
        return True

    async def _beat(self) -> None:
        """Renew the lease and bury the dead; end when idle, or when the state folder is another."""
        if not await asyncio.to_thread(self._folder_is_ours):
            self._end_without_folder()
            return
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        buried = await asyncio.to_thread(self._roster.beat, self.executor, self.context.full_since())
        if buried is None:
            raise Buried
        self._beaten_at = now
        self._renew_lease_file()
        if buried:
            self.context.wake.set()  # what they had in hand may be ours
        if self._idle_s is None or self.context.active or time.monotonic() - self.context.busy_at < self._idle_s:
            return
        if await self._any_work():
            self.context.busy_at = time.monotonic()
            return
        self._idle = True
        self._end(f"it had no work for {self._idle_s:g} s")

    def _folder_is_ours(self) -> bool:
        """Whether the state folder is the one this worker began with. Blocks."""
        return slot_mark(self._work.state_dir, self._slot) == self._mark

    def _end_without_folder(self) -> None:
        """End at once: it would work on files nobody can see, beside whoever holds the slot now."""
        self._code, self._given_up = BURIED, True  # its row is left to the next one of the slot
        self._end(f"its state folder {self._work.state_dir} was taken away")

    def _fence(self) -> None:
        """Let go of everything once the lease is over that cannot be renewed: another host may have the work by now."""
        if self._work.pooled:
            late = time.clock_gettime(time.CLOCK_BOOTTIME) - self._beaten_at
            if late > self._work.settings.lease_s:
                raise Buried(f"its lease ended while the database was away for {late:.0f} s")

    def _renew_lease_file(self) -> None:
        """Tell this host's shims until when the pool's work is ours, by a clock that also counts a laptop's sleep.

        Lines are of one length and go over the one before, which needs no room: on a full disk what runs goes on.
        """
        path = self.context.lease_file
        if path is None:
            return
        until = self._beaten_at + self._work.settings.lease_s
        line = f"{until:020.3f}\n".encode()
        try:
            if path.exists() and path.stat().st_size == len(line):
                with open_private(path, "r+b") as stream:
                    stream.write(line)
            else:
                replace_file(path, line)
            self.context.lease_until = until
        except OSError as error:  # the next beat tries again; without a lease that goes on, shims end what they run
            LOG.warning("the lease cannot be kept in %s: %s", path, error.strerror)

    def _canceled_items(self, link: sa.Connection) -> list[str]:
        """Return the ids in hand whose cancel was asked for."""
        canceled: list[str] = []
        for table in (self._work.tables.tasks, self._work.tables.jobs):
            mine = (table.c.executor == self.executor, table.c.cancel_at.is_not(None))
            canceled += link.execute(sa.select(table.c.id).where(*mine, table.c.status.in_(sorted(ACTIVE)))).scalars()
        return [item for item in canceled if item in self.context.active]

    async def _retire(self) -> None:
        await end_leftovers(self._work)
        await self._retention.round()

    async def _any_work(self) -> bool:
        """Whether anything is left to do that this host may do."""

        def unfinished(link: sa.Connection) -> bool:
            for table in (self._work.tables.tasks, self._work.tables.jobs):
                mine = table.c.home.is_(None) | (table.c.home == self._work.host)
                open_ = table.c.status.not_in(sorted(TERMINAL))
                ours = table.c.id.not_in(sorted(self._work.queue.unreadable))
                if link.execute(sa.select(table.c.id).where(mine, open_, ours).limit(1)).first() is not None:
                    return True
            return False

        return await self._work.database.read(unfinished)
