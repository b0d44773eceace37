"""Where each worker serves the files of its host to the doors of others, and the key of its own life for that."""

import sqlalchemy as sa
from alembic import op

from kdskills.storage.database import columns

revision = "work_0005"
down_revision = "work_0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; a worker that entered the roster before serves nothing."""
    for column in columns(sa.String(300), "address", "stream_key"):
        op.add_column("kd_workers", column)
