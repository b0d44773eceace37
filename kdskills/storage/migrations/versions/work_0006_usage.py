"""What each project used in a day: commands that were submitted, and processor time."""

import sqlalchemy as sa
from alembic import op

from kdskills.storage.database import columns, word_type

revision = "work_0006"
down_revision = "work_0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it; a day begins at nothing."""
    op.create_table(
        "kd_usage",
        *columns(word_type(200), "tenant", "project", primary_key=True),
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        *columns(sa.BigInteger, "tasks", "cpu_ms", nullable=False),
    )
