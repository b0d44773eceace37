"""Forgetting what is over: heads, workflows, artifacts, run folders, and the space they took (spec work §3)."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kdskills.jobs.database import micros, speaking, utc_now
from kdskills.jobs.opening import WHAT, Work
from kdskills.jobs.roster import Roster
from kdskills.jobs.states import TERMINAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    import sqlalchemy as sa


class Forgets(Protocol):
    """Where artifacts are."""

    async def forget(self, task_ids: Sequence[str]) -> None:
        """Forget the artifacts of these tasks."""
        ...


class Retention:
    """Forgets tasks and jobs that have been over for long, or are too many for their project.

    Artifacts, run folders and workflows go first, the head last: a round that was killed is done again.

    Args:
        work: The opened place.
        artifacts: Where artifacts are.
    """

    def __init__(self, work: Work, artifacts: Forgets) -> None:
        self._work = work
        self._artifacts = artifacts
        self._settings = work.settings

    async def round(self) -> int:
        """Forget everything that is due; returns how many heads went."""
        gone = 0
        for kind in ("job", "task"):
            while due := await self._work.database.read(partial(self._due, kind=kind)):
                await self._forget(kind, due)
                gone += len(due)
        await asyncio.to_thread(self._tidy)
        return gone

    def _due(self, link: sa.Connection, *, kind: str) -> list[str]:
        """Return ids of heads that may go, of this host's work or nobody's, a batch at most."""
        import sqlalchemy as sa

        table, batch = self._work.records.table(kind), self._settings.retention_batch
        over = table.c.status.in_(sorted(TERMINAL))
        ours = sa.or_(table.c.host.is_(None), table.c.host == self._work.host)
        alone = (over, ours) if kind == "job" else (over, ours, table.c.job_id.is_(None))
        oldest = micros(utc_now()) - round(self._settings.keep_s * 1_000_000)
        old = sa.select(table.c.id).where(*alone, table.c.finished_at < oldest).limit(batch)
        found = list(link.execute(old).scalars())
        if found:
            return found
        crowded = (
            sa.select(table.c.tenant, table.c.project, sa.func.count())
            .where(*alone)
            .group_by(table.c.tenant, table.c.project)
            .having(sa.func.count() > self._settings.keep_per_project)
        )
        for tenant, project, count in link.execute(crowded).all():
            whose = (*alone, table.c.tenant == tenant, table.c.project == project)
            many = min(batch, count - self._settings.keep_per_project)
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
        with speaking(WHAT):
            self._work.queues.delete(every)
        self._work.database.change(lambda link: self._delete(link, every))

    def _delete(self, link: sa.Connection, items: list[str]) -> None:
        for table in (self._work.tables.tasks, self._work.tables.jobs):
            link.execute(table.delete().where(table.c.id.in_(items)))

    def _tidy(self) -> None:
        """Forget old workers, and give SQLite's journal back to the disk."""
        Roster(self._work).forget(micros(utc_now()) - round(self._settings.keep_s * 1_000_000))
        if self._work.database.dialect == "sqlite":
            raw: Any = self._work.database.engine.raw_connection()
            try:
                raw.driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
            finally:
                raw.close()
