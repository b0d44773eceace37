"""The tables of projects and their skills; nothing of SQLAlchemy is imported before a database is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.jobs.database import word_type

if TYPE_CHECKING:
    import sqlalchemy as sa


class ProjectTables:
    """The tables, described once per database."""

    def __init__(self) -> None:
        import sqlalchemy as sa

        self.metadata = sa.MetaData()
        self.projects = sa.Table(
            "kd_projects",
            self.metadata,
            sa.Column("project", word_type(64), primary_key=True),
            sa.Column("bundle", sa.Text),
            sa.Column("generation", sa.BigInteger, nullable=False),
            sa.Column("created_at", sa.BigInteger, nullable=False),
        )
        self.skills = self._skills()
        self.versions = self._versions()
        self.pins = self._pins()
        self.audit = self._audit()

    def _named(self) -> tuple[sa.Column[str], sa.Column[str]]:
        import sqlalchemy as sa

        return (
            sa.Column("project", word_type(64), primary_key=True),
            sa.Column("name", word_type(256), primary_key=True),
        )

    def _skills(self) -> sa.Table:
        import sqlalchemy as sa

        return sa.Table(
            "kd_project_skills",
            self.metadata,
            *self._named(),
            sa.Column("full_id", word_type(256), nullable=False),
            sa.Column("enabled", sa.Boolean, nullable=False),
            sa.Column("active", sa.String(80)),
            sa.Column("created_at", sa.BigInteger, nullable=False),
            sa.Column("changed_at", sa.BigInteger, nullable=False),
            sa.Column("deleted_at", sa.BigInteger),
        )

    def _versions(self) -> sa.Table:
        import sqlalchemy as sa

        return sa.Table(
            "kd_skill_versions",
            self.metadata,
            *self._named(),
            sa.Column("version", sa.String(80), primary_key=True),
            sa.Column("full_id", word_type(256), nullable=False),
            sa.Column("description", sa.Text, nullable=False),
            sa.Column("tree_digest", sa.String(80), nullable=False),
            sa.Column("files", sa.Text, nullable=False),
            sa.Column("diagnostics", sa.Text, nullable=False),
            sa.Column("created_at", sa.BigInteger, nullable=False),
            sa.Column("created_by", sa.String(200), nullable=False),
            sa.Column("unused_since", sa.BigInteger),
        )

    def _pins(self) -> sa.Table:
        import sqlalchemy as sa

        return sa.Table(
            "kd_skill_pins",
            self.metadata,
            sa.Column("project", word_type(64), primary_key=True),
            sa.Column("holder", word_type(200), primary_key=True),
            sa.Column("name", word_type(256), primary_key=True),
            sa.Column("version", sa.String(80), primary_key=True),
            sa.Column("pinned_at", sa.BigInteger, nullable=False),
        )

    def _audit(self) -> sa.Table:
        import sqlalchemy as sa

        number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
        return sa.Table(
            "kd_audit",
            self.metadata,
            sa.Column("id", number, primary_key=True, autoincrement=True),
            sa.Column("at", sa.BigInteger, nullable=False),
            sa.Column("project", word_type(64), nullable=False, index=True),
            sa.Column("who", sa.String(200), nullable=False),
            sa.Column("action", sa.String(80), nullable=False),
            sa.Column("subject", sa.Text, nullable=False),
            sa.Column("facts", sa.Text, nullable=False),
            sa.Column("request_id", sa.String(200), nullable=False),
        )
