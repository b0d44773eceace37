"""Runs of handlers: their slots, threads and deadlines, the check of arguments, and the leases of running calls.

Handlers run on daemon threads, so that one that hangs does not keep the interpreter from ending, or as tasks of an event loop. A
thread of its own renews the leases, independent of all handlers.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

from kdskills.errors import MissingExtra
from kdskills.remote.dispatch.outcome import NOT_RECORDED, OUTCOME_UNKNOWN, failed
from kdskills.remote.dispatch.payloads import AnswerBuilder
from kdskills.remote.ports import CallIdentity, CallJournal, JournalRow, JsonObject, RemoteCall, StoredAnswer
from kdskills.remote.schemas.checks import validator_of
from kdskills.session.threads import HandlerThreads, discard, on_waiting_thread

if TYPE_CHECKING:
    from kdskills.remote.registry import RemoteSkill


T = TypeVar("T")

PERMISSIVE: Final[JsonObject] = {"type": "object", "properties": {}, "additionalProperties": True}
"""The schema of a handler that declares nothing; it checks nothing."""
MAX_FAULTS: Final = 20
MAX_WORDS: Final = 300


def faults(schema: JsonObject, arguments: Any) -> list[str]:
    """Return the faults of *arguments*, each as `path: message`, sorted by path; empty for valid ones.

    Absent arguments count as an empty object. No schema is fetched from anywhere: a `$ref` that leaves the schema is a
    fault.

    Raises:
        MissingExtra: The package that checks schemas is not installed.
    """
    if schema == PERMISSIVE:
        return []
    try:
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError:
        raise MissingExtra("checking the arguments of remote skills", "codex") from None
    validator = validator_of(schema, registry=Registry())
    try:
        problems = [
            (_path(error.absolute_path), _words(error.message))
            for error, _ in zip(
                validator.iter_errors({} if arguments is None else arguments), range(10 * MAX_FAULTS), strict=False
            )
        ]
    except Unresolvable as error:
        return [f"$: the skill's schema refers to {_words(str(error.ref))}, which is not in it"]
    except RecursionError:
        return ["$: nested too deeply"]
    except ValueError as error:
        return [f"$: the skill's schema holds a pattern that is not used: {_words(str(error))}"]
    problems.sort()
    words = [f"{path}: {message}" for path, message in problems]
    return words if len(words) <= MAX_FAULTS else [*words[:MAX_FAULTS], f"and {len(words) - MAX_FAULTS} more"]


def own_copy(arguments: Any) -> Any:
    """Return a copy of *arguments* with all nested lists and objects copied; other values are shared."""
    holder = [arguments]
    unvisited: list[Any] = [holder]
    copies: dict[int, Any] = {}  # by id of the original: a value may contain itself
    while unvisited:
        container = unvisited.pop()
        for key, inner in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if not isinstance(inner, dict | list):
                continue
            if id(inner) not in copies:
                copies[id(inner)] = inner.copy()
                unvisited.append(copies[id(inner)])
            container[key] = copies[id(inner)]
    return holder[0]


def _path(parts: Any) -> str:
    text = "$"
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{str(part)[:80]}"
    return text


def _words(message: str) -> str:
    flat = " ".join(message.split())
    return flat if len(flat) <= MAX_WORDS else f"{flat[:MAX_WORDS]}…"


LEASE_S: Final = 6.0
RENEW_S: Final = 2.0


class CallLeases:
    """Renews the lease of every running call, from a daemon thread that sleeps while no call runs.

    Args:
        lease_s: How long a lease lasts.
        renew_s: How often it is renewed.
    """

    def __init__(self, lease_s: float = LEASE_S, renew_s: float = RENEW_S) -> None:
        self.lease_s = lease_s
        self._renew_s = renew_s
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._leases: dict[tuple[int, str], tuple[CallJournal, str]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def hold(self, journal: CallJournal, key: str, owner: str) -> None:
        """Renew this call's lease from now on.

        Raises:
            RuntimeError: The thread cannot be started.
        """
        if self._process != os.getpid():  # after a fork: the thread and its calls belong to the parent process
            self._begin()
        with self._changed:
            self._leases[id(journal), key] = (journal, owner)
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._renew_all, name="kdskills-leases", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()

    def release(self, journal: CallJournal, key: str, owner: str) -> None:
        """Stop renewing this call's lease, if *owner* still has it."""
        with self._changed:
            if self._leases.get((id(journal), key)) == (journal, owner):
                del self._leases[id(journal), key]

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
                leases = dict(self._leases)
            by_journal: dict[int, tuple[CallJournal, dict[str, str]]] = {}
            for (number, key), (journal, owner) in leases.items():
                by_journal.setdefault(number, (journal, {}))[1][key] = owner
            for journal, rows in by_journal.values():
                try:
                    journal.renew(rows, self.lease_s)
                except Exception as error:  # noqa: BLE001 - a journal that is away for a moment must not end this thread
                    _log.warning("leases of %d calls could not be renewed: %s", len(rows), type(error).__name__)


WRITE_TRIES: Final = 3
WRITE_PAUSE_S: Final = 0.2

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
        self.asynchronous = asynchronous
        self.on_loop = asynchronous and is_coroutine_function(skill.handler)
        self.began = False
        self.ended = threading.Event()
        self.value: Any = None
        self.raised: BaseException | None = None
        self.answer: StoredAnswer | None = None
        self.row: JournalRow | None = None
        self.cancel: Callable[[], None] = lambda: None  # set by the runner when the caller gives up waiting

    def run(self) -> Awaitable[Any] | None:
        """Run the call on this thread; an awaitable is returned, for the loop to await and pass to `complete`.

        Exceptions of the handler become answers.
        """
        if not self.begin():
            return None
        value = self.invoke()
        if self.raised is None and inspect.isawaitable(value):
            if self.asynchronous:
                return value
            discard(value)
            self.commit(self._answers.awaitable(self._attempt.tool))
            return None
        self.complete(value)
        return None

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
                _log.warning("the answer of %s could not be recorded: %s", self._attempt.tool, type(error).__name__)
                if not tries_left:
                    self.answer = failed(self._attempt.tool, NOT_RECORDED)
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
        self._leases.release(self._attempt.journal, self._attempt.key, self._attempt.owner)
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


class HandlerRunner:
    """Gives executions slots: coroutine functions of async sessions run as tasks, plain functions on threads.

    Args:
        slots: How many handlers may run at the same time.
    """

    def __init__(self, slots: int) -> None:
        self._count = slots
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._threads = HandlerThreads()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, execution: Execution, seconds: float | None) -> bool:
        """Return whether the execution ended in time; otherwise it may go on while nobody waits for it.

        After the deadline a task is cancelled, while a thread keeps its slot until it ends. In a sync session a handler without
        a deadline runs on the caller's own thread and takes no slot.

        Raises:
            RuntimeError: No thread could be started, so the handler did not run.
        """
        if seconds is None and not execution.asynchronous:
            await on_waiting_thread(execution.run)
            return True
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._count))
        slot_run = _SlotRun(execution, slots, self._threads)
        task = asyncio.create_task(slot_run.take())
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)
        try:
            done, _ = await asyncio.wait({task}, timeout=None if seconds is None else max(0.0, seconds))
        except asyncio.CancelledError:  # the caller stops waiting; a handler that began goes on
            if not slot_run.inside:
                task.cancel()
            raise
        if not done:
            slot_run.stop(task)
            execution.cancel = slot_run.cancel
            return False
        await task  # raises defects of this module, which would be lost otherwise
        return True


class _SlotRun:
    """One execution that waits for a slot and then runs in it."""

    def __init__(self, execution: Execution, slots: asyncio.Semaphore, threads: HandlerThreads) -> None:
        self._execution = execution
        self._slots = slots
        self._threads = threads
        self._handler: asyncio.Task[Any] | None = None
        self.inside = False

    def stop(self, task: asyncio.Task[None]) -> None:
        """Stop waiting for a slot; a handler that began is not stopped, see `cancel`."""
        if not self.inside:
            task.cancel()

    def cancel(self) -> None:
        """Cancel the handler's own task."""
        if self._handler is not None:
            self._handler.cancel()

    async def take(self) -> None:
        """Wait for a slot, run, give the slot back."""
        async with self._slots:
            self.inside = True
            try:
                await self._run()
            except asyncio.CancelledError:  # inside a slot, only a closing event loop cancels this task
                if self._execution.on_loop and not self._execution.ended.is_set():
                    self._execution.abandon()
                raise

    async def _run(self) -> None:
        execution = self._execution
        if not execution.on_loop:
            value = await self._threads.call(execution.run, on_loop_closed=discard)
            if value is None:
                return
        elif not await self._threads.call(execution.begin):
            return
        else:
            value = execution.invoke()
        if execution.raised is None and inspect.isawaitable(value):
            value = await self._run_task(value)
        try:
            await self._threads.call(lambda: execution.complete(value))
        except RuntimeError:  # no thread could be started: block the loop rather than lose an answer
            execution.complete(value)

    async def _run_task(self, value: Awaitable[Any]) -> Any:
        self._handler = asyncio.create_task(_await_handler(value, self._execution), context=self._execution.context)
        if inspect.iscoroutine(value):  # a task that is cancelled before its first step never awaits it
            self._handler.add_done_callback(lambda _: value.close())
        return await asyncio.shield(self._handler)


async def _await_handler(value: Awaitable[Any], execution: Execution) -> Any:
    """Await a handler's awaitable and store what it raises, so that not even `SystemExit` reaches the loop."""
    try:
        return await value
    except BaseException as error:  # noqa: BLE001 - every exception of a handler is answered
        execution.raised = error
        return None
