"""Where each worker serves the files of its host to other hosts' doors, by which key, and since when its disk is full."""

import sqlalchemy as sa
from alembic import op

from kdskills.storage.database import columns

revision = "work_0005"
down_revision = "work_0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add them; a worker that entered the roster before serves nothing, and says nothing of its disk."""
    for column in (*columns(sa.String(300), "address", "stream_key"), sa.Column("full_since", sa.BigInteger)):
        op.add_column("kd_workers", column)
