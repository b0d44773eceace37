"""Tables of tasks, jobs, workers, sessions and artifacts."""

import sqlalchemy as sa
from alembic import op

revision = "work_0001"
down_revision = None
branch_labels = ("work",)
depends_on = None


def word(length: int) -> sa.String:
    """Return text that is compared by bytes, not in a language's order."""
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def owned() -> list[sa.Column[object]]:
    """Return the columns that tasks and jobs share."""
    return [
        sa.Column("id", word(80), primary_key=True),
        sa.Column("tenant", word(200), nullable=False),
        sa.Column("project", word(200), nullable=False),
        sa.Column("agent", word(200), nullable=False),
        sa.Column("alias", word(200), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("session_id", word(128)),
        sa.Column("session_key", word(80), nullable=False),
        sa.Column("body_hash", sa.String(80), nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("home", sa.String(80)),
        sa.Column("host", sa.String(80)),
        sa.Column("executor", sa.String(80)),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("finished_at", sa.BigInteger),
        sa.Column("error_code", sa.String(80)),
        sa.Column("error_message", sa.Text),
        sa.Column("cancel_at", sa.BigInteger),
        sa.Column("cancel_reason", sa.Text),
    ]


def upgrade() -> None:
    """Make the tables."""
    artifacts()
    jobs()
    meta()
    tasks()
    sessions()
    workers()


def artifacts() -> None:
    """Make kd_artifacts."""
    op.create_table(
        "kd_artifacts",
        sa.Column("id", word(80), primary_key=True),
        sa.Column("tenant", word(200), nullable=False),
        sa.Column("project", word(200), nullable=False),
        sa.Column("agent", word(200), nullable=False),
        sa.Column("task_id", word(80)),
        sa.Column("job_id", word(80)),
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


def jobs() -> None:
    """Make kd_jobs."""
    op.create_table(
        "kd_jobs",
        *owned(),
    )
    op.create_index("kd_jobs_held", "kd_jobs", ["executor", "status"])
    op.create_index("kd_jobs_listed", "kd_jobs", ["tenant", "project", "created_at", "id"])
    op.create_index("kd_jobs_status", "kd_jobs", ["status", "finished_at"])


def meta() -> None:
    """Make kd_meta."""
    op.create_table(
        "kd_meta",
        sa.Column("name", sa.String(80), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )


def tasks() -> None:
    """Make kd_tasks."""
    op.create_table(
        "kd_tasks",
        *owned(),
        sa.Column("mode", sa.String(16), nullable=False),
        sa.Column("job_id", word(80)),
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
    )
    op.create_index("ix_kd_tasks_job_id", "kd_tasks", ["job_id"])
    op.create_index("kd_tasks_held", "kd_tasks", ["executor", "status"])
    op.create_index("kd_tasks_listed", "kd_tasks", ["tenant", "project", "created_at", "id"])
    op.create_index("kd_tasks_status", "kd_tasks", ["status", "finished_at"])


def sessions() -> None:
    """Make kd_work_sessions."""
    op.create_table(
        "kd_work_sessions",
        sa.Column("session_key", word(80), primary_key=True),
        sa.Column("holder", word(80)),
        sa.Column("host", sa.String(80)),
        sa.Column("used_at", sa.BigInteger, nullable=False),
    )


def workers() -> None:
    """Make kd_workers."""
    op.create_table(
        "kd_workers",
        sa.Column("executor", sa.String(80), primary_key=True),
        sa.Column("host", sa.String(80), nullable=False),
        sa.Column("slot", sa.Integer, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("beat_at", sa.BigInteger, nullable=False),
        sa.Column("lease_until", sa.BigInteger),
    )
    op.create_index("ix_kd_workers_host", "kd_workers", ["host"])
    op.create_index("ix_kd_workers_state", "kd_workers", ["state"])
