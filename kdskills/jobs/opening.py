"""Opening the place where work is kept: the state folder, the database and the queue in it (spec work §3)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.jobs.attempts import Attempts
from kdskills.jobs.database import Database, close_engine, speaking, upsert
from kdskills.jobs.folder import state_folder
from kdskills.jobs.migrate import upgrade
from kdskills.jobs.queues import Queues, migrate_queue, open_queue_engine, version
from kdskills.jobs.records import Records
from kdskills.jobs.settings import JobsSettings
from kdskills.jobs.tables import WorkTables
from kdskills.skills.private_files import open_private, write_private

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.attempts import Starter

QUEUE_LOCK: Final = 2_037_591
"""Number of the advisory lock under which the queue's tables are made."""
WHAT: Final = "the database of background work"
_QUEUE_MARK: Final = "queue"
_PAUSE_S: Final = 0.05


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
        wanted = version()
        self.url = url
        self.state_dir = state_dir
        self.settings = settings or JobsSettings()
        state_folder(state_dir)
        self.host = host_id(state_dir)
        self.tables = WorkTables()
        self.database = Database(url, what=WHAT)
        self.records = Records(self.tables, self.database.dialect)
        self.attempts = Attempts(state_dir, starter)
        self.queue_engine: sa.Engine = open_queue_engine(url)
        self._prepare(wanted)
        self.queues = Queues(self.queue_engine)

    @property
    def pooled(self) -> bool:
        """Whether work is for any host of the pool; never with SQLite, whose file has one host."""
        if self.database.dialect == "sqlite":
            return False
        return self.settings.pool is not False

    def close(self) -> None:
        """Close every connection; blocks."""
        self.queues.close()
        close_engine(self.queue_engine)
        self.database.close()

    def _prepare(self, wanted: str) -> None:
        """Make or upgrade the tables, the queue's too; costs one read when they are up to date."""
        upgrade(self.database, "work")
        meta = self.tables.meta

        def mark(link: sa.Connection) -> str | None:
            return link.execute(
                meta.select().with_only_columns(meta.c.value).where(meta.c.name == _QUEUE_MARK)
            ).scalar()

        if self.database.ask(mark) == wanted:
            return
        with speaking(WHAT), _one_at_a_time(self.database, self.state_dir):
            if self.database.ask(mark) == wanted:
                return
            migrate_queue(self.queue_engine)

            def note(link: sa.Connection) -> None:
                new = upsert(link.dialect.name, meta).values(name=_QUEUE_MARK, value=wanted)
                link.execute(new.on_conflict_do_update(index_elements=["name"], set_={"value": wanted}))

            self.database.change(note)


def host_id(state_dir: Path) -> str:
    """Return the id of the host whose disk *state_dir* is on: random, made once, as long-lived as the disk."""
    path = state_dir / "host"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    part = state_dir / f".host.{os.getpid()}.{threading.get_ident()}"
    write_private(part, secrets.token_hex(8) + "\n")
    try:
        with contextlib.suppress(FileExistsError):
            os.link(part, path)  # the first of several at once wins
    finally:
        part.unlink()
    return path.read_text().strip()


@contextlib.contextmanager
def _one_at_a_time(database: Database, state_dir: Path) -> Iterator[None]:
    """Hold a lock that everybody opening this database takes before the queue's tables are made."""
    import fcntl

    if database.dialect == "postgresql":
        # no transaction and no statement may stay open meanwhile: an index that is built concurrently waits for them all
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as link:
            while not link.exec_driver_sql(f"SELECT pg_try_advisory_lock({QUEUE_LOCK})").scalar():
                time.sleep(_PAUSE_S)
            try:
                yield
            finally:
                link.exec_driver_sql(f"SELECT pg_advisory_unlock({QUEUE_LOCK})")
        return
    with open_private(state_dir / "schema.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


async def open_work(
    url: str, state_dir: Path, settings: JobsSettings | None = None, *, starter: Starter | None = None
) -> Work:
    """As `Work`, without blocking the event loop."""
    return await asyncio.to_thread(Work, url, state_dir, settings, starter=starter)
