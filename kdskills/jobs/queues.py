"""The queue under the work: DBOS as a client speaks to it, in the same database and transaction as the heads (spec work §3).

Queues: one per host for what is pinned to it, one for the pool, and one per host for steps of jobs. In the first two the
partition is the session, one at a time. Only ids travel in workflow arguments.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from kdskills.errors import MissingExtra
from kdskills.jobs.database import open_engine, set_pragmas

if TYPE_CHECKING:
    import sqlalchemy as sa
    from dbos import DBOSClient

APP: Final = "kdskills"
VERSION: Final = "kd-wf-1"
"""Number of the protocol between clients and workers: constant, so that an upgrade strands no work."""
SCHEMA: Final = "dbos"

TASK: Final = "kd_task"
JOB: Final = "kd_job"
POOL: Final = "kd-pool"
POOL_STEPS: Final = "kd-pool-steps"
_HOST: Final = "kd-host-"
_STEPS: Final = "kd-steps-"


def host_queue(host: str) -> str:
    """Return the queue of what is pinned to *host*."""
    return _HOST + host


def steps_queue(host: str) -> str:
    """Return the queue of job steps on *host*: their job holds the session already, and never waits in the same queue."""
    return _STEPS + host


def host_of_queue(queue: str) -> str | None:
    """Return the host a queue belongs to; None for the pool's."""
    for prefix in (_HOST, _STEPS):
        if queue.startswith(prefix):
            return queue.removeprefix(prefix)
    return None


def same_kind(queue: str, host: str | None) -> str:
    """Return the queue of the same kind on *host*, or in the pool for None."""
    steps = queue.startswith(_STEPS) or queue == POOL_STEPS
    if host is None:
        return POOL_STEPS if steps else POOL
    return steps_queue(host) if steps else host_queue(host)


@dataclass(frozen=True, slots=True)
class Held:
    """A workflow row some executor took."""

    id: str
    queue: str
    executor: str


class Queues:
    """The queue as seen from outside a worker.

    Args:
        engine: Of `open_queue_engine`.

    Raises:
        MissingExtra: DBOS is not installed.
    """

    def __init__(self, engine: sa.Engine) -> None:
        version()
        self._engine = engine

    def prepare(self) -> None:
        """Load the engine's package, which takes longer than anything done with it: not while a transaction waits."""
        _ = self._client

    @cached_property
    def _client(self) -> DBOSClient:
        dbos = load()
        client: DBOSClient = dbos.DBOSClient(
            system_database_engine=self._engine,
            dbos_system_schema=SCHEMA,
            serializer=dbos.DBOSPortableJSONSerializer(),
            application_name=APP,
            retry_connection_errors=False,
            lazy=True,
        )
        return client

    def enqueue(self, link: sa.Connection, workflow: str, item: str, queue: str, partition: str | None) -> None:
        """Add a row to *queue* in the transaction of *link*: it is there exactly if the head is."""
        options: dict[str, Any] = {
            "workflow_name": workflow,
            "queue_name": queue,
            "workflow_id": item,
            "app_version": VERSION,
        }
        if partition is not None:
            options["queue_partition_key"] = partition
        self._client.enqueue_in_transaction(link, options, item)  # type: ignore[arg-type]
        if partition not in (None, item):
            self._put_last(link, item, queue, partition)

    def _put_last(self, link: sa.Connection, item: str, queue: str, partition: str | None) -> None:
        """Give a row a later time than all others of its partition: the queue's own clock may be one of whole seconds."""
        import sqlalchemy as sa

        rows = _rows_table(link, "workflow_uuid", "status", "queue_name", "queue_partition_key", "created_at")
        before = (rows.c.queue_name == queue, rows.c.status == "ENQUEUED", rows.c.queue_partition_key == partition)
        others = rows.select().with_only_columns(sa.func.max(rows.c.created_at))
        latest = link.execute(others.where(*before, rows.c.workflow_uuid != item)).scalar()
        now = round(time.time() * 1000)
        at = now if latest is None else max(now, latest + 1)
        link.execute(rows.update().where(rows.c.workflow_uuid == item).values(created_at=at))

    def pending(self) -> list[Held]:
        """Return every row an executor took and has not finished."""
        return self._rows(["PENDING"])

    def waiting(self, queues: Sequence[str]) -> list[Held]:
        """Return every row that waits in one of *queues*."""
        return self._rows(["ENQUEUED", "DELAYED"], list(queues)) if queues else []

    def states(self, items: Sequence[str]) -> dict[str, str]:
        """Return the engine's word on the workflows of *items*, where there are any."""
        if not items:
            return {}
        found = self._client.list_workflows(workflow_ids=list(items), load_input=False, load_output=False)
        return {row.workflow_id: row.status for row in found}

    def resume(self, items: Sequence[str], queue: str) -> None:
        """Put rows back into *queue*; finished ones stay finished."""
        if items:
            self._client.resume_workflows(list(items), queue_name=queue)

    def requeue(self, link: sa.Connection, item: str, queue: str) -> None:
        """Give a row this process took to *queue* instead, in the transaction of *link*; who runs it now loses it."""
        rows = _rows_table(link, "workflow_uuid", "status", "queue_name", "owner_xid", "started_at_epoch_ms")
        mine = rows.update().where(rows.c.workflow_uuid == item, rows.c.status == "PENDING")
        link.execute(mine.values(status="ENQUEUED", queue_name=queue, owner_xid=None, started_at_epoch_ms=None))

    def register(self, name: str, *, poll_s: float, held: int, partitioned: bool) -> None:
        """Describe a queue, so that workers listen to it."""
        self._client.register_queue(
            name,
            worker_concurrency=held,
            partition_concurrency=1 if partitioned else None,
            polling_interval_sec=poll_s,
        )

    def cancel(self, items: Sequence[str]) -> None:
        """Take rows out of their queue for good."""
        if items:
            self._client.cancel_workflows(list(items))

    def delete(self, items: Sequence[str]) -> None:
        """Forget rows and what was kept with them."""
        if items:
            self._client.delete_workflows(list(items))

    def close(self) -> None:
        """Let go of the engine, which is the opener's to dispose."""
        if "_client" in self.__dict__:
            self._client.destroy()

    def _rows(self, states: list[str], queues: list[str] | None = None) -> list[Held]:
        found = self._client.list_workflows(
            status=states,
            name=[TASK, JOB],
            app_version=VERSION,
            queue_name=queues,
            load_input=False,
            load_output=False,
        )
        return [Held(row.workflow_id, row.queue_name or "", row.executor_id or "") for row in found]


def _rows_table(link: sa.Connection, *columns: str) -> sa.TableClause:
    """Describe the queue's own table, as far as it is asked for."""
    import sqlalchemy as sa

    schema = None if link.dialect.name == "sqlite" else SCHEMA
    return sa.table("workflow_status", *(sa.column(name) for name in columns), schema=schema)


def version() -> str:
    """Return the installed version of DBOS without importing it. Raises MissingExtra."""
    from importlib import metadata

    try:
        return metadata.version("dbos")
    except metadata.PackageNotFoundError:
        raise MissingExtra("background work", "jobs") from None


def load() -> Any:
    """Return the package `dbos`, with its own log handler kept away. Raises MissingExtra."""
    log = logging.getLogger("dbos")
    if not log.handlers:  # it adds a console handler of its own to a logger that has none
        log.addHandler(logging.NullHandler())
        log.setLevel(logging.WARNING)
    try:
        import dbos
    except ImportError:
        raise MissingExtra("background work", "jobs") from None
    return dbos


def open_queue_engine(url: str, *, connections: int = 20) -> sa.Engine:
    """Return an engine of its own for DBOS, with its way of beginning transactions and our pragmas.

    Raises:
        MissingExtra: SQLAlchemy or the driver is not installed.
    """
    return open_engine(
        url, what="background work", prepare=_prepare_sqlite, pool_size=connections, max_overflow=10, pool_timeout=30
    )


def migrate_queue(engine: sa.Engine) -> None:
    """Make DBOS's own tables, or bring them up to date."""
    load()
    from dbos import DBOSPortableJSONSerializer
    from dbos._sys_db import SystemDatabase  # the public way takes a URL and opens an engine without our pragmas

    url = "sqlite:///queue" if engine.dialect.name == "sqlite" else "postgresql://queue/queue"
    system = SystemDatabase.create(
        system_database_url=url,
        engine_kwargs={},
        engine=engine,
        schema=SCHEMA,
        serializer=DBOSPortableJSONSerializer(),
        executor_id=None,
        use_listen_notify=False,
    )
    system.run_migrations()


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = "IMMEDIATE"
    set_pragmas(connection, "foreign_keys=ON")
