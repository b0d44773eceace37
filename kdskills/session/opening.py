"""Opening, listing and closing sessions."""

from __future__ import annotations

from collections.abc import Sequence

from kdskills.session.codes import invalid
from kdskills.session.config import config_invalid
from kdskills.session.core import Call, Core, checked_id, session_not_found, store_errors
from kdskills.session.loading import load
from kdskills.session.scope import NO_TURN
from kdskills.session.state import SessionHead, SessionRecord


async def open_session(
    core: Core, session_id: str | None, consumer: str | None, max_active: int | None, initial: Sequence[str]
) -> SessionRecord:
    """Open a session with *initial* skills loaded, or not at all."""
    if max_active is not None and max_active < 1:
        raise config_invalid("max_active must be at least 1")
    new_id = checked_id(session_id)
    now = core.config.clock()
    cap = max_active if max_active is not None else core.config.max_active
    record = SessionRecord(new_id, consumer or core.config.consumer, 1, now, now, cap)
    core.source.gate(record.consumer)  # a frozen view refuses other consumers before anything exists
    await core.record_expired(new_id)
    await core.create(record)
    if initial:
        try:
            await load(core, Call(new_id, NO_TURN), initial, "replace", "code")
        except BaseException:  # raised again: no session stays without its first skills
            await close(core, new_id)
            raise
    return record


async def close(core: Core, session_id: str) -> bool:
    """Close a session; loads on their way end with `session_not_found`."""
    core.tickets.session_closed(session_id, session_not_found(session_id))
    core.drop(session_id)
    with store_errors():
        return await core.store.delete(session_id)


async def list_sessions(core: Core, consumer: str | None, limit: int, after: str | None) -> list[SessionHead]:
    """Return up to *limit* heads sorted by id; expired sessions are passed over."""
    if limit < 1:
        raise invalid("limit must be at least 1", ("/limit", "must be at least 1"))
    oldest = core.config.clock() - core.config.idle_ttl
    heads: list[SessionHead] = []
    while len(heads) < limit:
        missing = limit - len(heads)
        with store_errors():
            page = await core.store.page(consumer=consumer, after=after, limit=missing)
        heads += [head for head in page if head.touched_at >= oldest]
        if len(page) < missing:
            break
        after = page[-1].session_id
    return heads
