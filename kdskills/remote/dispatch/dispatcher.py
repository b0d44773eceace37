"""The one way a call is run: named, claimed, checked, run, written down, and only then answered (spec remote §4)."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kdskills.errors import MissingExtra
from kdskills.remote.core import Driver
from kdskills.remote.dispatch.arguments import faults
from kdskills.remote.dispatch.execution import Execution
from kdskills.remote.dispatch.leases import Leases
from kdskills.remote.dispatch.outcome import (
    NO_JOURNAL,
    OUTCOME_UNKNOWN,
    CallOutcome,
    failed,
    outcome_of,
    overdue,
    unregistered,
)
from kdskills.remote.dispatch.payloads import Answers
from kdskills.remote.dispatch.running import BlockingRunner, LoopRunner, Runner
from kdskills.remote.dispatch.spool import Spool
from kdskills.remote.dispatch.threads import Threads
from kdskills.remote.journal.identity import WeakIdentities, strong_key
from kdskills.remote.journal.memory import MemoryJournal
from kdskills.remote.journal.states import ANSWERED, takeover
from kdskills.remote.ports import CallIdentity, CallJournal, JournalRow, RemoteCall, StoredAnswer

if TYPE_CHECKING:
    from kdskills.remote.registry import RemoteSkill

T = TypeVar("T")

NO_SESSION_S: Final = 30.0
"""How long a worker without the session leaves a call to others."""
NO_SKILL_S: Final = 1.0
"""How long a worker with the session, but without the skill, does."""
FIRST_LOOK_S: Final = 0.005
LAST_LOOK_S: Final = 0.2
AWAY_S: Final = 30.0
"""How long a waiter bears with a journal that does not answer."""
ACCEPTED_KEPT: Final = 65_536

_log = logging.getLogger(__name__)


class JournalAway(Exception):
    """The journal did not answer; its own error is the cause."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a call is written down, and by whom."""

    journal: CallJournal
    key: str
    owner: str
    named: bool


@dataclass(frozen=True, slots=True)
class _Order:
    """A call as it came."""

    skill: RemoteSkill | None
    identity: CallIdentity
    arguments: Any
    tool: str
    connection: str

    @property
    def idempotent(self) -> bool:
        return self.skill is not None and self.skill.idempotent


class Dispatcher:
    """Runs the calls of one facade (spec remote §4).

    Args:
        driver: What may be waited for: a sync facade's never suspends.
        journal: Keeps calls with a strong identity; None keeps them in memory. The caller closes it.
        max_concurrency: Handlers that run at once.
        spool: Keeps what does not fit into an answer.
        leases: The thread that keeps leases alive; one of its own when omitted.
        no_session_s: How long a call for an unknown session is left to other workers.
        no_skill_s: How long a call for an unknown skill is.
    """

    def __init__(
        self,
        driver: Driver,
        journal: CallJournal | None = None,
        *,
        max_concurrency: int = 8,
        spool: Spool | None = None,
        leases: Leases | None = None,
        no_session_s: float = NO_SESSION_S,
        no_skill_s: float = NO_SKILL_S,
    ) -> None:
        self.journal: CallJournal = journal if journal is not None else MemoryJournal()
        self.owner = f"{socket.gethostname()[:60]}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        self._driver = driver
        self._answers = Answers(spool)
        self._leases = leases or Leases()
        self._runner: Runner = (LoopRunner if driver.asynchronous else BlockingRunner)(max(1, max_concurrency))
        self._threads = Threads()
        self._weak = MemoryJournal()
        self._names = WeakIdentities()
        self._refuse_after = (no_session_s, no_skill_s)
        self._accepted: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()

    async def call(
        self,
        skill: RemoteSkill | None,
        identity: CallIdentity,
        arguments: Any,
        *,
        shown: str | None = None,
        connection: str = "",
        knows_session: bool = True,
    ) -> CallOutcome:
        """Answer one delivery of a call; never raises for what a handler or the journal does.

        Args:
            skill: The registered skill; None when this worker has none of that name.
            identity: Who asks for which call.
            arguments: Any JSON value.
            shown: How messages name the tool; the identity's own word when omitted.
            connection: Where the answer will be submitted: an answer accepted there before is a `duplicate`.
            knows_session: Whether this worker serves the session at all.
        """
        order = _Order(skill, identity, arguments, shown or identity.tool, connection)
        place = self._place(identity)
        try:
            if skill is None and place.named and place.journal.shared:
                await self._leave_to_others(place, self._refuse_after[knows_session])
            return await self._answered(order, place)
        except JournalAway as error:
            _log.warning("a call of %s was not run: the journal failed with %r", order.tool, error.__cause__)
            return outcome_of(failed(order.tool, NO_JOURNAL), key=place.key if place.named else None)

    async def run(
        self, skill: RemoteSkill | None, identity: CallIdentity, arguments: Any, *, shown: str | None = None
    ) -> CallOutcome:
        """Run a call without asking or keeping anything: two calls of this run twice."""
        order = _Order(skill, identity, arguments, shown or identity.tool, "")
        return await self._answered(order, self._nowhere())

    def accepted(self, outcome: CallOutcome, connection: str) -> None:
        """Note that the outcome's answer was accepted on *connection*: delivered there again it is a `duplicate`."""
        if outcome.key is None:
            return
        with self._lock:
            self._accepted[outcome.key, connection] = None
            self._accepted.move_to_end((outcome.key, connection))
            if len(self._accepted) > ACCEPTED_KEPT:
                self._accepted.popitem(last=False)

    def was_accepted(self, key: str, connection: str) -> bool:
        """Return whether the answer of this call was accepted on *connection*."""
        with self._lock:
            return (key, connection) in self._accepted

    def forget(self, session_id: str) -> None:
        """Drop the weak identities of a session: a request id means nothing once the session is closed."""
        self._names.forget(session_id)
        self._weak.forget(session_id)

    def close(self) -> None:
        """End the thread of leases; the journal stays open, it is the caller's."""
        self._leases.close()

    def _place(self, identity: CallIdentity) -> _Place:
        key = strong_key(identity)
        if key is not None:
            return _Place(self.journal, key, self._attempt(), named=True)
        key = self._names.key(identity)
        return self._nowhere() if key is None else _Place(self._weak, key, self._attempt(), named=True)

    def _nowhere(self) -> _Place:
        return _Place(MemoryJournal(kept=1), f"once-{uuid.uuid4().hex}", self._attempt(), named=False)

    def _attempt(self) -> str:
        return f"{self.owner}:{uuid.uuid4().hex[:12]}"

    async def _answered(self, order: _Order, place: _Place) -> CallOutcome:
        while True:
            claim = await self._ask(
                place,
                lambda: place.journal.claim(
                    place.key, order.identity, place.owner, self._leases.lease_s, idempotent=order.idempotent
                ),
            )
            if claim.mine:
                outcome = await self._perform(order, place)
                if outcome is not None:
                    return outcome
                continue  # another worker took the call before its handler started: its answer counts
            row = await self._wait(order, place, claim.row)
            if row is not None and row.answer is not None:
                return self._replayed(order, place, row)

    def _replayed(self, order: _Order, place: _Place, row: JournalRow) -> CallOutcome:
        assert row.answer is not None
        duplicate = self.was_accepted(place.key, order.connection)
        return outcome_of(row.answer, row=row, key=place.key, replayed=True, duplicate=duplicate)

    async def _perform(self, order: _Order, place: _Place) -> CallOutcome | None:
        """Run a claimed call; None when it was taken over before its handler started."""
        key = place.key if place.named else None
        refused = self._refused(order)
        if refused is not None or order.skill is None:
            answer = refused or unregistered(order.tool)
            row = await self._ask(place, lambda: place.journal.finish(place.key, place.owner, answer))
            if row is not None and row.owner != place.owner:
                return None
            return outcome_of(answer, row=row, key=key)
        skill = order.skill
        self._leases.hold(place.journal, place.key, place.owner)
        execution = self._execution(order, skill, place)
        if not await self._runner.run(execution, skill.deadline_seconds):
            return await self._given_up(order, skill, place, execution)
        if execution.answer is None:
            if not execution.began:
                return await self._not_begun(order, place)
            return outcome_of(failed(order.tool, OUTCOME_UNKNOWN), row=execution.row, key=key)
        row = execution.row
        answer = row.answer if row is not None and row.answer is not None else execution.answer
        if row is not None and row.state not in ANSWERED:  # an idempotent call was taken over while it ran
            return None
        ours = answer is execution.answer or answer == execution.answer
        return outcome_of(
            answer,
            row=row,
            key=key,
            result=execution.value if ours else None,
            replayed=not ours,
            reraise=execution.raised if isinstance(execution.raised, KeyboardInterrupt) else None,
        )

    async def _not_begun(self, order: _Order, place: _Place) -> CallOutcome | None:
        """The handler was not started: the row is another's now, or the journal is away."""
        row = await self._ask(place, lambda: place.journal.get(place.key))
        if row is not None and row.owner == place.owner and row.state not in ANSWERED:
            raise JournalAway("a start was not recorded")
        return None

    async def _given_up(
        self, order: _Order, skill: RemoteSkill, place: _Place, execution: Execution
    ) -> CallOutcome | None:
        """Commit the answer of a passed deadline, unless the result came first."""
        assert skill.deadline_seconds is not None
        execution.call.stop.set()
        answer = overdue(order.tool, skill.deadline_seconds)
        row = await self._ask(place, lambda: place.journal.overdue(place.key, place.owner, answer))
        self._leases.release(place.journal, place.key, place.owner)
        if row is not None and (row.answer is None or row.owner != place.owner):
            return None
        given = answer if row is None or row.answer is None else row.answer
        return outcome_of(given, row=row, key=place.key if place.named else None)

    def _refused(self, order: _Order) -> StoredAnswer | None:
        if order.skill is None:
            return unregistered(order.tool)
        try:
            found = faults(order.skill.input_schema, order.arguments)
        except MissingExtra as error:
            return failed(order.tool, error.message)
        return self._answers.failure(failed(order.tool, "; ".join(found)).error or "") if found else None

    def _execution(self, order: _Order, skill: RemoteSkill, place: _Place) -> Execution:
        deadline = None if skill.deadline_seconds is None else time.time() + skill.deadline_seconds
        identity = order.identity
        return Execution(
            skill,
            order.tool,
            order.arguments,
            call=RemoteCall(place.key, identity.thread_id, identity.turn_id, identity.call_id, deadline),
            context=copy_context(),
            journal=place.journal,
            key=place.key,
            owner=place.owner,
            answers=self._answers,
            leases=self._leases,
            asynchronous=self._driver.asynchronous,
        )

    async def _leave_to_others(self, place: _Place, seconds: float) -> None:
        """Wait until another worker has claimed the call, or the time is over."""
        until = time.monotonic() + seconds
        pause = FIRST_LOOK_S
        while time.monotonic() < until:
            if await self._ask(place, lambda: place.journal.get(place.key)) is not None:
                return
            await self._driver.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(LAST_LOOK_S, pause * 2)

    async def _wait(self, order: _Order, place: _Place, row: JournalRow | None) -> JournalRow | None:
        """Wait for the row's answer; None when it is to be claimed again."""
        pause, since, left_since = FIRST_LOOK_S, time.monotonic(), None
        while row is not None and row.state not in ANSWERED:
            if takeover(row, idempotent=order.idempotent) is not None:
                return None
            if not row.alive:
                left_since = left_since or time.monotonic()
                if not row.idempotent or time.monotonic() - left_since >= self._refuse_after[1]:
                    row = await self._lost(order, place, row)
                    continue
            await self._driver.sleep(pause)
            pause = min(LAST_LOOK_S, pause * 2)
            try:
                row = await self._ask(place, lambda: place.journal.get(place.key))
                since = time.monotonic()
            except JournalAway:
                if time.monotonic() - since > AWAY_S:
                    raise
        return row

    async def _lost(self, order: _Order, place: _Place, row: JournalRow) -> JournalRow | None:
        owner = row.owner
        unknown = failed(order.tool, OUTCOME_UNKNOWN)
        return await self._ask(place, lambda: place.journal.lose(place.key, owner, unknown))

    async def _ask(self, place: _Place, question: Callable[[], T]) -> T:
        """Ask the journal, on a thread when others must not wait for its disk."""
        try:
            if self._driver.asynchronous and not isinstance(place.journal, MemoryJournal):
                return await self._threads.call(question)
            return question()
        except Exception as error:
            raise JournalAway(type(error).__name__) from error
