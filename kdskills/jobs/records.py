"""Rows of tasks and jobs: their tables, reading them as heads, adding them, moving them by compare-and-set, and what a verdict writes.

Times are microseconds since 1970. Text that a program wrote is kept as bytes: a NUL in it must not break a row.
Every function that touches rows takes the connection of the caller's transaction. A worker's move is fenced: it happens only
while the row is the worker's and the worker is alive in the roster, so one that was given up cannot change anything any more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import ValidationError

from kdskills.errors import OperatorMustAct
from kdskills.jobs.model import (
    ARTIFACTS,
    ENDPOINTS,
    JOBS,
    OPEN,
    OUTPUT_ERRORS,
    TASKS,
    TERMINAL,
    Command,
    Head,
    JobHead,
    JobSpec,
    Placement,
    Scope,
    TaskHead,
    TaskSpec,
    before,
    step_spec,
    steps_of,
)
from kdskills.storage.database import LazyModule, columns, micros, moment_of, upsert, utc_now, word_type

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.attempts import Attempt, AttemptFacts, Verdict
else:
    sa = LazyModule("sqlalchemy")

LISTINGS: Final = {
    "listed": ("tenant", "project", "created_at", "id"),
    "agent": ("tenant", "project", "agent", "created_at", "id"),
    "agent_status": ("tenant", "project", "agent", "status", "created_at", "id"),
    "project_status": ("tenant", "project", "status", "created_at", "id"),
    "of_session": ("tenant", "project", "session_id", "created_at", "id"),
    "of_skill": ("tenant", "project", "skill_name", "created_at", "id"),
    "session": ("session_key", "status", "created_at", "id"),
    "held": ("executor", "status"),
    "status": ("status", "finished_at"),
}
"""Columns of indexes both tasks and jobs have, by the end of their names: for lists, for what an agent has open, and for
who holds a session."""
QUEUED: Final = {"open": ("session_key", "created_at"), "turn": ("status", "created_at", "id")}
"""Indexes the queue asks by: they hold only what is not over, however much is kept of what is."""
INDEXED: Final = ("queued", "starting", "running")
"""What is not over, in the order in which SQLite knows these indexes by it."""
BEGUN: Final = INDEXED[1:]


class WorkTables:
    """The tables, described once per opener; nothing of SQLAlchemy is imported before one is opened."""

    def __init__(self) -> None:
        self.metadata = sa.MetaData()
        word, ident, time = word_type(200), word_type(80), sa.BigInteger
        self.tasks = self._work(
            "kd_tasks",
            sa.Column("mode", sa.String(16), nullable=False),
            sa.Column("job_id", ident, index=True),
            *columns(sa.Integer, "attempt", "restarts", nullable=False),
            *columns(sa.Integer, "step", "try", "exit_code", "signal"),
            *columns(sa.LargeBinary, "stdout_tail", "stderr_tail"),
            *columns(time, "ready_at", "stdout_total", "stderr_total"),
            *columns(sa.Text, "artifacts", "output_errors", "endpoints"),
        )
        self.jobs = self._work("kd_jobs")
        self.workers = sa.Table(
            "kd_workers",
            self.metadata,
            sa.Column("executor", sa.String(80), primary_key=True),
            sa.Column("host", sa.String(80), nullable=False, index=True),
            *columns(sa.Integer, "slot", "pid", nullable=False),
            sa.Column("name", sa.String(255), nullable=False),
            sa.Column("state", sa.String(8), nullable=False, index=True),
            *columns(time, "started_at", "beat_at", nullable=False),
            sa.Column("lease_until", time),  # by the database's clock; empty for a host that keeps its work for ever
            sa.Column("version", sa.String(40)),
            *columns(sa.Integer, "slots", "services"),
            *columns(sa.String(300), "address", "stream_key"),  # where it serves the files of its host, and to whom
            sa.Column("full_since", time),  # it takes nothing new, because the disk of its state folder is full
        )
        self.hosts = self._drained_hosts()
        self.sessions = sa.Table(
            "kd_work_sessions",  # kd_sessions are the loaded skills of conversations, which may live in the same database
            self.metadata,
            sa.Column("session_key", ident, primary_key=True),
            sa.Column("host", sa.String(80)),  # none when the newest of its files are in the store, for any host
            sa.Column("used_at", time, nullable=False),
        )
        self.artifacts = sa.Table(
            "kd_artifacts",
            self.metadata,
            sa.Column("id", ident, primary_key=True),
            *columns(word, "tenant", "project", "agent", nullable=False),
            sa.Column("task_id", ident, index=True),
            sa.Column("job_id", ident),
            sa.Column("path", sa.Text, nullable=False),
            sa.Column("sha256", sa.String(64), nullable=False),
            *columns(time, "size", "created_at", nullable=False),
            sa.Column("mime", sa.String(255), nullable=False),
            sa.Column("mode", sa.Integer, nullable=False),
            sa.Column("skill_name", sa.String(500), nullable=False),
            sa.Column("version_hash", sa.String(80), nullable=False),
            sa.Index("kd_artifacts_content", "project", "sha256"),
        )
        self.usage = self._usage_of_days()
        self.meta = sa.Table(
            "kd_meta",
            self.metadata,
            sa.Column("name", sa.String(80), primary_key=True),
            sa.Column("value", sa.Text, nullable=False),
        )

    def _usage_of_days(self) -> sa.Table:
        """Return the table of what each project used in a day, by its number since 1970."""
        return sa.Table(
            "kd_usage",
            self.metadata,
            *columns(word_type(200), "tenant", "project", primary_key=True),
            sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
            *columns(sa.BigInteger, "tasks", "cpu_ms", nullable=False),
        )

    def _drained_hosts(self) -> sa.Table:
        """Return the table of hosts that take nothing new; a host as such is known by its workers."""
        return sa.Table(
            "kd_hosts",
            self.metadata,
            sa.Column("host", sa.String(80), primary_key=True),
            sa.Column("drained_at", sa.BigInteger, nullable=False),
            sa.Column("drained_by", sa.String(400), nullable=False),
        )

    def _work(self, name: str, *more: sa.Column[Any]) -> sa.Table:
        """Return the table of tasks or of jobs: what both have, with their indexes, and *more* columns."""
        open_ = sa.text(f"status IN ({', '.join(map(repr, INDEXED))})")
        partial: dict[str, Any] = {"sqlite_where": open_, "postgresql_where": open_}
        return sa.Table(
            name,
            self.metadata,
            sa.Column("id", word_type(80), primary_key=True),
            *columns(word_type(200), "tenant", "project", "agent", "alias", nullable=False),
            sa.Column("status", sa.String(16), nullable=False),
            sa.Column("session_id", word_type(128)),
            sa.Column("session_key", word_type(80), nullable=False),
            sa.Column("body_hash", sa.String(80), nullable=False),
            sa.Column("spec", sa.Text, nullable=False),
            *columns(sa.String(80), "home", "host", "executor", "error_code"),  # no home is one in the whole pool
            sa.Column("created_at", sa.BigInteger, nullable=False),
            *columns(sa.BigInteger, "started_at", "finished_at", "cancel_at"),
            *columns(sa.Text, "error_message", "cancel_reason"),
            sa.Column("skill_name", word_type(500)),
            sa.Column("repeat_of", word_type(80)),
            sa.Column("traceparent", sa.String(80)),
            *more,
            *(sa.Index(f"{name}_{end}", *of) for end, of in LISTINGS.items()),
            *(sa.Index(f"{name}_{end}", *of, **partial) for end, of in QUEUED.items()),
        )


class WorkUnreadable(OperatorMustAct, code="work_unreadable"):
    """A task or job was written by a later version, which this process does not understand."""


_OVER: Final = tuple(sorted(TERMINAL))
_TAILS: Final = ("stdout_tail", "stderr_tail")
_TEXTS: Final = ("artifacts", "output_errors", "endpoints")
_LONG: Final = ("spec", *_TAILS, *_TEXTS)
"""Columns that may be long, which a state of a step is told without."""


@dataclass(frozen=True, slots=True)
class ListQuery:
    """Which rows a listing shows, the newest first; all states when no `status` is named.

    `before` is time and id of the last head of the page before, `steps` tells whether tasks of jobs are shown, `skill_name` is
    the full id of the skill they are of.
    """

    scope: Scope
    any_agent: bool = False
    status: Sequence[str] = ()
    job_id: str | None = None
    before: tuple[datetime, str] | None = None
    limit: int = 100
    session_id: str | None = None
    skill_name: str | None = None
    steps: bool = True


class WorkRecords:
    """Rows of tasks and jobs in a database of *dialect* `sqlite` or `postgresql`."""

    def __init__(self, tables: WorkTables, dialect: str) -> None:
        self.tables = tables
        self.dialect = dialect
        self._by_kind = {"task": tables.tasks, "job": tables.jobs}

    # Statements that every request asks are made once: making one costs more than what SQLite does for it.

    @cached_property
    def _one(self) -> Mapping[str, sa.Select[Any]]:
        item: sa.BindParameter[str] = sa.bindparam("item")
        return {kind: table.select().where(table.c.id == item) for kind, table in self._by_kind.items()}

    @cached_property
    def _new(self) -> Mapping[str, Any]:
        return {
            kind: upsert(self.dialect, table).on_conflict_do_nothing().returning(table.c.id)
            for kind, table in self._by_kind.items()
        }

    @cached_property
    def _open_work(self) -> sa.Select[Any]:
        counts = []
        for table in self._by_kind.values():
            mine = [table.c[name] == sa.bindparam(name) for name in ("tenant", "project", "agent")]
            query = sa.select(table.c.id).where(*mine, in_states(table, OPEN)).limit(sa.bindparam("most"))
            if table is self.tables.tasks:
                query = query.where(table.c.job_id.is_(None))
            counts.append(sa.select(sa.func.count()).select_from(query.subquery()).scalar_subquery())
        return sa.select(*counts)

    def table(self, kind: str) -> sa.Table:
        """Return the table of `task` or `job`."""
        return self._by_kind[kind]

    def add(self, link: sa.Connection, kind: str, values: Mapping[str, Any]) -> bool:
        """Add a task or job; False when one of its id is there."""
        return link.execute(self._new[kind], dict(values)).first() is not None

    def head(self, link: sa.Connection, kind: type[Head], item: str, *, brief: bool = False) -> Head | None:
        """Return a task, or a job and its steps, *brief* ones as in `heads`; None when it is not there.

        Raises WorkUnreadable.
        """
        if not item.isascii() or "\0" in item:  # no id: databases refuse what they cannot keep, each in its own way
            return None
        rows = link.execute(self._one[kind.KIND], {"item": item}).mappings().all()
        try:
            return next(iter(self._heads(link, kind, rows, brief=brief)), None)
        except ValidationError as error:
            message = f"{kind.KIND} {item} was written by a later version: ask a process of that version"
            raise WorkUnreadable(message, id=item) from error

    def heads(self, link: sa.Connection, kind: type[Head], query_filter: ListQuery) -> list[Head]:
        """Return tasks without the tails of what they printed, or jobs and the states of their steps, the newest first.

        Nothing is told of what steps printed and left behind, and of what only a later version understands no more than its
        columns say: no command, and no steps.
        """
        table, scope = self.table(kind.KIND), query_filter.scope
        wanted = {name: getattr(query_filter, name) for name in ("session_id", "job_id", "skill_name")}
        wanted |= {"tenant": scope.tenant, "project": scope.project}
        query = _without(table, _TAILS)
        query = query.where(*(table.c[name] == value for name, value in wanted.items() if value is not None))
        if not query_filter.any_agent:
            # with a skill its index is the one to use: without statistics SQLite would take the agent's, and walk through all of it
            agent = table.c.agent if query_filter.skill_name is None else sa.func.coalesce(table.c.agent, "")
            query = query.where(agent == scope.agent)
        if query_filter.status:
            query = query.where(table.c.status.in_(query_filter.status))
        if kind.KIND == "task" and not query_filter.steps:
            query = query.where(table.c.job_id.is_(None))
        if query_filter.before is not None:
            moment, item = micros(query_filter.before[0]), query_filter.before[1]
            earlier = sa.and_(table.c.created_at == moment, table.c.id < item)
            query = query.where(sa.or_(table.c.created_at < moment, earlier))
        query = query.order_by(table.c.created_at.desc(), table.c.id.desc()).limit(query_filter.limit)
        return self._heads(link, kind, link.execute(query).mappings().all(), brief=True, lenient=True)

    def body_hash(self, link: sa.Connection, kind: str, item: str) -> str | None:
        """Return the hash of the request a task or job was made from."""
        table = self.table(kind)
        return link.execute(table.select().with_only_columns(table.c.body_hash).where(table.c.id == item)).scalar()

    def _heads(
        self,
        link: sa.Connection,
        kind: type[Head],
        rows: Sequence[Mapping[Any, Any]],
        *,
        brief: bool,
        lenient: bool = False,
    ) -> list[Head]:
        steps = self._steps(link, [row["id"] for row in rows], brief=brief) if rows and kind.KIND == "job" else {}
        heads = []
        for row in rows:
            try:
                spec = spec_of(kind, row)
                tasks = [
                    head_of(TaskHead, step, spec=step_spec(spec, step["step"]) if brief else None)
                    for step in steps.get(row["id"], ())
                    if isinstance(spec, JobSpec)
                ]
                heads.append(head_of(kind, row, spec=spec, tasks=tasks))
            except ValidationError:
                if not lenient:
                    raise
                heads.append(_plain_head(kind, row))
        return heads

    def _steps(self, link: sa.Connection, jobs: Sequence[str], *, brief: bool) -> Mapping[str, list[Mapping[Any, Any]]]:
        table = self.tables.tasks
        of_jobs = (table.c.job_id.in_(jobs), table.c.step.is_not(None))
        query = _without(table, _LONG if brief else ()).where(*of_jobs)
        steps: dict[str, list[Mapping[Any, Any]]] = {}
        for step in link.execute(query.order_by(table.c.job_id, table.c.step, table.c["try"])).mappings():
            steps.setdefault(step["job_id"], []).append(step)
        return steps

    def open_work(self, link: sa.Connection, scope: Scope, most: int) -> int:
        """Return how many tasks and jobs of an agent are not over, counting to *most*; steps are part of their job."""
        parameters = scope.model_dump(exclude={"alias"}) | {"most": most}
        return min(most, sum(link.execute(self._open_work, parameters).one()))

    def goes_on(self, link: sa.Connection, kind: str, item: str, executor: str, *, even_canceled: bool = False) -> bool:
        """Whether *executor*, alive, holds a row that is not over and of which no cancel was asked, or *even_canceled*."""
        table = self.table(kind)
        mine = (table.c.id == item, table.c.executor == executor, self._lives(executor))
        open_ = (table.c.status.not_in(_OVER), *(() if even_canceled else (table.c.cancel_at.is_(None),)))
        return link.execute(table.select().with_only_columns(table.c.id).where(*mine, *open_)).first() is not None

    def holder(self, link: sa.Connection, session_key: str, *, but: str = "") -> str | None:
        """Return the task or job, *but* one, that is not over and came first in this session; None when nothing holds it."""
        holders: list[tuple[int, str]] = []
        for kind, table in self._by_kind.items():
            query = sa.select(table.c.created_at, table.c.id).order_by(table.c.created_at).limit(1)
            query = query.where(table.c.session_key == session_key, table.c.id != but, in_states(table, OPEN))
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
        asking = table.update().where(mine).values(cancel_at=now, cancel_reason=reason)
        end = {"status": "canceled", "error_code": "canceled", "finished_at": now}
        if link.execute(asking.where(table.c.status == "queued").values(end)).rowcount:
            return "canceled"
        if link.execute(asking.where(table.c.status.not_in(_OVER), table.c.cancel_at.is_(None))).rowcount:
            return "asked"
        unfinished = table.select().with_only_columns(table.c.id).where(mine, table.c.status.not_in(_OVER))
        return None if link.execute(unfinished).first() is None else "asked"

    def force(
        self, link: sa.Connection, kind: str, item: str, new_status: str, *, executor: str | None, **values: Any
    ) -> bool:
        """End a row that nobody alive holds; False when somebody took it meanwhile, or it is over."""
        table, workers = self.table(kind), self.tables.workers
        alive = sa.select(workers.c.executor).where(workers.c.state == "live")
        same_executor = table.c.executor.is_(None) if executor is None else table.c.executor == executor
        free = sa.or_(table.c.executor.is_(None), table.c.executor.not_in(alive))
        change = table.update().where(table.c.id == item, table.c.status.not_in(_OVER), same_executor, free)
        end = {"status": new_status, "finished_at": micros(utc_now())} | values
        return link.execute(change.values(end)).rowcount > 0

    def _lives(self, executor: str) -> sa.ColumnElement[bool]:
        workers = self.tables.workers
        return sa.exists().where(workers.c.executor == executor, workers.c.state == "live")


def _without(table: sa.Table, names: Sequence[str]) -> sa.Select[Any]:
    return sa.select(*(column for column in table.c if column.name not in names))


def in_states(table: sa.FromClause, states: Sequence[str]) -> sa.ColumnElement[bool]:
    """Return whether a row is in one of *states*.

    They are written into the statement: only so a partial index can serve it, and parameters for `IN` are put together
    anew each time it is run.
    """
    return table.c.status.in_([sa.literal_column(f"'{state}'") for state in states])


def new_row(
    item: str,
    spec: TaskSpec | JobSpec,
    session_key: str,
    *,
    body_hash: str,
    home: str | None,
    repeat_of: str | None = None,
) -> dict[str, Any]:
    """Return the row of a task or job that is queued now, which may be a repeat of another."""
    of_task = {"mode": spec.mode, "attempt": 0, "restarts": 0} if isinstance(spec, TaskSpec) else {}
    return {
        "id": item,
        **spec.scope.model_dump(),
        "status": "queued",
        "session_id": spec.session_id,
        "session_key": session_key,
        "body_hash": body_hash,
        "spec": spec.model_dump_json(
            exclude={"traceparent"}
        ),  # workers of earlier versions refuse fields they do not know
        "traceparent": spec.traceparent or None,
        "home": home,
        "created_at": micros(utc_now()),
        "skill_name": spec.placement.skill_name,
        "repeat_of": repeat_of,
        **of_task,
    }


_VALUES: Final[Mapping[str, Any]] = {
    "artifacts": ARTIFACTS.validate_json,
    "output_errors": OUTPUT_ERRORS.validate_json,
    "endpoints": ENDPOINTS.validate_json,
    "stdout_tail": bytes,
    "stderr_tail": bytes,
    **dict.fromkeys(("created_at", "started_at", "ready_at", "finished_at", "cancel_at"), moment_of),
}
"""How columns that are no plain values are read."""
_COLUMNS: Final = {
    kind.KIND: [(field.name, field.name.rstrip("_")) for field in fields(kind) if field.name not in ("spec", "steps")]
    for kind in (TaskHead, JobHead)
}
"""Fields of heads and the columns they are read from."""


def spec_of(kind: type[Head], row: Mapping[Any, Any]) -> TaskSpec | JobSpec:
    """Return the specification a row holds. Raises ValidationError for one that only a later version understands."""
    spec = kind.SPEC.model_validate_json(row["spec"])
    return spec.model_copy(update={"traceparent": row["traceparent"]}) if row.get("traceparent") else spec


def head_of(
    kind: type[Head], row: Mapping[Any, Any], *, spec: TaskSpec | JobSpec | None = None, tasks: Sequence[TaskHead] = ()
) -> Head:
    """Return the head a row holds, made of *spec* where that is at hand; a new row need not have every column.

    Raises ValidationError as `spec_of`.
    """
    values: dict[str, Any] = {"spec": spec or spec_of(kind, row)}
    if kind.KIND == "job":
        values["steps"] = steps_of(values["spec"], tasks, over=row["status"] in TERMINAL)
    for name, column in _COLUMNS[kind.KIND]:
        value = row.get(column)
        if value is not None:  # what is empty is as the head has it when it says nothing
            values[name] = _VALUES[column](value) if column in _VALUES else value
    return kind(**values)


def _plain_head(kind: type[Head], row: Mapping[Any, Any]) -> Head:
    """Return what columns say of a task or job whose specification, or other text, only a later version understands."""
    scope = Scope(**{name: row[name] for name in Scope.model_fields})
    facts: dict[str, Any] = {"scope": scope, "session_id": row["session_id"]}
    facts["placement"] = Placement(engine="", skill_name=row["skill_name"] or "", version_hash="")
    facts |= {"steps": ()} if kind.KIND == "job" else {"command": Command(argv=()), "mode": row["mode"]}
    columns = {name: value for name, value in row.items() if name not in _TEXTS}
    return head_of(kind, columns, spec=kind.SPEC(**facts))


def dump(values: Sequence[Any]) -> str:
    """Return values of the model as JSON text."""
    return json.dumps([value.model_dump(mode="json") for value in values], separators=(",", ":"))


STALE: Final = timedelta(minutes=2)
"""A note older than this is of a process that died while it deleted."""

LOOSE: Final = "loose:"
_LOCK: Final = 2_037_582


class ContentRecords:
    """Which contents artifacts have, and which nobody has any more: these are written down until their bytes are deleted.

    A note says that bytes are being deleted: nobody adds an artifact of them meanwhile. *host* is this host's id where each
    host of a pool has a store of its own, and None for one store.
    """

    def __init__(self, tables: WorkTables, host: str | None = None) -> None:
        self._tables = tables
        self._host = host

    def alone(self, link: sa.Connection) -> None:
        """Let nobody else add or remove artifacts until this transaction is over; SQLite does so by itself."""
        if link.dialect.name == "postgresql":
            link.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")

    def take(self, link: sa.Connection, project: str, sha256: str) -> bool:
        """Let an artifact be added of these bytes; False while somebody deletes them."""
        if self._is_deleted(link, project, sha256):
            return False
        self._drop(link, content_note(project, sha256))
        return True

    def let_go(self, link: sa.Connection, contents: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Write down which of *contents*, by project and digest, nobody has any more, and return them."""
        loose = [content for content in contents if not self._has_artifact(link, *content)]
        for content in loose:
            self._put(link, self._loose(*content), json.dumps([self._host, *content]))
        return loose

    def leftovers(self, link: sa.Connection) -> list[tuple[str, str]]:
        """Return what is written down as nobody's, by project and digest, of the store of this host."""
        meta = self._tables.meta
        query = sa.select(meta.c.value).where(meta.c.name.startswith(LOOSE)).order_by(meta.c.name)
        contents = [json.loads(text) for text in link.execute(query).scalars()]
        return [(project, sha256) for host, project, sha256 in contents if host == self._host]

    def begin(self, link: sa.Connection, *, project: str, sha256: str) -> str | None:
        """Note that bytes nobody has are deleted from now on, and return the note's text; None leaves them alone."""
        self.alone(link)
        if self._has_artifact(link, project, sha256):
            self._drop(link, self._loose(project, sha256))
        elif not self._is_deleted(link, project, sha256):
            mark = str(micros(utc_now()))
            self._put(link, content_note(project, sha256), mark)
            return mark
        return None

    def done(self, link: sa.Connection, *, project: str, sha256: str, mark: str) -> None:
        """Bytes are deleted: forget that they were nobody's, and the note of *mark*, unless it is another's by now."""
        self._drop(link, self._loose(project, sha256))
        self._drop(link, content_note(project, sha256), self._tables.meta.c.value == mark)

    def _has_artifact(self, link: sa.Connection, project: str, sha256: str) -> bool:
        table, tasks, workers = self._tables.artifacts, self._tables.tasks, self._tables.workers
        query = sa.select(table.c.id).where(table.c.project == project, table.c.sha256 == sha256).limit(1)
        if self._host is not None:  # of a host that is not heard of any more, the files may have been brought here
            on_another = sa.and_(tasks.c.host != self._host, tasks.c.host.in_(sa.select(workers.c.host)))
            query = query.where(~sa.exists().where(tasks.c.id == table.c.task_id, on_another))
        return link.execute(query).first() is not None

    def _is_deleted(self, link: sa.Connection, project: str, sha256: str) -> bool:
        """Whether somebody alive deletes these bytes now."""
        meta = self._tables.meta
        begun = link.execute(sa.select(meta.c.value).where(meta.c.name == content_note(project, sha256))).scalar()
        return begun is not None and micros(utc_now()) - int(begun) < STALE / timedelta(microseconds=1)

    def _put(self, link: sa.Connection, name: str, text: str) -> None:
        new = upsert(link.dialect.name, self._tables.meta).values(name=name, value=text)
        link.execute(new.on_conflict_do_update(index_elements=["name"], set_={"value": new.excluded.value}))

    def _drop(self, link: sa.Connection, name: str, *conditions: sa.ColumnElement[bool]) -> None:
        link.execute(self._tables.meta.delete().where(self._tables.meta.c.name == name, *conditions))

    def _loose(self, project: str, sha256: str) -> str:
        """Return the name of what is written down: beside the note, whose text earlier versions read as a time."""
        return LOOSE + hashlib.sha256(f"{content_note(project, sha256)} {self._host}".encode()).hexdigest()[:40]


def content_note(project: str, sha256: str) -> str:
    """Return the name of the note that these bytes are being deleted; its text is when that began, in microseconds."""
    return "forget:" + hashlib.sha256(f"{sha256}{project}".encode("utf-8", "surrogatepass")).hexdigest()[:40]


Repetition = Literal["no", "retry", "restart"]

LOST_TRIES: Final = 3
"""How often a task is tried again after it was lost, if it may be repeated, or did not begin for want of room."""
WORDS: Final = 2000
"""Characters of an error's message in a head."""
BY_ITSELF: Final = frozenset({"ok", "nonzero", "timeout", "limit", "startup_timeout"})
"""Verdicts of programs that no cancel ended."""


def ending(head: TaskHead, verdict: Verdict) -> tuple[str, dict[str, Any]]:
    """Return the terminal state and columns a verdict means.

    A cancel counts only where it ended the program, or kept a service from being restarted.
    """
    goes_on = head.spec.service is not None and head.restarts < head.spec.service.restart
    status, code = "failed", verdict.error_code
    if verdict.status == "ok":
        status, code = "succeeded", None
    elif verdict.status == "cancelled" or (head.cancel_at and (goes_on or verdict.status not in BY_ITSELF)):
        status, code = "canceled", "canceled"
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


def observed(head: TaskHead, facts: AttemptFacts | None) -> dict[str, Any]:
    """Return the columns an attempt's facts mean: its start unless the head has one, readiness, and where it is reached."""
    values: dict[str, Any] = {}
    if facts is not None and head.started_at is None:
        values["started_at"] = moment(facts.started_at)
    if facts is not None and facts.ready_at is not None:
        values["ready_at"] = moment(facts.ready_at)
        if facts.endpoints:
            values["endpoints"] = dump(facts.endpoints)
    return values


def outcome(head: TaskHead, attempt: Attempt, size: int) -> dict[str, Any]:
    """Return the columns of what an attempt was, and the last *size* bytes of each stream it printed. Blocks."""
    values = observed(head, attempt.facts())
    for stream in ("stdout", "stderr"):
        piece = attempt.tail(stream, size)
        values |= {f"{stream}_tail": piece.data, f"{stream}_total": piece.total}
    return values


def moment(seconds: float | None) -> int | None:
    """Return the column of a time in seconds since the epoch."""
    return None if not seconds else round(seconds * 1_000_000)


def without_room(verdict: Verdict) -> bool:
    """Whether nothing began because the disk was full."""
    return verdict.status == "refused" and verdict.error_code == "disk_full"


def follows(head: TaskHead, verdict: Verdict) -> Repetition:
    """Return whether another attempt follows: of what was lost and may be repeated, or of a service that is restarted.

    What did not begin for want of room may be repeated whatever it is. How often something was lost is told by the head alone,
    so that a worker that dies with its programs forgets nothing.
    """
    no_room = without_room(verdict)
    if head.cancel_at is not None or (verdict.status in ("ok", "cancelled", "refused") and not no_room):
        return "no"
    lost = head.attempt - 1 - head.restarts
    if (no_room or (verdict.status == "lost" and head.spec.retry_on_lost)) and lost < LOST_TRIES:
        return "retry"
    if no_room:
        return "no"
    service = head.spec.service
    return "restart" if service is not None and head.restarts < service.restart else "no"
