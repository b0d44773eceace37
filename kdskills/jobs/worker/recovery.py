"""Putting work back that dead workers held: on every beat, not once (spec work §3)."""

from __future__ import annotations

import contextlib
import fcntl
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from kdskills.jobs.database import micros, speaking, utc_now
from kdskills.jobs.opening import WHAT, Work
from kdskills.jobs.queues import host_of_queue, host_queue, same_kind, steps_queue
from kdskills.jobs.roster import Roster
from kdskills.jobs.states import TERMINAL
from kdskills.jobs.worker.desk import LOG
from kdskills.skills.private_files import open_private

if TYPE_CHECKING:
    import sqlalchemy as sa

RECOVERY_LOCK: Final = 2_037_593
"""Number of the advisory lock under which work is put back."""
_GRACE_S: Final = 10.0
_BATCH: Final = 500


class Recovery:
    """Puts work back. Every worker does it, one at a time: a row must not be put back that was just taken.

    Args:
        work: The opened place.
        executor: The worker that does it.
    """

    def __init__(self, work: Work, executor: str) -> None:
        self._work = work
        self._executor = executor
        self._roster = Roster(work)

    def round(self) -> int:
        """Bury the dead and put back what they held; returns how many rows moved. Blocks."""
        buried = self._roster.bury(self._executor)
        for executor in buried:
            LOG.warning("worker %s is dead", executor)
        with speaking(WHAT), self._alone() as alone:
            return self._put_back() if alone else 0

    def mend(self) -> int:
        """End heads whose workflow is over though they are not: something else than kdskills ended it. Blocks."""
        late = micros(utc_now()) - round(_GRACE_S * 1_000_000)
        mended = 0
        for kind in ("task", "job"):
            held = self._work.database.ask(partial(self._abandoned, kind=kind, late=late))
            if not held:
                continue
            with speaking(WHAT):
                states = self._work.queues.states(list(held))
            for item, executor in held.items():
                state = states.get(item, "GONE")
                if state in ("ENQUEUED", "PENDING", "DELAYED"):
                    continue
                mended += self._end(kind, item, executor, state)
        return mended

    def _put_back(self) -> int:
        live = {row.executor: row.host for row in self._work.database.ask(self._roster.live)}
        hosts = set(live.values())
        moves: defaultdict[str, list[str]] = defaultdict(list)
        for row in self._work.queues.pending():
            if row.executor not in live:
                moves[self._target(row.id, row.queue, hosts, self._host_of(row.executor))].append(row.id)
        if self._work.pooled:
            dead = self._work.database.ask(self._known_hosts) - hosts
            queues = [queue for host in sorted(dead) for queue in (host_queue(host), steps_queue(host))]
            for row in self._work.queues.waiting(queues):
                target = self._target(row.id, row.queue, hosts, host_of_queue(row.queue))
                if target != row.queue:
                    moves[target].append(row.id)
        for queue, items in moves.items():
            LOG.info("%d put back into %s", len(items), queue)
            self._work.queues.resume(items, queue)
        return sum(map(len, moves.values()))

    def _target(self, item: str, queue: str, hosts: set[str], host: str | None) -> str:
        """Return where a row goes: its host while that has a worker or is all it may run on, else the pool."""
        if host is not None and host in hosts:
            return same_kind(queue, host)
        home = self._work.database.ask(lambda link: self._home(link, item))
        return same_kind(queue, home)

    def _home(self, link: sa.Connection, item: str) -> str | None:
        for kind in ("task", "job"):
            table = self._work.records.table(kind)
            row = link.execute(table.select().with_only_columns(table.c.home).where(table.c.id == item)).first()
            if row is not None:
                home: str | None = row[0]
                return home
        return self._work.host

    def _host_of(self, executor: str) -> str | None:
        table = self._work.tables.workers
        query = table.select().with_only_columns(table.c.host).where(table.c.executor == executor)
        return self._work.database.ask(lambda link: link.execute(query).scalar())

    def _known_hosts(self, link: sa.Connection) -> set[str]:
        table = self._work.tables.workers
        return set(link.execute(table.select().with_only_columns(table.c.host).distinct()).scalars())

    def _abandoned(self, link: sa.Connection, *, kind: str, late: int) -> dict[str, str | None]:
        import sqlalchemy as sa

        table, workers = self._work.records.table(kind), self._work.tables.workers
        alive = sa.select(workers.c.executor).where(workers.c.state == "live")
        free = sa.or_(table.c.executor.is_(None), table.c.executor.not_in(alive))
        query = (
            sa.select(table.c.id, table.c.executor)
            .where(table.c.status.not_in(sorted(TERMINAL)), table.c.created_at < late, free)
            .order_by(table.c.created_at)
            .limit(_BATCH)
        )
        return {row[0]: row[1] for row in link.execute(query)}

    def _end(self, kind: str, item: str, executor: str | None, state: str) -> bool:
        canceled = state == "CANCELLED"
        values = {
            "error_code": "canceled" if canceled else "infra_error",
            "error_message": f"its workflow ended outside kdskills: {state.lower()}",
        }
        to = "canceled" if canceled else "failed"
        return self._work.database.change(
            lambda link: self._work.records.force(link, kind, item, to, executor=executor, **values)
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the lock of recovery inside the block; gives False when somebody else is at it."""
        if self._work.database.dialect == "postgresql":
            with self._work.database.engine.begin() as link:
                yield bool(link.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({RECOVERY_LOCK})").scalar())
            return
        with open_private(self._work.state_dir / "recovery.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
