"""The journal of calls, and the receipts of turns."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make `remote_calls` and `remote_receipts`."""
    op.create_table(
        "remote_calls",
        sa.Column("key", sa.String(80), primary_key=True),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("thread_id", sa.Text),
        sa.Column("turn_id", sa.Text),
        sa.Column("call_id", sa.Text),
        sa.Column("namespace", sa.Text),
        sa.Column("tool", sa.Text, nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("idempotent", sa.Boolean, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("lease_until", sa.BigInteger, nullable=False),
        sa.Column("response", sa.Text),
        sa.Column("late_response", sa.Text),
        sa.Column("told", sa.Boolean, nullable=False),
        sa.Column("late_told", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger),
        sa.Column("answered_at", sa.BigInteger),
        sa.Column("late_at", sa.BigInteger),
    )
    op.create_index("remote_calls_by_session", "remote_calls", ["session_id", "created_at"])
    op.create_index("remote_calls_by_age", "remote_calls", ["created_at"])
    op.create_table(
        "remote_receipts",
        sa.Column("session_id", sa.String(200), primary_key=True),
        sa.Column("turn_id", sa.String(200), primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_remote_receipts_created_at", "remote_receipts", ["created_at"])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("remote_receipts")
    op.drop_table("remote_calls")
