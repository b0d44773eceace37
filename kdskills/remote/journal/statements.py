"""The journal's tables and SQL, built once per journal: every call would pay for building it again."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from kdskills.remote.journal.calls import ANSWERED, IDENTIFYING, KEEPS_LATE, MOVES, NEEDS_DEAD_OWNER, Event
from kdskills.storage.database import columns, upsert

metadata: sa.MetaData = sa.MetaData()
"""Describes the tables; nothing is opened by reading it."""

calls: sa.Table = sa.Table(
    "remote_calls",
    metadata,
    sa.Column("key", sa.String(80), primary_key=True),
    sa.Column("session_id", sa.Text, nullable=False),
    *columns(sa.Text, "thread_id", "turn_id", "call_id", "namespace"),
    sa.Column("tool", sa.Text, nullable=False),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("idempotent", sa.Boolean, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("lease_until", sa.BigInteger, nullable=False),
    *columns(sa.Text, "response", "late_response"),
    *columns(sa.Boolean, "told", "late_told", nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    *columns(sa.BigInteger, "started_at", "answered_at", "late_at"),
    sa.Index("remote_calls_by_session", "session_id", "created_at"),
    sa.Index("remote_calls_by_age", "created_at"),
)

receipts: sa.Table = sa.Table(
    "remote_receipts",
    metadata,
    *columns(sa.String(200), "session_id", "turn_id", primary_key=True),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False, index=True),
)

catalogs: sa.Table = sa.Table(
    "remote_catalogs",
    metadata,
    sa.Column("session_id", sa.String(200), primary_key=True),
    *columns(sa.String(16), "strategy", "digest", "context_digest", "release", nullable=False),
    sa.Column("tools", sa.Text, nullable=False),
    sa.Column("release_by", sa.String(32), nullable=False),
    *columns(sa.BigInteger, "version", "updated_at", nullable=False),
)

MICRO: Final = 1_000_000
ANSWERED_STATES: Final = sorted(ANSWERED)


class Statements:
    """Statements whose values are bound as `b_…`; each returns the row after the change, or nothing.

    Args:
        dialect: `sqlite` binds this moment as `b_now`; `postgresql` uses its own clock.
    """

    def __init__(self, dialect: str) -> None:
        self.now: Any = sa.bindparam("b_now", type_=sa.BigInteger)
        if dialect == "postgresql":
            self.now = sa.cast(sa.extract("epoch", sa.func.clock_timestamp()) * MICRO, sa.BigInteger)
        lease = {"lease_until": self.now + sa.bindparam("b_lease", type_=sa.BigInteger)}
        self._shown = (*calls.c, (calls.c.lease_until > self.now).label("alive"))
        names = ("key", "owner", "idempotent", *IDENTIFYING)
        new = {name: sa.bindparam(f"b_{name}", type_=calls.c[name].type) for name in names}
        insert = upsert(dialect, calls).values(
            **new, **lease, created_at=self.now, state=MOVES[None, "claim"], told=False, late_told=False
        )
        self.insert = insert.on_conflict_do_nothing().returning(*self._shown)
        self.row = self.select(calls.c.key == new["key"])
        mine = calls.update().where(calls.c.key == new["key"], calls.c.owner == new["owner"])
        running = calls.c.state.not_in(ANSWERED_STATES)
        self.running = (running, calls.c.lease_until > self.now)
        self.renew = mine.where(running).values(**lease)
        payload = sa.bindparam("b_answer", type_=sa.Text)
        late = {"late_response": payload, "late_at": self.now}
        waiting = (calls.c.state.in_(sorted(KEEPS_LATE)), calls.c.late_response.is_(None))
        self.late = mine.where(*waiting).values(**late).returning(*self._shown)
        answer = {"response": payload, "answered_at": self.now}
        claim = {"owner": sa.bindparam("b_new_owner", type_=sa.Text), **lease}
        values: dict[Event, dict[str, Any]] = {"start": {"started_at": self.now}, "take": claim, "rerun": claim}
        dead = calls.c.lease_until <= self.now
        self.moves: dict[Event, sa.Update] = {}
        for event in {event for state, event in MOVES if state is not None}:
            states = sorted(state for state, name in MOVES if name == event and state is not None)
            (target,) = {MOVES[state, event] for state in states}
            move = mine.where(calls.c.state.in_(states), *([dead] if event in NEEDS_DEAD_OWNER else []))
            self.moves[event] = move.values(state=target, **values.get(event, answer)).returning(*self._shown)
        self.lose_dead = self.moves["lose"].where(dead)
        lost = sa.and_(calls.c.state == "running", dead)
        answered = sa.and_(calls.c.state.in_(ANSWERED_STATES), sa.not_(calls.c.told))
        told_late = sa.and_(calls.c.late_response.is_not(None), sa.not_(calls.c.late_told))
        self.untold = sa.or_(lost, answered, told_late)
        """The condition of rows whose outcome (lost, answered or late) the model was not told."""

    def select(self, *conditions: Any) -> sa.Select[Any]:
        """Return the query for rows that fit, oldest first."""
        return sa.select(*self._shown).where(*conditions).order_by(calls.c.created_at, calls.c.key)
