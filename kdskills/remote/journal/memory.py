"""`MemoryJournal`: the calls of one process, for clients without a backend and for weak identities."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kdskills.remote.journal.calls import ANSWERED, IDENTIFYING, KEEPS_LATE, Event, after, takeover
from kdskills.remote.ports import CallClaim, CallIdentity, JournalRow, StoredAnswer

KEPT_PER_SESSION: Final = 4096
"""Calls remembered per session; the oldest answered ones go first."""


class MemoryJournal:
    """Keeps calls in this process; safe from any thread.

    Args:
        kept: Calls remembered per session.
        clock: Gives seconds since 1970.
    """

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
                state = after(row.state, event) or row.state
                row = replace(row, state=state, owner=owner, lease_until=now + lease_s, alive=True)
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
            row, moved = self._rows.get(key), self._move(key, owner, "answer", answer)
            waits = row is not None and row.owner == owner and row.state in KEEPS_LATE and row.late is None
            if row is not None and waits and not moved:
                self._rows[key] = replace(row, late=answer)
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
            for key in keys:
                row = self._rows.get(key)
                if row is not None and row.state in ANSWERED:
                    self._rows[key] = replace(row, told=True)
                    if row.late is not None:
                        self._late_told.add(key)

    def settle(self, session_id: str, turn_id: str) -> None:
        """As `CallJournal.settle`."""
        with self._lock:
            for key in self._sessions.get(session_id, ()):
                row = self._rows[key]
                if row.turn_id == turn_id and row.state in ANSWERED:
                    self._rows[key] = replace(row, told=True)

    def forget(self, session_id: str) -> None:
        """Drop the answered calls of a session."""
        with self._lock:
            self._drop([k for k in self._sessions.get(session_id, ()) if self._rows[k].state in ANSWERED], session_id)

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
            state = None if row is None or row.owner != owner else after(row.state, event)
            if row is None or state is None:
                return False
            self._rows[key] = replace(row, state=state, answer=answer or row.answer)
            return True
