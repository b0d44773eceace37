"""Opening the place where work is kept: the state folder, and the database with the queue in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.jobs.attempts import Attempts
from kdskills.jobs.database import Database
from kdskills.jobs.folder import state_folder
from kdskills.jobs.migrate import upgrade
from kdskills.jobs.queue import WorkQueue
from kdskills.jobs.records import WorkRecords
from kdskills.jobs.room import telling_full_disk
from kdskills.jobs.roster import Roster
from kdskills.jobs.settings import JobsSettings
from kdskills.jobs.tables import WorkTables
from kdskills.skills.private_files import write_private

if TYPE_CHECKING:
    from kdskills.jobs.attempts import Starter

DATABASE_LABEL: Final = "the database of background work"


class Work:
    """What clients and workers share: blocking, opened once per process and place.

    Args:
        url: `sqlite:///path` or `postgresql://…`.
        state_dir: Folder of runs and session files of this host; made when it is not there.
        settings: Intervals and limits.
        starter: Starts attempts; None for clients, which only find them.

    Raises:
        MissingExtra: The extra `jobs` is not installed.
        DatabaseUnavailable: The database does not answer, or the folder cannot be made.
    """

    def __init__(
        self, url: str, state_dir: Path, settings: JobsSettings | None = None, *, starter: Starter | None = None
    ) -> None:
        self.url = url
        self.state_dir = state_dir
        self.settings = settings or JobsSettings()
        state_folder(state_dir)
        self.host = host_id(state_dir)
        self.tables = WorkTables()
        self.database = Database(url, label=DATABASE_LABEL)
        self.records = WorkRecords(self.tables, self.database.dialect)
        self.attempts = Attempts(state_dir, starter)
        upgrade(self.database, "work")
        self.roster = Roster(self)
        self.queue = WorkQueue(
            self.records,
            self.roster,
            self.host,
            pooled=self.pooled,
            global_concurrency=self.settings.global_concurrency,
        )

    @property
    def pooled(self) -> bool:
        """Whether work is for any host of the pool; never with SQLite, whose file has one host."""
        if self.database.dialect == "sqlite":
            return False
        return self.settings.pool is not False

    def close(self) -> None:
        """Close every connection; blocks."""
        self.database.close()


def host_id(state_dir: Path) -> str:
    """Return the id of the host whose disk *state_dir* is on: random, made once, as long-lived as the disk.

    Raises:
        StorageFull: There is no room to keep it.
    """
    path = state_dir / "host"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    part = state_dir / f".host.{os.getpid()}.{threading.get_ident()}"
    try:
        with telling_full_disk():
            write_private(part, secrets.token_hex(8) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(part, path)  # the first of several at once wins
    finally:
        part.unlink(missing_ok=True)
    return path.read_text().strip()


async def open_work(
    url: str, state_dir: Path, settings: JobsSettings | None = None, *, starter: Starter | None = None
) -> Work:
    """As `Work`, without blocking the event loop."""
    return await asyncio.to_thread(Work, url, state_dir, settings, starter=starter)
