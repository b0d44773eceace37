"""The journal's tables and SQL, built once per journal: every call would pay for building it again."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from kdskills.remote.journal.calls import ANSWERED, IDENTIFYING, KEEPS_LATE, NEEDS_DEAD_OWNER, Event, after, sources
from kdskills.storage.database import upsert

metadata: sa.MetaData = sa.MetaData()
"""Describes the tables; nothing is opened by reading it."""

calls: sa.Table = sa.Table(
    "remote_calls",
    metadata,
    sa.Column("key", sa.String(80), primary_key=True),
    sa.Column("session_id", sa.Text, nullable=False),
    *(sa.Column(name, sa.Text) for name in ("thread_id", "turn_id", "call_id", "namespace")),
    sa.Column("tool", sa.Text, nullable=False),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("idempotent", sa.Boolean, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("lease_until", sa.BigInteger, nullable=False),
    *(sa.Column(name, sa.Text) for name in ("response", "late_response")),
    *(sa.Column(name, sa.Boolean, nullable=False) for name in ("told", "late_told")),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    *(sa.Column(name, sa.BigInteger) for name in ("started_at", "answered_at", "late_at")),
    sa.Index("remote_calls_by_session", "session_id", "created_at"),
    sa.Index("remote_calls_by_age", "created_at"),
)

receipts: sa.Table = sa.Table(
    "remote_receipts",
    metadata,
    sa.Column("session_id", sa.String(200), primary_key=True),
    sa.Column("turn_id", sa.String(200), primary_key=True),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False, index=True),
)

catalogs: sa.Table = sa.Table(
    "remote_catalogs",
    metadata,
    sa.Column("session_id", sa.String(200), primary_key=True),
    *(sa.Column(name, sa.String(16), nullable=False) for name in ("strategy", "digest", "context_digest", "release")),
    sa.Column("tools", sa.Text, nullable=False),
    sa.Column("release_by", sa.String(32), nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("updated_at", sa.BigInteger, nullable=False),
)

MICRO: Final = 1_000_000
ANSWERED_STATES: Final = sorted(ANSWERED)
_BOUND: Final = ("key", "owner", "idempotent", *IDENTIFYING)


class Statements:
    """Statements whose values are bound as `b_…`; each returns the row after the change, or nothing.

    Args:
        dialect: `sqlite` binds this moment as `b_now`; `postgresql` uses its own clock.
    """

    def __init__(self, dialect: str) -> None:
        self.now: Any = sa.bindparam("b_now", type_=sa.BigInteger)
        if dialect == "postgresql":
            self.now = sa.cast(sa.extract("epoch", sa.func.clock_timestamp()) * MICRO, sa.BigInteger)
        self._shown = (*calls.c, (calls.c.lease_until > self.now).label("alive"))
        self._mine = (calls.c.key == sa.bindparam("b_key"), calls.c.owner == sa.bindparam("b_owner"))
        self.row = self.select(calls.c.key == sa.bindparam("b_key"))
        bound = {name: sa.bindparam(f"b_{name}", type_=calls.c[name].type) for name in _BOUND}
        given = {**bound, "lease_until": self._lease(), "created_at": self.now, "state": after(None, "claim")}
        new = upsert(dialect, calls).values(told=False, late_told=False, **given)
        self.insert = new.on_conflict_do_nothing().returning(*self._shown)
        answer = {"response": sa.bindparam("b_answer", type_=sa.Text), "answered_at": self.now}
        claim_values = {"owner": sa.bindparam("b_new_owner", type_=sa.Text), "lease_until": self._lease()}
        self.start = self._move("start", {"started_at": self.now})
        self.finish = self._move("answer", answer)
        self.overdue = self._move("deadline", answer)
        self.lose = self._move("lose", answer, calls.c.lease_until <= self.now)
        self.abandon = self._move("lose", answer)
        self.takeovers = {
            event: self._move(event, claim_values, calls.c.lease_until <= self.now) for event in NEEDS_DEAD_OWNER
        }
        late = {"late_response": answer["response"], "late_at": self.now}
        waiting = (calls.c.state.in_(sorted(KEEPS_LATE)), calls.c.late_response.is_(None))
        self.late = calls.update().where(*self._mine, *waiting).values(**late).returning(*self._shown)
        running = calls.c.state.not_in(ANSWERED_STATES)
        self.renew = calls.update().where(*self._mine, running).values(lease_until=self._lease())

    def select(self, *conditions: Any) -> sa.Select[Any]:
        """Return the query for rows that fit, oldest first."""
        return sa.select(*self._shown).where(*conditions).order_by(calls.c.created_at, calls.c.key)

    def untold(self) -> Any:
        """Return the condition of rows whose outcome (lost, answered or late) the model was not told."""
        lost = sa.and_(calls.c.state == "running", calls.c.lease_until <= self.now)
        answered = sa.and_(calls.c.state.in_(ANSWERED_STATES), sa.not_(calls.c.told))
        late = sa.and_(calls.c.late_response.is_not(None), sa.not_(calls.c.late_told))
        return sa.or_(lost, answered, late)

    def _lease(self) -> Any:
        return self.now + sa.bindparam("b_lease", type_=sa.BigInteger)

    def _move(self, event: Event, values: dict[str, Any], *also: Any) -> sa.Update:
        """Return one move of the table as one compare-and-swap."""
        states = sources(event)
        (target,) = {after(state, event) for state in states}
        change = calls.update().where(*self._mine, calls.c.state.in_(states), *also)
        moved: sa.Update = change.values(state=target, **values).returning(*self._shown)
        return moved
