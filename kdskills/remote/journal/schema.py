"""Brings a database to the newest revision of the tables of remote skills."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.errors import MissingExtra
from kdskills.storage.database import SCHEMA_LOCK, run_revisions

if TYPE_CHECKING:
    import sqlalchemy as sa

VERSION_TABLE: Final = "remote_schema"
MIGRATIONS: Final = Path(__file__).with_name("migrations")


def newest() -> str:
    """Return the newest revision: revisions are one straight chain, numbered by their files."""
    return max(path.name[1:5] for path in (MIGRATIONS / "versions").glob("r[0-9][0-9][0-9][0-9]_*.py"))


def current(link: sa.Connection) -> str | None:
    """Return the revision a database is at, or None for one without our tables."""
    import sqlalchemy as sa

    if not sa.inspect(link).has_table(VERSION_TABLE):
        return None
    revision: str | None = link.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608 - a constant
    return revision


def upgrade(link: sa.Connection) -> None:
    """Bring the database behind *link* to the newest revision, in the transaction that is open there.

    Several processes may open a new database at once: on PostgreSQL an advisory lock makes them wait for one another, on
    SQLite the transaction itself does. Alembic is imported only when there is something to do.

    Raises:
        MissingExtra: Alembic is not installed.
    """
    if link.dialect.name == "postgresql":
        link.exec_driver_sql(f"SELECT pg_advisory_xact_lock({SCHEMA_LOCK})")
    revision = current(link)
    if revision is not None and revision >= newest():
        return  # at a later revision a newer kdskills was here: its tables have all of ours
    run_revisions(link, MIGRATIONS, "head", missing=MissingExtra("the journal of calls", "codex"))
