"""Tables of tasks, jobs, workers, sessions and artifacts."""

from typing import Any

import sqlalchemy as sa
from alembic import op

from kdskills.storage.database import columns, word_type

revision = "work_0001"
down_revision = None
branch_labels = ("work",)
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "kd_artifacts",
        sa.Column("id", word_type(80), primary_key=True),
        *columns(word_type(200), "tenant", "project", "agent", nullable=False),
        *columns(word_type(80), "task_id", "job_id"),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("mime", sa.String(255), nullable=False),
        sa.Column("mode", sa.Integer, nullable=False),
        sa.Column("skill_name", sa.String(500), nullable=False),
        sa.Column("version_hash", sa.String(80), nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_kd_artifacts_task_id", "kd_artifacts", ["task_id"])
    op.create_index("kd_artifacts_content", "kd_artifacts", ["project", "sha256"])
    work("kd_jobs")
    op.create_table(
        "kd_meta", sa.Column("name", sa.String(80), primary_key=True), sa.Column("value", sa.Text, nullable=False)
    )
    work(
        "kd_tasks",
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("job_id", word_type(80)),
        *columns(sa.Integer, "step", "try"),
        *columns(sa.Integer, "attempt", "restarts", nullable=False),
        sa.Column("ready_at", sa.BigInteger),
        *columns(sa.Integer, "exit_code", "signal"),
        *columns(sa.LargeBinary, "stdout_tail", "stderr_tail"),
        *columns(sa.BigInteger, "stdout_total", "stderr_total"),
        *columns(sa.Text, "artifacts", "output_errors", "endpoints"),
    )
    op.create_index("ix_kd_tasks_job_id", "kd_tasks", ["job_id"])
    op.create_table(
        "kd_work_sessions",
        sa.Column("session_key", word_type(80), primary_key=True),
        sa.Column("holder", word_type(80)),
        sa.Column("host", sa.String(80)),
        sa.Column("used_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "kd_workers",
        sa.Column("executor", sa.String(80), primary_key=True),
        sa.Column("host", sa.String(80), nullable=False, index=True),
        *columns(sa.Integer, "slot", "pid", nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("state", sa.String(8), nullable=False, index=True),
        *columns(sa.BigInteger, "started_at", "beat_at", nullable=False),
        sa.Column("lease_until", sa.BigInteger),
    )


def work(table: str, *more: sa.Column[Any]) -> None:
    """Make the table of jobs or of tasks, with the columns and indexes both have, and *more* columns."""
    op.create_table(
        table,
        sa.Column("id", word_type(80), primary_key=True),
        *columns(word_type(200), "tenant", "project", "agent", "alias", nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("session_id", word_type(128)),
        sa.Column("session_key", word_type(80), nullable=False),
        sa.Column("body_hash", sa.String(80), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        *columns(sa.String(80), "home", "host", "executor"),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        *columns(sa.BigInteger, "started_at", "finished_at"),
        sa.Column("error_code", sa.String(80)),
        sa.Column("error_message", sa.Text),
        sa.Column("cancel_at", sa.BigInteger),
        sa.Column("cancel_reason", sa.Text),
        *more,
    )
    op.create_index(f"{table}_held", table, ["executor", "status"])
    op.create_index(f"{table}_listed", table, ["tenant", "project", "created_at", "id"])
    op.create_index(f"{table}_status", table, ["status", "finished_at"])
