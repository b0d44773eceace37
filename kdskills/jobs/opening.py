"""Opening the place where work is kept: the state folder, and the database with the queue in it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.jobs.attempts import Attempts
from kdskills.jobs.queue import WorkQueue
from kdskills.jobs.records import WorkRecords
from kdskills.jobs.roster import Roster
from kdskills.jobs.settings import JobsSettings
from kdskills.jobs.tables import WorkTables
from kdskills.storage.database import Database, upgrade
from kdskills.storage.folder import host_id, state_folder

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


async def open_work(
    url: str, state_dir: Path, settings: JobsSettings | None = None, *, starter: Starter | None = None
) -> Work:
    """As `Work`, without blocking the event loop."""
    return await asyncio.to_thread(Work, url, state_dir, settings, starter=starter)
