"""The SQL of the journal, built once per journal: every call would pay for building it again."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from kdskills.remote.journal.states import ANSWERED, KEEPS_LATE, NEEDS_DEAD_OWNER, Event, after, sources
from kdskills.remote.journal.tables import calls as table
from kdskills.storage.database import upsert

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
        self._shown = (*table.c, (table.c.lease_until > self.now).label("alive"))
        self._mine = (table.c.key == sa.bindparam("b_key"), table.c.owner == sa.bindparam("b_owner"))
        self.row = self.select(table.c.key == sa.bindparam("b_key"))
        self.insert = self._insert(dialect)
        answer = {"response": sa.bindparam("b_answer", type_=sa.Text), "answered_at": self.now}
        claim_values = {"owner": sa.bindparam("b_new_owner", type_=sa.Text), "lease_until": self._lease()}
        self.start = self._move("start", {"started_at": self.now})
        self.finish = self._move("answer", answer)
        self.overdue = self._move("deadline", answer)
        self.lose = self._move("lose", answer, table.c.lease_until <= self.now)
        self.abandon = self._move("lose", answer)
        self.takeovers = {
            event: self._move(event, claim_values, table.c.lease_until <= self.now) for event in NEEDS_DEAD_OWNER
        }
        self.late = (
            table.update()
            .where(*self._mine, table.c.state.in_(sorted(KEEPS_LATE)), table.c.late_response.is_(None))
            .values(late_response=sa.bindparam("b_answer", type_=sa.Text), late_at=self.now)
            .returning(*self._shown)
        )
        self.renew = (
            table.update().where(*self._mine, table.c.state.not_in(ANSWERED_STATES)).values(lease_until=self._lease())
        )

    def select(self, *conditions: Any) -> sa.Select[Any]:
        """Return the query for rows that fit, oldest first."""
        return sa.select(*self._shown).where(*conditions).order_by(table.c.created_at, table.c.key)

    def untold(self) -> Any:
        """Return the condition of rows whose outcome (lost, answered or late) the model was not told."""
        lost = sa.and_(table.c.state == "running", table.c.lease_until <= self.now)
        answered = sa.and_(table.c.state.in_(ANSWERED_STATES), sa.not_(table.c.told))
        late = sa.and_(table.c.late_response.is_not(None), sa.not_(table.c.late_told))
        return sa.or_(lost, answered, late)

    def _lease(self) -> Any:
        return self.now + sa.bindparam("b_lease", type_=sa.BigInteger)

    def _insert(self, dialect: str) -> Any:
        bound = ("key", "session_id", "thread_id", "turn_id", "call_id", "namespace", "tool", "owner", "idempotent")
        values = {name: sa.bindparam(f"b_{name}", type_=table.c[name].type) for name in bound}
        times = {"lease_until": self._lease(), "created_at": self.now}
        new = upsert(dialect, table).values(state=after(None, "claim"), told=False, late_told=False, **values, **times)
        return new.on_conflict_do_nothing().returning(*self._shown)

    def _move(self, event: Event, values: dict[str, Any], *also: Any) -> sa.Update:
        """Return one move of the table as one compare-and-swap."""
        states = sources(event)
        (target,) = {after(state, event) for state in states}
        change = table.update().where(*self._mine, table.c.state.in_(states), *also)
        moved: sa.Update = change.values(state=target, **values).returning(*self._shown)
        return moved
