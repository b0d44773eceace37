"""The workers: who is alive, by locks on one host and by leases of the database's clock between hosts.

A worker's row never comes back to life: it is buried once, and a worker that finds itself buried ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.storage.database import micros, utc_now

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.opening import Work


_LOG: Final = logging.getLogger("kdskills.jobs")
FENCE_US: Final = 5_000_000
"""Microseconds a host's shims have, after its lease, to end what they run before another host begins."""

_UNIX_DAY: Final = 2_440_587.5
_DAY_US: Final = 86_400_000_000


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as the roster knows it; `leased` tells whether its host answers to the pool."""

    executor: str
    host: str
    slot: int
    leased: bool


class Roster:
    """The table of workers.

    Args:
        work: Where it is.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._table = work.tables.workers

    def enter(self, executor: str, slot: int) -> None:
        """Add this worker, which holds the lock of *slot*: whoever had it before is dead. Blocks."""
        table, now = self._table, micros(utc_now())

        def change(link: sa.Connection) -> None:
            before = table.update().where(table.c.host == self._work.host, table.c.slot == slot)
            link.execute(before.values(state="dead"))
            row = {
                "executor": executor,
                "host": self._work.host,
                "slot": slot,
                "pid": os.getpid(),
                "name": socket.gethostname()[:255],
                "state": "live",
                "started_at": now,
                "beat_at": now,
            }
            link.execute(table.insert().values(**row, lease_until=self._lease()))

        self._work.database.change(change)

    def beat(self, executor: str) -> list[str] | None:
        """Renew the worker's lease, bury workers that are dead, and return those; None when it was buried itself. Blocks."""

        def change(link: sa.Connection) -> list[str] | None:
            alive = link.execute(self._renewal, {"mine": executor, "now": micros(utc_now())}).rowcount > 0
            return self._bury(link, executor) if alive else None

        return self._work.database.change(change)

    def leave(self, executor: str) -> None:
        """Bury this worker, which ends. Blocks."""
        table = self._table
        departure = table.update().where(table.c.executor == executor).values(state="dead")
        self._work.database.change(lambda link: link.execute(departure))

    def bury(self, mine: str | None = None) -> list[str]:
        """Bury workers that are dead: of this host by their locks, of other hosts by their leases. Blocks.

        Args:
            mine: The caller's own executor, whose lock is held by the caller itself.

        Returns:
            Those buried by this call.
        """
        return self._work.database.change(lambda link: self._bury(link, mine))

    def occupied(self) -> sa.Select[tuple[str]]:
        """Return the question for hosts whose programs may still run: with a worker, or within their lease and its fence.

        A worker that ended in order leaves its programs running, so its host is not free before the lease is over.
        """
        import sqlalchemy as sa

        table = self._table
        leased = table.c.lease_until >= self._clock() - FENCE_US
        return sa.select(table.c.host).where(sa.or_(table.c.state == "live", leased))

    def _bury(self, link: sa.Connection, mine: str | None) -> list[str]:
        """As `bury`, in the transaction of *link*; one question when nobody died."""
        table = self._table
        dead = [
            row.executor
            for row in link.execute(self._living)
            if row.executor != mine
            and (row.over or (row.host == self._work.host and not slot_taken(self._work.state_dir, row.slot)))
        ]
        if not dead:
            return []
        change = table.update().where(table.c.state == "live", table.c.executor.in_(dead)).values(state="dead")
        buried = list(link.execute(change.returning(table.c.executor)).scalars())
        for executor in buried:
            _LOG.warning("worker %s is dead", executor)
        return buried

    @cached_property
    def _renewal(self) -> sa.Update:
        """The change of the beat of the worker `mine` at `now`."""
        import sqlalchemy as sa

        table = self._table
        mine = table.update().where(table.c.executor == sa.bindparam("mine"), table.c.state == "live")
        return mine.values(beat_at=sa.bindparam("now"), lease_until=self._lease())

    @cached_property
    def _living(self) -> sa.Select[tuple[str, str, int, bool]]:
        """The question for workers that were not buried, and whether the lease of each is over."""
        import sqlalchemy as sa

        table = self._table
        over = sa.func.coalesce(table.c.lease_until < self._clock() - FENCE_US, sa.false()).label("over")
        return sa.select(table.c.executor, table.c.host, table.c.slot, over).where(table.c.state == "live")

    def live(self, link: sa.Connection) -> list[WorkerRow]:
        """Return the workers that were not buried."""
        table = self._table
        columns = (table.c.executor, table.c.host, table.c.slot, table.c.lease_until)
        rows = link.execute(table.select().with_only_columns(*columns).where(table.c.state == "live"))
        return [WorkerRow(row[0], row[1], row[2], row[3] is not None) for row in rows]

    def alive_hosts(self, link: sa.Connection, hosts: Set[str]) -> set[str]:
        """Return those of *hosts* that have a worker."""
        return {row.host for row in self.live(link)} & hosts

    def forget(self, before: int) -> None:
        """Forget buried workers whose last beat was before *before*, in microseconds. Blocks."""
        table = self._table
        old = table.delete().where(table.c.state == "dead", table.c.beat_at < before)
        self._work.database.change(lambda link: link.execute(old))

    def _lease(self) -> sa.ColumnElement[int] | None:
        if not self._work.pooled:
            return None
        return self._clock() + round(self._work.settings.lease_s * 1_000_000)

    def _clock(self) -> sa.ColumnElement[int]:
        """Return the database's own time in microseconds: hosts' clocks differ."""
        import sqlalchemy as sa

        if self._work.database.dialect == "postgresql":
            return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()) * 1_000_000, sa.BigInteger)
        return sa.cast((sa.func.julianday("now") - _UNIX_DAY) * _DAY_US, sa.BigInteger)


def slot_file(state_dir: Path, slot: int) -> Path:
    """Return the lock of a worker's slot; one worker per host and slot holds it for life."""
    return state_dir / f"worker-{slot}.lock"


def slot_taken(state_dir: Path, slot: int) -> bool:
    """Whether a worker lives in *slot* of this host."""
    try:
        fd = os.open(slot_file(state_dir, slot), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def slot_mark(state_dir: Path, slot: int) -> tuple[int, int] | None:
    """Return what tells the slot's lock file from any other of its name; None when it is gone."""
    try:
        lock_stat = slot_file(state_dir, slot).stat()
    except FileNotFoundError:
        return None
    return lock_stat.st_dev, lock_stat.st_ino


@contextlib.contextmanager
def hold_slot(state_dir: Path, slot: int) -> Iterator[bool]:
    """Hold the lock of *slot* inside the block; gives False when another worker holds it."""
    fd = os.open(slot_file(state_dir, slot), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield _locked(fd)
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
