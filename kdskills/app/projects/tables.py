"""The tables of projects and their skills; nothing of SQLAlchemy is imported before a database is opened."""

from __future__ import annotations

from kdskills.jobs.database import word_type


class ProjectTables:
    """The tables, described once per database."""

    def __init__(self) -> None:
        import sqlalchemy as sa

        name, digest, moment = word_type(256), sa.String(80), sa.BigInteger
        self.metadata = sa.MetaData()
        self.projects = sa.Table(
            "kd_projects",
            self.metadata,
            sa.Column("project", word_type(64), primary_key=True),
            sa.Column("bundle", sa.Text),
            sa.Column("generation", sa.BigInteger, nullable=False),
            sa.Column("created_at", moment, nullable=False),
        )
        self.skills = sa.Table(
            "kd_project_skills",
            self.metadata,
            sa.Column("project", word_type(64), primary_key=True),
            sa.Column("name", name, primary_key=True),
            sa.Column("full_id", name, nullable=False),
            sa.Column("enabled", sa.Boolean, nullable=False),
            sa.Column("active", digest),
            sa.Column("created_at", moment, nullable=False),
            sa.Column("changed_at", moment, nullable=False),
            sa.Column("deleted_at", moment),
        )
        self.versions = sa.Table(
            "kd_skill_versions",
            self.metadata,
            sa.Column("project", word_type(64), primary_key=True),
            sa.Column("name", name, primary_key=True),
            sa.Column("version", digest, primary_key=True),
            sa.Column("full_id", name, nullable=False),
            sa.Column("description", sa.Text, nullable=False),
            sa.Column("tree_digest", digest, nullable=False),
            sa.Column("files", sa.Text, nullable=False),
            sa.Column("diagnostics", sa.Text, nullable=False),
            sa.Column("created_at", moment, nullable=False),
            sa.Column("created_by", sa.String(200), nullable=False),
            sa.Column("unused_since", moment),
        )
        self.pins = sa.Table(
            "kd_skill_pins",
            self.metadata,
            sa.Column("project", word_type(64), primary_key=True),
            sa.Column("holder", word_type(200), primary_key=True),
            sa.Column("name", name, primary_key=True),
            sa.Column("version", digest, primary_key=True),
            sa.Column("pinned_at", moment, nullable=False),
        )
        self.audit = sa.Table(
            "kd_audit",
            self.metadata,
            sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
            sa.Column("at", moment, nullable=False),
            sa.Column("project", word_type(64), nullable=False, index=True),
            sa.Column("who", sa.String(200), nullable=False),
            sa.Column("action", sa.String(80), nullable=False),
            sa.Column("subject", sa.Text, nullable=False),
            sa.Column("facts", sa.Text, nullable=False),
            sa.Column("request_id", sa.String(200), nullable=False),
        )
