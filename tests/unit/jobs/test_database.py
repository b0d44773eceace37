"""What is said of a database that fails: enough to act upon, and no word of the driver's that may hold a password."""

import os
import socket
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import sqlalchemy as sa

from kdskills.jobs.queue import Work
from kdskills.jobs.runs import passing
from kdskills.remote.journal.sql import SqlJournal
from kdskills.storage import database as room
from kdskills.storage.database import HEADS, Database, DatabaseUnavailable, lock_schema, upgrade


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


FROZEN = "SELECT current_setting('idle_in_transaction_session_timeout')"


@pytest.fixture
def shared(postgres, tmp_path):
    """Two hosts that share an empty PostgreSQL."""
    url = postgres.create(f"kd_frozen_{os.urandom(4).hex()}")
    works = [Work(url, tmp_path / name) for name in ("one", "two")]
    yield works
    for work in works:
        work.close()


class Frozen:
    """A transaction that did *change* and then stands still, in a thread of its own, until the block is over."""

    def __init__(self, database, change):
        self._reached, self._goes_on = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._change, self._database = change, database

    def _act(self, link):
        link.execute(self._change)
        self._reached.set()
        assert self._goes_on.wait(60)

    def __enter__(self):
        self.end = self._pool.submit(self._database.change, self._act)
        assert self._reached.wait(60)
        return self

    def __exit__(self, *_):
        self._goes_on.set()
        self._pool.shutdown()


@pytest.mark.needs("postgres")
def test_a_worker_that_freezes_in_its_beat_stops_no_other(shared):
    """A row of the roster that a dead worker's session holds is passed over: others beat, and bury it once it is free."""
    one, two = shared
    table = one.tables.workers
    for work in shared:
        work.roster.enter(work.host, 0)
    over = table.update().where(table.c.executor == one.host).values(lease_until=1)
    one.database.change(lambda link: link.execute(over))
    with Frozen(one.database, over), ThreadPoolExecutor(1) as pool:
        assert pool.submit(two.roster.beat, two.host).result(5) == []
    assert two.roster.beat(two.host) == [one.host]


@pytest.mark.needs("postgres")
def test_what_freezes_in_a_transaction_loses_its_locks(shared, monkeypatch):
    """The server ends a transaction that stands still, whatever rows it holds; whoever comes back may try again."""
    monkeypatch.setattr(room, "FROZEN_MS", 200)
    one, two = shared
    one.database.engine.dispose()  # its next connections are told
    table = one.tables.usage
    day = {"tenant": "t", "project": "p", "day": 1, "tasks": 0, "cpu_ms": 0}
    two.database.change(lambda link: link.execute(table.insert().values(day)))
    count = table.update().values(tasks=table.c.tasks + 1)
    with Frozen(one.database, count) as frozen, ThreadPoolExecutor(1) as pool:
        pool.submit(two.database.change, lambda link: link.execute(count)).result(20)
    with pytest.raises(DatabaseUnavailable) as told:
        frozen.end.result(20)
    assert passing(told.value)
    assert one.database.ask(lambda link: link.execute(sa.select(table.c.tasks)).scalar()) == 1


@pytest.mark.needs("postgres")
def test_a_server_that_takes_no_writes_yet_is_waited_for(postgres):
    """What a standby refuses before it is promoted may be written later; what no server would take is not tried again."""
    url = postgres.create(f"kd_standby_{os.urandom(4).hex()}")
    with closing(Database(f"{url}?options=-c%20default_transaction_read_only%3Don")) as standby:
        for words, later in (("CREATE TABLE t (x int)", True), ("CREATE TABLE", False)):
            with pytest.raises(DatabaseUnavailable) as told:
                standby.change(lambda link, words=words: link.exec_driver_sql(words))
            assert passing(told.value) == later


@pytest.mark.needs("postgres")
def test_long_transactions_are_not_cut(shared):
    """Backups read for as long as they write, restores wait for objects, and upgrades have a minute between statements."""

    def told(link):
        return link.exec_driver_sql(FROZEN).scalar()

    def restoring(link):
        lock_schema(link, 0)
        return told(link)

    def upgrading(link):
        lock_schema(link)
        return told(link)

    database = shared[0].database
    assert [database.snapshot(told), database.change(restoring), database.change(upgrading)] == ["0", "0", "1min"]
    assert {database.ask(told), database.change(told)} == {"10s"}


@pytest.mark.needs("postgres")
def test_a_database_that_vanished_is_noticed(shared):
    """Each connection, also one that only listens, asks whether its server lives, and gives up within half a minute."""
    raw = shared[0].database.engine.raw_connection()
    try:
        with closing(socket.socket(fileno=os.dup(raw.driver_connection.fileno()))) as link:
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            said = {name: link.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in NOTICED}
    finally:
        raw.close()
    assert said == NOTICED


NOTICED = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
