"""Tables of projects, their skills and versions, pins, audit rows and tokens."""

import sqlalchemy as sa
from alembic import op

from kdskills.storage.database import columns, word_type

revision = "service_0001"
down_revision = None
branch_labels = ("service",)
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "kd_projects",
        sa.Column("project", word_type(64), primary_key=True),
        sa.Column("bundle", sa.Text),
        *columns(sa.BigInteger, "generation", "created_at", nullable=False),
    )
    op.create_table(
        "kd_project_skills",
        sa.Column("project", word_type(64), primary_key=True),
        sa.Column("name", word_type(256), primary_key=True),
        sa.Column("full_id", word_type(256), nullable=False),
        sa.Column("enabled", sa.Boolean, nullable=False),
        sa.Column("active", sa.String(80)),
        *columns(sa.BigInteger, "created_at", "changed_at", nullable=False),
        sa.Column("deleted_at", sa.BigInteger),
    )
    op.create_table(
        "kd_skill_versions",
        sa.Column("project", word_type(64), primary_key=True),
        sa.Column("name", word_type(256), primary_key=True),
        sa.Column("version", sa.String(80), primary_key=True),
        sa.Column("full_id", word_type(256), nullable=False),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("tree_digest", sa.String(80), nullable=False),
        *columns(sa.Text, "files", "diagnostics", nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("unused_since", sa.BigInteger),
    )
    op.create_table(
        "kd_skill_pins",
        sa.Column("project", word_type(64), primary_key=True),
        sa.Column("holder", word_type(200), primary_key=True),
        sa.Column("name", word_type(256), primary_key=True),
        sa.Column("version", sa.String(80), primary_key=True),
        sa.Column("pinned_at", sa.BigInteger, nullable=False),
    )
    audit_and_tokens()


def audit_and_tokens() -> None:
    """Make kd_audit and kd_tokens."""
    op.create_table(
        "kd_audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("project", word_type(64), nullable=False, index=True),
        sa.Column("who", sa.String(200), nullable=False),
        sa.Column("action", sa.String(80), nullable=False),
        *columns(sa.Text, "subject", "facts", nullable=False),
        sa.Column("request_id", sa.String(200), nullable=False),
    )
    op.create_table(
        "kd_tokens",
        sa.Column("id", word_type(32), primary_key=True),
        sa.Column("secret_hash", sa.String(80), nullable=False),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("project", word_type(64), nullable=False, index=True),
        sa.Column("agent", sa.String(128), nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("allowed_tools", sa.Text),
        *columns(sa.Integer, "requests_per_minute", "concurrent_work"),
        sa.Column("body_bytes", sa.BigInteger),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        *columns(sa.BigInteger, "expires_at", "revoked_at"),
    )
