"""What is remembered of each thread's catalog."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make `remote_catalogs`."""
    op.create_table(
        "remote_catalogs",
        sa.Column("session_id", sa.String(200), primary_key=True),
        sa.Column("strategy", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(16), nullable=False),
        sa.Column("tools", sa.Text, nullable=False),
        sa.Column("context_digest", sa.String(16), nullable=False),
        sa.Column("release", sa.String(16), nullable=False),
        sa.Column("release_by", sa.String(32), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("updated_at", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("remote_catalogs")
