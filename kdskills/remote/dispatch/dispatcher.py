"""Runs a call: identified, claimed in its journal, checked, run, recorded, and only then answered.

Handlers run on daemon threads, so that one that hangs does not keep the interpreter from ending, or as tasks of an event loop.
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
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

from kdskills.remote.dispatch.payloads import OUTCOME_UNKNOWN, AnswerBuilder, Spool, failed, overdue, unregistered
from kdskills.remote.journal.calls import ANSWERED, MemoryJournal, WeakIdentities, strong_key, takeover
from kdskills.remote.ports import CallIdentity, CallJournal, CallState, JournalRow, JsonObject, RemoteCall, StoredAnswer
from kdskills.remote.schemas.checks import faults, own_copy
from kdskills.session.threads import HandlerThreads, discard, on_waiting_thread

if TYPE_CHECKING:
    from kdskills.remote.registry import RemoteSkill


T = TypeVar("T")

AWAITABLE: Final = "got an awaitable; use AsyncCodexClient (or AsyncCodexManager)"
NOT_RECORDED: Final = "outcome unknown: the result could not be recorded"
NO_JOURNAL: Final = "not run: the journal of calls does not answer"

FIRST_LOOK_S: Final = 0.005
LAST_LOOK_S: Final = 0.2
AWAY_S: Final = 30.0  # how long a waiting call tolerates a journal that does not answer
NO_SESSION_S: Final = 30.0  # how long a worker without the session leaves a call to others
NO_SKILL_S: Final = 1.0  # how long a worker with the session, but without the skill, leaves a call to others
ACCEPTED_KEPT: Final = 65_536  # answers that are remembered as accepted; the oldest go first
LEASE_S: Final = 6.0
RENEW_S: Final = 2.0
WRITE_TRIES: Final = 3
WRITE_PAUSE_S: Final = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The answer for the model, and further facts for the program; without a journal's row there are fewer."""

    response_payload: JsonObject  # fit for the wire; the caller's own copy
    handled: bool  # by a handler
    result: Any = None  # of the handler; None for a replay
    error: str | None = None
    key: str | None = None
    state: CallState | None = None
    replayed: bool = False  # read from the journal; the handler did not run for this delivery
    late: bool = False  # a result came after the model had got another answer
    duplicate: bool = False  # accepted on this connection before, so nothing must be submitted
    reraise: BaseException | None = None  # a `KeyboardInterrupt` to raise again once the answer is submitted


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
        """Renew this call's lease from now on. Raises RuntimeError when the thread cannot be started."""
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


def is_coroutine_function(handler: Any) -> bool:
    """Return whether calling *handler* only makes a coroutine: then it is called on the loop, not on a thread."""
    while hasattr(handler, "func") and hasattr(handler, "keywords"):  # functools.partial
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - its kind is asked, not whether it can be called


class JournalAway(Exception):
    """The journal did not answer; its own error is the cause."""


class CallAttempt:
    """One attempt at a call: it waits for another attempt's answer, or runs the handler and records what became of it.

    The handler runs in the context variables of the attempt's maker, who may stop waiting before it has ended. A call that is not
    *findable* has a journal of its own; without a *skill* it is refused.
    """

    def __init__(
        self,
        dispatcher: RemoteDispatcher,
        skill: RemoteSkill | None,
        identity: CallIdentity,
        arguments: Any,
        *,
        findable: bool = True,
    ) -> None:
        self._dispatcher = dispatcher
        self._skill = skill
        self._identity = identity
        self._arguments = arguments
        self.tool = identity.label
        self.journal, key = dispatcher.journal, strong_key(identity) if findable else None
        if findable and key is None:
            self.journal, key = dispatcher.weak_journal, dispatcher.weak_identities.key(identity)
        if key is None:
            self.journal = MemoryJournal(kept=1)
        self.reported_key = key  # None: nobody else can find the call by it
        self.key = key or f"once-{uuid.uuid4().hex}"
        self.owner = f"{dispatcher.owner}:{uuid.uuid4().hex[:12]}"  # this attempt's name in the journal
        self._on_loop = dispatcher.asynchronous and skill is not None and is_coroutine_function(skill.handler)
        self._context = copy_context()
        self._call: RemoteCall | None = None  # what the handler learns, once it is to run
        self._began = False
        self._in_slot = False
        self._ended = threading.Event()
        self._task: asyncio.Task[Any] | None = None
        self._value: Any = None
        self._raised: BaseException | None = None
        self._recorded: StoredAnswer | None = None
        self._row: JournalRow | None = None

    def outcome(self, answer: StoredAnswer, row: JournalRow | None = None, **facts: Any) -> CallOutcome:
        """Return the outcome with this answer, what the journal's row tells, and further *facts*."""
        payload = {**answer.payload, "contentItems": [dict(item) for item in answer.payload["contentItems"]]}
        state, late = (None, False) if row is None else (row.state, row.late is not None)
        facts = {"error": answer.error, "key": self.reported_key, "state": state, "late": late, **facts}
        return CallOutcome(payload, answer.handled, **facts)

    async def leave_to_others(self, seconds: float) -> None:
        """Wait until another worker has claimed the call, but not longer than *seconds*."""
        until, pause = time.monotonic() + seconds, FIRST_LOOK_S
        while time.monotonic() < until:
            if await self._ask(self.journal.get, self.key) is not None:
                return
            await asyncio.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(LAST_LOOK_S, pause * 2)

    async def answered(self, connection: str) -> CallOutcome:
        """Claim the call and answer it, or wait for the answer of the attempt that has it. Raises JournalAway."""
        idempotent = self._skill is not None and self._skill.idempotent
        lease_s = self._dispatcher.leases.lease_s
        while True:
            claim = await self._ask(
                self.journal.claim, self.key, self._identity, self.owner, lease_s, idempotent=idempotent
            )
            if claim.mine:
                outcome = await self._perform()
                if outcome is not None:
                    return outcome
                continue  # another worker has taken over the call, so its answer counts
            row = await self._wait_for_answer(claim.row, idempotent=idempotent)
            if row is not None and row.answer is not None:
                duplicate = self._dispatcher.was_accepted(self.key, connection)
                return self.outcome(row.answer, row, replayed=True, duplicate=duplicate)

    async def _wait_for_answer(self, row: JournalRow | None, *, idempotent: bool) -> JournalRow | None:
        """Wait until the row has an answer and return it; return None when the call must be claimed again."""
        pause, since, left_since = FIRST_LOOK_S, time.monotonic(), None
        while row is not None and row.state not in ANSWERED:
            if takeover(row, idempotent=idempotent) is not None:
                return None
            if not row.alive:
                left_since = left_since or time.monotonic()
                if not row.idempotent or time.monotonic() - left_since >= self._dispatcher.no_skill_s:
                    row = await self._ask(self.journal.lose, self.key, row.owner, failed(self.tool, OUTCOME_UNKNOWN))
                    continue
            await asyncio.sleep(pause)
            pause = min(LAST_LOOK_S, pause * 2)
            try:
                row = await self._ask(self.journal.get, self.key)
                since = time.monotonic()
            except JournalAway:
                if time.monotonic() - since > AWAY_S:
                    raise
        return row

    async def _ask(self, question: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Query the call's journal, on a thread unless it is in memory: its disk must not block the event loop."""
        try:
            if isinstance(self.journal, MemoryJournal):
                return question(*arguments, **keywords)
            return await self._dispatcher.threads.call(partial(question, *arguments, **keywords))
        except Exception as error:
            raise JournalAway(type(error).__name__) from error

    async def _perform(self) -> CallOutcome | None:
        """Answer the claimed call; return None when another worker took it over."""
        skill, answers, refused = self._skill, self._dispatcher.answers, None
        if skill is None:
            refused = unregistered(self.tool)
        else:
            problems = faults(skill.input_schema, self._arguments)
            refused = answers.failure(self.tool, "; ".join(problems)) if problems else None
        if skill is None or refused is not None:
            refused = refused or unregistered(self.tool)
            row = await self._ask(self.journal.finish, self.key, self.owner, refused)
            return None if self._taken_over(row) else self.outcome(refused, row)
        seconds, identity = skill.deadline_seconds, self._identity
        deadline = None if seconds is None else time.time() + seconds
        self._call = RemoteCall(self.key, identity.thread_id, identity.turn_id, identity.call_id, deadline)
        try:
            self._dispatcher.leases.hold(self)
            in_time = await self._run_until(seconds)
        except RuntimeError as error:  # no thread could be started, so the handler did not run
            self._commit(answers.of_error(self.tool, error))
            in_time = True
        if in_time or seconds is None:
            return await self._final_outcome()
        answer = overdue(self.tool, seconds)
        try:
            row = await self._ask(self.journal.overdue, self.key, self.owner, answer)
            self._dispatcher.leases.release(self)
            if self._taken_over(row):
                return None
            return self.outcome(answer if row is None or row.answer is None else row.answer, row)
        except JournalAway:  # the lease stays, so that the handler's end can still be recorded
            return self.outcome(answer)
        finally:  # only after the commit, so that a result of the cancelled handler counts as late
            self._call.stop.set()  # how a handler on a thread learns that nobody waits
            if self._task is not None:
                self._task.cancel()

    async def _run_until(self, seconds: float | None) -> bool:
        """Return whether the run ended in time; otherwise it may go on while nobody waits for it.

        After the deadline a task is cancelled, while a thread keeps its slot until it ends. In a sync session a handler without a
        deadline runs on the caller's own thread and takes no slot. Raises RuntimeError when no thread could be started.
        """
        if seconds is None and not self._dispatcher.asynchronous:
            await on_waiting_thread(self._run)
            return True
        task = asyncio.create_task(self._run_in_slot())
        self._dispatcher.tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._dispatcher.tasks.discard)
        done: set[asyncio.Task[None]] = set()
        try:
            done, _ = await asyncio.wait({task}, timeout=None if seconds is None else max(0.0, seconds))
        finally:
            if not done and not self._in_slot:  # a handler that began goes on, whoever stops waiting
                task.cancel()
        if done:
            await task  # raises defects of this module, which would be lost otherwise
        return bool(done)

    async def _run_in_slot(self) -> None:
        """Wait for a slot and run the call in it: a coroutine function on this loop, a plain function on a thread."""
        threads = self._dispatcher.threads
        async with self._dispatcher.slots():
            self._in_slot = True
            try:
                if self._on_loop:
                    value = self._invoke() if await threads.call(self._begin) else None
                else:
                    value = await threads.call(self._run, on_loop_closed=discard)
                if self._raised is None and inspect.isawaitable(value):
                    value = await self._awaited(value)
                if self._ended.is_set():
                    return
                try:
                    await threads.call(partial(self._complete, value))
                except RuntimeError:  # no thread could be started: block the loop rather than lose an answer
                    self._complete(value)
            except asyncio.CancelledError:  # inside a slot, only a closing event loop cancels this task
                if self._on_loop and not self._ended.is_set():
                    try:
                        unknown = failed(self.tool, OUTCOME_UNKNOWN)
                        self._row = self.journal.lose(self.key, self.owner, unknown, dead=False)
                    finally:
                        self._end()
                raise

    async def _awaited(self, awaitable: Any) -> Any:
        """Await what the handler made, as a task; store what it raises: not even `SystemExit` reaches the loop."""

        async def guarded() -> Any:
            try:
                return await awaitable
            except BaseException as error:  # noqa: BLE001 - every exception of a handler is answered
                self._raised = error
                return None

        self._task = asyncio.create_task(guarded(), context=self._context)
        if inspect.iscoroutine(awaitable):  # a task that is cancelled before its first step never awaits it
            self._task.add_done_callback(lambda _: awaitable.close())
        return await asyncio.shield(self._task)

    def _run(self) -> Awaitable[Any] | None:
        """Run the call on this thread; an awaitable is returned, for the loop to await and complete the call with."""
        if not self._begin():
            return None
        value = self._invoke()
        if self._raised is not None or not inspect.isawaitable(value):
            self._complete(value)
            return None
        if self._dispatcher.asynchronous:
            return value
        discard(value)
        self._commit(failed(self.tool, AWAITABLE))
        return None

    def _begin(self) -> bool:
        """Record that the handler is about to start; return False when another attempt owns the call by now."""
        try:
            self._began = self.journal.start(self.key, self.owner)
        except Exception as error:  # noqa: BLE001 - any journal's failure means that the handler must not run
            _log.warning("a call of %s was not run: the journal does not answer (%s)", self.tool, type(error).__name__)
        if not self._began:
            self._end()
        return self._began

    def _invoke(self) -> Any:
        """Call the handler in the caller's context; store what it raises."""
        try:
            return self._context.run(self._handle)
        except BaseException as error:  # noqa: BLE001 - every exception of a handler is answered
            self._raised = error
            return None

    def _handle(self) -> Any:
        skill: Any = self._skill  # there is one: nothing runs without
        extra = {skill.call_parameter: self._call} if skill.call_parameter else {}
        if self._arguments is None:
            return skill.handler(**extra)
        # The handler gets a copy: if it changes its arguments, the identity of the call must stay the same.
        arguments = own_copy(self._arguments)
        if isinstance(arguments, dict):
            return skill.handler(**{**skill.coerce(arguments), **extra})
        return skill.handler(arguments, **extra)

    def _complete(self, value: Any) -> None:
        """Build the answer and commit it."""
        answers = self._dispatcher.answers
        if self._raised is None:
            try:
                answer = answers.of_value(self.tool, value)
                self._value = value if answer.handled else None
            except BaseException as error:  # noqa: BLE001 - `__str__` and iterators of the value are the handler's code, too
                self._raised = error
        self._commit(answer if self._raised is None else answers.of_error(self.tool, self._raised))

    def _commit(self, answer: StoredAnswer) -> None:
        """Commit the answer; an answer that cannot be committed is not given, since no worker could repeat it."""
        for tries_left in reversed(range(WRITE_TRIES)):
            try:
                self._row = self.journal.finish(self.key, self.owner, answer)
                self._recorded = answer
                break
            except Exception as error:  # noqa: BLE001 - any journal's failure is answered as an unknown outcome
                _log.warning("the answer of %s could not be recorded: %s", self.tool, type(error).__name__)
                if not tries_left:
                    self._recorded = failed(self.tool, NOT_RECORDED)
                else:
                    time.sleep(WRITE_PAUSE_S)
        self._end()

    def _end(self) -> None:
        self._dispatcher.leases.release(self)
        self._ended.set()

    def _taken_over(self, row: JournalRow | None) -> bool:
        return row is not None and row.owner != self.owner

    async def _final_outcome(self) -> CallOutcome | None:
        """Return the outcome of an ended run: its own answer, or the one the journal has instead."""
        if not self._began:
            row = await self._ask(self.journal.get, self.key)
            if row is not None and not self._taken_over(row) and row.state not in ANSWERED:
                raise JournalAway("the start was not recorded")
            return None
        row, own = self._row, self._recorded
        if row is not None and row.state not in ANSWERED:
            return None  # taken over while it ran: the answer of the second run counts
        final = row.answer if row is not None and row.answer is not None else own
        is_own = final is not None and final == own
        return self.outcome(
            final or failed(self.tool, OUTCOME_UNKNOWN),
            row,
            result=self._value if is_own else None,
            replayed=not is_own,
            reraise=self._raised if isinstance(self._raised, KeyboardInterrupt) else None,
        )


class RemoteDispatcher:
    """Runs the calls of one facade, at most *max_concurrency* handlers at once.

    Calls with a strong identity are in the shared *journal*, which the caller closes. Those with a weak one stay in memory: a
    request id that is used again in another run must not find the first run's answer. Calls without an identity get a journal
    of their own. A call is left to other workers for *no_session_s* seconds if its session is unknown here, for *no_skill_s* if
    its skill is.
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
        self.asynchronous = asynchronous
        self.owner = f"{socket.gethostname()[:60]}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
        self.weak_journal = MemoryJournal()
        self.weak_identities = WeakIdentities()
        self.answers = AnswerBuilder(spool)
        self.leases = leases or CallLeases()
        self.threads = HandlerThreads()
        self.tasks: set[asyncio.Task[None]] = set()
        self.no_skill_s = no_skill_s
        self._no_session_s = no_session_s
        self._slot_count = max(1, max_concurrency)
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._accepted: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._accepting = threading.Lock()

    async def call(
        self,
        skill: RemoteSkill | None,
        identity: CallIdentity,
        arguments: Any,
        *,
        connection: str = "",
        knows_session: bool = True,
    ) -> CallOutcome:
        """Answer one delivery of a call; failures of the handler or the journal become answers, not exceptions.

        An answer accepted before on *connection*, where this one will be submitted, is a `duplicate`.
        """
        attempt = CallAttempt(self, skill, identity, arguments)
        try:
            if skill is None and attempt.reported_key is not None and attempt.journal.shared:
                await attempt.leave_to_others(self.no_skill_s if knows_session else self._no_session_s)
            return await attempt.answered(connection)
        except JournalAway as error:
            _log.warning("a call of %s was not run: the journal failed with %r", attempt.tool, error.__cause__)
            return attempt.outcome(failed(attempt.tool, NO_JOURNAL))

    async def run(self, skill: RemoteSkill | None, identity: CallIdentity, arguments: Any) -> CallOutcome:
        """Run a call without a shared journal: the same call made twice runs twice."""
        return await CallAttempt(self, skill, identity, arguments, findable=False).answered("")

    def slots(self) -> asyncio.Semaphore:
        """Return the running loop's semaphore of handlers that may run at once."""
        return self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._slot_count))

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
        self.weak_identities.forget(session_id)
        self.weak_journal.forget(session_id)

    def close(self) -> None:
        """Stop renewing leases; the journal stays open, because the caller closes it."""
        self.leases.close()
