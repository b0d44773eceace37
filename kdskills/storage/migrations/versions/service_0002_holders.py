"""What a token says of its holder: whether a person starts skills with it, and which tools the holder has."""

import sqlalchemy as sa
from alembic import op

revision = "service_0002"
down_revision = "service_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add both to kd_tokens; tokens made before are a model's, without tools."""
    op.add_column("kd_tokens", sa.Column("person", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("kd_tokens", sa.Column("tools", sa.Text, nullable=False, server_default="[]"))
