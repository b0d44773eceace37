"""Runs a call: identified, claimed in its journal, checked, run, recorded, and only then answered.

Handlers run on daemon threads, so that one that hangs does not keep the interpreter from ending, or as tasks of an event loop. A
thread of its own renews the leases, independent of all handlers.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

from kdskills.errors import MissingExtra
from kdskills.remote.dispatch.payloads import (
    AWAITABLE,
    NO_JOURNAL,
    NOT_RECORDED,
    OUTCOME_UNKNOWN,
    AnswerBuilder,
    CallOutcome,
    Spool,
    failed,
    outcome_of,
    overdue,
    unregistered,
)
from kdskills.remote.journal.calls import ANSWERED, MemoryJournal, WeakIdentities, strong_key, takeover
from kdskills.remote.ports import CallIdentity, CallJournal, JournalRow, RemoteCall, StoredAnswer
from kdskills.remote.schemas.checks import faults, own_copy
from kdskills.session.threads import HandlerThreads, discard, on_waiting_thread

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


@dataclass(frozen=True, slots=True)
class CallAttempt:
    """One attempt at a call that is to be run or answered.

    Attributes:
        skill: The skill to run; None when this worker has none of that name.
        identity: Identifies the call.
        arguments: Any JSON value.
        tool: How messages name the skill.
        journal: Where the call is recorded.
        key: The call's key there.
        owner: This attempt's name there.
        findable: Whether a repeated delivery gets the same key.
    """

    skill: RemoteSkill | None
    identity: CallIdentity
    arguments: Any
    tool: str
    journal: CallJournal
    key: str
    owner: str
    findable: bool

    @property
    def reported_key(self) -> str | None:
        """The key if others can find the call by it, else None."""
        return self.key if self.findable else None

    def taken_over(self, row: JournalRow | None) -> bool:
        """Return whether another attempt has the call's row."""
        return row is not None and row.owner != self.owner


LEASE_S: Final = 6.0
RENEW_S: Final = 2.0


class CallLeases:
    """Renews the lease of every running call every *renew_s*, from a daemon thread that sleeps while no call runs."""

    def __init__(self, lease_s: float = LEASE_S, renew_s: float = RENEW_S) -> None:
        self.lease_s = lease_s
        self._renew_s = renew_s
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._leases: dict[tuple[int, str], CallAttempt] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def hold(self, call: CallAttempt) -> None:
        """Renew this call's lease from now on.

        Raises:
            RuntimeError: The thread cannot be started.
        """
        if self._process != os.getpid():  # after a fork: the thread and its calls belong to the parent process
            self._begin()
        with self._changed:
            self._leases[id(call.journal), call.key] = call
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._renew_all, name="kdskills-leases", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()

    def release(self, call: CallAttempt) -> None:
        """Stop renewing this call's lease, if this attempt still has it."""
        with self._changed:
            if self._leases.get((id(call.journal), call.key)) is call:
                del self._leases[id(call.journal), call.key]

    def close(self) -> None:
        """End the thread; calls that still run count as dead once their leases expire."""
        if self._process != os.getpid():
            self._begin()
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=self.lease_s)

    def _renew_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._leases)
                self._changed.wait_for(lambda: self._closed, timeout=self._renew_s)
                if self._closed:
                    return
                calls = list(self._leases.values())
            for journal in {id(call.journal): call.journal for call in calls}.values():
                rows = {call.key: call.owner for call in calls if call.journal is journal}
                try:
                    journal.renew(rows, self.lease_s)
                except Exception as error:  # noqa: BLE001 - a journal that is away for a moment must not end this thread
                    _log.warning("leases of %d calls could not be renewed: %s", len(rows), type(error).__name__)


WRITE_TRIES: Final = 3
WRITE_PAUSE_S: Final = 0.2


class Execution:
    """Runs one handler, in the context variables of its maker, and records its answer.

    The caller may stop waiting before the handler has ended.

    Args:
        attempt: The call, whose arguments passed the checks.
        skill: The skill to run.
        answers: Builds the answer.
        leases: Renews this call's lease until the answer is committed.
        asynchronous: Whether awaitable results can be awaited.
    """

    def __init__(
        self,
        attempt: CallAttempt,
        skill: RemoteSkill,
        answers: AnswerBuilder,
        leases: CallLeases,
        *,
        asynchronous: bool,
    ) -> None:
        identity = attempt.identity
        deadline = None if skill.deadline_seconds is None else time.time() + skill.deadline_seconds
        self.call = RemoteCall(attempt.key, identity.thread_id, identity.turn_id, identity.call_id, deadline)
        self.context = copy_context()
        self._skill = skill
        self._attempt = attempt
        self._answers = answers
        self._leases = leases
        self._asynchronous = asynchronous
        self._on_loop = asynchronous and is_coroutine_function(skill.handler)
        self.began = False
        self.ended = threading.Event()
        self.value: Any = None
        self.raised: BaseException | None = None
        self.answer: StoredAnswer | None = None
        self.row: JournalRow | None = None
        self.in_slot = False
        self._task: asyncio.Task[Any] | None = None

    def run(self) -> Awaitable[Any] | None:
        """Run the call on this thread; an awaitable is returned, for the loop to await and pass to `complete`.

        Exceptions of the handler become answers.
        """
        if not self.begin():
            return None
        value = self.invoke()
        if self.raised is None and inspect.isawaitable(value):
            if self._asynchronous:
                return value
            discard(value)
            self.commit(failed(self._attempt.tool, AWAITABLE))
            return None
        self.complete(value)
        return None

    async def run_in(self, slots: asyncio.Semaphore, threads: HandlerThreads) -> None:
        """Wait for a slot and run the call in it: a coroutine function on this loop, a plain function on a thread."""
        async with slots:
            self.in_slot = True
            try:
                value = await self._value(threads)
                if self.ended.is_set():
                    return
                try:
                    await threads.call(lambda: self.complete(value))
                except RuntimeError:  # no thread could be started: block the loop rather than lose an answer
                    self.complete(value)
            except asyncio.CancelledError:  # inside a slot, only a closing event loop cancels this task
                if self._on_loop and not self.ended.is_set():
                    self.abandon()
                raise

    async def _value(self, threads: HandlerThreads) -> Any:
        """Return what the handler returned; nothing counts once the call has ended."""
        if not self._on_loop:
            value = await threads.call(self.run, on_loop_closed=discard)
        else:
            value = self.invoke() if await threads.call(self.begin) else None
        if self.raised is None and inspect.isawaitable(value):
            self._task = asyncio.create_task(self._awaited(value), context=self.context)
            if inspect.iscoroutine(value):  # a task that is cancelled before its first step never awaits it
                self._task.add_done_callback(lambda _: value.close())
            return await asyncio.shield(self._task)
        return value

    async def _awaited(self, value: Awaitable[Any]) -> Any:
        """Await the handler's awaitable and store what it raises, so that not even `SystemExit` reaches the loop."""
        try:
            return await value
        except BaseException as error:  # noqa: BLE001 - every exception of a handler is answered
            self.raised = error
            return None

    def cancel(self) -> None:
        """Cancel a handler that runs on the loop; one on a thread learns from `RemoteCall.cancelled` that nobody waits."""
        self.call.stop.set()
        if self._task is not None:
            self._task.cancel()

    def begin(self) -> bool:
        """Record that the handler is about to start; return False when another attempt owns the call by now."""
        try:
            self.began = self._attempt.journal.start(self._attempt.key, self._attempt.owner)
        except Exception as error:  # noqa: BLE001 - any journal's failure means that the handler must not run
            _log.warning(
                "a call of %s was not run: the journal does not answer (%s)", self._attempt.tool, type(error).__name__
            )
        if not self.began:
            self._end()
        return self.began

    def invoke(self) -> Any:
        """Call the handler in the caller's context; store what it raises."""
        try:
            return self.context.run(self._handler)
        except BaseException as error:  # noqa: BLE001 - every exception of a handler is answered
            self.raised = error
            return None

    def complete(self, value: Any) -> None:
        """Build the answer and commit it."""
        if self.raised is not None:
            self.commit(self._answers.of_error(self._attempt.tool, self.raised))
            return
        try:
            answer = self._answers.of_value(self._attempt.tool, value)
            self.value = value if answer.handled else None
        except BaseException as error:  # noqa: BLE001 - `__str__` and iterators of the value are the handler's code, too
            self.raised = error
            answer = self._answers.of_error(self._attempt.tool, error)
        self.commit(answer)

    def commit(self, answer: StoredAnswer) -> None:
        """Commit the answer; an answer that cannot be committed is not given, since no worker could repeat it."""
        attempt = self._attempt
        for tries_left in reversed(range(WRITE_TRIES)):
            try:
                self.row = attempt.journal.finish(attempt.key, attempt.owner, answer)
                self.answer = answer
                break
            except Exception as error:  # noqa: BLE001 - any journal's failure is answered as an unknown outcome
                _log.warning("the answer of %s could not be recorded: %s", attempt.tool, type(error).__name__)
                if not tries_left:
                    self.answer = failed(attempt.tool, NOT_RECORDED)
                else:
                    time.sleep(WRITE_PAUSE_S)
        self._end()

    def abandon(self) -> None:
        """Record an unknown outcome, because the event loop of the handler is closing."""
        try:
            unknown = failed(self._attempt.tool, OUTCOME_UNKNOWN)
            self.row = self._attempt.journal.lose(self._attempt.key, self._attempt.owner, unknown, dead=False)
        finally:
            self._end()

    def _end(self) -> None:
        self._leases.release(self._attempt)
        self.ended.set()

    def _handler(self) -> Any:
        extra = {self._skill.call_parameter: self.call} if self._skill.call_parameter else {}
        if self._attempt.arguments is None:
            return self._skill.handler(**extra)
        # The handler gets a copy: if it changes its arguments, the identity of the call must stay the same.
        arguments = own_copy(self._attempt.arguments)
        if isinstance(arguments, dict):
            return self._skill.handler(**{**self._skill.coerce(arguments), **extra})
        return self._skill.handler(arguments, **extra)


def is_coroutine_function(handler: Any) -> bool:
    """Return whether calling *handler* only makes a coroutine: then it is called on the loop, not on a thread."""
    while hasattr(handler, "func") and hasattr(handler, "keywords"):  # functools.partial
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - its kind is asked, not whether it can be called


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
        self._slot_count = max(1, max_concurrency)
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
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
            self._leases.hold(call)
            in_time = await self._run(execution, deadline_seconds)
        except RuntimeError as error:  # no thread could be started, so the handler did not run
            execution.commit(self._answers.of_error(call.tool, error))
            in_time = True
        if in_time or deadline_seconds is None:
            return await self._final_outcome(call, execution)
        try:
            return await self._overdue_outcome(overdue(call.tool, deadline_seconds), call)
        finally:  # only after the commit, so that a result of the cancelled handler counts as late
            execution.cancel()

    async def _run(self, execution: Execution, seconds: float | None) -> bool:
        """Return whether the execution ended in time; otherwise it may go on while nobody waits for it.

        After the deadline a task is cancelled, while a thread keeps its slot until it ends. In a sync session a handler without
        a deadline runs on the caller's own thread and takes no slot.

        Raises:
            RuntimeError: No thread could be started, so the handler did not run.
        """
        if seconds is None and not self._asynchronous:
            await on_waiting_thread(execution.run)
            return True
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._slot_count))
        task = asyncio.create_task(execution.run_in(slots, self._threads))
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)
        done: set[asyncio.Task[None]] = set()
        try:
            done, _ = await asyncio.wait({task}, timeout=None if seconds is None else max(0.0, seconds))
        finally:
            if not done and not execution.in_slot:  # a handler that began goes on, whoever stops waiting
                task.cancel()
        if done:
            await task  # raises defects of this module, which would be lost otherwise
        return bool(done)

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
        self._leases.release(call)
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
