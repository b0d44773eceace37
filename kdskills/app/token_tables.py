"""The table of tokens; nothing of SQLAlchemy is imported before a database is opened."""

from __future__ import annotations

from kdskills.jobs.database import word_type


class TokenTables:
    """The table, described once per database."""

    def __init__(self) -> None:
        import sqlalchemy as sa

        self.metadata = sa.MetaData()
        self.tokens = sa.Table(
            "kd_tokens",
            self.metadata,
            sa.Column("id", word_type(32), primary_key=True),
            sa.Column("secret_hash", sa.String(80), nullable=False),
            sa.Column("label", sa.String(200), nullable=False),
            sa.Column("project", word_type(64), nullable=False, index=True),
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
            sa.Column("person", sa.Boolean, nullable=False, server_default=sa.false()),
            sa.Column("tools", sa.Text, nullable=False, server_default="[]"),
        )
