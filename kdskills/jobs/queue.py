"""The queue: the rows of tasks and jobs themselves, asked in one order by every worker (see `docs/explanation/queue.md`).

There is no table beside the heads. A row that is `queued` waits; a claim is one transaction in which a worker takes what it
has room for and moves it on. Claims happen one at a time, under one lock, so that whoever claims sees everything the claims
before it did: order and exclusivity of a session are conditions of one query.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import ValidationError

from kdskills.execution.dirs import file_locks
from kdskills.jobs import shim
from kdskills.jobs.attempts import Attempts, Verdict
from kdskills.jobs.model import JobSpec, Kind, TaskHead, TaskSpec
from kdskills.jobs.quotas import FreePlaces, ProjectQuotas
from kdskills.jobs.records import (
    BEGUN,
    INDEXED,
    WorkRecords,
    WorkTables,
    WorkUnreadable,
    ending,
    follows,
    head_of,
    in_states,
)
from kdskills.jobs.settings import JobsSettings
from kdskills.storage.database import Database, LazyModule, micros, upgrade, upsert, utc_now
from kdskills.storage.folder import host_id, state_folder

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.attempts import WarmStarter
else:
    sa = LazyModule("sqlalchemy")

CHANNEL: Final = "kd_work"
"""PostgreSQL's channel: `queue` when there is work to claim, `queue MODE` when it needs room for a `batch`, a `service` or a
`job`; `cancel ID` and `job ID` for whoever has ID in hand."""
CLAIM_LOCK: Final = 2_037_591
"""Number of the advisory lock under which work is claimed."""
MAX_LEFT: Final = 4000
"""Ids of work for later versions that one worker passes over at most; what waits behind more of it waits for an upgrade."""


class Capacity(NamedTuple):
    """How much more work of each mode a worker has room for."""

    batch: int
    service: int
    job: int

    @property
    def most(self) -> int:
        """The most that one claim takes."""
        return max(1, sum(self))


@dataclass(frozen=True, slots=True)
class ClaimedWork:
    """What one claim took: tasks, each with the attempt to start or adopt, and ids of jobs; whether more may follow."""

    tasks: tuple[TaskHead, ...] = ()
    jobs: tuple[str, ...] = ()
    may_continue: bool = False


@dataclass(eq=False)
class WorkQueue:
    """The queue of one database as one host sees it; where it is *pooled*, work that is not pinned may run here.

    *global_concurrency* bounds the commands that run at one time in the whole pool.
    """

    records: WorkRecords
    roster: Roster
    host: str
    pooled: bool
    global_concurrency: int | None
    quotas: ProjectQuotas
    _questions: dict[tuple[bool, ...], sa.Select[Any]] = field(default_factory=dict, init=False)
    _repeatable: set[str] = field(default_factory=set, init=False)
    """Ids of tasks of hosts that are gone which are to be begun anew, once there is room."""
    unreadable: set[str] = field(default_factory=set, init=False)
    """Ids of tasks and jobs that only a later version understands, which its workers take; `MAX_LEFT` at most."""
    broken: dict[str, set[str]] = field(default_factory=dict, init=False)
    """Engines that start no program here for now, with ids of tasks that were left to other hosts; `MAX_LEFT` at most."""

    def announce(self, link: sa.Connection, word: str = "queue") -> None:
        """Wake the workers once the transaction of *link* commits; SQLite's watch the file and need no telling."""
        if link.dialect.name == "postgresql":
            link.execute(sa.select(sa.func.pg_notify(CHANNEL, word)))

    def last_of_session(self, link: sa.Connection, session_key: str) -> int:
        """Return the latest time of what is not over in a session, in microseconds; 0 when nothing is.

        What is submitted next is given a later one, whatever the clocks of its submitters say: a session's order is that
        of these times.
        """
        tasks, jobs = self.records.table("task"), self.records.table("job")
        latest = [
            sa.select(sa.func.max(table.c.created_at))
            .where(table.c.session_key == session_key, in_states(table, INDEXED))
            .scalar_subquery()
            for table in (tasks, jobs)
        ]
        return max((moment or 0) for moment in link.execute(sa.select(*latest)).one())

    def stranded(self, link: sa.Connection) -> bool:
        """Whether something waits here, or in the pool, though no worker is alive that would take it."""
        workers = self.records.tables.workers
        alive = sa.exists().where(workers.c.state == "live")
        if not self.pooled:
            alive = alive.where(workers.c.host == self.host)
        waits = []
        for table in (self.records.table("task"), self.records.table("job")):
            homes = (table.c.home == self.host, table.c.home.is_(None))
            waits.append(sa.exists().where(in_states(table, ("queued",)), sa.or_(*homes[: 1 + self.pooled])))
        return bool(link.execute(sa.select(sa.and_(sa.or_(*waits), ~alive))).scalar())

    def claim(self, link: sa.Connection, executor: str, capacity: Capacity, in_hand: Collection[str]) -> ClaimedWork:
        """Take what *executor* has room for, and everything of this host that nobody alive has in hand.

        A task that waited is `starting` with its next attempt; one that had begun on this host keeps its attempt, to be
        adopted, room or not; one of a host that is gone follows its own word on being lost, and begins anew where there is
        room. A job is `running`. Nothing is taken for a worker that was buried. *in_hand* are ids it sees through already.
        """
        if not self._alone(link, executor):
            return ClaimedWork()
        # what began counts in the pool already: a take-over needs a place here, and none of the pool's
        room, beyond = capacity._asdict(), any(capacity)
        if self.global_concurrency is not None:
            capacity = capacity._replace(batch=min(capacity.batch, self._free_in_pool(link)))
        room["pool"] = capacity.batch
        rows = self.candidates(link, executor, capacity, in_hand, beyond)
        places = self.quotas.free_places(link) if self.quotas.bounds_running else None
        fresh: dict[str, list[str]] = {"task": [], "job": []}
        adopted: list[str] = []
        heads: list[TaskHead] = []
        lost, passed_over = 0, len(self._left())
        self._repeatable.intersection_update(row.id for row in rows)
        for row in rows:
            if row.status == "queued":
                if self._fits(row, room, places):
                    fresh[row.kind].append(row.id)
            elif row.host == self.host or (row.kind == "job" and room["job"] > 0):
                room[row.mode] -= 1
                (fresh["job"] if row.kind == "job" else adopted).append(row.id)
            elif row.kind == "task" and (room[row.mode] > 0 or row.id not in self._repeatable):
                head, is_lost = self._take_over(link, row.id, executor, room[row.mode] > 0)
                lost += is_lost  # it was at most once, and its host is gone
                if head is not None:
                    room[row.mode] -= 1
                    heads.append(head)
        table = self.records.table("task")
        nobodys = {"executor": None, "host": None, "ready_at": None}
        begun = {"status": "starting", "attempt": table.c.attempt + 1, "executor": executor, "host": self.host}
        waiting = {"status": "queued", "attempt": table.c.attempt - 1}
        new = self._change(link, fresh["task"], nobodys | begun, nobodys | waiting)
        heads += [head for head in new if not self._is_left(head)]
        self._change(link, [head.id for head in new if head not in heads], nobodys | waiting)
        heads += self._change(link, adopted, {"executor": executor}, {"executor": None})
        jobs = self._readable_jobs(link, fresh["job"])
        if jobs:  # also those that ran on a host that is gone
            table = self.records.table("job")
            began = sa.func.coalesce(table.c.started_at, micros(utc_now()))
            values = {"status": "running", "executor": executor, "host": self.host, "started_at": began}
            link.execute(table.update().where(table.c.id.in_(jobs)).values(values))
        claimed = {*jobs, *(head.id for head in heads)}
        self._settle(link, sorted({row.session_key for row in rows if row.in_session and row.id in claimed}))
        # steps of a host that is gone follow their job
        follow = any(row.kind == "job" and row.status != "queued" and row.id in claimed for row in rows)
        may_continue = follow or (len(rows) >= capacity.most and bool(claimed or lost))
        return ClaimedWork(tuple(heads), tuple(jobs), may_continue or len(self._left()) > passed_over)

    def _free_in_pool(self, link: sa.Connection) -> int:
        """Return how many commands more may run on all hosts: exact, because claims happen one at a time."""
        table = self.records.table("task")
        batch = (in_states(table, BEGUN), table.c.mode == "batch")
        running = link.execute(sa.select(sa.func.count()).select_from(table).where(*batch)).scalar_one()
        return max(0, (self.global_concurrency or 0) - running)

    def _fits(self, row: sa.Row[Any], room: dict[str, int], places: FreePlaces | None) -> bool:
        """Take a place for what waits, of the *room* of its mode, and of the pool's and its project's *places*, if there is one."""
        is_batch = row.mode == "batch"
        if room[row.mode] <= 0 or (is_batch and room["pool"] <= 0):
            return False
        if is_batch and places is not None and not places.take(row.tenant, row.project):
            return False
        room[row.mode] -= 1
        room["pool"] -= is_batch
        return True

    def _alone(self, link: sa.Connection, executor: str) -> bool:
        """Hold the lock of claims until the transaction ends; False for a worker that was buried."""
        self.hold_claims(link)
        workers = self.records.tables.workers
        mine = sa.select(workers.c.executor).where(workers.c.executor == executor, workers.c.state == "live")
        return link.execute(mine).first() is not None

    def hold_claims(self, link: sa.Connection) -> None:
        """Let nobody claim anything until the transaction ends."""
        if link.dialect.name == "postgresql":  # SQLite's writer is alone already
            link.execute(sa.select(sa.func.pg_advisory_xact_lock(CLAIM_LOCK)))

    def candidates(
        self, link: sa.Connection, executor: str, capacity: Capacity, in_hand: Collection[str], beyond: bool = False
    ) -> Sequence[sa.Row[Any]]:
        """Return what may be claimed now, orphans first, then what waited longest: one question, without the lock.

        Orphans of hosts that are gone are among it where there is any room, or with *beyond*.
        """
        room = (*(places > 0 for places in capacity), beyond or any(capacity))
        question = self._questions.get(room)
        if question is None:
            question = self._questions[room] = self._question(*room)
        parameters: dict[str, Any] = {"executor": executor, "in_hand": sorted(in_hand), "most": capacity.most}
        parameters["left"] = sorted(self._left())
        if self.quotas.bounds_running and (capacity.batch or capacity.service):
            parameters["busy"] = self.quotas.free_places(link).busy
        return link.execute(question, parameters).all()

    def _question(self, batch: bool, service: bool, jobs: bool, beyond: bool) -> sa.Select[Any]:
        """Return the question for what may be claimed with room for these: made once, as it takes longer than its answer."""
        parts = [self._orphans("task"), self._orphans("job")]
        if self.pooled and beyond:
            parts += [self._orphans("task", beyond=True), self._orphans("job", beyond=True)]
        modes = [mode for mode, room in (("batch", batch), ("service", service)) if room]
        if modes:
            tasks, jobs_ = self.records.table("task"), self.records.table("job")
            # steps run where their session's files are: on the host of their job
            ours = sa.exists().where(jobs_.c.id == tasks.c.job_id, jobs_.c.host == self.host)
            steps = self._columns("task", 2).where(in_states(tasks, ("queued",)), tasks.c.job_id.is_not(None), ours)
            allowed: list[sa.ColumnElement[bool]] = [tasks.c.mode.in_(modes)]
            if self.quotas.bounds_running:  # what waits for a place of its project is in nobody's way
                busy: sa.BindParameter[Any] = sa.bindparam("busy", expanding=True)
                free = sa.tuple_(tasks.c.tenant, tasks.c.project).not_in(busy)
                allowed.append(sa.or_(tasks.c.mode != "batch", free))
            parts += [part.where(*allowed) for part in (self._waiting("task"), steps)]
        if jobs:
            parts.append(self._waiting("job"))
        most = sa.bindparam("most", type_=sa.Integer)
        limited = [
            sa.select(part.order_by(part.selected_columns.created_at, part.selected_columns.id).limit(most).subquery())
            for part in parts
        ]
        every = sa.union_all(*limited).subquery()
        return sa.select(every).order_by(every.c.rank, every.c.created_at, every.c.id)

    def _columns(self, kind: Kind, rank: int) -> sa.Select[Any]:
        """Return the beginning of a question for rows of *kind* that are not left to others."""
        table = self.records.table(kind)
        task = kind == "task"
        ids_left = sa.bindparam("left", type_=sa.String, expanding=True)
        in_session = table.c.session_id.is_not(None) & table.c.job_id.is_(None) if task else sa.true()
        return sa.select(
            sa.literal(kind).label("kind"),
            sa.literal(rank).label("rank"),
            table.c.id,
            table.c.status,
            table.c.host,
            table.c.tenant,
            table.c.project,
            (table.c.mode if task else sa.literal("job")).label("mode"),
            table.c.session_key,
            in_session.label("in_session"),
            table.c.created_at,
        ).where(table.c.id.not_in(ids_left))

    def _waiting(self, kind: Kind) -> sa.Select[Any]:
        """Return the question for what waits and whose turn it is in its session; steps of jobs are not among it."""
        table, sessions = self.records.table(kind), self.records.tables.sessions
        bound_elsewhere = sa.exists().where(
            sessions.c.session_key == table.c.session_key,
            sessions.c.host != self.host,
            sessions.c.host.in_(self.roster.occupied()),
        )
        runnable = table.c.home == self.host
        if self.pooled:
            runnable = runnable | (table.c.home.is_(None) & ~bound_elsewhere)
        question = self._columns(kind, 2).where(in_states(table, ("queued",)), runnable, ~self._drained())
        for front_kind in ("task", "job"):
            question = question.where(~self._in_front(kind, front_kind))
        return question.where(table.c.job_id.is_(None)) if kind == "task" else question

    def _drained(self) -> sa.ColumnElement[bool]:
        """Whether this host takes nothing new; what it began, steps of its jobs included, it sees through."""
        return sa.exists().where(self.records.tables.hosts.c.host == self.host)

    def _in_front(self, kind: str, front_kind: str) -> sa.ColumnElement[bool]:
        """Return whether something of the same session runs, or came before and is not over."""
        table, front = self.records.table(kind), self.records.table(front_kind).alias()
        before = sa.or_(
            front.c.created_at < table.c.created_at,
            sa.and_(front.c.created_at == table.c.created_at, front.c.id < table.c.id),
            in_states(front, BEGUN),
        )
        blocker = sa.exists().where(front.c.session_key == table.c.session_key, in_states(front, INDEXED), before)
        if front_kind == "task":
            blocker = blocker.where(front.c.job_id.is_(None))  # a job's steps are not in its way: it holds the session
        return blocker.where(front.c.id != table.c.id) if kind == front_kind else blocker

    def _orphans(self, kind: Kind, *, beyond: bool = False) -> sa.Select[Any]:
        """Return the question for what began and nobody alive sees through: of this host, or *beyond* of those that are gone."""
        table, workers = self.records.table(kind), self.records.tables.workers
        live = sa.select(workers.c.executor).where(workers.c.state == "live")
        executor = sa.bindparam("executor", type_=sa.String)
        in_hand = sa.bindparam("in_hand", type_=sa.String, expanding=True)
        forgotten = sa.and_(table.c.executor == executor, table.c.id.not_in(in_hand))
        nobodys = sa.or_(table.c.executor.is_(None), table.c.executor.not_in(live), forgotten)
        question = self._columns(kind, int(beyond)).where(in_states(table, BEGUN), nobodys)
        if not beyond:
            return question.where(table.c.host == self.host)
        vacant = table.c.host.not_in(self.roster.occupied())
        question = question.where(table.c.host != self.host, table.c.home.is_(None), vacant, ~self._drained())
        if kind == "task":  # a step follows its job, to where the session's files are
            jobs = self.records.table("job")
            theirs = sa.or_(jobs.c.host != self.host, jobs.c.host.is_(None))
            question = question.where(~sa.exists().where(jobs.c.id == table.c.job_id, in_states(jobs, INDEXED), theirs))
        return question

    def _change(
        self, link: sa.Connection, items: Sequence[str], values: dict[str, Any], otherwise: dict[str, Any] | None = None
    ) -> list[TaskHead]:
        """Give tasks *values* and return their heads; those that only a later version understands get *otherwise* instead."""
        if not items:
            return []
        table, heads, unreadable = self.records.table("task"), dict[str, TaskHead](), list[str]()
        change = table.update().where(table.c.id.in_(items)).values(values).returning(*table.c)
        for row in link.execute(change).mappings().all():
            try:
                heads[row["id"]] = head_of(TaskHead, row)
            except ValidationError as error:
                self._leave(row["id"], error)
                unreadable.append(row["id"])
        if unreadable:
            link.execute(table.update().where(table.c.id.in_(unreadable)).values(otherwise or {}))
        return [heads[item] for item in items if item in heads]

    def _readable_jobs(self, link: sa.Connection, items: Sequence[str]) -> list[str]:
        """Return those of *items* whose specifications, those of their steps too, this version understands."""
        if not items:
            return []
        readable, jobs, steps = dict.fromkeys(items), self.records.table("job"), self.records.table("task")
        texts = [
            sa.select(jobs.c.id, jobs.c.spec, sa.literal(False).label("is_step")).where(jobs.c.id.in_(items)),
            sa.select(steps.c.job_id, steps.c.spec, sa.literal(True)).where(steps.c.job_id.in_(items)),
        ]
        for row in link.execute(sa.union_all(*texts)):
            try:
                (TaskSpec if row.is_step else JobSpec).model_validate_json(row.spec)
            except ValidationError as error:
                self._leave(row.id, error)
                readable.pop(row.id, None)
        return list(readable)

    def _leave(self, item: str, error: BaseException | None) -> None:
        """Leave a task or job to workers of a later version."""
        if item in self.unreadable or len(self.unreadable) >= MAX_LEFT:
            return
        problems = error.errors(include_input=False) if isinstance(error, ValidationError) else []
        fields = ", ".join(sorted({".".join(map(str, problem["loc"])) for problem in problems}))
        _LOG.warning("%s is left to a worker of a later version: %s", item, fields[:500])
        self.unreadable.add(item)

    def _left(self) -> set[str]:
        """Return the ids of what is left to other workers."""
        return self.unreadable.union(*self.broken.values())

    def _is_left(self, head: TaskHead) -> bool:
        """Whether a task is left to other hosts, as programs do not start here; one that may run only here is not."""
        tasks = self.broken.get(head.spec.placement.engine)
        if tasks is None or head.home is not None or head.spec.session_id is not None or head.job_id is not None:
            return False
        if len(tasks) < MAX_LEFT:
            tasks.add(head.id)
        return True

    def _take_over(self, link: sa.Connection, item: str, executor: str, room: bool) -> tuple[TaskHead | None, bool]:
        """Take a task whose host is gone, to be run anew if there is *room*; or none, and whether it is over as it may not be."""
        try:
            head = self.records.head(link, TaskHead, item)
        except WorkUnreadable as error:
            self._leave(item, error.__cause__)
            return None, False
        assert head is not None
        lost = Verdict(status="lost", error_code="lost", error_message=f"host {head.host} is gone", finished_at=0.0)
        decision = follows(head, lost)
        if decision != "no" and self._is_left(head):
            return None, False
        if decision != "no":
            self._repeatable.add(item)
            if not room:
                return None, False
            values = {"status": "starting", "attempt": head.attempt + 1, "ready_at": None}
            values |= {"restarts": head.restarts + (decision == "restart"), "executor": executor, "host": self.host}
            return self._change(link, [item], values)[0], False
        status, values = ending(head, lost)
        self._change(link, [item], values | {"status": status})
        if head.job_id is not None:
            self.announce(link, f"job {head.job_id}")
        self.announce(link)
        return None, True

    def _settle(self, link: sa.Connection, sessions: Sequence[str]) -> None:
        if sessions:
            now, new = micros(utc_now()), upsert(link.dialect.name, self.records.tables.sessions)
            rows = [{"session_key": key, "host": self.host, "used_at": now} for key in sessions]
            change = {"host": new.excluded.host, "used_at": new.excluded.used_at}
            link.execute(new.on_conflict_do_update(index_elements=["session_key"], set_=change), rows)


class Work:
    """What clients and workers share: blocking, opened once per process and place.

    *state_dir* is the folder of runs and session files of this host, made when it is not there. Without a *starter*, as
    clients have none, attempts are only found. Raises MissingExtra, and DatabaseUnavailable also when the folder cannot
    be made.
    """

    def __init__(
        self, url: str, state_dir: Path, settings: JobsSettings | None = None, *, starter: WarmStarter | None = None
    ) -> None:
        self.url = url
        self.state_dir = state_dir
        self.settings = settings or JobsSettings()
        state_folder(state_dir)
        self.host = host_id(state_dir)
        self.tables = WorkTables()
        role = "client" if starter is None else "worker"
        self.database = Database(url, label="the database of background work", role=role)
        self.records = WorkRecords(self.tables, self.database.dialect)
        self.attempts = Attempts(state_dir, starter)
        upgrade(self.database, "work")
        self.roster = Roster(self)
        self.quotas = ProjectQuotas(self.records, self.settings.quotas)
        most = self.settings.global_concurrency
        self.queue = WorkQueue(self.records, self.roster, self.host, self.pooled, most, self.quotas)

    @property
    def pooled(self) -> bool:
        """Whether work is for any host of the pool; never with SQLite, whose file has one host."""
        return self.database.dialect != "sqlite" and self.settings.pool is not False

    async def alone(self) -> bool:
        """Whether no other host is heard of that may run work submitted here."""
        workers = self.tables.workers
        far_hosts = sa.select(workers.c.host).where(workers.c.host != self.host).limit(1)
        return not self.pooled or await self.database.read(lambda link: link.execute(far_hosts).first()) is None

    def close(self) -> None:
        """Close every connection; blocks."""
        self.database.close()


_LOG: Final = logging.getLogger("kdskills.jobs")
FENCE_US: Final = 5_000_000
"""Microseconds a host's shims have, after its lease, to end what they run before another host begins."""

_UNIX_DAY: Final = 2_440_587.5
_DAY_US: Final = 86_400_000_000


class Roster:
    """The table of workers."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._table = work.tables.workers

    def enter(self, executor: str, slot: int, entry: tuple[str, str] | None = None) -> None:
        """Add this worker, which holds the lock of *slot*, and the address and key it serves its host's files by. Blocks.

        Whoever had the slot before is dead.
        """
        table, now = self._table, micros(utc_now())

        def change(link: sa.Connection) -> None:
            before = table.update().where(table.c.host == self._work.host, table.c.slot == slot)
            link.execute(before.values(state="dead"))
            row = {"executor": executor, "host": self._work.host, "slot": slot, "pid": os.getpid(), "state": "live"}
            row |= {"name": socket.gethostname()[:255], "started_at": now, "beat_at": now, "lease_until": self._lease()}
            row |= self._work.settings.model_dump(include={"slots", "services"}) | {"version": version("kdskills")[:40]}
            if entry is not None:
                row |= {"address": entry[0], "stream_key": entry[1]}
            link.execute(table.insert().values(row))

        self._work.database.change(change)

    def beat(self, executor: str, full_since: int | None = None) -> list[str] | None:
        """Renew the worker's lease, bury workers that are dead, and return those; None when it was buried itself. Blocks.

        *full_since* tells from when on, in microseconds, it takes nothing new because its disk is full; None while it has room.
        """

        def change(link: sa.Connection) -> list[str] | None:
            mine = self._table.update().where(self._table.c.executor == executor, self._table.c.state == "live")
            renewal = mine.values(beat_at=micros(utc_now()), lease_until=self._lease(), full_since=full_since)
            return self._bury(link, executor) if link.execute(renewal).rowcount else None

        return self._work.database.change(change)

    def leave(self, executor: str) -> None:
        """Bury this worker, which ends. Blocks."""
        table = self._table
        departure = table.update().where(table.c.executor == executor).values(state="dead")
        self._work.database.change(lambda link: link.execute(departure))

    def bury(self, mine: str | None = None) -> list[str]:
        """Bury workers that are dead, of this host by their locks, of other hosts by their leases, and return them. Blocks.

        *mine* is the caller's own executor, whose lock the caller itself holds.
        """
        return self._work.database.change(lambda link: self._bury(link, mine))

    def occupied(self) -> sa.Select[tuple[str]]:
        """Return the question for hosts whose programs may still run: with a worker, or within their lease and its fence.

        A worker that ended in order leaves its programs running, so its host is not free before the lease is over.
        """
        leased = self._table.c.lease_until >= self.clock() - FENCE_US
        return sa.select(self._table.c.host).where(sa.or_(self._table.c.state == "live", leased))

    def _bury(self, link: sa.Connection, mine: str | None) -> list[str]:
        """As `bury`, in the transaction of *link*; one question when nobody died."""
        table = self._table
        over = sa.func.coalesce(table.c.lease_until < self.clock() - FENCE_US, sa.false()).label("over")
        living = sa.select(table.c.executor, table.c.host, table.c.slot, over).where(table.c.state == "live")
        dead = [
            row.executor
            for row in link.execute(living)
            if row.executor != mine
            and (row.over or (row.host == self._work.host and not slot_taken(self._work.state_dir, row.slot)))
        ]
        if not dead:
            return []
        # a row that a frozen worker holds is left to a later beat: waiting for it would end the lease of who waits
        free = sa.select(table.c.executor).where(table.c.state == "live", table.c.executor.in_(dead))
        change = table.update().where(table.c.executor.in_(free.with_for_update(skip_locked=True)))
        buried = list(link.execute(change.values(state="dead").returning(table.c.executor)).scalars())
        for executor in buried:
            _LOG.warning("worker %s is dead", executor)
        return buried

    def live(self, link: sa.Connection) -> Sequence[sa.Row[Any]]:
        """Return the rows of workers that were not buried."""
        return link.execute(self._table.select().where(self._table.c.state == "live")).all()

    def forget(self, before: int) -> None:
        """Forget buried workers whose last beat was before *before*, in microseconds. Blocks."""
        table = self._table
        old = table.delete().where(table.c.state == "dead", table.c.beat_at < before)
        self._work.database.change(lambda link: link.execute(old))

    def _lease(self) -> sa.ColumnElement[int] | None:
        if not self._work.pooled:
            return None
        return self.clock() + round(self._work.settings.lease_s * 1_000_000)

    def clock(self) -> sa.ColumnElement[int]:
        """Return the database's own time in microseconds: hosts' clocks differ."""
        if self._work.database.dialect == "postgresql":
            return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()) * 1_000_000, sa.BigInteger)
        return sa.cast((sa.func.julianday("now") - _UNIX_DAY) * _DAY_US, sa.BigInteger)


def slot_file(state_dir: Path, slot: int) -> Path:
    """Return the lock of a worker's slot; one worker per host and slot holds it for life."""
    return state_dir / f"worker-{slot}.lock"


def slot_taken(state_dir: Path, slot: int) -> bool:
    """Whether a worker lives in *slot* of this host."""
    return shim.lock_taken(slot_file(state_dir, slot))


def slot_mark(state_dir: Path, slot: int) -> tuple[int, int] | None:
    """Return what tells the slot's lock file from any other of its name; None when it is gone."""
    try:
        lock_stat = slot_file(state_dir, slot).stat()
    except FileNotFoundError:
        return None
    return lock_stat.st_dev, lock_stat.st_ino


@contextlib.contextmanager
def hold_slot(state_dir: Path, slot: int, patience_s: float = 2.0) -> Iterator[bool]:
    """Hold the lock of *slot* inside the block; gives False when another worker holds it. Raises ExecRefused without locks.

    Blocks for *patience_s*: whoever looks whether the slot is taken holds its lock for a moment.
    """
    file_locks()
    fd = shim.take_lock(state_dir, patience_s, slot_file(state_dir, slot).name)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)
