"""What wakes a worker: PostgreSQL's notifications, or a change of SQLite's file. What is missed costs one poll."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kdskills.jobs.queue import CHANNEL
from kdskills.jobs.worker.desk import LOG

if TYPE_CHECKING:
    from kdskills.jobs.database import Database

_AGAIN_S: Final = 2.0
_LISTEN_S: Final = 1.0
CHANGED: Final = "changed"
"""The word for a file that changed: anything may have happened."""


class QueueWatch:
    """Calls back with each word that reaches the queue, from a thread of its own.

    Args:
        database: Where the queue is.
        tell: Called with `queue`, `cancel ID`, `job ID`, or `CHANGED` when anything may have happened; in another thread.
        look_s: Seconds between two looks at SQLite's counter of changes.
    """

    def __init__(self, database: Database, tell: Callable[[str], None], look_s: float) -> None:
        self._database = database
        self._tell = tell
        self._look_s = look_s
        self._over = threading.Event()
        act = self._listen if database.dialect == "postgresql" else self._watch
        self._thread = threading.Thread(target=self._keep, args=(act,), name="queue-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching; returns without waiting for the thread."""
        self._over.set()

    def _keep(self, act: Callable[[], None]) -> None:
        """Watch for good: what breaks is begun again, and whatever was missed meanwhile is told as one change."""
        from sqlalchemy.exc import SQLAlchemyError

        failures: tuple[type[Exception], ...] = (SQLAlchemyError, sqlite3.Error, OSError)
        if self._database.dialect == "postgresql":
            from psycopg import Error

            failures = (*failures, Error)
        while not self._over.is_set():
            try:
                act()
            except failures as error:
                LOG.warning("the queue is looked at from time to time only: %s", type(error).__name__)
                self._over.wait(_AGAIN_S)

    def _listen(self) -> None:
        """Pass PostgreSQL's notifications on."""
        connection = self._database.engine.raw_connection()
        try:
            driver: Any = connection.driver_connection
            connection.detach()
            driver.autocommit = True
            driver.execute(f"LISTEN {CHANNEL}")
            self._tell(CHANGED)
            while not self._over.is_set():
                for notice in driver.notifies(timeout=_LISTEN_S):
                    self._tell(notice.payload)
        finally:
            connection.close()

    def _watch(self) -> None:
        """Tell of each commit to SQLite's file, which a counter in its header tells without a question to the tables."""
        connection = self._database.engine.raw_connection()
        driver: Any = connection.driver_connection
        connection.detach()
        try:
            before = None
            while not self._over.wait(self._look_s):
                version = driver.execute("PRAGMA data_version").fetchone()[0]
                if version != before:
                    before = version
                    self._tell(CHANGED)
        finally:
            connection.close()
