"""The keys of calls, and the life of a call as a table; both journals read their rules here.

Keys are strong ones for good, weak ones for the life of a facade, or none.

::

    (new) -claim-> claimed -start-> running -answer-> done
                   claimed -answer-> done            refused before it ran: unknown skill, bad arguments
                   claimed -deadline-> overdue       still in the queue
                   claimed -take-> claimed           its owner is dead; nothing ran
                                    running -deadline-> overdue
                                    running -rerun-> claimed    its owner is dead, the skill is idempotent
                                    running -lose-> unknown     its owner is dead, it is not

What is answered stays answered: an answer after `overdue` or `unknown` moves nothing and is kept as the late one.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kdskills.remote.ports import CallIdentity, CallState, JournalRow

Event = Literal["claim", "start", "answer", "deadline", "take", "rerun", "lose"]

MOVES: Final[dict[tuple[CallState | None, Event], CallState]] = {
    (None, "claim"): "claimed",
    ("claimed", "start"): "running",
    ("claimed", "answer"): "done",
    ("claimed", "deadline"): "overdue",
    ("claimed", "take"): "claimed",
    ("running", "answer"): "done",
    ("running", "deadline"): "overdue",
    ("running", "rerun"): "claimed",
    ("running", "lose"): "unknown",
}

ANSWERED: Final[frozenset[CallState]] = frozenset({"done", "overdue", "unknown"})
"""States whose rows hold the answer that was, or will be, given."""

KEEPS_LATE: Final[frozenset[CallState]] = frozenset({"overdue", "unknown"})
"""States in which another answer is kept as the late one."""

NEEDS_DEAD_OWNER: Final[frozenset[Event]] = frozenset({"take", "rerun"})
"""Moves allowed only when the owner's lease has run out."""


def after(state: CallState | None, event: Event) -> CallState | None:
    """Return the state *event* leads to, or None when it changes nothing there."""
    return MOVES.get((state, event))


def sources(event: Event) -> tuple[CallState, ...]:
    """Return the states *event* may move, sorted."""
    return tuple(sorted(state for state, name in MOVES if name == event and state is not None))


def takeover(row: JournalRow, *, idempotent: bool) -> Event | None:
    """Return how a row of another owner may be claimed, or None while it may not.

    Args:
        row: The row as it was read.
        idempotent: Whether the skill of the one who asks may run twice; the row must say so, too.
    """
    if row.alive:
        return None
    if row.state == "claimed":
        return "take"
    return "rerun" if row.state == "running" and row.idempotent and idempotent else None


IDENTIFYING: Final = ("session_id", "thread_id", "turn_id", "call_id", "namespace", "tool")
"""What a row keeps of a call's identity, under the identity's own names."""

WEAK_PER_SESSION: Final = 4096
"""Weak identities remembered per session; the oldest go first."""


def arguments_digest(arguments: Any) -> str:
    """Return SHA-256, in hex, of arguments as canonical JSON: keys sorted, no spaces, ASCII.

    Values that are no JSON, which only a client in this process can hand over, count by their `repr`.
    """
    try:
        text = json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=repr)
    except (TypeError, ValueError, RecursionError):  # keys of several kinds, or a value inside itself
        text = f"repr:{arguments!r}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def strong_key(identity: CallIdentity) -> str | None:
    """Return the key of a call whose thread, turn and call are known; None for any other.

    It is SHA-256 of `[thread, turn, call, namespace, tool, arguments hash]`; request ids come back, so none is in it.
    """
    if not identity.strong:
        return None
    call = [identity.thread_id, identity.turn_id, identity.call_id]
    parts = [*call, identity.namespace, identity.tool, identity.arguments_sha256]
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()


@dataclass(slots=True)
class _WeakKey:
    key: str
    call_id: str | None


@dataclass(slots=True)
class _SessionKeys:
    """The weak identities of one session: newest last."""

    by_name: dict[tuple[str | None, ...], list[_WeakKey]] = field(default_factory=dict)
    order: deque[tuple[str | None, ...]] = field(default_factory=deque)


class WeakIdentities:
    """Gives keys to calls known only by `[session, facade epoch, request id, tool, arguments hash, call id]`.

    A call id that is absent, there or here, matches any; once known it is kept, so that a later call under the same
    request id with another call id is another call. Nothing of this outlives the process: a request id does not either.
    """

    def __init__(self, limit: int = WEAK_PER_SESSION) -> None:
        self._limit = limit
        self._sessions: dict[str, _SessionKeys] = {}
        self._lock = threading.Lock()

    def key(self, identity: CallIdentity) -> str | None:
        """Return the key of this call, a new one when it was not seen before; None without a request id."""
        if identity.request_id is None:
            return None
        name = (identity.epoch, identity.request_id, identity.namespace, identity.tool, identity.arguments_sha256)
        with self._lock:
            session = self._sessions.setdefault(identity.session_id, _SessionKeys())
            for weak_key in reversed(session.by_name.get(name, [])):
                if weak_key.call_id is None or identity.call_id is None or weak_key.call_id == identity.call_id:
                    weak_key.call_id = weak_key.call_id or identity.call_id
                    return weak_key.key
            new_key = _WeakKey(f"weak-{uuid.uuid4().hex}", identity.call_id)
            session.by_name.setdefault(name, []).append(new_key)
            session.order.append(name)
            if len(session.order) > self._limit:
                oldest = session.order.popleft()
                del session.by_name[oldest][0]
                if not session.by_name[oldest]:
                    del session.by_name[oldest]
            return new_key.key

    def forget(self, session_id: str) -> None:
        """Drop what is known of a session."""
        with self._lock:
            self._sessions.pop(session_id, None)
