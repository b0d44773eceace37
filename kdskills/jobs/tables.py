"""The tables of background work, readable without the durable engine.

Times are microseconds since 1970. Text that a program wrote is kept as bytes: a NUL in it must not break a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kdskills.storage.database import word_type

if TYPE_CHECKING:
    import sqlalchemy as sa

ID_LENGTH = 80


LISTINGS: Final = {
    "agent": ("tenant", "project", "agent", "created_at", "id"),
    "agent_status": ("tenant", "project", "agent", "status", "created_at", "id"),
    "project_status": ("tenant", "project", "status", "created_at", "id"),
    "of_session": ("tenant", "project", "session_id", "created_at", "id"),
    "session": ("session_key", "status", "created_at", "id"),
}
"""Columns of indexes both tasks and jobs have, by the end of their names: for lists, for what an agent has open, and for
who holds a session."""


class WorkTables:
    """The tables, described once per opener; nothing of SQLAlchemy is imported before one is opened."""

    def __init__(self) -> None:
        import sqlalchemy as sa

        self.metadata = sa.MetaData()
        self.tasks = self._tasks()
        self.jobs = self._jobs()
        self.workers = self._workers()
        self.sessions = self._sessions()
        self.artifacts = self._artifacts()
        self.meta = sa.Table(
            "kd_meta",
            self.metadata,
            sa.Column("name", sa.String(80), primary_key=True),
            sa.Column("value", sa.Text, nullable=False),
        )

    def _owned(self) -> list[sa.Column[object]]:
        import sqlalchemy as sa

        word = word_type(200)
        return [
            sa.Column("id", word_type(ID_LENGTH), primary_key=True),
            sa.Column("tenant", word, nullable=False),
            sa.Column("project", word, nullable=False),
            sa.Column("agent", word, nullable=False),
            sa.Column("alias", word, nullable=False),
            sa.Column("status", sa.String(16), nullable=False),
            sa.Column("session_id", word_type(128)),
            sa.Column("session_key", word_type(ID_LENGTH), nullable=False),
            sa.Column("body_hash", sa.String(ID_LENGTH), nullable=False),
            sa.Column("spec", sa.Text, nullable=False),
            sa.Column("home", sa.String(ID_LENGTH)),  # the host it is pinned to; empty for work of the pool
            sa.Column("host", sa.String(ID_LENGTH)),
            sa.Column("executor", sa.String(ID_LENGTH)),
            sa.Column("created_at", sa.BigInteger, nullable=False),
            sa.Column("started_at", sa.BigInteger),
            sa.Column("finished_at", sa.BigInteger),
            sa.Column("error_code", sa.String(80)),
            sa.Column("error_message", sa.Text),
            sa.Column("cancel_at", sa.BigInteger),
            sa.Column("cancel_reason", sa.Text),
        ]

    def _tasks(self) -> sa.Table:
        import sqlalchemy as sa

        return sa.Table(
            "kd_tasks",
            self.metadata,
            *self._owned(),
            sa.Column("mode", sa.String(16), nullable=False),
            sa.Column("job_id", word_type(ID_LENGTH), index=True),
            sa.Column("step", sa.Integer),
            sa.Column("try", sa.Integer),
            sa.Column("attempt", sa.Integer, nullable=False),
            sa.Column("restarts", sa.Integer, nullable=False),
            sa.Column("ready_at", sa.BigInteger),
            sa.Column("exit_code", sa.Integer),
            sa.Column("signal", sa.Integer),
            sa.Column("stdout_tail", sa.LargeBinary),
            sa.Column("stderr_tail", sa.LargeBinary),
            sa.Column("stdout_total", sa.BigInteger),
            sa.Column("stderr_total", sa.BigInteger),
            sa.Column("artifacts", sa.Text),
            sa.Column("output_errors", sa.Text),
            sa.Column("endpoints", sa.Text),
            sa.Index("kd_tasks_listed", "tenant", "project", "created_at", "id"),
            *_listings("kd_tasks"),
            sa.Index("kd_tasks_held", "executor", "status"),
            sa.Index("kd_tasks_status", "status", "finished_at"),
            *_queue_indexes("kd_tasks"),
        )

    def _jobs(self) -> sa.Table:
        import sqlalchemy as sa

        return sa.Table(
            "kd_jobs",
            self.metadata,
            *self._owned(),
            sa.Index("kd_jobs_listed", "tenant", "project", "created_at", "id"),
            *_listings("kd_jobs"),
            sa.Index("kd_jobs_held", "executor", "status"),
            sa.Index("kd_jobs_status", "status", "finished_at"),
            *_queue_indexes("kd_jobs"),
        )

    def _workers(self) -> sa.Table:
        import sqlalchemy as sa

        return sa.Table(
            "kd_workers",
            self.metadata,
            sa.Column("executor", sa.String(ID_LENGTH), primary_key=True),
            sa.Column("host", sa.String(ID_LENGTH), nullable=False, index=True),
            sa.Column("slot", sa.Integer, nullable=False),
            sa.Column("pid", sa.Integer, nullable=False),
            sa.Column("name", sa.String(255), nullable=False),
            sa.Column("state", sa.String(8), nullable=False, index=True),
            sa.Column("started_at", sa.BigInteger, nullable=False),
            sa.Column("beat_at", sa.BigInteger, nullable=False),
            sa.Column(
                "lease_until", sa.BigInteger
            ),  # by the database's clock; empty for a host that keeps its work for ever
        )

    def _sessions(self) -> sa.Table:
        import sqlalchemy as sa

        return sa.Table(
            "kd_work_sessions",  # kd_sessions are the loaded skills of conversations, which may live in the same database
            self.metadata,
            sa.Column("session_key", word_type(ID_LENGTH), primary_key=True),
            sa.Column("host", sa.String(ID_LENGTH)),
            sa.Column("used_at", sa.BigInteger, nullable=False),
        )

    def _artifacts(self) -> sa.Table:
        import sqlalchemy as sa

        word = word_type(200)
        return sa.Table(
            "kd_artifacts",
            self.metadata,
            sa.Column("id", word_type(ID_LENGTH), primary_key=True),
            sa.Column("tenant", word, nullable=False),
            sa.Column("project", word, nullable=False),
            sa.Column("agent", word, nullable=False),
            sa.Column("task_id", word_type(ID_LENGTH), index=True),
            sa.Column("job_id", word_type(ID_LENGTH)),
            sa.Column("path", sa.Text, nullable=False),
            sa.Column("sha256", sa.String(64), nullable=False),
            sa.Column("size", sa.BigInteger, nullable=False),
            sa.Column("mime", sa.String(255), nullable=False),
            sa.Column("mode", sa.Integer, nullable=False),
            sa.Column("skill_name", sa.String(500), nullable=False),
            sa.Column("version_hash", sa.String(ID_LENGTH), nullable=False),
            sa.Column("created_at", sa.BigInteger, nullable=False),
            sa.Index("kd_artifacts_content", "project", "sha256"),
        )


def _listings(table: str) -> list[sa.Index]:
    import sqlalchemy as sa

    return [sa.Index(f"{table}_{name}", *columns) for name, columns in LISTINGS.items()]


def _queue_indexes(table: str) -> list[sa.Index]:
    """Return the indexes the queue asks by; they hold only what is not over, however much is kept of what is."""
    import sqlalchemy as sa

    open_ = sa.text("status IN ('queued', 'starting', 'running')")
    return [
        sa.Index(f"{table}_{name}", *columns, sqlite_where=open_, postgresql_where=open_)
        for name, columns in (("open", ("session_key", "created_at")), ("turn", ("status", "created_at", "id")))
    ]
