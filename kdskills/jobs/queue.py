"""The queue: the rows of tasks and jobs themselves, asked in one order by every worker (see `docs/explanation/queue.md`).

There is no table beside the heads. A row that is `queued` waits; a claim is one transaction in which a worker takes what it
has room for and moves it on. Claims happen one at a time, under one lock, so that whoever claims sees everything the claims
before it did: order and exclusivity of a session are conditions of one query.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kdskills.jobs.attempts import Verdict
from kdskills.jobs.records import ending, follows, in_states, task_of
from kdskills.storage.database import micros, upsert, utc_now

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.model import TaskHead
    from kdskills.jobs.records import WorkRecords
    from kdskills.jobs.roster import Roster

Kind = Literal["task", "job"]

CHANNEL: Final = "kd_work"
"""PostgreSQL's channel: `queue` when there is work to claim, `queue MODE` when it needs room for a `batch`, a `service` or a
`job`; `cancel ID` and `job ID` for whoever has ID in hand."""
CLAIM_LOCK: Final = 2_037_591
"""Number of the advisory lock under which work is claimed."""
FROZEN_MS: Final = 10_000
"""Milliseconds a claim may stand still before the server ends it: its lock must not outlive a frozen machine's patience."""
_ACTIVE: Final = ("starting", "running")
_OPEN: Final = ("queued", *_ACTIVE)


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many more commands, services and jobs a worker has room for."""

    batch: int
    service: int
    jobs: int

    def has_room(self, mode: str) -> bool:
        """Whether there is room for one more `batch`, `service` or `job`; for work of any other name there may be."""
        return {"batch": self.batch, "service": self.service, "job": self.jobs}.get(mode, 1) > 0


@dataclass(frozen=True, slots=True)
class ClaimedWork:
    """What one claim took.

    Attributes:
        tasks: Heads of tasks that are this worker's now, each with the attempt to start or to adopt.
        jobs: Ids of jobs that are this worker's now.
        may_continue: Whether there may be more to claim at once.
    """

    tasks: tuple[TaskHead, ...] = ()
    jobs: tuple[str, ...] = ()
    may_continue: bool = False


class WorkQueue:
    """The queue of one database as one host sees it.

    Args:
        records: The rows.
        roster: Who is alive.
        host: This host.
        pooled: Whether work that is not pinned may run here.
        global_concurrency: Commands that run at one time in the whole pool; None for as many as there is room for.
    """

    def __init__(
        self, records: WorkRecords, roster: Roster, host: str, *, pooled: bool, global_concurrency: int | None
    ) -> None:
        self._records = records
        self._roster = roster
        self._host = host
        self._pooled = pooled
        self._limit = global_concurrency
        self._questions: dict[tuple[bool, bool, bool], sa.Select[Any]] = {}

    def announce(self, link: sa.Connection, word: str = "queue") -> None:
        """Wake the workers once the transaction of *link* commits; SQLite's watch the file and need no telling."""
        if link.dialect.name == "postgresql":
            import sqlalchemy as sa

            link.execute(sa.select(sa.func.pg_notify(CHANNEL, word)))

    def last_of_session(self, link: sa.Connection, session_key: str) -> int:
        """Return the latest time of what is not over in a session, in microseconds; 0 when nothing is.

        What is submitted next is given a later one, whatever the clocks of its submitters say: a session's order is that
        of these times.
        """
        import sqlalchemy as sa

        tasks, jobs = self._records.table("task"), self._records.table("job")
        latest = [
            sa.select(sa.func.max(table.c.created_at))
            .where(table.c.session_key == session_key, in_states(table, _OPEN))
            .scalar_subquery()
            for table in (tasks, jobs)
        ]
        return max((moment or 0) for moment in link.execute(sa.select(*latest)).one())

    def stranded(self, link: sa.Connection) -> bool:
        """Whether something waits here, or in the pool, though no worker is alive that would take it."""
        import sqlalchemy as sa

        workers = self._records.tables.workers
        alive = sa.exists().where(workers.c.state == "live")
        if not self._pooled:
            alive = alive.where(workers.c.host == self._host)
        tables = [self._records.table(kind) for kind in ("task", "job")]
        waits = [sa.exists().where(in_states(table, ("queued",)), self._pinned_here(table)) for table in tables]
        return bool(link.execute(sa.select(sa.and_(sa.or_(*waits), ~alive))).scalar())

    def _pinned_here(self, table: sa.Table) -> sa.ColumnElement[bool]:
        """Return whether a row is pinned to this host, or to none of a pool this host is in."""
        pinned_here = table.c.home == self._host
        return pinned_here | table.c.home.is_(None) if self._pooled else pinned_here

    def anything(self, link: sa.Connection, executor: str, capacity: Capacity, in_hand: Collection[str]) -> bool:
        """Whether a claim would find something: one question, without the lock."""
        return bool(self._candidates(link, executor, capacity, in_hand))

    def claim(self, link: sa.Connection, executor: str, capacity: Capacity, in_hand: Collection[str]) -> ClaimedWork:
        """Take what *executor* has room for, and everything of this host that nobody alive has in hand.

        A task that waited is `starting` with its next attempt; one that had begun on this host keeps its attempt, to be
        adopted; one of a host that is gone follows its own word on being lost. A job is `running`. Nothing is taken for a
        worker that was buried.

        Args:
            link: A transaction that writes.
            executor: The worker.
            capacity: What it has room for.
            in_hand: Ids it sees through already.
        """
        if not self._alone(link, executor):
            return ClaimedWork()
        if self._limit is not None:
            capacity = Capacity(
                min(capacity.batch, max(0, self._limit - self._running(link))), capacity.service, capacity.jobs
            )
        rows = self._candidates(link, executor, capacity, in_hand)
        room = {"batch": capacity.batch, "service": capacity.service, "job": capacity.jobs}
        fresh: dict[str, list[str]] = {"task": [], "job": []}
        adopted: list[str] = []
        heads: list[TaskHead] = []
        sessions: set[str] = set()
        for row in rows:
            if row.status != "queued" and row.kind == "task":
                if row.host == self._host:
                    adopted.append(row.id)
                    continue
                head = self._take_over(link, row.id, executor)
                if head is None:
                    continue  # it was at most once, and its host is gone
                heads.append(head)
            elif row.status == "queued":
                if room[row.mode] <= 0:
                    continue
                room[row.mode] -= 1
                fresh[row.kind].append(row.id)
            else:
                fresh["job"].append(row.id)
            if row.in_session:
                sessions.add(row.session_key)
        heads += self._begin(link, fresh["task"], executor) + self._adopt(link, adopted, executor)
        self._begin_jobs(link, fresh["job"], executor)
        self._settle(link, sorted(sessions))
        may_continue = len(rows) >= _limit_of(capacity)
        return ClaimedWork(tuple(heads), tuple(fresh["job"]), may_continue)

    def _alone(self, link: sa.Connection, executor: str) -> bool:
        """Hold the lock of claims until the transaction ends; False for a worker that was buried."""
        import sqlalchemy as sa

        if link.dialect.name == "postgresql":  # SQLite's writer is alone already
            frozen = sa.func.set_config("idle_in_transaction_session_timeout", str(FROZEN_MS), True)
            link.execute(sa.select(frozen, sa.func.pg_advisory_xact_lock(CLAIM_LOCK)))
        workers = self._records.tables.workers
        mine = sa.select(workers.c.executor).where(workers.c.executor == executor, workers.c.state == "live")
        return link.execute(mine).first() is not None

    def _candidates(
        self, link: sa.Connection, executor: str, capacity: Capacity, in_hand: Collection[str]
    ) -> Sequence[sa.Row[Any]]:
        """Return what may be claimed now: orphans first, then what waited longest."""
        room = (capacity.batch > 0, capacity.service > 0, capacity.jobs > 0)
        question = self._questions.get(room)
        if question is None:
            question = self._questions[room] = self._question(*room)
        parameters = {"executor": executor, "in_hand": sorted(in_hand), "most": _limit_of(capacity)}
        return link.execute(question, parameters).all()

    def _question(self, batch: bool, service: bool, jobs: bool) -> sa.Select[Any]:
        """Return the question for what may be claimed with room for these: made once, as it takes longer than its answer."""
        import sqlalchemy as sa

        parts = [self._orphans("task"), self._orphans("job")]
        modes = [mode for mode, room in (("batch", batch), ("service", service)) if room]
        if modes:
            mode = self._records.table("task").c.mode
            parts += [part.where(mode.in_(modes)) for part in (self._waiting("task"), self._waiting_steps())]
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
        """Begin a question for rows of *kind*."""
        import sqlalchemy as sa

        table = self._records.table(kind)
        task = kind == "task"
        in_session = table.c.session_id.is_not(None) & table.c.job_id.is_(None) if task else sa.true()
        return sa.select(
            sa.literal(kind).label("kind"),
            sa.literal(rank).label("rank"),
            table.c.id,
            table.c.status,
            table.c.host,
            (table.c.mode if task else sa.literal("job")).label("mode"),
            table.c.session_key,
            in_session.label("in_session"),
            table.c.created_at,
        )

    def _waiting(self, kind: Kind) -> sa.Select[Any]:
        """Return the question for what waits and whose turn it is in its session; steps of jobs are not among it."""
        import sqlalchemy as sa

        table, sessions = self._records.table(kind), self._records.tables.sessions
        bound_elsewhere = sa.exists().where(
            sessions.c.session_key == table.c.session_key,
            sessions.c.host != self._host,
            sessions.c.host.in_(self._roster.occupied()),
        )
        runnable = table.c.home == self._host
        if self._pooled:
            runnable = runnable | (table.c.home.is_(None) & ~bound_elsewhere)
        question = self._columns(kind, 1).where(in_states(table, ("queued",)), runnable)
        for front_kind in ("task", "job"):
            question = question.where(~self._in_front(kind, front_kind))
        return question.where(table.c.job_id.is_(None)) if kind == "task" else question

    def _in_front(self, kind: str, front_kind: str) -> sa.ColumnElement[bool]:
        """Return whether something of the same session runs, or came before and is not over."""
        import sqlalchemy as sa

        table, front = self._records.table(kind), self._records.table(front_kind).alias()
        before = sa.or_(
            front.c.created_at < table.c.created_at,
            sa.and_(front.c.created_at == table.c.created_at, front.c.id < table.c.id),
            in_states(front, _ACTIVE),
        )
        blocker = sa.exists().where(front.c.session_key == table.c.session_key, in_states(front, _OPEN), before)
        if front_kind == "task":
            blocker = blocker.where(front.c.job_id.is_(None))  # a job's steps are not in its way: it holds the session
        return blocker.where(front.c.id != table.c.id) if kind == front_kind else blocker

    def _waiting_steps(self) -> sa.Select[Any]:
        """Return the question for steps whose job is this host's: they run where the session's files are."""
        import sqlalchemy as sa

        tasks, jobs = self._records.table("task"), self._records.table("job")
        ours = sa.exists().where(jobs.c.id == tasks.c.job_id, jobs.c.host == self._host)
        return self._columns("task", 1).where(in_states(tasks, ("queued",)), tasks.c.job_id.is_not(None), ours)

    def _orphans(self, kind: Kind) -> sa.Select[Any]:
        """Return the question for what began and nobody alive sees through: of this host, or of one that is gone."""
        import sqlalchemy as sa

        table, workers = self._records.table(kind), self._records.tables.workers
        live = sa.select(workers.c.executor).where(workers.c.state == "live")
        executor = sa.bindparam("executor", type_=sa.String)
        in_hand = sa.bindparam("in_hand", type_=sa.String, expanding=True)
        forgotten = sa.and_(table.c.executor == executor, table.c.id.not_in(in_hand))
        nobodys = sa.or_(table.c.executor.is_(None), table.c.executor.not_in(live), forgotten)
        reach = table.c.host == self._host
        if self._pooled:
            reach = reach | (table.c.home.is_(None) & table.c.host.not_in(self._roster.occupied()))
        return self._columns(kind, 0).where(in_states(table, _ACTIVE), nobodys, reach)

    def _running(self, link: sa.Connection) -> int:
        """Return how many commands run in the whole pool; exact, because claims happen one at a time."""
        import sqlalchemy as sa

        table = self._records.table("task")
        count = sa.select(sa.func.count()).select_from(table).where(in_states(table, _ACTIVE), table.c.mode == "batch")
        return int(link.execute(count).scalar_one())

    def _begin(self, link: sa.Connection, items: Sequence[str], executor: str) -> list[TaskHead]:
        """Move tasks that waited to `starting`, with the number of the attempt that follows."""
        table = self._records.table("task")
        values = {"status": "starting", "attempt": table.c.attempt + 1, "ready_at": None}
        return self._change(link, items, values | {"executor": executor, "host": self._host})

    def _adopt(self, link: sa.Connection, items: Sequence[str], executor: str) -> list[TaskHead]:
        """Take tasks that began on this host, as they are."""
        return self._change(link, items, {"executor": executor})

    def _change(self, link: sa.Connection, items: Sequence[str], values: dict[str, Any]) -> list[TaskHead]:
        if not items:
            return []
        table = self._records.table("task")
        change = table.update().where(table.c.id.in_(items)).values(values).returning(*table.c)
        heads = {row["id"]: task_of(row) for row in link.execute(change).mappings()}
        return [heads[item] for item in items if item in heads]

    def _begin_jobs(self, link: sa.Connection, items: Sequence[str], executor: str) -> None:
        """Move jobs to `running` here, also those that ran on a host that is gone."""
        import sqlalchemy as sa

        if not items:
            return
        table = self._records.table("job")
        values = {
            "status": "running",
            "executor": executor,
            "host": self._host,
            "started_at": sa.func.coalesce(table.c.started_at, micros(utc_now())),
        }
        link.execute(table.update().where(table.c.id.in_(items)).values(values))

    def _take_over(self, link: sa.Connection, item: str, executor: str) -> TaskHead | None:
        """Take a task whose host is gone, to be run anew; None when it may not be, and is over by this."""
        head = self._records.task(link, item)
        assert head is not None
        lost = Verdict(status="lost", error_code="lost", error_message=f"host {head.host} is gone", finished_at=0.0)
        decision = follows(head, lost)
        if decision != "no":
            values = {"status": "starting", "attempt": head.attempt + 1, "ready_at": None}
            values |= {"restarts": head.restarts + (decision == "restart"), "executor": executor, "host": self._host}
            return self._change(link, [item], values)[0]
        status, values = ending(head, lost)
        self._change(link, [item], values | {"status": status})
        if head.job_id is not None:
            self.announce(link, f"job {head.job_id}")
        self.announce(link)
        return None

    def _settle(self, link: sa.Connection, sessions: Sequence[str]) -> None:
        """Note that the files of these sessions are on this host."""
        if not sessions:
            return
        table, now = self._records.tables.sessions, micros(utc_now())
        rows = [{"session_key": key, "host": self._host, "used_at": now} for key in sessions]
        new = upsert(link.dialect.name, table)
        change = {"host": new.excluded.host, "used_at": new.excluded.used_at}
        link.execute(new.on_conflict_do_update(index_elements=["session_key"], set_=change), rows)


def _limit_of(capacity: Capacity) -> int:
    return max(1, capacity.batch + capacity.service + capacity.jobs)
