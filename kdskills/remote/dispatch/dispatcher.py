"""Runs a call: identified, claimed, checked, run, recorded, and only then answered."""

from __future__ import annotations

import logging
import time
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final

from kdskills.errors import MissingExtra
from kdskills.remote.core import Driver
from kdskills.remote.dispatch.arguments import faults
from kdskills.remote.dispatch.claims import (
    AcceptedAnswers,
    CallAddress,
    CallAddresses,
    CallRequest,
    JournalAway,
    JournalClaims,
)
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
"""How long a worker with the session, but without the skill, leaves a call to others."""

_log = logging.getLogger(__name__)


class RemoteDispatcher:
    """Runs the calls of one facade.

    Args:
        driver: How to wait and call; the driver of a sync facade never suspends.
        journal: Stores calls with a strong identity; None means in memory. The caller closes it.
        max_concurrency: How many handlers may run at the same time.
        spool: Stores the full text of answers that were cut.
        leases: Renews the leases of running calls; a new one when omitted.
        no_session_s: How long a call for an unknown session is left to other workers.
        no_skill_s: The same for a call of an unknown skill.
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
        self._accepted = AcceptedAnswers()

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
        """Answer one delivery of a call; failures of the handler or the journal become answers, not exceptions.

        Args:
            skill: The registered skill; None when this worker has no skill of that name.
            identity: Identifies the call.
            arguments: Any JSON value.
            tool_label: How messages name the tool; the identity's tool when omitted.
            connection: Where the answer will be submitted: an answer accepted there before is a `duplicate`.
            knows_session: Whether this worker serves the session at all.
        """
        call = CallRequest(skill, identity, arguments, tool_label or identity.tool, connection)
        address = self._addresses.find(identity)
        try:
            if skill is None and address.findable and address.journal.shared:
                await self._claims.leave_to_others(address, self._refuse_after[knows_session])
            return await self._answer_call(call, address)
        except JournalAway as error:
            _log.warning("a call of %s was not run: the journal failed with %r", call.tool, error.__cause__)
            return outcome_of(failed(call.tool, NO_JOURNAL), key=address.reported_key)

    async def run(
        self, skill: RemoteSkill | None, identity: CallIdentity, arguments: Any, *, tool_label: str | None = None
    ) -> CallOutcome:
        """Run a call without a shared journal: the same call made twice runs twice."""
        call = CallRequest(skill, identity, arguments, tool_label or identity.tool)
        return await self._answer_call(call, self._addresses.unfindable())

    def accepted(self, outcome: CallOutcome, connection: str) -> None:
        """Record that the answer was accepted on *connection*: a delivery repeated there is a `duplicate`."""
        if outcome.key is not None:
            self._accepted.add(outcome.key, connection)

    def was_accepted(self, key: str, connection: str) -> bool:
        """Return whether an answer of this call was accepted on *connection*."""
        return self._accepted.has(key, connection)

    def forget(self, session_id: str) -> None:
        """Delete the weak identities of a session: its request ids mean nothing once it is closed."""
        self._addresses.forget(session_id)

    def close(self) -> None:
        """Stop renewing leases; the journal stays open, because the caller closes it."""
        self._leases.close()

    async def _answer_call(self, call: CallRequest, address: CallAddress) -> CallOutcome:
        while True:
            claim = await self._claims.claim(call, address)
            if claim.mine:
                outcome = await self._perform(call, address)
                if outcome is not None:
                    return outcome
                continue  # another worker has taken over the call, so its answer counts
            row = await self._claims.wait_for_answer(call, address, claim.row)
            if row is not None and row.answer is not None:
                duplicate = self._accepted.has(address.key, call.connection)
                return outcome_of(row.answer, row=row, key=address.reported_key, replayed=True, duplicate=duplicate)

    async def _perform(self, call: CallRequest, address: CallAddress) -> CallOutcome | None:
        """Answer a claimed call; return None when another worker took it over."""
        refused = self._refusal(call)
        if refused is not None or call.skill is None:
            return await self._refuse(refused or unregistered(call.tool), address)
        execution = self._execution(call, call.skill, address)
        try:
            self._leases.hold(address.journal, address.key, address.owner)
            in_time = await self._runner.run(execution, call.skill.deadline_seconds)
        except RuntimeError as error:  # no thread could be started, so the handler did not run
            execution.commit(self._answers.of_error(call.tool, error))
            in_time = True
        if in_time:
            return await self._final_outcome(call, address, execution)
        assert call.skill.deadline_seconds is not None
        try:
            return await self._overdue_outcome(overdue(call.tool, call.skill.deadline_seconds), address)
        finally:  # only after the commit, so that a result of the cancelled handler counts as late
            execution.call.stop.set()
            execution.cancel()

    async def _refuse(self, answer: StoredAnswer, address: CallAddress) -> CallOutcome | None:
        row = await self._claims.ask(address, lambda: address.journal.finish(address.key, address.owner, answer))
        return None if _another_has(row, address) else outcome_of(answer, row=row, key=address.reported_key)

    async def _final_outcome(self, call: CallRequest, address: CallAddress, execution: Execution) -> CallOutcome | None:
        """Return the outcome of an ended execution: its own answer, or the one the journal has instead."""
        if not execution.began:
            row = await self._claims.ask(address, lambda: address.journal.get(address.key))
            if row is not None and not _another_has(row, address) and row.state not in ANSWERED:
                raise JournalAway("the start was not recorded")
            return None
        row, answer = execution.row, execution.answer
        if row is not None and row.state not in ANSWERED:
            return None  # taken over while it ran: the answer of the second run counts
        final_answer = row.answer if row is not None and row.answer is not None else answer
        is_own = final_answer is not None and final_answer == answer
        return outcome_of(
            final_answer or failed(call.tool, OUTCOME_UNKNOWN),
            row=row,
            key=address.reported_key,
            result=execution.value if is_own else None,
            replayed=not is_own,
            reraise=execution.raised if isinstance(execution.raised, KeyboardInterrupt) else None,
        )

    async def _overdue_outcome(self, answer: StoredAnswer, address: CallAddress) -> CallOutcome | None:
        """Commit the answer for a missed deadline; a result that was committed first is the answer instead."""
        try:
            row = await self._claims.ask(address, lambda: address.journal.overdue(address.key, address.owner, answer))
        except JournalAway:  # the lease stays, so that the handler's end can still be recorded
            return outcome_of(answer, key=address.reported_key)
        self._leases.release(address.journal, address.key, address.owner)
        if _another_has(row, address):
            return None
        final_answer = answer if row is None or row.answer is None else row.answer
        return outcome_of(final_answer, row=row, key=address.reported_key)

    def _refusal(self, call: CallRequest) -> StoredAnswer | None:
        if call.skill is None:
            return unregistered(call.tool)
        try:
            problems = faults(call.skill.input_schema, call.arguments)
        except MissingExtra as error:
            return failed(call.tool, error.message)
        return self._answers.failure(call.tool, "; ".join(problems)) if problems else None

    def _execution(self, call: CallRequest, skill: RemoteSkill, address: CallAddress) -> Execution:
        deadline = None if skill.deadline_seconds is None else time.time() + skill.deadline_seconds
        identity = call.identity
        return Execution(
            skill,
            call.tool,
            call.arguments,
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
