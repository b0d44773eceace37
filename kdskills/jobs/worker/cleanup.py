"""What a worker forgets and ends: work that is over for long with all it left, and programs nobody waits for."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from kdskills.errors import BadRequest
from kdskills.jobs.attempts.attempt import RUNS, attempt_alive
from kdskills.jobs.attempts.order import require_task_id
from kdskills.jobs.model import TERMINAL
from kdskills.jobs.opening import Work
from kdskills.jobs.roster import Roster
from kdskills.jobs.worker.context import LOG, OutputKeeper
from kdskills.storage.database import micros, utc_now

if TYPE_CHECKING:
    import sqlalchemy as sa


class Retention:
    """Forgets tasks and jobs that have been over for long, or are too many for their project.

    Artifacts and run folders go first, the head last: a round that was killed is done again.

    Args:
        work: The opened place.
        artifacts: Where artifacts are.
    """

    def __init__(self, work: Work, artifacts: OutputKeeper) -> None:
        self._work = work
        self._artifacts = artifacts
        self._settings = work.settings

    async def round(self) -> int:
        """Forget everything that is due; returns how many heads went."""
        removed_heads = 0
        for kind in ("job", "task"):
            while due := await self._work.database.read(partial(self._due, kind=kind)):
                await self._forget(kind, due)
                removed_heads += len(due)
        await asyncio.to_thread(self._tidy)
        return removed_heads

    def _due(self, link: sa.Connection, *, kind: str) -> list[str]:
        """Return ids of heads that may go, of this host's work or nobody's, a batch at most.

        Nobody's is also what ran on a host whose workers were forgotten: it has been silent for as long as work is kept.
        """
        import sqlalchemy as sa

        table, batch = self._work.records.table(kind), self._settings.retention_batch
        over = table.c.status.in_(sorted(TERMINAL))
        hosts = sa.select(self._work.tables.workers.c.host)
        ours = sa.or_(table.c.host.is_(None), table.c.host == self._work.host, table.c.host.not_in(hosts))
        alone = (over, ours) if kind == "job" else (over, ours, table.c.job_id.is_(None))
        oldest = micros(utc_now()) - round(self._settings.keep_s * 1_000_000)
        old = sa.select(table.c.id).where(*alone, table.c.finished_at < oldest).limit(batch)
        expired = list(link.execute(old).scalars())
        if expired:
            return expired
        most = self._settings.keep_per_project
        many_rows = (  # an index alone tells; what is over is counted only where there may be too much
            sa.select(table.c.tenant, table.c.project)
            .group_by(table.c.tenant, table.c.project)
            .having(sa.func.count() > most)
        )
        for tenant, project in link.execute(many_rows).all():
            whose = (*alone, table.c.tenant == tenant, table.c.project == project)
            many = min(batch, link.execute(sa.select(sa.func.count()).where(*whose)).scalar_one() - most)
            if many <= 0:
                continue
            first = sa.select(table.c.id).where(*whose).order_by(table.c.finished_at, table.c.id).limit(many)
            return list(link.execute(first).scalars())
        return []

    async def _forget(self, kind: str, items: list[str]) -> None:
        tasks = items
        if kind == "job":
            heads = await self._work.database.read(lambda link: self._work.records.tasks_of_jobs(link, items))
            tasks = [head.id for head in heads]
        await self._artifacts.forget(tasks)
        await asyncio.to_thread(self._remove, kind, items, tasks)

    def _remove(self, kind: str, items: list[str], tasks: list[str]) -> None:
        for item in tasks:
            self._work.attempts.remove(item)
        every = [*tasks, *items] if kind == "job" else items
        self._work.database.change(lambda link: self._delete(link, every))

    def _delete(self, link: sa.Connection, items: list[str]) -> None:
        for table in (self._work.tables.tasks, self._work.tables.jobs):
            link.execute(table.delete().where(table.c.id.in_(items)))

    def _sweep(self) -> None:
        """Remove old run folders without a head: others forgot what ran here while this host was away."""
        items = [item for item in self._work.attempts.tasks() if self._old(item)]
        table, batch = self._work.tables.tasks, self._settings.retention_batch
        for first in range(0, len(items), batch):
            some = items[first : first + batch]
            query = table.select().with_only_columns(table.c.id).where(table.c.id.in_(some))
            recorded = set(self._work.database.ask(partial(_ids, query=query)))
            for item in some:
                if item not in recorded:
                    self._work.attempts.remove(item)

    def _old(self, item: str) -> bool:
        try:
            touched = (self._work.state_dir / RUNS / require_task_id(item)).stat().st_mtime
        except (FileNotFoundError, BadRequest):  # somebody else removed it; or it is nothing of ours
            return False
        return time.time() - touched > self._settings.keep_s

    def _tidy(self) -> None:
        """Forget old workers and folders nobody knows of, and give SQLite's journal back to the disk."""
        Roster(self._work).forget(micros(utc_now()) - round(self._settings.keep_s * 1_000_000))
        self._sweep()
        if self._work.database.dialect == "sqlite":
            raw: Any = self._work.database.engine.raw_connection()
            try:
                raw.driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
            finally:
                raw.close()


def _ids(link: sa.Connection, query: sa.Select[Any]) -> list[str]:
    return list(link.execute(query).scalars())


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
