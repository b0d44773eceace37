"""The one way to a database: prepared once, honest about failures, silent about passwords."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kdskills.errors import OperatorMustAct
from kdskills.storage.database import Database, DatabaseUnavailable, micros, moment_of, utc_now


def test_prepared_once_by_whoever_comes_first(tmp_path: Path) -> None:
    """Threads that come at once wait for one preparation, and what it asks itself does not wait for itself."""
    done = []

    def prepare(database: Database) -> None:
        database.change(lambda link: link.exec_driver_sql("CREATE TABLE t (a INTEGER)"))
        done.append(database.ask(lambda link: link.exec_driver_sql("SELECT count(*) FROM t").scalar()))

    database = Database(f"sqlite:///{tmp_path / 'x.db'}", prepare=prepare)
    found = []

    def ask() -> None:
        found.append(database.ask(lambda link: link.exec_driver_sql("SELECT count(*) FROM t").scalar()))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    database.engine.dispose()
    assert (done, found) == ([0], [0] * 8)


def test_a_preparation_that_failed_is_tried_again(tmp_path: Path) -> None:
    """A failure is the caller's to see, and leaves the work to the next one."""
    tries = []

    def prepare(database: Database) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("no")

    database = Database(f"sqlite:///{tmp_path / 'x.db'}", prepare=prepare)
    with pytest.raises(OSError, match="no"):
        database.ask(lambda link: None)
    assert database.ask(lambda link: 7) == 7
    database.engine.dispose()
    assert len(tries) == 2


async def test_work_is_done_in_threads(tmp_path: Path) -> None:
    """Neither reading nor writing runs on the event loop's thread."""
    database = Database(f"sqlite:///{tmp_path / 'x.db'}")
    here = threading.get_ident()
    assert here != await database.read(lambda link: threading.get_ident())
    assert here != await database.write(lambda link: threading.get_ident())
    await database.aclose()


@pytest.mark.parametrize("url", ["postgresql://kd:sesame@127.0.0.1:1/x", "sqlite:////nowhere/at/all/x.db"])
def test_failures_keep_secrets(url: str) -> None:
    """A database that does not answer is the operator's to mend; no message holds the URL's password or path."""
    database = Database(url, label="the house's database")
    with pytest.raises(DatabaseUnavailable) as caught:
        database.ask(lambda link: link.exec_driver_sql("SELECT 1"))
    database.engine.dispose()
    assert isinstance(caught.value, OperatorMustAct)
    assert "the house's database does not answer" in caught.value.message
    assert not {"sesame", "127.0.0.1", "nowhere"} & set(str(caught.value.to_json()).replace("/", " ").split())


@pytest.mark.parametrize("url", ["", "nonsense", "http://x", "mysql+nothing://x"])
def test_what_is_no_url(url: str) -> None:
    """Text that names no database is refused when it is opened."""
    with pytest.raises(OperatorMustAct):
        Database(url)


def test_times_survive() -> None:
    """Microseconds since 1970 and back are the same moment."""
    now = utc_now()
    assert moment_of(micros(now)) == now


def test_a_closed_database_keeps_no_connection(tmp_path) -> None:
    """What is in use when it is closed, and what is asked afterwards, is closed after its use."""

    def opened() -> int:
        return sum(
            str(entry.readlink()).startswith(str(tmp_path))
            for entry in Path("/proc/self/fd").glob("[0-9]*")
            if entry.is_symlink()
        )

    database = Database(f"sqlite:///{tmp_path / 'x.db'}")
    database.ask(lambda link: (link.exec_driver_sql("SELECT 1").scalar(), database.close()))
    assert opened() == 0
    assert database.ask(lambda link: link.exec_driver_sql("SELECT 1").scalar()) == 1
    assert opened() == 0
