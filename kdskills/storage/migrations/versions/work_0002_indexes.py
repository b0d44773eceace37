"""Indexes for lists, for what an agent has open and for who holds a session."""

from alembic import op

revision = "work_0002"
down_revision = "work_0001"
branch_labels = None
depends_on = None

LISTINGS = {
    "agent": ["tenant", "project", "agent", "created_at", "id"],
    "agent_status": ["tenant", "project", "agent", "status", "created_at", "id"],
    "project_status": ["tenant", "project", "status", "created_at", "id"],
    "of_session": ["tenant", "project", "session_id", "created_at", "id"],
    "session": ["session_key", "status", "created_at", "id"],
}


def upgrade() -> None:
    """Make them."""
    for table in ("kd_tasks", "kd_jobs"):
        for name, columns in LISTINGS.items():
            op.create_index(f"{table}_{name}", table, columns)
