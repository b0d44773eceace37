"""Runs a call: identified, claimed in its journal, checked, run, recorded, and only then answered."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kdskills.errors import MissingExtra
from kdskills.remote.dispatch.execution import CallAttempt, CallLeases, Execution, HandlerRunner, faults
from kdskills.remote.dispatch.outcome import (
    NO_JOURNAL,
    OUTCOME_UNKNOWN,
    CallOutcome,
    failed,
    outcome_of,
    overdue,
    unregistered,
)
from kdskills.remote.dispatch.payloads import AnswerBuilder, Spool
from kdskills.remote.journal.calls import ANSWERED, MemoryJournal, WeakIdentities, strong_key, takeover
from kdskills.remote.ports import CallIdentity, CallJournal, JournalRow, StoredAnswer
from kdskills.session.threads import HandlerThreads

if TYPE_CHECKING:
    from kdskills.remote.registry import RemoteSkill


T = TypeVar("T")

FIRST_LOOK_S: Final = 0.005
LAST_LOOK_S: Final = 0.2
AWAY_S: Final = 30.0
"""How long a waiting call tolerates a journal that does not answer."""
NO_SESSION_S: Final = 30.0
"""How long a worker without the session leaves a call to others."""
NO_SKILL_S: Final = 1.0
"""How long a worker with the session, but without the skill, leaves a call to others."""
ACCEPTED_KEPT: Final = 65_536
"""Answers that are remembered as accepted; the oldest go first."""

_log = logging.getLogger(__name__)


class JournalAway(Exception):
    """The journal did not answer; its own error is the cause."""


class RemoteDispatcher:
    """Runs the calls of one facade.

    Calls with a strong identity are in the shared journal. Those with a weak one stay in memory: a request id that is used
    again in another run must not find the first run's answer. Calls without an identity get a journal of their own.

    Args:
        journal: Stores calls with a strong identity; None means in memory. The caller closes it.
        asynchronous: Whether awaitable results of handlers can be awaited.
        max_concurrency: How many handlers may run at the same time.
        spool: Stores the full text of answers that were cut.
        leases: Renews the leases of running calls; a new one when omitted.
        no_session_s: How long a call for an unknown session is left to other workers.
        no_skill_s: The same for a call of an unknown skill.
    """

    def __init__(
        self,
        journal: CallJournal | None = None,
        *,
        asynchronous: bool = True,
        max_concurrency: int = 8,
        spool: Spool | None = None,
        leases: CallLeases | None = None,
        no_session_s: float = NO_SESSION_S,
        no_skill_s: float = NO_SKILL_S,
    ) -> None:
        self.journal: CallJournal = journal if journal is not None else MemoryJournal()
        self._asynchronous = asynchronous
        self._owner = f"{socket.gethostname()[:60]}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        self._weak_journal = MemoryJournal()
        self._weak_identities = WeakIdentities()
        self._answers = AnswerBuilder(spool)
        self._leases = leases or CallLeases()
        self._threads = HandlerThreads()
        self._runner = HandlerRunner(max(1, max_concurrency))
        self._no_session_s = no_session_s
        self._no_skill_s = no_skill_s
        self._accepted: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._accepting = threading.Lock()

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
        attempt = self._attempt(skill, identity, arguments, tool_label)
        try:
            if skill is None and attempt.findable and attempt.journal.shared:
                await self._leave_to_others(attempt, self._no_skill_s if knows_session else self._no_session_s)
            return await self._answer(attempt, connection)
        except JournalAway as error:
            _log.warning("a call of %s was not run: the journal failed with %r", attempt.tool, error.__cause__)
            return outcome_of(failed(attempt.tool, NO_JOURNAL), key=attempt.reported_key)

    async def run(
        self, skill: RemoteSkill | None, identity: CallIdentity, arguments: Any, *, tool_label: str | None = None
    ) -> CallOutcome:
        """Run a call without a shared journal: the same call made twice runs twice."""
        return await self._answer(self._attempt(skill, identity, arguments, tool_label, findable=False), "")

    def accepted(self, outcome: CallOutcome, connection: str) -> None:
        """Record that the answer was accepted on *connection*: a delivery repeated there is a `duplicate`."""
        if outcome.key is not None:
            with self._accepting:
                self._accepted[outcome.key, connection] = None
                self._accepted.move_to_end((outcome.key, connection))
                if len(self._accepted) > ACCEPTED_KEPT:
                    self._accepted.popitem(last=False)

    def was_accepted(self, key: str, connection: str) -> bool:
        """Return whether an answer of this call was accepted on *connection*."""
        with self._accepting:
            return (key, connection) in self._accepted

    def forget(self, session_id: str) -> None:
        """Delete the weak identities of a session: its request ids mean nothing once it is closed."""
        self._weak_identities.forget(session_id)
        self._weak_journal.forget(session_id)

    def close(self) -> None:
        """Stop renewing leases; the journal stays open, because the caller closes it."""
        self._leases.close()

    def _attempt(
        self,
        skill: RemoteSkill | None,
        identity: CallIdentity,
        arguments: Any,
        tool_label: str | None,
        *,
        findable: bool = True,
    ) -> CallAttempt:
        """Return a new attempt at a call, with the journal and the key under which it is recorded."""
        journal, key = self.journal, strong_key(identity) if findable else None
        if findable and key is None:
            journal, key = self._weak_journal, self._weak_identities.key(identity)
        if key is None:
            journal, findable = MemoryJournal(kept=1), False
        return CallAttempt(
            skill,
            identity,
            arguments,
            tool_label or identity.tool,
            journal=journal,
            key=key or f"once-{uuid.uuid4().hex}",
            owner=f"{self._owner}:{uuid.uuid4().hex[:12]}",
            findable=findable,
        )

    async def _answer(self, call: CallAttempt, connection: str) -> CallOutcome:
        idempotent = call.skill is not None and call.skill.idempotent
        lease_s = self._leases.lease_s
        while True:
            claim = await self._ask(
                call, lambda: call.journal.claim(call.key, call.identity, call.owner, lease_s, idempotent=idempotent)
            )
            if claim.mine:
                outcome = await self._perform(call)
                if outcome is not None:
                    return outcome
                continue  # another worker has taken over the call, so its answer counts
            row = await self._wait_for_answer(call, claim.row, idempotent=idempotent)
            if row is not None and row.answer is not None:
                duplicate = self.was_accepted(call.key, connection)
                return outcome_of(row.answer, row=row, key=call.reported_key, replayed=True, duplicate=duplicate)

    async def _leave_to_others(self, call: CallAttempt, seconds: float) -> None:
        """Wait until another worker has claimed the call, but not longer than *seconds*."""
        until, pause = time.monotonic() + seconds, FIRST_LOOK_S
        while time.monotonic() < until:
            if await self._ask(call, lambda: call.journal.get(call.key)) is not None:
                return
            await asyncio.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(LAST_LOOK_S, pause * 2)

    async def _wait_for_answer(
        self, call: CallAttempt, row: JournalRow | None, *, idempotent: bool
    ) -> JournalRow | None:
        """Wait until the row has an answer and return it; return None when the call must be claimed again."""
        pause, since, left_since = FIRST_LOOK_S, time.monotonic(), None
        while row is not None and row.state not in ANSWERED:
            if takeover(row, idempotent=idempotent) is not None:
                return None
            if not row.alive:
                left_since = left_since or time.monotonic()
                if not row.idempotent or time.monotonic() - left_since >= self._no_skill_s:
                    row = await self._record_loss(call, row.owner)
                    continue
            await asyncio.sleep(pause)
            pause = min(LAST_LOOK_S, pause * 2)
            try:
                row = await self._ask(call, lambda: call.journal.get(call.key))
                since = time.monotonic()
            except JournalAway:
                if time.monotonic() - since > AWAY_S:
                    raise
        return row

    async def _record_loss(self, call: CallAttempt, owner: str) -> JournalRow | None:
        unknown = failed(call.tool, OUTCOME_UNKNOWN)
        return await self._ask(call, lambda: call.journal.lose(call.key, owner, unknown))

    async def _ask(self, call: CallAttempt, question: Callable[[], T]) -> T:
        """Query the call's journal, on a thread unless it is in memory: its disk must not block the event loop."""
        try:
            if isinstance(call.journal, MemoryJournal):
                return question()
            return await self._threads.call(question)
        except Exception as error:
            raise JournalAway(type(error).__name__) from error

    async def _perform(self, call: CallAttempt) -> CallOutcome | None:
        """Answer a claimed call; return None when another worker took it over."""
        refused = self._refusal(call)
        if refused is not None or call.skill is None:
            answer = refused or unregistered(call.tool)
            row = await self._ask(call, lambda: call.journal.finish(call.key, call.owner, answer))
            return None if call.taken_over(row) else outcome_of(answer, row=row, key=call.reported_key)
        execution = Execution(call, call.skill, self._answers, self._leases, asynchronous=self._asynchronous)
        deadline_seconds = call.skill.deadline_seconds
        try:
            self._leases.hold(call.journal, call.key, call.owner)
            in_time = await self._runner.run(execution, deadline_seconds)
        except RuntimeError as error:  # no thread could be started, so the handler did not run
            execution.commit(self._answers.of_error(call.tool, error))
            in_time = True
        if in_time or deadline_seconds is None:
            return await self._final_outcome(call, execution)
        try:
            return await self._overdue_outcome(overdue(call.tool, deadline_seconds), call)
        finally:  # only after the commit, so that a result of the cancelled handler counts as late
            execution.call.stop.set()
            execution.cancel()

    async def _final_outcome(self, call: CallAttempt, execution: Execution) -> CallOutcome | None:
        """Return the outcome of an ended execution: its own answer, or the one the journal has instead."""
        if not execution.began:
            row = await self._ask(call, lambda: call.journal.get(call.key))
            if row is not None and not call.taken_over(row) and row.state not in ANSWERED:
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
            key=call.reported_key,
            result=execution.value if is_own else None,
            replayed=not is_own,
            reraise=execution.raised if isinstance(execution.raised, KeyboardInterrupt) else None,
        )

    async def _overdue_outcome(self, answer: StoredAnswer, call: CallAttempt) -> CallOutcome | None:
        """Commit the answer for a missed deadline; a result that was committed first is the answer instead."""
        try:
            row = await self._ask(call, lambda: call.journal.overdue(call.key, call.owner, answer))
        except JournalAway:  # the lease stays, so that the handler's end can still be recorded
            return outcome_of(answer, key=call.reported_key)
        self._leases.release(call.journal, call.key, call.owner)
        if call.taken_over(row):
            return None
        final_answer = answer if row is None or row.answer is None else row.answer
        return outcome_of(final_answer, row=row, key=call.reported_key)

    def _refusal(self, call: CallAttempt) -> StoredAnswer | None:
        if call.skill is None:
            return unregistered(call.tool)
        try:
            problems = faults(call.skill.input_schema, call.arguments)
        except MissingExtra as error:
            return failed(call.tool, error.message)
        return self._answers.failure(call.tool, "; ".join(problems)) if problems else None
