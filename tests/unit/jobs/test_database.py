"""What is said of a database that fails: enough to act upon, and no word of the driver's that may hold a password."""

import pytest

from kdskills.jobs.database import Database, DatabaseUnavailable


@pytest.fixture
def database(tmp_path):
    """A database of this test's own."""
    made = Database(f"sqlite:///{tmp_path / 'work.db'}")
    yield made
    made.engine.dispose()


def test_a_full_database_is_called_full(database):
    """A database without room is told from one that is locked or broken."""

    def fill(link):
        link.exec_driver_sql("PRAGMA max_page_count = 4")
        link.exec_driver_sql("CREATE TABLE t (x BLOB)")
        link.exec_driver_sql("INSERT INTO t VALUES (zeroblob(1000000))")

    with pytest.raises(DatabaseUnavailable, match=r"OperationalError \(SQLITE_FULL\)"):
        database.change(fill)
