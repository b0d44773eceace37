"""Runs a call: identified, claimed in its journal, checked, run, recorded, and only then answered."""

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
from kdskills.remote.dispatch.execution import (
    BlockingRunner,
    CallLeases,
    Execution,
    HandlerThreads,
    LoopRunner,
    Runner,
    faults,
)
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
from kdskills.remote.journal.calls import ANSWERED, WeakIdentities, strong_key, takeover
from kdskills.remote.journal.memory import MemoryJournal
from kdskills.remote.ports import CallClaim, CallIdentity, CallJournal, JournalRow, RemoteCall, StoredAnswer

if TYPE_CHECKING:
    from kdskills.remote.registry import RemoteSkill


T = TypeVar("T")

FIRST_LOOK_S: Final = 0.005
LAST_LOOK_S: Final = 0.2
AWAY_S: Final = 30.0
"""How long a waiting call tolerates a journal that does not answer."""
ACCEPTED_KEPT: Final = 65_536


class JournalAway(Exception):
    """The journal did not answer; its own error is the cause."""


@dataclass(frozen=True, slots=True)
class CallAddress:
    """Where a call is recorded, and by which attempt; *findable*: a repeated delivery gets the same key."""

    journal: CallJournal
    key: str
    owner: str
    findable: bool

    @property
    def reported_key(self) -> str | None:
        """The key if others can find the call by it, else None."""
        return self.key if self.findable else None


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call that is to be run or answered."""

    skill: RemoteSkill | None
    identity: CallIdentity
    arguments: Any
    tool: str
    connection: str = ""

    @property
    def idempotent(self) -> bool:
        """Whether this worker may run the call again after another worker died while running it."""
        return self.skill is not None and self.skill.idempotent


class CallAddresses:
    """Finds the journal and key of a call by its identity.

    Calls with a strong identity are in the shared journal. Those with a weak one stay in memory: a request id that is used
    again in another run must not find the first run's answer. Calls without an identity get a journal of their own.

    Args:
        journal: Keeps calls with a strong identity.
    """

    def __init__(self, journal: CallJournal) -> None:
        self.owner = f"{socket.gethostname()[:60]}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        self._journal = journal
        self._weak = MemoryJournal()
        self._names = WeakIdentities()

    def find(self, identity: CallIdentity) -> CallAddress:
        """Return the address of this call, for a new attempt."""
        key = strong_key(identity)
        if key is not None:
            return CallAddress(self._journal, key, self._attempt(), findable=True)
        key = self._names.key(identity)
        return self.unfindable() if key is None else CallAddress(self._weak, key, self._attempt(), findable=True)

    def unfindable(self) -> CallAddress:
        """Return an address that no other delivery finds."""
        return CallAddress(MemoryJournal(kept=1), f"once-{uuid.uuid4().hex}", self._attempt(), findable=False)

    def forget(self, session_id: str) -> None:
        """Drop the weak identities of a session."""
        self._names.forget(session_id)
        self._weak.forget(session_id)

    def _attempt(self) -> str:
        return f"{self.owner}:{uuid.uuid4().hex[:12]}"


class AcceptedAnswers:
    """Remembers which answers were accepted on which connection, the newest `ACCEPTED_KEPT`; thread-safe."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: str, connection: str) -> None:
        """Record that the answer of a call was accepted."""
        with self._lock:
            self._pairs[key, connection] = None
            self._pairs.move_to_end((key, connection))
            if len(self._pairs) > ACCEPTED_KEPT:
                self._pairs.popitem(last=False)

    def has(self, key: str, connection: str) -> bool:
        """Return whether the answer of a call was accepted."""
        with self._lock:
            return (key, connection) in self._pairs


class JournalClaims:
    """Queries the journals for one facade.

    Args:
        driver: How to wait and call: on an event loop, or blocking.
        lease_s: How long a claim lasts unless it is renewed.
        no_skill_s: How long an idempotent call of a dead worker is left to workers that may run it.
    """

    def __init__(self, driver: Driver, lease_s: float, no_skill_s: float) -> None:
        self._driver = driver
        self._lease_s = lease_s
        self._no_skill_s = no_skill_s
        self._threads = HandlerThreads()

    async def claim(self, call: CallRequest, address: CallAddress) -> CallClaim:
        """Claim the call, or return its row as another attempt left it."""
        return await self.ask(
            address,
            lambda: address.journal.claim(
                address.key, call.identity, address.owner, self._lease_s, idempotent=call.idempotent
            ),
        )

    async def leave_to_others(self, address: CallAddress, seconds: float) -> None:
        """Wait until another worker has claimed the call, but not longer than *seconds*."""
        until = time.monotonic() + seconds
        pause = FIRST_LOOK_S
        while time.monotonic() < until:
            if await self.ask(address, lambda: address.journal.get(address.key)) is not None:
                return
            await self._driver.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(LAST_LOOK_S, pause * 2)

    async def wait_for_answer(
        self, call: CallRequest, address: CallAddress, row: JournalRow | None
    ) -> JournalRow | None:
        """Wait until the row has an answer and return it; return None when the call must be claimed again."""
        pause, since, left_since = FIRST_LOOK_S, time.monotonic(), None
        while row is not None and row.state not in ANSWERED:
            if takeover(row, idempotent=call.idempotent) is not None:
                return None
            if not row.alive:
                left_since = left_since or time.monotonic()
                if not row.idempotent or time.monotonic() - left_since >= self._no_skill_s:
                    row = await self._record_loss(call, address, row)
                    continue
            await self._driver.sleep(pause)
            pause = min(LAST_LOOK_S, pause * 2)
            try:
                row = await self.ask(address, lambda: address.journal.get(address.key))
                since = time.monotonic()
            except JournalAway:
                if time.monotonic() - since > AWAY_S:
                    raise
        return row

    async def _record_loss(self, call: CallRequest, address: CallAddress, row: JournalRow) -> JournalRow | None:
        owner = row.owner
        unknown = failed(call.tool, OUTCOME_UNKNOWN)
        return await self.ask(address, lambda: address.journal.lose(address.key, owner, unknown))

    async def ask(self, address: CallAddress, question: Callable[[], T]) -> T:
        """Query the journal, on a thread where its disk must not block an event loop."""
        try:
            if self._driver.asynchronous and not isinstance(address.journal, MemoryJournal):
                return await self._threads.call(question)
            return question()
        except Exception as error:
            raise JournalAway(type(error).__name__) from error


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
