"""Rows of tasks and jobs: reading them as heads, adding them, moving them by compare-and-set, and what a verdict writes.

Every function that touches rows takes the connection of the caller's transaction. A worker's move is fenced: it happens only
while the row is the worker's and the worker is alive in the roster, so one that was given up cannot change anything any more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from kdskills.jobs.model import (
    ARTIFACTS,
    ENDPOINTS,
    JOBS,
    OPEN,
    OUTPUT_ERRORS,
    TASKS,
    TERMINAL,
    JobHead,
    JobSpec,
    Scope,
    TaskHead,
    TaskSpec,
    before,
)
from kdskills.jobs.plan import steps_of
from kdskills.storage.database import micros, moment_of, upsert, utc_now

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.attempts import Attempt, AttemptFacts, Verdict
    from kdskills.jobs.model import TaskHead
    from kdskills.jobs.tables import WorkTables


_MOMENTS: Final = ("created_at", "started_at", "finished_at", "cancel_at")
_OVER: Final = tuple(sorted(TERMINAL))


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which rows a listing shows; without `steps` tasks that are steps of jobs are left out."""

    scope: Scope
    any_agent: bool = False
    status: tuple[str, ...] = ()
    job_id: str | None = None
    before: tuple[datetime, str] | None = None
    limit: int = 100
    session_id: str | None = None
    steps: bool = True


class WorkRecords:
    """Rows of tasks and jobs.

    Args:
        tables: The tables.
        dialect: `sqlite` or `postgresql`.
    """

    def __init__(self, tables: WorkTables, dialect: str) -> None:
        self.tables = tables
        self.dialect = dialect

    # Statements that every request asks are made once: making one costs more than what SQLite does for it.

    @cached_property
    def _one_task(self) -> sa.Select[Any]:
        import sqlalchemy as sa

        return self.tables.tasks.select().where(self.tables.tasks.c.id == sa.bindparam("item"))

    @cached_property
    def _new(self) -> Mapping[str, Any]:
        tables = (self.tables.tasks, self.tables.jobs)
        return {
            table.name: upsert(self.dialect, table).on_conflict_do_nothing().returning(table.c.id) for table in tables
        }

    @cached_property
    def _open_work(self) -> sa.Select[Any]:
        import sqlalchemy as sa

        counts = []
        for table in (self.tables.tasks, self.tables.jobs):
            mine = [table.c[name] == sa.bindparam(name) for name in ("tenant", "project", "agent")]
            query = sa.select(table.c.id).where(*mine, in_states(table, OPEN)).limit(sa.bindparam("most"))
            if table is self.tables.tasks:
                query = query.where(table.c.job_id.is_(None))
            counts.append(sa.select(sa.func.count()).select_from(query.subquery()).scalar_subquery())
        return sa.select(*counts)

    def table(self, kind: str) -> sa.Table:
        """Return the table of `task` or `job`."""
        return self.tables.tasks if kind == "task" else self.tables.jobs

    def add_task(self, link: sa.Connection, values: Mapping[str, Any]) -> bool:
        """Add a task; False when one of its id is there."""
        return self._add(link, self.tables.tasks, values)

    def add_job(self, link: sa.Connection, values: Mapping[str, Any]) -> bool:
        """Add a job; False when one of its id is there."""
        return self._add(link, self.tables.jobs, values)

    def task(self, link: sa.Connection, item: str) -> TaskHead | None:
        """Return a task, or None."""
        if not _storable(item):
            return None
        row = link.execute(self._one_task, {"item": item}).mappings().first()
        return None if row is None else task_of(row)

    def job(self, link: sa.Connection, item: str) -> JobHead | None:
        """Return a job and its steps, or None."""
        if not _storable(item):
            return None
        table = self.tables.jobs
        row = link.execute(table.select().where(table.c.id == item)).mappings().first()
        return None if row is None else job_of(row, self.tasks_of_jobs(link, [item]))

    def body_hash(self, link: sa.Connection, kind: str, item: str) -> str | None:
        """Return the hash of the request a task or job was made from."""
        table = self.table(kind)
        return link.execute(table.select().with_only_columns(table.c.body_hash).where(table.c.id == item)).scalar()

    def tasks_of_jobs(self, link: sa.Connection, jobs: Sequence[str]) -> list[TaskHead]:
        """Return every task of these jobs, in the order of steps and tries."""
        table = self.tables.tasks
        query = table.select().where(table.c.job_id.in_(jobs)).order_by(table.c.job_id, table.c.step, table.c["try"])
        return [task_of(row) for row in link.execute(query).mappings()]

    def list_tasks(self, link: sa.Connection, query_filter: ListQuery) -> list[TaskHead]:
        """Return tasks, the newest first."""
        query = self._listing(self.tables.tasks, query_filter)
        if query_filter.job_id is not None:
            query = query.where(self.tables.tasks.c.job_id == query_filter.job_id)
        if not query_filter.steps:
            query = query.where(self.tables.tasks.c.job_id.is_(None))
        return [task_of(row) for row in link.execute(query).mappings()]

    def list_jobs(self, link: sa.Connection, query_filter: ListQuery) -> list[JobHead]:
        """Return jobs, the newest first."""
        rows = link.execute(self._listing(self.tables.jobs, query_filter)).mappings().all()
        tasks = self.tasks_of_jobs(link, [row["id"] for row in rows])
        return [job_of(row, [task for task in tasks if task.job_id == row["id"]]) for row in rows]

    def open_work(self, link: sa.Connection, scope: Scope, most: int) -> int:
        """Return how many tasks and jobs of an agent are not over, counting to *most*; steps are part of their job."""
        whose = {"tenant": scope.tenant, "project": scope.project, "agent": scope.agent}
        return min(most, sum(link.execute(self._open_work, {**whose, "most": most}).one()))

    def goes_on(self, link: sa.Connection, kind: str, item: str, executor: str) -> bool:
        """Whether *executor*, alive, holds a row that is not over and of which no cancel was asked."""
        table = self.table(kind)
        mine = (table.c.id == item, table.c.executor == executor, self._lives(executor))
        open_ = (table.c.status.not_in(_OVER), table.c.cancel_at.is_(None))
        return link.execute(table.select().with_only_columns(table.c.id).where(*mine, *open_)).first() is not None

    def holder(self, link: sa.Connection, session_key: str, *, but: str = "") -> str | None:
        """Return the task or job, *but* one, that is not over and came first in this session; None when nothing holds it."""
        import sqlalchemy as sa

        holders: list[tuple[int, str]] = []
        for kind in ("task", "job"):
            table = self.table(kind)
            query = (
                sa.select(table.c.created_at, table.c.id)
                .where(table.c.session_key == session_key, table.c.id != but, in_states(table, OPEN))
                .order_by(table.c.created_at)
                .limit(1)
            )
            if kind == "task":
                query = query.where(table.c.job_id.is_(None))
            holders += [(row[0], row[1]) for row in link.execute(query)]
        return min(holders)[1] if holders else None

    def move(
        self,
        link: sa.Connection,
        kind: str,
        item: str,
        new_status: str,
        executor: str,
        *,
        of_attempt: int | None = None,
        **values: Any,
    ) -> bool:
        """Move a row *executor* holds to the state *new_status*; False when the tables of states, or the fence, forbid it.

        With *of_attempt* it is moved only while that attempt is its latest.
        """
        table = self.table(kind)
        allowed = before(TASKS if kind == "task" else JOBS, new_status)
        mine = (table.c.id == item, table.c.executor == executor, self._lives(executor))
        change = table.update().where(*mine, table.c.status.in_(allowed)).values(status=new_status, **values)
        if of_attempt is not None:
            change = change.where(table.c.attempt == of_attempt)
        return link.execute(change).rowcount > 0

    def ask_cancel(self, link: sa.Connection, kind: str, item: str, reason: str) -> str | None:
        """Ask for a cancel; what waits in a queue is canceled at once. Returns the state now, or None for what was over."""
        table, now, reason = self.table(kind), micros(utc_now()), reason.replace("\0", "\N{REPLACEMENT CHARACTER}")
        mine = table.c.id == item
        waiting = table.update().where(mine, table.c.status == "queued")
        ended = {"status": "canceled", "error_code": "canceled", "finished_at": now}
        done = waiting.values(cancel_at=now, cancel_reason=reason, **ended)
        if link.execute(done).rowcount:
            return "canceled"
        request = table.update().where(mine, table.c.status.not_in(_OVER), table.c.cancel_at.is_(None))
        if link.execute(request.values(cancel_at=now, cancel_reason=reason)).rowcount:
            return "asked"
        unfinished = table.select().with_only_columns(table.c.id).where(mine, table.c.status.not_in(_OVER))
        return None if link.execute(unfinished).first() is None else "asked"

    def force(
        self, link: sa.Connection, kind: str, item: str, new_status: str, *, executor: str | None, **values: Any
    ) -> bool:
        """End a row that nobody alive holds; False when somebody took it meanwhile, or it is over."""
        import sqlalchemy as sa

        table, workers = self.table(kind), self.tables.workers
        alive = sa.select(workers.c.executor).where(workers.c.state == "live")
        same_executor = table.c.executor.is_(None) if executor is None else table.c.executor == executor
        free = sa.or_(table.c.executor.is_(None), table.c.executor.not_in(alive))
        change = table.update().where(table.c.id == item, table.c.status.not_in(_OVER), same_executor, free)
        return (
            link.execute(change.values({"status": new_status, "finished_at": micros(utc_now())} | values)).rowcount > 0
        )

    def session_host(self, link: sa.Connection, session_key: str) -> str | None:
        """Return the host whose disk has the session's files, if any has."""
        table = self.tables.sessions
        query = table.select().with_only_columns(table.c.host).where(table.c.session_key == session_key)
        return link.execute(query).scalar()

    def _lives(self, executor: str) -> sa.ColumnElement[bool]:
        import sqlalchemy as sa

        workers = self.tables.workers
        return sa.exists().where(workers.c.executor == executor, workers.c.state == "live")

    def _add(self, link: sa.Connection, table: sa.Table, values: Mapping[str, Any]) -> bool:
        return link.execute(self._new[table.name], dict(values)).first() is not None

    def _listing(self, table: sa.Table, query_filter: ListQuery) -> sa.Select[Any]:
        import sqlalchemy as sa

        scope = query_filter.scope
        query = table.select().where(table.c.tenant == scope.tenant, table.c.project == scope.project)
        if not query_filter.any_agent:
            query = query.where(table.c.agent == scope.agent)
        if query_filter.session_id is not None:
            query = query.where(table.c.session_id == query_filter.session_id)
        if query_filter.status:
            query = query.where(table.c.status.in_(query_filter.status))
        if query_filter.before is not None:
            moment, item = micros(query_filter.before[0]), query_filter.before[1]
            earlier = sa.and_(table.c.created_at == moment, table.c.id < item)
            query = query.where(sa.or_(table.c.created_at < moment, earlier))
        return query.order_by(table.c.created_at.desc(), table.c.id.desc()).limit(query_filter.limit)


def in_states(table: sa.FromClause, states: Sequence[str]) -> sa.ColumnElement[bool]:
    """Return whether a row is in one of *states*.

    They are written into the statement: only so a partial index can serve it, and parameters for `IN` are put together
    anew each time it is run.
    """
    import sqlalchemy as sa

    return table.c.status.in_([sa.literal_column(f"'{state}'") for state in states])


def new_row(
    item: str, spec: TaskSpec | JobSpec, session_key: str, *, body_hash: str, home: str | None
) -> dict[str, Any]:
    """Return the columns tasks and jobs share, of a row that is queued now."""
    scope = spec.scope
    return {
        "id": item,
        "tenant": scope.tenant,
        "project": scope.project,
        "agent": scope.agent,
        "alias": scope.alias,
        "status": "queued",
        "session_id": spec.session_id,
        "session_key": session_key,
        "body_hash": body_hash,
        "spec": spec.model_dump_json(),
        "home": home,
        "created_at": micros(utc_now()),
    }


def new_task(item: str, spec: TaskSpec, session_key: str, *, body_hash: str, home: str | None) -> dict[str, Any]:
    """Return the row of a task that is queued now."""
    shared = new_row(item, spec, session_key, body_hash=body_hash, home=home)
    return shared | {"mode": spec.mode, "attempt": 0, "restarts": 0}


def submitted_task(row: Mapping[str, Any], spec: TaskSpec) -> TaskHead:
    """Return the head of a task whose new *row* was just added."""
    shared_columns = ("id", "status", "mode", "session_key", "attempt", "restarts", "home")
    return TaskHead(spec=spec, created_at=moment_of(row["created_at"]), **{name: row[name] for name in shared_columns})


def submitted_job(row: Mapping[str, Any], spec: JobSpec) -> JobHead:
    """Return the head of a job whose new *row* was just added."""
    shared_values = {name: row[name] for name in ("id", "status", "session_key", "home")}
    return JobHead(spec=spec, steps=steps_of(spec, ()), created_at=moment_of(row["created_at"]), **shared_values)


def task_of(row: Mapping[Any, Any]) -> TaskHead:
    """Return the head a row of tasks holds."""
    plain = ("id", "status", "mode", "session_key", "attempt", "restarts", "job_id", "step", "home", "host", "executor")
    outcome_columns = (
        "exit_code",
        "signal",
        "error_code",
        "error_message",
        "stdout_total",
        "stderr_total",
        "cancel_reason",
    )
    return TaskHead(
        spec=TaskSpec.model_validate_json(row["spec"]),
        try_=row["try"],
        stdout_tail=bytes(row["stdout_tail"] or b""),
        stderr_tail=bytes(row["stderr_tail"] or b""),
        artifacts=ARTIFACTS.validate_json(row["artifacts"] or "[]"),
        output_errors=OUTPUT_ERRORS.validate_json(row["output_errors"] or "[]"),
        endpoints=ENDPOINTS.validate_json(row["endpoints"] or "[]"),
        **{name: row[name] for name in (*plain, *outcome_columns)},
        **_moments(row, (*_MOMENTS, "ready_at")),
    )


def job_of(row: Mapping[Any, Any], tasks: Sequence[TaskHead]) -> JobHead:
    """Return the head a row of jobs and the rows of its tasks hold."""
    plain = ("id", "status", "session_key", "home", "host", "executor", "error_code", "error_message", "cancel_reason")
    spec = JobSpec.model_validate_json(row["spec"])
    return JobHead(
        spec=spec,
        steps=steps_of(spec, tasks, over=row["status"] in TERMINAL),
        **{name: row[name] for name in plain},
        **_moments(row, _MOMENTS),
    )


def _storable(item: str) -> bool:
    """Whether *item* can be an id at all: databases refuse what they cannot keep, each in its own way."""
    return item.isascii() and "\0" not in item


def dump(values: Sequence[Any]) -> str:
    """Return values of the model as JSON text."""
    return json.dumps([value.model_dump(mode="json") for value in values], separators=(",", ":"))


def _moments(row: Mapping[Any, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: None if row[name] is None else moment_of(row[name]) for name in names}


Repetition = Literal["no", "retry", "restart"]

LOST_TRIES: Final = 3
"""How often a task that may be repeated is tried again after it was lost."""
WORDS: Final = 2000
"""Characters of an error's message in a head."""
BY_ITSELF: Final = frozenset({"ok", "nonzero", "timeout", "limit", "startup_timeout"})
"""Verdicts of programs that no cancel ended."""


def canceled(head: TaskHead, verdict: Verdict) -> bool:
    """Whether a cancel ended the task: it ended the program, or kept a service from being restarted."""
    if verdict.status == "cancelled":
        return True
    if head.cancel_at is None or verdict.status == "ok":
        return False
    service = head.spec.service
    return verdict.status not in BY_ITSELF or (service is not None and head.restarts < service.restart)


def ending(head: TaskHead, verdict: Verdict) -> tuple[str, dict[str, Any]]:
    """Return the terminal state and columns a verdict means. A cancel counts only where it ended the program."""
    if canceled(head, verdict):
        status, code = "canceled", "canceled"
    elif verdict.status == "ok":
        status, code = "succeeded", None
    else:
        status, code = "failed", verdict.error_code
    message = None if code is None else (verdict.error_message or None)
    values: dict[str, Any] = {
        "exit_code": verdict.exit_code,
        "signal": verdict.signal,
        "error_code": code,
        "error_message": None if message is None else message.replace("\0", "\N{REPLACEMENT CHARACTER}")[:WORDS],
        "finished_at": moment(verdict.finished_at) or micros(utc_now()),
        "stdout_total": verdict.stdout_total,
        "stderr_total": verdict.stderr_total,
    }
    if verdict.started_at is not None and head.started_at is None:
        values["started_at"] = moment(verdict.started_at)
    return status, values


def printed(attempt: Attempt, size: int) -> dict[str, Any]:
    """Return the columns of what an attempt printed: the last *size* bytes of each stream. Blocks."""
    values: dict[str, Any] = {}
    for stream in ("stdout", "stderr"):
        piece = attempt.tail(stream, size)
        values |= {f"{stream}_tail": piece.data, f"{stream}_total": piece.total}
    return values


def readiness(facts: AttemptFacts | None) -> dict[str, Any]:
    """Return the columns that say that a program is ready, and where it is reached; none of one that never was."""
    if facts is None or facts.ready_at is None:
        return {}
    reached = {"endpoints": dump(facts.endpoints)} if facts.endpoints else {}
    return {"ready_at": moment(facts.ready_at), **reached}


def began(head: TaskHead, facts: AttemptFacts | None) -> dict[str, Any]:
    """Return the column that says when the task's first program was started, unless the head has it."""
    return {} if facts is None or head.started_at is not None else {"started_at": moment(facts.started_at)}


def moment(seconds: float | None) -> int | None:
    """Return the column of a time in seconds since the epoch."""
    return None if not seconds else round(seconds * 1_000_000)


def follows(head: TaskHead, verdict: Verdict) -> Repetition:
    """Return whether another attempt follows: of what was lost and may be repeated, or of a service that is restarted.

    How often something was lost is told by the head alone, so that a worker that dies with its programs forgets nothing.
    """
    if head.cancel_at is not None or verdict.status in ("ok", "cancelled", "refused"):
        return "no"
    lost = head.attempt - 1 - head.restarts
    if verdict.status == "lost" and head.spec.retry_on_lost and lost < LOST_TRIES:
        return "retry"
    service = head.spec.service
    return "restart" if service is not None and head.restarts < service.restart else "no"
