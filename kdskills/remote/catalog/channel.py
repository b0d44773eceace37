"""The context channel of a client's threads: which catalog text each model has received."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kdskills.remote.catalog.context import CONTEXT_KEY, additional_context, context_text
from kdskills.remote.catalog.digest import text_digest
from kdskills.remote.catalog.store import CatalogRecord, CatalogRecords
from kdskills.remote.ports import JsonObject

if TYPE_CHECKING:
    from kdskills.remote.client.threads import WatchedThreads


@dataclass(slots=True)
class _ChannelState:
    """The state of one thread's channel in this process."""

    offered: tuple[JsonObject, str] | None = None  # the context returned last by `next`, and its digest
    compactions: int = 0  # how often the history had been compacted when the context was sent
    lost: bool = False  # the context is gone from the history
    settling: asyncio.Task[None] | None = None  # work after the last turn that must end before the next message


class ContextChannel:
    """Decides which context the next message carries, and records which one the server accepted.

    Args:
        threads: The watched threads, whose histories may be compacted.
        records: Stores the digest of the text sent last.
    """

    def __init__(self, threads: WatchedThreads, records: CatalogRecords) -> None:
        self._threads = threads
        self._records = records
        self._states: defaultdict[str, _ChannelState] = defaultdict(_ChannelState)

    async def next(self, record: CatalogRecord, instruction_text: str) -> JsonObject:
        """Return keywords of the next message: `additional_context`, or nothing when the model has seen this text."""
        session_id = record.session_id
        state, digest = self._states[session_id], text_digest(instruction_text)
        lost = state.lost or self._threads.get(session_id).compactions != state.compactions
        unchanged = record.context_digest == digest
        if unchanged and not lost:
            return {}
        text = context_text(instruction_text, earlier=bool(record.context_digest) and not (lost and unchanged))
        if text is None:
            return {}
        context = additional_context(text)
        state.offered = (context[CONTEXT_KEY], digest)
        return {"additional_context": context}

    async def sent(self, session_id: str, context: object) -> None:
        """Record that the server accepted a message with this `additionalContext`."""
        state = self._states[session_id]
        if state.offered is None or not isinstance(context, dict) or context.get(CONTEXT_KEY) != state.offered[0]:
            return
        digest, state.offered, state.lost = state.offered[1], None, False
        state.compactions = self._threads.get(session_id).compactions
        await self._records.update(session_id, lambda record: replace(record, context_digest=digest))

    def lost(self, session_id: str) -> None:
        """Record that turns were rolled back: the context they carried is no longer in the history."""
        self._states[session_id].lost = True

    def settling(self, session_id: str, task: asyncio.Task[None]) -> None:
        """Remember a task that must end before the next message of a session."""
        self._states[session_id].settling = task

    async def settled(self, session_id: str) -> None:
        """Wait until the work after the last turn has ended."""
        task = self._states[session_id].settling
        if task is not None and not task.done():
            await asyncio.wait({task})

    def forget(self, session_id: str) -> None:
        """Delete the state of a closed session."""
        self._states.pop(session_id, None)
