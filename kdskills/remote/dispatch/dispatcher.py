"""The one way a call is run: named, claimed, checked, run, written down, and only then answered."""

from __future__ import annotations

import logging
import time
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final

from kdskills.errors import MissingExtra
from kdskills.remote.core import Driver
from kdskills.remote.dispatch.arguments import faults
from kdskills.remote.dispatch.claims import Accepted, CallAddress, CallAddresses, JournalAway, JournalClaims, Order
from kdskills.remote.dispatch.execution import Execution
from kdskills.remote.dispatch.leases import CallLeases
from kdskills.remote.dispatch.outcome import (
    NO_JOURNAL,
    OUTCOME_UNKNOWN,
    CallOutcome,
    failed,
    outcome_of,
    overdue,
    unregistered,
)
from kdskills.remote.dispatch.payloads import AnswerBuilder
from kdskills.remote.dispatch.running import BlockingRunner, LoopRunner, Runner
from kdskills.remote.dispatch.spool import Spool
from kdskills.remote.journal.memory import MemoryJournal
from kdskills.remote.journal.states import ANSWERED
from kdskills.remote.ports import CallIdentity, CallJournal, JournalRow, RemoteCall, StoredAnswer

if TYPE_CHECKING:
    from kdskills.remote.registry import RemoteSkill

NO_SESSION_S: Final = 30.0
"""How long a worker without the session leaves a call to others."""
NO_SKILL_S: Final = 1.0
"""How long a worker with the session, but without the skill, does."""

_log = logging.getLogger(__name__)


class CallDispatcher:
    """Runs the calls of one facade.

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
        leases: CallLeases | None = None,
        no_session_s: float = NO_SESSION_S,
        no_skill_s: float = NO_SKILL_S,
    ) -> None:
        self.journal: CallJournal = journal if journal is not None else MemoryJournal()
        self._asynchronous = driver.asynchronous
        self._addresses = CallAddresses(self.journal)
        self._answers = AnswerBuilder(spool)
        self._leases = leases or CallLeases()
        self._claims = JournalClaims(driver, self._leases.lease_s, no_skill_s)
        self._runner: Runner = (LoopRunner if driver.asynchronous else BlockingRunner)(max(1, max_concurrency))
        self._refuse_after = (no_session_s, no_skill_s)
        self._accepted = Accepted()

    async def call(
        self,
        skill: RemoteSkill | None,
        identity: CallIdentity,
        arguments: Any,
        *,
        tool_label: str | None = None,
        connection: str = "",
        knows_session: bool = True,
    ) -> CallOutcome:
        """Answer one delivery of a call; never raises for what a handler or the journal does.

        Args:
            skill: The registered skill; None when this worker has none of that name.
            identity: Who asks for which call.
            arguments: Any JSON value.
            tool_label: How messages name the tool; the identity's own word when omitted.
            connection: Where the answer will be submitted: an answer accepted there before is a `duplicate`.
            knows_session: Whether this worker serves the session at all.
        """
        order = Order(skill, identity, arguments, tool_label or identity.tool, connection)
        address = self._addresses.find(identity)
        try:
            if skill is None and address.findable and address.journal.shared:
                await self._claims.leave_to_others(address, self._refuse_after[knows_session])
            return await self._answered(order, address)
        except JournalAway as error:
            _log.warning("a call of %s was not run: the journal failed with %r", order.tool, error.__cause__)
            return outcome_of(failed(order.tool, NO_JOURNAL), key=address.reported_key)

    async def run(
        self, skill: RemoteSkill | None, identity: CallIdentity, arguments: Any, *, tool_label: str | None = None
    ) -> CallOutcome:
        """Run a call without asking or keeping anything: two calls of this run twice."""
        order = Order(skill, identity, arguments, tool_label or identity.tool)
        return await self._answered(order, self._addresses.unfindable())

    def accepted(self, outcome: CallOutcome, connection: str) -> None:
        """Note that the outcome's answer was accepted on *connection*: delivered there again it is a `duplicate`."""
        if outcome.key is not None:
            self._accepted.add(outcome.key, connection)

    def was_accepted(self, key: str, connection: str) -> bool:
        """Return whether an answer of this call was accepted on *connection*."""
        return self._accepted.has(key, connection)

    def forget(self, session_id: str) -> None:
        """Drop the weak identities of a session: a request id means nothing once the session is closed."""
        self._addresses.forget(session_id)

    def close(self) -> None:
        """End the thread of leases; the journal stays open, it is the caller's."""
        self._leases.close()

    async def _answered(self, order: Order, address: CallAddress) -> CallOutcome:
        while True:
            claim = await self._claims.claim(order, address)
            if claim.mine:
                outcome = await self._perform(order, address)
                if outcome is not None:
                    return outcome
                continue  # another worker has the call now: its answer counts
            row = await self._claims.answered(order, address, claim.row)
            if row is not None and row.answer is not None:
                duplicate = self._accepted.has(address.key, order.connection)
                return outcome_of(row.answer, row=row, key=address.reported_key, replayed=True, duplicate=duplicate)

    async def _perform(self, order: Order, address: CallAddress) -> CallOutcome | None:
        """Answer a claimed call; None when another worker has it now."""
        refused = self._refused(order)
        if refused is not None or order.skill is None:
            return await self._refuse(refused or unregistered(order.tool), address)
        execution = self._execution(order, order.skill, address)
        try:
            self._leases.hold(address.journal, address.key, address.owner)
            in_time = await self._runner.run(execution, order.skill.deadline_seconds)
        except RuntimeError as error:  # this process may not have another thread: nothing began
            execution.commit(self._answers.of_error(order.tool, error))
            in_time = True
        if in_time:
            return await self._ended(order, address, execution)
        assert order.skill.deadline_seconds is not None
        try:
            return await self._given_up(overdue(order.tool, order.skill.deadline_seconds), address)
        finally:  # only now: what a handler says to its cancellation is late, not the answer
            execution.call.stop.set()
            execution.cancel()

    async def _refuse(self, answer: StoredAnswer, address: CallAddress) -> CallOutcome | None:
        row = await self._claims.ask(address, lambda: address.journal.finish(address.key, address.owner, answer))
        return None if _another_has(row, address) else outcome_of(answer, row=row, key=address.reported_key)

    async def _ended(self, order: Order, address: CallAddress, execution: Execution) -> CallOutcome | None:
        """Tell what an execution came to: its own answer, or the one the journal has instead."""
        if not execution.began:
            row = await self._claims.ask(address, lambda: address.journal.get(address.key))
            if row is not None and not _another_has(row, address) and row.state not in ANSWERED:
                raise JournalAway("the start was not recorded")
            return None
        row, answer = execution.row, execution.answer
        if row is not None and row.state not in ANSWERED:  # taken over, although it ran: the re-run's answer counts
            return None
        final_answer = row.answer if row is not None and row.answer is not None else answer
        ours = final_answer is not None and final_answer == answer
        return outcome_of(
            final_answer or failed(order.tool, OUTCOME_UNKNOWN),
            row=row,
            key=address.reported_key,
            result=execution.value if ours else None,
            replayed=not ours,
            reraise=execution.raised if isinstance(execution.raised, KeyboardInterrupt) else None,
        )

    async def _given_up(self, answer: StoredAnswer, address: CallAddress) -> CallOutcome | None:
        """Commit the answer of a passed deadline; a result that came first is the answer instead."""
        try:
            row = await self._claims.ask(address, lambda: address.journal.overdue(address.key, address.owner, answer))
        except JournalAway:  # the lease stays held: the handler's own end will be written down
            return outcome_of(answer, key=address.reported_key)
        self._leases.release(address.journal, address.key, address.owner)
        if _another_has(row, address):
            return None
        final_answer = answer if row is None or row.answer is None else row.answer
        return outcome_of(final_answer, row=row, key=address.reported_key)

    def _refused(self, order: Order) -> StoredAnswer | None:
        if order.skill is None:
            return unregistered(order.tool)
        try:
            problems = faults(order.skill.input_schema, order.arguments)
        except MissingExtra as error:
            return failed(order.tool, error.message)
        return self._answers.failure(order.tool, "; ".join(problems)) if problems else None

    def _execution(self, order: Order, skill: RemoteSkill, address: CallAddress) -> Execution:
        deadline = None if skill.deadline_seconds is None else time.time() + skill.deadline_seconds
        identity = order.identity
        return Execution(
            skill,
            order.tool,
            order.arguments,
            call=RemoteCall(address.key, identity.thread_id, identity.turn_id, identity.call_id, deadline),
            context=copy_context(),
            journal=address.journal,
            key=address.key,
            owner=address.owner,
            answers=self._answers,
            leases=self._leases,
            asynchronous=self._asynchronous,
        )


def _another_has(row: JournalRow | None, address: CallAddress) -> bool:
    return row is not None and row.owner != address.owner
