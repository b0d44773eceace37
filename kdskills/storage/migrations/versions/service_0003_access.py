"""Audit rows say which token, agent, address and skill; tokens say when they were last used."""

import sqlalchemy as sa
from alembic import op

from kdskills.storage.database import word_type

revision = "service_0003"
down_revision = "service_0002"
branch_labels = None
depends_on = None

OF_A_TOKEN = "%:token:________________"  # door, word and 16 digits  # noqa: S105 - a pattern of who changed something
FULL_ID = "SELECT s.full_id FROM kd_project_skills s WHERE s.project = kd_audit.project AND s.name = kd_audit.subject"


def upgrade() -> None:
    """Add the columns, and fill them as far as earlier rows tell."""
    op.add_column("kd_audit", sa.Column("token", word_type(32)))
    op.add_column("kd_audit", sa.Column("agent", word_type(128), nullable=False, server_default=""))
    op.add_column("kd_audit", sa.Column("address", sa.String(64), nullable=False, server_default=""))
    op.add_column("kd_audit", sa.Column("skill", word_type(256)))
    of_token = sa.text("UPDATE kd_audit SET token = substr(who, length(who) - 15) WHERE who LIKE :pattern")
    op.execute(of_token.bindparams(pattern=OF_A_TOKEN))
    op.execute(f"UPDATE kd_audit SET skill = ({FULL_ID}) WHERE action LIKE 'skill.%' OR action = 'version.collect'")  # noqa: S608 - our own constant
    op.drop_index("ix_kd_audit_project", "kd_audit")
    op.create_index("kd_audit_listing", "kd_audit", ["project", "id"])
    op.add_column("kd_tokens", sa.Column("last_used_at", sa.BigInteger))
