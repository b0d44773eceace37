"""What wakes a worker: PostgreSQL's notifications, or a change of SQLite's file. What is missed costs one poll.

Between two words nothing runs: the thread waits for the server's socket, or for the kernel to tell of a write to the file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sqlite3
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kdskills.jobs.database import DatabaseUnavailable
from kdskills.jobs.queue import CHANNEL
from kdskills.jobs.worker.context import LOG

if TYPE_CHECKING:
    from kdskills.jobs.database import Database

_AGAIN_S: Final = 2.0
_FIRST_LOOK_S: Final = 0.001
_IN_MODIFY: Final = 0x2
CHANGED: Final = "changed"
"""The word for a file that changed: anything may have happened."""


class QueueWatch:
    """Calls back with each word that reaches the queue, from a thread of its own.

    Args:
        database: Where the queue is.
        tell: Called with `queue`, `cancel ID`, `job ID`, or `CHANGED` when anything may have happened; in another thread.
        look_s: Least seconds between two commits to SQLite's file that are told.
    """

    def __init__(self, database: Database, tell: Callable[[str], None], look_s: float) -> None:
        self._database = database
        self._tell = tell
        self._look_s = look_s
        self._closing: int | None = None
        """Writing end of a pipe whose other end, the thread's own, is told of `close` by the end of this one."""

    def start(self) -> None:
        """Begin to watch."""
        ends, self._closing = os.pipe()
        act = self._listen if self._database.dialect == "postgresql" else self._watch
        threading.Thread(target=self._keep, args=(act, ends), name="queue-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching; returns without waiting for the thread."""
        closing, self._closing = self._closing, None
        if closing is not None:
            os.close(closing)

    def _keep(self, act: Callable[[int], None], closing: int) -> None:
        """Watch for good: what breaks is begun again, and whatever was missed meanwhile is told as one change."""
        from sqlalchemy.exc import SQLAlchemyError

        failures: tuple[type[Exception], ...] = (SQLAlchemyError, sqlite3.Error, OSError, DatabaseUnavailable)
        if self._database.dialect == "postgresql":
            from psycopg import Error

            failures = (*failures, Error)
        try:
            while _goes_on(closing, 0.0):
                try:
                    act(closing)
                except failures as error:
                    LOG.warning("the queue is looked at from time to time only: %s", type(error).__name__)
                    _goes_on(closing, _AGAIN_S)
        finally:
            os.close(closing)

    def _listen(self, closing: int) -> None:
        """Pass PostgreSQL's notifications on."""
        connection = self._database.engine.raw_connection()
        try:
            driver: Any = connection.driver_connection
            connection.detach()
            driver.autocommit = True
            driver.execute(f"LISTEN {CHANNEL}")
            self._tell(CHANGED)
            going = True
            while going:
                for notice in driver.notifies(timeout=0):
                    self._tell(notice.payload)
                going = _goes_on(closing, None, driver.fileno())
        finally:
            connection.close()

    def _watch(self, closing: int) -> None:
        """Tell of each commit to SQLite's file, which a counter in its header tells without a question to the tables."""
        connection = self._database.engine.raw_connection()
        driver: Any = connection.driver_connection
        connection.detach()
        with contextlib.ExitStack() as last:
            last.callback(connection.close)
            _version(driver)  # the file's journal is there from now on
            writes = _writes_to(f"{driver.execute('PRAGMA database_list').fetchone()[2]}-wal")
            if writes is not None:
                last.callback(os.close, writes)
            before = _version(driver)
            self._tell(CHANGED)
            while _goes_on(closing, self._look_s if writes is None else None, writes):
                if writes is not None:
                    os.read(writes, 65536)
                pause = _FIRST_LOOK_S  # a commit is written first and counts a little later
                while pause <= max(self._look_s, _FIRST_LOOK_S):
                    if not _goes_on(closing, pause):
                        return
                    version = _version(driver)
                    if version == before:
                        pause *= 2
                        continue
                    before, pause = version, self._look_s
                    self._tell(CHANGED)


def _goes_on(closing: int, seconds: float | None, readable: int | None = None) -> bool:
    """Wait for *seconds*, or without end, or until *readable* can be read; False once *closing* can be."""
    poller = select.poll()
    poller.register(closing, select.POLLIN)
    if readable is not None:
        poller.register(readable, select.POLLIN)
    ready = poller.poll(None if seconds is None else seconds * 1000)
    return all(fd != closing for fd, _ in ready)


def _version(driver: sqlite3.Connection) -> int:
    """Return the counter that changes with each commit of another connection."""
    version: int = driver.execute("PRAGMA data_version").fetchone()[0]
    return version


def _writes_to(path: str) -> int | None:
    """Return a descriptor that can be read once *path* was written to; None where the kernel tells of none.

    The file is not opened: closing it would take SQLite's locks on it away from this process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd >= 0 and libc.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) >= 0:
        return fd
    LOG.warning("writes to the queue's file are looked for all the time: %s", os.strerror(ctypes.get_errno()))
    if fd >= 0:
        os.close(fd)
    return None
