"""Lets workers that share a journal release threads for each other."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kdskills.remote.catalog.store import CatalogRecord, CatalogRecords
from kdskills.remote.journal.sql import JournalUnavailable
from kdskills.remote.ports import AppServerError, AppServerGone, WaitTimeoutError

if TYPE_CHECKING:
    from kdskills.remote.client.server import AppServer

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
        await self._mark(session_id, "releasing")
        try:
            yield
        finally:
            await self._mark(session_id, "applied")

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

    async def _mark(self, session_id: str, word: str) -> None:
        def change(record: CatalogRecord) -> CatalogRecord:
            return replace(record, release="releasing" if word == "releasing" else "applied", release_by=self._owner)

        await self._records.update(session_id, change)
