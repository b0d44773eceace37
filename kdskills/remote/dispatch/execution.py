"""One run of a handler, from its slot to the committed answer."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

from kdskills.remote.core import discard
from kdskills.remote.dispatch.arguments import own_copy
from kdskills.remote.dispatch.leases import CallLeases
from kdskills.remote.dispatch.outcome import NOT_RECORDED, OUTCOME_UNKNOWN, failed
from kdskills.remote.dispatch.payloads import AnswerBuilder
from kdskills.remote.ports import CallJournal, JournalRow, RemoteCall, StoredAnswer

if TYPE_CHECKING:
    from kdskills.remote.registry import RemoteSkill

WRITE_TRIES: Final = 3
WRITE_PAUSE_S: Final = 0.2

_log = logging.getLogger(__name__)


class Execution:
    """Runs one handler and records its answer; the caller may stop waiting before the handler has ended.

    Args:
        skill: The skill to run.
        tool: How messages name it.
        arguments: Any JSON value that passed the checks.
        call: Facts about the call, for handlers that ask for them.
        context: The caller's context variables, copied for this run.
        journal: Where the answer is committed.
        key: The call's key in the journal.
        owner: This attempt's name in the journal.
        answers: Builds the answer.
        leases: Renews this call's lease until the answer is committed.
        asynchronous: Whether awaitable results can be awaited.
    """

    def __init__(
        self,
        skill: RemoteSkill,
        tool: str,
        arguments: Any,
        *,
        call: RemoteCall,
        context: Context,
        journal: CallJournal,
        key: str,
        owner: str,
        answers: AnswerBuilder,
        leases: CallLeases,
        asynchronous: bool,
    ) -> None:
        self.skill = skill
        self.tool = tool
        self.call = call
        self.context = context
        self._arguments = arguments
        self._journal = journal
        self._key = key
        self._owner = owner
        self._answers = answers
        self._leases = leases
        self._asynchronous = asynchronous
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
            if self._asynchronous:
                return value
            discard(value)
            self.commit(self._answers.awaitable(self.tool))
            return None
        self.complete(value)
        return None

    def begin(self) -> bool:
        """Record that the handler is about to start; return False when another attempt owns the call by now."""
        try:
            self.began = self._journal.start(self._key, self._owner)
        except Exception as error:  # noqa: BLE001 - any journal's failure means that the handler must not run
            _log.warning("a call of %s was not run: the journal does not answer (%s)", self.tool, type(error).__name__)
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
            self.commit(self._answers.of_error(self.tool, self.raised))
            return
        try:
            answer = self._answers.of_value(self.tool, value)
            self.value = value if answer.handled else None
        except BaseException as error:  # noqa: BLE001 - `__str__` and iterators of the value are the handler's code, too
            self.raised = error
            answer = self._answers.of_error(self.tool, error)
        self.commit(answer)

    def commit(self, answer: StoredAnswer) -> None:
        """Commit the answer; an answer that cannot be committed is not given, since no worker could repeat it."""
        for tries_left in reversed(range(WRITE_TRIES)):
            try:
                self.row = self._journal.finish(self._key, self._owner, answer)
                self.answer = answer
                break
            except Exception as error:  # noqa: BLE001 - any journal's failure is answered as an unknown outcome
                _log.warning("the answer of %s could not be recorded: %s", self.tool, type(error).__name__)
                if not tries_left:
                    self.answer = failed(self.tool, NOT_RECORDED)
                else:
                    time.sleep(WRITE_PAUSE_S)
        self._end()

    def abandon(self) -> None:
        """Record an unknown outcome, because the event loop of the handler is closing."""
        try:
            unknown = failed(self.tool, OUTCOME_UNKNOWN)
            self.row = self._journal.lose(self._key, self._owner, unknown, dead=False)
        finally:
            self._end()

    def _end(self) -> None:
        self._leases.release(self._journal, self._key, self._owner)
        self.ended.set()

    def _handler(self) -> Any:
        extra = {self.skill.call_parameter: self.call} if self.skill.call_parameter else {}
        if self._arguments is None:
            return self.skill.handler(**extra)
        # The handler gets a copy: if it changes its arguments, the identity of the call must stay the same.
        arguments = own_copy(self._arguments)
        if isinstance(arguments, dict):
            return self.skill.handler(**{**self.skill.coerce(arguments), **extra})
        return self.skill.handler(arguments, **extra)


def is_coroutine_function(handler: Any) -> bool:
    """Return whether calling *handler* only makes a coroutine: then it is called on the loop, not on a thread."""
    while hasattr(handler, "func") and hasattr(handler, "keywords"):  # functools.partial
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004 - its kind is asked, not whether it can be called
