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
        *(sa.Column(name, sa.Text) for name in ("thread_id", "turn_id", "call_id", "namespace")),
        sa.Column("tool", sa.Text, nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("idempotent", sa.Boolean, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("lease_until", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.Text) for name in ("response", "late_response")),
        *(sa.Column(name, sa.Boolean, nullable=False) for name in ("told", "late_told")),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.BigInteger) for name in ("started_at", "answered_at", "late_at")),
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
