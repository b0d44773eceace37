"""Where workers serve the files of their hosts, by which key, since when their disk is full; the trace of tasks and jobs."""

import sqlalchemy as sa
from alembic import op

from kdskills.storage.database import columns

revision = "work_0005"
down_revision = "work_0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; a worker that entered the roster before serves nothing, and work that was submitted before has no trace."""
    for column in (*columns(sa.String(300), "address", "stream_key"), sa.Column("full_since", sa.BigInteger)):
        op.add_column("kd_workers", column)
    for table in ("kd_tasks", "kd_jobs"):
        op.add_column(table, sa.Column("traceparent", sa.String(80)))
