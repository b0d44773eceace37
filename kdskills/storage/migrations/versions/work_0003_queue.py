"""The queue is the tasks and jobs themselves: indexes to ask them by, and nothing left of the engine that was beside them."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "work_0003"
down_revision = "work_0002"
branch_labels = None
depends_on = None

OPEN = "status IN ('queued', 'starting', 'running')"
ENGINE_SCHEMA = "dbos"
ENGINE_TABLES = """
operation_outputs notifications workflow_events_history workflow_events workflow_input workflow_output streams
event_dispatch_kv workflow_schedules application_versions queues workflow_status dbos_migrations
"""
"""In an order that foreign keys allow."""
OURS = "('kd_task', 'kd_job')"


def upgrade() -> None:
    """Give up the workers of the version before, whose queue this ends, and make the indexes.

    Workers that are given up end, or wait, and change nothing any more; their programs go on and are adopted. Everything
    the queue needs stands in the heads: what waits is `queued`, and a session's order is that of `created_at`.
    """
    op.execute("UPDATE kd_workers SET state = 'dead'")
    for table in ("kd_tasks", "kd_jobs"):
        open_: dict[str, Any] = {"sqlite_where": sa.text(OPEN), "postgresql_where": sa.text(OPEN)}
        op.create_index(f"{table}_open", table, ["session_key", "created_at"], **open_)
        op.create_index(f"{table}_turn", table, ["status", "created_at", "id"], **open_)
    op.drop_column("kd_work_sessions", "holder")
    drop_engine()


def drop_engine() -> None:
    """Drop the tables of the engine before, unless another application keeps rows in them: then only ours."""
    link = op.get_bind()
    schema = None if link.dialect.name == "sqlite" else ENGINE_SCHEMA
    present = set(sa.inspect(link).get_table_names(schema=schema))
    if not {"operation_outputs", "dbos_migrations"} <= present:
        return
    prefix = "" if schema is None else f"{schema}."
    foreign = f"SELECT 1 FROM {prefix}workflow_status WHERE name NOT IN {OURS} LIMIT 1"  # noqa: S608 - our own constants
    if link.exec_driver_sql(foreign).first() is not None:
        op.execute(f"DELETE FROM {prefix}workflow_status WHERE name IN {OURS}")  # noqa: S608 - our own constants
    elif schema is not None:
        op.execute(f"DROP SCHEMA {schema} CASCADE")
    else:
        for table in ENGINE_TABLES.split():
            op.execute(f"DROP TABLE IF EXISTS {table}")
