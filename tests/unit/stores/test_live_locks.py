"""Opening a database once more never takes the locks of the connections this process has open to it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kdskills.app.operations.machine import UpgradeInput, upgrade_database
from kdskills.app.settings import Settings
from kdskills.app.tokens import Tokens
from kdskills.builtin.stores.sql import SqlStore
from kdskills.jobs.queue import Work
from kdskills.remote.journal import SqlJournal
from kdskills.storage.database import Database

PROBE = "import fcntl,sys; f=open(sys.argv[1],'r+b'); fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002)"
"""Takes the bytes every connection to a live write-ahead log holds shared; another process can, once they were dropped."""

OPENERS: dict[str, Callable[[str, Path], object]] = {
    "journal": lambda url, _state: SqlJournal(url),
    "work": Work,
    "sessions": lambda url, _state: SqlStore(url),
    "service": lambda url, _state: Tokens(Database(url)),
    "upgrade": lambda url, state: upgrade_database(Settings(database_url=url, state_dir=state), UpgradeInput()),
}


@pytest.mark.parametrize("opener", OPENERS)
def test_opening_again_keeps_the_locks(opener: str, tmp_path: Path) -> None:
    """While one connection lives no other process can take the file for a left one, whatever else this process opens."""
    file = tmp_path / "live.db"
    url = f"sqlite:///{file}"
    first = Database(url)
    first.ask(
        lambda link: link.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar()
    )  # stays open in the pool
    opened = OPENERS[opener](url, tmp_path)
    taken = subprocess.run([sys.executable, "-c", PROBE, str(file)], check=False, capture_output=True, text=True)
    assert (taken.returncode, "BlockingIOError" in taken.stderr) == (1, True), taken.stderr
    for owner in (opened, first.engine):
        getattr(owner, "close", getattr(owner, "dispose", lambda: None))()
