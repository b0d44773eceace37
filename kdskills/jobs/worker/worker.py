"""The worker's life: a slot, a row in the roster, beats, cancels, retention, and its end (spec work §3)."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Final

from kdskills.errors import KdskillsError
from kdskills.jobs.database import DatabaseUnavailable, micros, utc_now
from kdskills.jobs.opening import Work
from kdskills.jobs.retention import Retention
from kdskills.jobs.roster import Roster, hold_slot, slot_mark
from kdskills.jobs.states import TERMINAL
from kdskills.jobs.worker.about import about
from kdskills.jobs.worker.desk import LOG, Buried, Desk, Keeper, passing
from kdskills.jobs.worker.engine import Engine
from kdskills.jobs.worker.jobs import JobRun
from kdskills.jobs.worker.leftovers import end_leftovers
from kdskills.jobs.worker.recovery import Recovery
from kdskills.jobs.worker.tasks import TaskRun
from kdskills.skills.private_files import write_private

if TYPE_CHECKING:
    import sqlalchemy as sa

BURIED: Final = 75
"""Exit code of a worker that found itself given up by the others."""
_MEND_EVERY: Final = 10


class Worker:
    """One worker: the process that runs DBOS, one per host and slot.

    Args:
        work: The opened place, whose attempts can be started.
        keeper: Keeps outputs.
        slot: Which of the host's workers this is.
        idle_s: Seconds without work after which it ends; None for one that stays.
    """

    def __init__(self, work: Work, keeper: Keeper, *, slot: int = 0, idle_s: float | None = None) -> None:
        self._work = work
        self._keeper = keeper
        self._slot = slot
        self._idle_s = idle_s
        self.executor = f"{work.host}-{slot}-{secrets.token_hex(6)}"
        self._roster = Roster(work)
        self._recovery = Recovery(work, self.executor)
        self._retention = Retention(work, keeper)
        self._stop = asyncio.Event()
        self._code = 0
        self._beats = 0
        self._mark: tuple[int, int] | None = None
        self._idle = False
        self.left_work = False
        self.end_reason = "it broke"
        self._beaten_at = time.clock_gettime(time.CLOCK_BOOTTIME)

    def stop(self) -> None:
        """Ask it to end; programs go on, and the next worker adopts them."""
        self._end("it was asked to end")

    async def serve(self) -> int:
        """Work until asked to end, idle, or buried; returns the exit code. 0 at once when the slot is another's.

        `end_reason` says why it ended. The process should end right after: DBOS has threads that still hold what this
        worker had.
        """
        with hold_slot(self._work.state_dir, self._slot) as held:
            if not held:
                self.end_reason = f"another worker has slot {self._slot}"
                return 0
            self._mark = slot_mark(self._work.state_dir, self._slot)
            await self._live()
        # submitted while the slot was still ours: its client saw a worker, and there is none any more
        self.left_work = self._idle and await self._any_work()
        return self._code

    async def _live(self) -> None:
        """Be the worker of the slot."""
        await asyncio.to_thread(self._roster.enter, self.executor, self._slot)
        self.desk = Desk(self._work, self.executor, self._keeper)
        self._renew_lease_file()
        engine = Engine(
            self._work,
            self.executor,
            run_task=lambda item: self._guarded("task", item, TaskRun(self.desk, item).run()),
            run_job=lambda item: self._guarded("job", item, JobRun(self.desk, item).run()),
            preempted=self._preempted,
            loop=asyncio.get_running_loop(),
        )
        loops = [
            asyncio.ensure_future(self._every(period, act))
            for period, act in (
                (self._work.settings.beat_s, self._beat),
                (self._work.settings.cancel_poll_s, self._cancels),
                (self._work.settings.retention_every_s, self._retire),
            )
        ]
        try:
            await asyncio.to_thread(self._recovery.round)
            await asyncio.to_thread(engine.launch)
            LOG.info("worker %s takes work", self.executor)
            await self._stop.wait()
        finally:
            for one in loops:
                one.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            if self._code == 0:
                await self._leave()

    async def _leave(self) -> None:
        try:
            await asyncio.to_thread(self._roster.leave, self.executor)
        except DatabaseUnavailable as error:
            LOG.warning("the row of this worker stays for the others to bury: %s", error.message)

    async def _guarded(self, kind: str, item: str, run: Coroutine[None, None, None]) -> None:
        """Run; a worker that finds itself buried ends instead of letting the workflow end."""
        try:
            with about(**{kind: item}):
                try:
                    await run
                except Exception as error:  # noqa: BLE001 - it is told in the head of what it broke
                    LOG.exception("%s %s broke", kind, item)
                    await self._broke(kind, item, error)
        except Buried as buried:
            self._bury(buried)
            await asyncio.Event().wait()

    async def _broke(self, kind: str, item: str, error: Exception) -> None:
        """End what kdskills itself failed at: a head must not wait for ever for a workflow that is over."""
        said = error.message if isinstance(error, KdskillsError) else f"{type(error).__name__}: {error}"
        values = {
            "error_code": "infra_error",
            "error_message": said.replace("\0", "")[:1000],
            "finished_at": micros(utc_now()),
        }
        moved = await self.desk.write(
            lambda link: self._work.records.move(link, kind, item, "failed", self.executor, **values)
        )
        if not moved:
            await self.desk.require_alive()

    async def _preempted(self, kind: str, item: str) -> None:
        """Cancel what a workflow stood for that somebody cancelled; our own cancels are over by then."""
        reason = "its workflow was cancelled"
        await self.desk.write(lambda link: self._work.records.ask_cancel(link, kind, item, reason))

    def _bury(self, buried: Buried) -> None:
        if not self._stop.is_set():
            self._code = BURIED
            self._end(buried.reason)

    def _end(self, reason: str) -> None:
        """Stop for *reason*; the first one counts."""
        if not self._stop.is_set():
            self.end_reason = reason
            self._stop.set()

    async def _every(self, period: float, act: Callable[[], Coroutine[None, None, None]]) -> None:
        """Do *act* again and again; nothing but its own burial stops a worker's rounds."""
        while True:
            try:
                await self._round(act)
            except Buried as buried:
                self._bury(buried)
                return
            await asyncio.sleep(period)

    async def _round(self, act: Callable[[], Coroutine[None, None, None]]) -> None:
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

    async def _beat(self) -> None:
        """Renew the lease, bury the dead, put their work back; end when idle."""
        self._beats += 1
        if await asyncio.to_thread(slot_mark, self._work.state_dir, self._slot) != self._mark:
            # it would work on files nobody can see, beside whoever holds the slot now
            raise Buried(f"its state folder {self._work.state_dir} was taken away")
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if not await asyncio.to_thread(self._roster.beat, self.executor):
            raise Buried
        self._beaten_at = now
        self._renew_lease_file()
        await asyncio.to_thread(self._recovery.round)
        if self._beats % _MEND_EVERY == 0:
            await asyncio.to_thread(self._recovery.mend)
        await self._maybe_idle()

    def _fence(self) -> None:
        """End once the lease is over that cannot be renewed: another host may have taken the work by now."""
        if self._work.pooled:
            late = time.clock_gettime(time.CLOCK_BOOTTIME) - self._beaten_at
            if late > self._work.settings.lease_s:
                raise Buried(f"its lease ended while the database was away for {late:.0f} s")

    def _renew_lease_file(self) -> None:
        """Tell this host's shims until when the pool's work is ours, by a clock that also counts a laptop's sleep."""
        path = self.desk.lease_file
        if path is None:
            return
        part = path.with_name(f".{path.name}.{os.getpid()}")
        write_private(part, f"{self._beaten_at + self._work.settings.lease_s:.3f}\n")
        part.rename(path)

    async def _cancels(self) -> None:
        """Pass on what was asked of the work in hand."""
        if not self.desk.active:
            return
        for item in await asyncio.to_thread(self._work.database.ask, self._asked):
            self.desk.asked(item).set()
            self.desk.changed(item).set()

    def _asked(self, link: sa.Connection) -> list[str]:
        found: list[str] = []
        for kind in ("task", "job"):
            table = self._work.records.table(kind)
            query = table.select().with_only_columns(table.c.id)
            mine = (table.c.executor == self.executor, table.c.cancel_at.is_not(None))
            found += link.execute(query.where(*mine, table.c.status.in_(("starting", "running")))).scalars()
        return [item for item in found if item in self.desk.active]

    async def _retire(self) -> None:
        await end_leftovers(self._work)
        await self._retention.round()

    async def _maybe_idle(self) -> None:
        if self._idle_s is None or self.desk.active or time.monotonic() - self.desk.busy_at < self._idle_s:
            return
        if await self._any_work():
            self.desk.busy_at = time.monotonic()
            return
        self._idle = True
        self._end(f"it had no work for {self._idle_s:g} s")

    async def _any_work(self) -> bool:
        """Whether anything is left to do that this host may do."""
        return await asyncio.to_thread(self._work.database.ask, self._unfinished)

    def _unfinished(self, link: sa.Connection) -> bool:
        for kind in ("task", "job"):
            table = self._work.records.table(kind)
            mine = table.c.home.is_(None) | (table.c.home == self._work.host)
            query = table.select().with_only_columns(table.c.id).where(mine, table.c.status.not_in(sorted(TERMINAL)))
            if link.execute(query.limit(1)).first() is not None:
                return True
        return False
