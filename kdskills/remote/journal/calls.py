"""The keys of calls, the moves of a call as a table, which both journals read their rules from, and the journal in memory.

What is answered stays answered: an answer after `overdue` or `unknown` moves nothing and is kept as the late one.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from kdskills.remote.ports import CallClaim, CallIdentity, CallState, JournalRow, StoredAnswer

Event = Literal["claim", "start", "answer", "deadline", "take", "rerun", "lose"]

MOVES: Final[dict[tuple[CallState | None, Event], CallState]] = {
    (None, "claim"): "claimed",
    ("claimed", "start"): "running",
    ("claimed", "answer"): "done",  # refused before it ran: unknown skill, bad arguments
    ("claimed", "deadline"): "overdue",  # still in the queue
    ("claimed", "take"): "claimed",  # its owner is dead; nothing ran
    ("running", "answer"): "done",
    ("running", "deadline"): "overdue",
    ("running", "rerun"): "claimed",  # its owner is dead, the skill is idempotent
    ("running", "lose"): "unknown",  # its owner is dead, it is not
}
"""The state an event leads to; an event that is not listed for a state changes nothing there."""

ANSWERED: Final[frozenset[CallState]] = frozenset({"done", "overdue", "unknown"})
"""States whose rows hold the answer that was, or will be, given."""

KEEPS_LATE: Final[frozenset[CallState]] = frozenset({"overdue", "unknown"})
"""States in which another answer is kept as the late one."""

NEEDS_DEAD_OWNER: Final[frozenset[Event]] = frozenset({"take", "rerun"})
"""Moves allowed only when the owner's lease has run out."""


def takeover(row: JournalRow, *, idempotent: bool) -> Event | None:
    """Return how a row of another owner may be claimed, or None while it may not; both must say *idempotent* for a re-run."""
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
    name: tuple[str | None, ...]
    call_id: str | None


class WeakIdentities:
    """Gives keys to calls known only by `[session, facade epoch, request id, tool, arguments hash, call id]`.

    A call id that is absent, there or here, matches any; once known it is kept, so that a later call under the same
    request id with another call id is another call. Nothing of this outlives the process: a request id does not either.
    """

    def __init__(self, limit: int = WEAK_PER_SESSION) -> None:
        self._limit = limit
        self._sessions: dict[str, deque[_WeakKey]] = {}
        self._lock = threading.Lock()

    def key(self, identity: CallIdentity) -> str | None:
        """Return the key of this call, a new one when it was not seen before; None without a request id."""
        if identity.request_id is None:
            return None
        name = (identity.epoch, identity.request_id, identity.namespace, identity.tool, identity.arguments_sha256)
        with self._lock:
            keys = self._sessions.setdefault(identity.session_id, deque(maxlen=self._limit))
            for weak in reversed(keys):
                if weak.name == name and (identity.call_id is None or weak.call_id in (None, identity.call_id)):
                    weak.call_id = weak.call_id or identity.call_id
                    return weak.key
            keys.append(_WeakKey(f"weak-{uuid.uuid4().hex}", name, identity.call_id))
            return keys[-1].key

    def forget(self, session_id: str) -> None:
        """Drop what is known of a session."""
        with self._lock:
            self._sessions.pop(session_id, None)


KEPT_PER_SESSION: Final = 4096
"""Calls remembered per session; the oldest answered ones go first."""


class MemoryJournal:
    """Keeps calls in this process, *kept* of them per session; safe from any thread."""

    shared = False

    def __init__(self, *, kept: int = KEPT_PER_SESSION, clock: Callable[[], float] = time.time) -> None:
        self._kept = kept
        self._clock = clock
        self._rows: dict[str, JournalRow] = {}
        self._sessions: dict[str, dict[str, None]] = {}
        self._late_told: set[str] = set()
        self._lock = threading.RLock()

    def claim(self, key: str, identity: CallIdentity, owner: str, lease_s: float, *, idempotent: bool) -> CallClaim:
        """As `CallJournal.claim`."""
        with self._lock:
            now, row = self._clock(), self.get(key)
            if row is None:
                named = {name: getattr(identity, name) for name in IDENTIFYING}
                row = JournalRow(key, "claimed", owner, idempotent, now + lease_s, alive=True, created_at=now, **named)
                self._sessions.setdefault(row.session_id, {})[key] = None
            elif (event := takeover(row, idempotent=idempotent)) is not None:
                row = replace(row, state=MOVES[row.state, event], owner=owner, lease_until=now + lease_s, alive=True)
            else:
                return CallClaim(row, mine=False)
            self._rows[key] = row
            keys = self._sessions[row.session_id]
            if len(keys) > self._kept:
                self._drop([k for k in keys if self._rows[k].state in ANSWERED][:1], row.session_id)
            return CallClaim(row, mine=True)

    def start(self, key: str, owner: str) -> bool:
        """As `CallJournal.start`."""
        return self._move(key, owner, "start")

    def finish(self, key: str, owner: str, answer: StoredAnswer) -> JournalRow | None:
        """As `CallJournal.finish`."""
        with self._lock:
            row = self._rows.get(key)
            if row is not None and row.owner == owner and row.state in KEEPS_LATE and row.late is None:
                self._rows[key] = replace(row, late=answer)
            else:
                self._move(key, owner, "answer", answer)
            return self.get(key)

    def overdue(self, key: str, owner: str, answer: StoredAnswer) -> JournalRow | None:
        """As `CallJournal.overdue`."""
        with self._lock:
            self._move(key, owner, "deadline", answer)
            return self.get(key)

    def lose(self, key: str, owner: str, answer: StoredAnswer, *, dead: bool = True) -> JournalRow | None:
        """As `CallJournal.lose`."""
        with self._lock:
            row = self.get(key)
            if row is not None and not (dead and row.alive):
                self._move(key, owner, "lose", answer)
            return self.get(key)

    def get(self, key: str) -> JournalRow | None:
        """As `CallJournal.get`."""
        row = self._rows.get(key)
        return None if row is None else replace(row, alive=row.lease_until > self._clock())

    def renew(self, keys: Mapping[str, str], lease_s: float) -> None:
        """As `CallJournal.renew`."""
        with self._lock:
            until = self._clock() + lease_s
            for key, owner in keys.items():
                row = self._rows.get(key)
                if row is not None and row.owner == owner and row.state not in ANSWERED:
                    self._rows[key] = replace(row, lease_until=until)

    def running(self, session_id: str) -> Sequence[JournalRow]:
        """As `CallJournal.running`."""
        return [row for row in self.calls(session_id) if row.state not in ANSWERED and row.alive]

    def calls(self, session_id: str, turn_id: str | None = None) -> Sequence[JournalRow]:
        """As `CallJournal.calls`."""
        with self._lock:
            rows = [self.get(key) for key in self._sessions.get(session_id, ())]
        return [row for row in rows if row is not None and turn_id in (None, row.turn_id)]

    def outcomes(self, session_id: str, turn_id: str | None = None) -> Sequence[JournalRow]:
        """As `CallJournal.outcomes`."""

        def untold(row: JournalRow) -> bool:
            if row.late is not None and row.key not in self._late_told:
                return True
            return not row.told if row.state in ANSWERED else row.state == "running" and not row.alive

        rows = self.calls(session_id)
        return [row for row in rows if (turn_id is None or row.turn_id != turn_id) and untold(row)]

    def tell(self, keys: Sequence[str]) -> None:
        """As `CallJournal.tell`."""
        with self._lock:
            rows = [row for key in keys if (row := self._rows.get(key)) is not None and row.state in ANSWERED]
            self._rows.update({row.key: replace(row, told=True) for row in rows})
            self._late_told.update(row.key for row in rows if row.late is not None)

    def settle(self, session_id: str, turn_id: str) -> None:
        """As `CallJournal.settle`."""
        with self._lock:
            rows = [row for row in self.calls(session_id, turn_id) if row.state in ANSWERED]
            self._rows.update({row.key: replace(row, told=True) for row in rows})

    def forget(self, session_id: str) -> None:
        """Drop the answered calls of a session."""
        with self._lock:
            self._drop([row.key for row in self.calls(session_id) if row.state in ANSWERED], session_id)

    def close(self) -> None:
        """Do nothing: a journal in memory has nothing to close."""

    def _drop(self, keys: Sequence[str], session_id: str) -> None:
        session_keys = self._sessions.get(session_id, {})
        for key in keys:
            del self._rows[key], session_keys[key]
            self._late_told.discard(key)
        if not session_keys:
            self._sessions.pop(session_id, None)

    def _move(self, key: str, owner: str, event: Event, answer: StoredAnswer | None = None) -> bool:
        with self._lock:
            row = self._rows.get(key)
            if row is None or row.owner != owner or (row.state, event) not in MOVES:
                return False
            self._rows[key] = replace(row, state=MOVES[row.state, event], answer=answer or row.answer)
            return True
