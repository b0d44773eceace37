"""Tables of projects, their skills and versions, pins, audit rows and tokens."""

import sqlalchemy as sa
from alembic import op

revision = "service_0001"
down_revision = None
branch_labels = ("service",)
depends_on = None


def word(length: int) -> sa.String:
    """Return text that is compared by bytes, not in a language's order."""
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def upgrade() -> None:
    """Make the tables."""
    projects()
    versions()
    audit()
    tokens()


def projects() -> None:
    """Make kd_projects and kd_project_skills."""
    op.create_table(
        "kd_projects",
        sa.Column("project", word(64), primary_key=True),
        sa.Column("bundle", sa.Text),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "kd_project_skills",
        sa.Column("project", word(64), primary_key=True),
        sa.Column("name", word(256), primary_key=True),
        sa.Column("full_id", word(256), nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("active", sa.String(80)),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("changed_at", sa.BigInteger, nullable=False),
        sa.Column("deleted_at", sa.BigInteger),
    )


def versions() -> None:
    """Make kd_skill_versions and kd_skill_pins."""
    op.create_table(
        "kd_skill_versions",
        sa.Column("project", word(64), primary_key=True),
        sa.Column("name", word(256), primary_key=True),
        sa.Column("version", sa.String(80), primary_key=True),
        sa.Column("full_id", word(256), nullable=False),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("tree_digest", sa.String(80), nullable=False),
        sa.Column("files", sa.Text, nullable=False),
        sa.Column("diagnostics", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("unused_since", sa.BigInteger),
    )
    op.create_table(
        "kd_skill_pins",
        sa.Column("project", word(64), primary_key=True),
        sa.Column("holder", word(200), primary_key=True),
        sa.Column("name", word(256), primary_key=True),
        sa.Column("version", sa.String(80), primary_key=True),
        sa.Column("pinned_at", sa.BigInteger, nullable=False),
    )


def audit() -> None:
    """Make kd_audit."""
    op.create_table(
        "kd_audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("project", word(64), nullable=False, index=True),
        sa.Column("who", sa.String(200), nullable=False),
        sa.Column("action", sa.String(80), nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("facts", sa.Text, nullable=False),
        sa.Column("request_id", sa.String(200), nullable=False),
    )


def tokens() -> None:
    """Make kd_tokens."""
    op.create_table(
        "kd_tokens",
        sa.Column("id", word(32), primary_key=True),
        sa.Column("secret_hash", sa.String(80), nullable=False),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("project", word(64), nullable=False, index=True),
        sa.Column("agent", sa.String(128), nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("allowed_tools", sa.Text),
        sa.Column("requests_per_minute", sa.Integer),
        sa.Column("concurrent_work", sa.Integer),
        sa.Column("body_bytes", sa.BigInteger),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("revoked_at", sa.BigInteger),
    )
