"""The stored record of each thread's catalog, in memory or in the journal's database.

Workers that share a journal's database share the records, and release threads for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from kdskills.errors import Conflict
from kdskills.remote.journal.sql import JournalUnavailable
from kdskills.remote.ports import AppServerError, AppServerGone, WaitTimeoutError
from kdskills.storage.database import upsert

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.remote.client.server import AppServer


Release = Literal["", "releasing", "applied"]


@dataclass(frozen=True, slots=True)
class CatalogRecord:
    """One thread's catalog.

    Attributes:
        session_id: The thread.
        strategy: How its catalog reaches the model; empty while none was needed.
        digest: Digest of the catalog in force; empty if none was ever pushed.
        tools: Digest of each tool in force by qualified name.
        context_digest: Digest of the catalog text the model has seen last; empty for none.
        release: `releasing` while a worker asks the others to release the thread, `applied` when they may resume it.
        release_by: The worker that asked.
        version: Counts changes; a record is written only over the version it was read at.
    """

    session_id: str
    strategy: str = ""
    digest: str = ""
    tools: dict[str, str] = field(default_factory=dict)
    context_digest: str = ""
    release: Release = ""
    release_by: str = ""
    version: int = 0


class MemoryCatalogStore:
    """Records of this process; as those of `SqlCatalogStore`, its methods are called from threads.

    Attributes:
        shared: Whether other workers see the same records.
    """

    shared = False

    def __init__(self) -> None:
        self._records: dict[str, CatalogRecord] = {}
        self._lock = threading.Lock()

    def get(self, session_id: str) -> CatalogRecord | None:
        """Return a thread's record."""
        return self._records.get(session_id)

    def update(self, session_id: str, change: Callable[[CatalogRecord], CatalogRecord]) -> CatalogRecord:
        """Apply a change to the newest version and return what was written."""
        with self._lock:
            old = self._records.get(session_id) or CatalogRecord(session_id)
            new = replace(change(old), version=old.version + 1)
            self._records[session_id] = new
            return new

    def forget(self, session_id: str) -> None:
        """Drop a thread's record."""
        with self._lock:
            self._records.pop(session_id, None)

    def releases(self, session_ids: Sequence[str]) -> list[CatalogRecord]:
        """Return the records of those threads that are being released, or were."""
        return [record for key in session_ids if (record := self._records.get(key)) is not None and record.release]


_TRIES = 20


class SqlCatalogStore:
    """Records in table `remote_catalogs`.

    Args:
        engine: The journal's; its schema is up to date.
    """

    shared = True

    def __init__(self, engine: sa.Engine) -> None:
        from kdskills.remote.journal.statements import catalogs

        self._engine = engine
        self._table = catalogs

    def get(self, session_id: str) -> CatalogRecord | None:
        """Return a thread's record."""
        records = self._find(self._table.c.session_id == session_id)
        return records[0] if records else None

    def update(self, session_id: str, change: Callable[[CatalogRecord], CatalogRecord]) -> CatalogRecord:
        """Apply a change to the newest version by compare-and-swap.

        Raises:
            Conflict: Other workers changed the record at every attempt.
        """
        columns = self._table.c
        for _ in range(_TRIES):
            old = self.get(session_id) or CatalogRecord(session_id)
            new = replace(change(old), session_id=session_id, version=old.version + 1)
            facts = {"tools": json.dumps(new.tools, sort_keys=True), "updated_at": int(time.time() * 1_000_000)}
            if old.version:
                same_version = (columns.session_id == session_id, columns.version == old.version)
                write: Any = self._table.update().where(*same_version)
            else:
                write = upsert(self._engine.dialect.name, self._table).on_conflict_do_nothing()
            with self._transaction() as link:
                if link.execute(write.values(**asdict(new) | facts).returning(columns.version)).first() is not None:
                    return new
        raise Conflict(f"other workers keep changing the catalog record of {session_id}", session_id=session_id)

    def forget(self, session_id: str) -> None:
        """Drop a thread's record."""
        with self._transaction() as link:
            link.execute(self._table.delete().where(self._table.c.session_id == session_id))

    def releases(self, session_ids: Sequence[str]) -> list[CatalogRecord]:
        """Return those of these threads that are being released, or were."""
        return self._find(self._table.c.session_id.in_(session_ids), self._table.c.release != "") if session_ids else []

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with self._engine.begin() as link:
                yield link
        except SQLAlchemyError as problem:
            raise JournalUnavailable(f"the catalog records do not answer: {type(problem).__name__}") from problem

    def _find(self, *conditions: Any) -> list[CatalogRecord]:
        columns = [self._table.c[name.name] for name in fields(CatalogRecord)]
        with self._transaction() as link:
            rows = link.execute(self._table.select().with_only_columns(*columns).where(*conditions)).mappings().all()
        return [CatalogRecord(**{**row, "tools": json.loads(row["tools"])}) for row in rows]


CatalogStore = MemoryCatalogStore | SqlCatalogStore


class CatalogRecords:
    """A store's records for coroutines: every access runs on a thread.

    Args:
        store: The store.
    """

    def __init__(self, store: CatalogStore) -> None:
        self._store = store
        self.shared = store.shared

    async def get(self, session_id: str) -> CatalogRecord:
        """Return a thread's record, an empty one when none is stored."""
        return await asyncio.to_thread(self._store.get, session_id) or CatalogRecord(session_id)

    async def update(self, session_id: str, change: Callable[[CatalogRecord], CatalogRecord]) -> CatalogRecord:
        """Apply a change."""
        return await asyncio.to_thread(self._store.update, session_id, change)

    async def forget(self, session_id: str) -> None:
        """Drop a thread's record."""
        await asyncio.to_thread(self._store.forget, session_id)

    async def releases(self, session_ids: Sequence[str]) -> list[CatalogRecord]:
        """Return the records of those threads that are being released, or were."""
        return await asyncio.to_thread(self._store.releases, session_ids)


POLL_SECONDS = 0.25
FREE_SECONDS = 30.0
"""How long a thread stays released for the worker that requested it; a worker that takes longer counts as dead."""


class Sharing:
    """One worker's part: it requests the release of threads, and releases threads that other workers request.

    Args:
        server: The server.
        records: Carries the requests; records in memory reach no other worker.
    """

    def __init__(self, server: AppServer, records: CatalogRecords) -> None:
        self._server = server
        self._records = records
        self._owner = secrets.token_hex(6)
        self._released: set[str] = set()
        self._request_times: dict[str, tuple[int, float]] = {}

    async def watch(self) -> None:
        """Release idle threads that others request, and resume them afterwards; runs until the client closes."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            # a failed look is repeated after the next pause
            with contextlib.suppress(AppServerGone, AppServerError, WaitTimeoutError, JournalUnavailable):
                await self._look()

    async def free(self, session_id: str) -> None:
        """Wait until a thread that this worker released is resumed, for `FREE_SECONDS` at most."""
        threads = self._server.threads
        await threads.until(lambda: session_id not in self._released or self._server.disconnected, FREE_SECONDS)

    @contextlib.asynccontextmanager
    async def releasing(self, session_id: str) -> AsyncIterator[None]:
        """Have the other workers release a thread for the body of the `with`."""
        if not self._records.shared:
            yield
            return

        def marked(word: Release) -> Awaitable[CatalogRecord]:
            return self._records.update(session_id, lambda old: replace(old, release=word, release_by=self._owner))

        await marked("releasing")
        try:
            yield
        finally:
            await marked("applied")

    async def _look(self) -> None:
        threads = [thread for thread in self._server.threads.all() if thread.subscribed or thread.id in self._released]
        if not threads or self._server.disconnected:
            return
        records = await self._records.releases([thread.id for thread in threads])
        requested_ids = {record.session_id for record in records if self._asks(record)}
        for thread in threads:
            if thread.id in requested_ids and thread.subscribed and thread.active_turn is None:
                self._released.add(thread.id)
                await self._server.request("thread/unsubscribe", threadId=thread.id)
                thread.subscribed = False
            elif thread.id in self._released and thread.id not in requested_ids:
                await self._server.resume(thread.id)
                self._released.discard(thread.id)
                self._server.threads.changed()

    def _asks(self, record: CatalogRecord) -> bool:
        """Whether another worker requests the thread; one that did so long ago and did not finish counts as dead."""
        if record.release != "releasing" or record.release_by == self._owner:
            return False
        version, since = self._request_times.get(record.session_id, (0, 0.0))
        if version != record.version:
            since = time.monotonic()
            self._request_times[record.session_id] = (record.version, since)
        return time.monotonic() - since < FREE_SECONDS
