"""The context channel of a client's threads: what each model has seen of its catalog."""

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
    """What this process knows of one thread's channel."""

    offered: tuple[JsonObject, str] | None = None  # the context handed out last, and its digest
    compactions: int = 0  # compactions the context was last sent after
    lost: bool = False  # the context is gone from the history
    settling: asyncio.Task[None] | None = None  # what the ended turn leaves to be done before the next one


class ContextChannel:
    """Decides what the next message carries, and notes what was taken.

    Args:
        threads: The watched threads, whose histories may be compacted.
        records: Keeps the digest last sent.
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
        """Note that the server took a message with this `additionalContext`."""
        state = self._states[session_id]
        if state.offered is None or not isinstance(context, dict) or context.get(CONTEXT_KEY) != state.offered[0]:
            return
        digest, state.offered, state.lost = state.offered[1], None, False
        state.compactions = self._threads.get(session_id).compactions
        await self._records.update(session_id, lambda record: replace(record, context_digest=digest))

    def lost(self, session_id: str) -> None:
        """Note that turns were taken back: what they carried is gone from the history."""
        self._states[session_id].lost = True

    def settling(self, session_id: str, task: asyncio.Task[None]) -> None:
        """Note what must be done before the next message of a session."""
        self._states[session_id].settling = task

    async def settled(self, session_id: str) -> None:
        """Wait until what the ended turn left is done."""
        task = self._states[session_id].settling
        if task is not None and not task.done():
            await asyncio.wait({task})

    def forget(self, session_id: str) -> None:
        """Drop what is kept of a closed session."""
        self._states.pop(session_id, None)
