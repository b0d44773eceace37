"""What is said of a database that fails: enough to act upon, and no word of the driver's that may hold a password."""

import os
import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import sqlalchemy as sa

from kdskills.remote.journal.sql import SqlJournal
from kdskills.storage import database as room
from kdskills.storage.database import HEADS, Database, DatabaseUnavailable, upgrade


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


def _leaving_the_old_mode(path):
    """Return a connection that writes in a file which is not in WAL mode yet: SQLite's own patience does not help there."""
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE IF NOT EXISTS t (x)")
    other.execute("BEGIN IMMEDIATE")
    other.execute("INSERT INTO t VALUES (1)")
    return other


def test_a_new_file_is_waited_for(database, tmp_path):
    """Who opens a file while another connection still writes in its old mode waits, and reads what was written."""
    other = _leaving_the_old_mode(tmp_path / "work.db")
    with closing(other), ThreadPoolExecutor(1) as pool:
        read = pool.submit(database.ask, lambda link: link.exec_driver_sql("SELECT x FROM t").scalar())
        with pytest.raises(TimeoutError):
            read.result(0.2)
        other.execute("COMMIT")
        assert read.result(60) == 1


def test_a_file_that_stays_locked_is_said_to_be(database, tmp_path, monkeypatch):
    """The wait for a new file ends, with the words for a locked one."""
    monkeypatch.setattr(room, "BUSY_MS", 50)
    locked = pytest.raises(DatabaseUnavailable, match=r"OperationalError \(SQLITE_BUSY\)")
    with closing(_leaving_the_old_mode(tmp_path / "work.db")), locked:
        database.ask(lambda link: link.exec_driver_sql("SELECT x FROM t").scalar())


def test_a_writer_that_waits_in_vain_is_told_so(database, tmp_path, monkeypatch):
    """Whoever cannot begin, since another writes, is told that the database is locked, and the next one writes."""
    monkeypatch.setattr(room, "BUSY_MS", 50)
    database.change(lambda link: link.exec_driver_sql("CREATE TABLE t (x)"))
    with closing(sqlite3.connect(tmp_path / "work.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseUnavailable, match=r"OperationalError \(SQLITE_BUSY\)") as told:
            database.change(lambda link: link.exec_driver_sql("INSERT INTO t VALUES (1)"))
        assert isinstance(told.value.__cause__, sa.exc.OperationalError)  # a worker waits for the end of such an outage
        other.execute("ROLLBACK")
    database.change(lambda link: link.exec_driver_sql("INSERT INTO t VALUES (2)"))
    assert database.ask(lambda link: link.exec_driver_sql("SELECT x FROM t").scalar()) == 2


def test_what_is_no_database_is_not_tried_again(tmp_path):
    """A file of something else is refused at once."""
    (tmp_path / "work.db").write_bytes(b"not a database at all, but long enough to be looked at\n" * 20)
    broken = Database(f"sqlite:///{tmp_path / 'work.db'}")
    with pytest.raises(DatabaseUnavailable, match=r"DatabaseError \(SQLITE_NOTADB\)"):
        broken.ask(lambda link: link.exec_driver_sql("SELECT 1").scalar())
    broken.engine.dispose()


def test_databases_are_brought_up_side_by_side(tmp_path):
    """Threads of one process that bring different databases up to date do not write into each other's."""

    def tables(number):
        one = Database(f"sqlite:///{tmp_path / str(number)}.db")
        for part in sorted(HEADS):
            upgrade(one, part)
        journal = SqlJournal(f"sqlite:///{tmp_path / str(number)}.calls.db")
        found = [sorted(sa.inspect(engine).get_table_names()) for engine in (one.engine, journal.engine)]
        one.engine.dispose()
        journal.close()
        return found

    with ThreadPoolExecutor(6) as pool:
        several = list(pool.map(tables, range(12)))
    assert several == [tables("alone")] * 12
    assert all(len(names) > 2 for names in several[0])


@pytest.mark.needs("postgres")
def test_postgres_is_told_who_connects(postgres):
    """A connection has the role, the host and the process in its name, unless the URL says another."""
    url = postgres.create("kd_names")
    asked = "SELECT application_name FROM pg_stat_activity WHERE pid = pg_backend_pid()"
    for more, expected in (
        ("", f"kdskills worker {socket.gethostname()[:30]}/{os.getpid()}"),
        ("?application_name=mine", "mine"),
    ):
        database = Database(f"{url}{more}", role="worker")
        assert database.ask(lambda link: link.exec_driver_sql(asked).scalar()) == expected
        database.close()
