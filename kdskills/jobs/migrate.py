"""Bringing a database's tables up to date: one Alembic tree, one branch per part (see `migrations/README.md`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.errors import MissingExtra
from kdskills.jobs.database import SCHEMA_LOCK, Database, run_revisions

if TYPE_CHECKING:
    import sqlalchemy as sa

HEADS: Final = {"service": "service_0002", "work": "work_0003"}
"""The newest revision of each part whose room opens its database here."""

VERSIONS: Final = "kd_alembic"
MIGRATIONS: Final = Path(__file__).with_name("migrations")


def upgrade(database: Database, part: str, head: str | None = None) -> bool:
    """Bring the tables of *part* up to date; whether there was anything to do. Blocks.

    Args:
        database: Where the tables are.
        part: Label of the part's branch, such as `work`.
        head: Its newest revision; looked up in `HEADS` when omitted.

    Raises:
        MissingExtra: Alembic is not installed.
        DatabaseUnavailable: The database does not answer.
    """
    target = HEADS[part] if head is None else head
    if target in database.ask(current):
        return False

    def change(link: sa.Connection) -> bool:
        if link.dialect.name == "postgresql":
            link.exec_driver_sql(f"SELECT pg_advisory_xact_lock({SCHEMA_LOCK})")
        if target in current(link):
            return False
        run_revisions(link, MIGRATIONS, f"{part}@head", missing=MissingExtra("a database of kdskills' own", "jobs"))
        return True

    return database.change(change)


def current(link: sa.Connection) -> frozenset[str]:
    """Return the revisions the database is at, of all parts."""
    import sqlalchemy as sa

    if not sa.inspect(link).has_table(VERSIONS):
        return frozenset()
    return frozenset(link.exec_driver_sql(f"SELECT version_num FROM {VERSIONS}").scalars())  # noqa: S608 - our own constant
