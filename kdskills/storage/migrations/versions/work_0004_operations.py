"""What operators and lists ask: what each worker has room for, hosts that take no new work, and work by its skill."""

import sqlalchemy as sa
from alembic import op

from kdskills.storage.database import columns, word_type

revision = "work_0004"
down_revision = "work_0003"
branch_labels = None
depends_on = None

SKILL = {
    "sqlite": "json_extract(spec, '$.placement.skill_name')",
    "postgresql": "spec::json #>> '{placement,skill_name}'",
}
"""Where a row had the name of its skill before."""


def upgrade() -> None:
    """Add them; a worker that entered the roster before tells nothing of itself."""
    op.create_table(
        "kd_hosts",
        sa.Column("host", sa.String(80), primary_key=True),
        sa.Column("drained_at", sa.BigInteger, nullable=False),
        sa.Column("drained_by", sa.String(400), nullable=False),
    )
    for column in (sa.Column("version", sa.String(40)), *columns(sa.Integer, "slots", "services")):
        op.add_column("kd_workers", column)
    for table in ("kd_tasks", "kd_jobs"):
        op.add_column(table, sa.Column("skill_name", word_type(500)))
        op.add_column(table, sa.Column("repeat_of", word_type(80)))
        op.execute(f"UPDATE {table} SET skill_name = {SKILL[op.get_bind().dialect.name]}")  # noqa: S608 - our own constants
        op.create_index(f"{table}_of_skill", table, ["tenant", "project", "skill_name", "created_at", "id"])
