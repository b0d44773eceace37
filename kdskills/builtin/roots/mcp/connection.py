"""A connection to an MCP server that is kept between questions.

Questions come from any thread, also from one whose event loop is busy, so the connection lives in a thread and loop of
its own. It ends when nobody asked for a while, and with the first thing that goes wrong: questions that are under way are
answered, the next one opens another.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

T = TypeVar("T")

Ask = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Takes a method and its parameters, and returns the server's answer."""
Question = Callable[[Ask], Awaitable[T]]
Connect = Callable[[AsyncExitStack], Awaitable[Ask]]

AT_ONCE: Final = 8
"""Questions a server gets at one time; more wait, and their time runs."""
IDLE_S: Final = 120.0
ENDING_S: Final = 5.0


class ConnectionLost(Exception):  # internal to this package: it becomes a failure of the server
    """The connection ended before the question was answered."""


@dataclass(eq=False, slots=True)
class _PendingQuestion:
    question: Question[Any]
    timeout_s: float
    answer: Future[Any] = field(default_factory=Future)


class Connection:
    """One connection, opened by its first question. Safe from any thread.

    Args:
        connect: Opens it; what the stack holds is closed with it.
        name: Of the thread.
        settled: Whether an error is an answer of the server, after which the connection still works.
        idle_s: Seconds without a question after which it is closed.
    """

    def __init__(
        self, connect: Connect, name: str, settled: Callable[[BaseException], bool], *, idle_s: float = IDLE_S
    ) -> None:
        self._connect = connect
        self._settled = settled
        self._idle_s = idle_s
        self._room = asyncio.Semaphore(AT_ONCE)
        self._lock = threading.RLock()  # the garbage collector may call `close` in a thread that holds it
        self._waiting: deque[_PendingQuestion] = deque()
        self._open = True
        self._wake: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.proven = False
        """Whether the server answered on it: what fails then may be the connection's fault alone."""

    def ask(self, question: Question[T], timeout_s: float) -> Future[T] | None:
        """Take a question; None when this connection takes no more.

        Args:
            question: Asks the server.
            timeout_s: Seconds until the answer is a TimeoutError; connecting has as many of its own.
        """
        pending = _PendingQuestion(question, timeout_s)
        with self._lock:
            if not self._open:
                return None
            self._waiting.append(pending)
            if self._thread.ident is None:
                atexit.register(self._end)
                self._thread.start()
            elif self._wake is not None:
                self._wake()
        return pending.answer

    def close(self) -> None:
        """Take no more questions, and end when those under way are answered."""
        with self._lock:
            self._open = False
            if self._wake is not None:
                self._wake()

    def _end(self) -> None:
        """Close before the interpreter exits, so that a server process we started sees the end of its input."""
        self.close()
        self._thread.join(ENDING_S)

    def _run(self) -> None:
        failure: Exception = ConnectionLost("the connection was closed")
        try:
            asyncio.run(self._live())
        except Exception as error:  # noqa: BLE001 - told below to those who asked, in their threads
            failure = error
        except asyncio.CancelledError:  # a broken transport cancels `_live`; those who asked were not cancelled
            failure = ConnectionLost("the connection was lost")
        with self._lock:
            self._open, self._wake = False, None
            unanswered = list(self._waiting)
            self._waiting.clear()
        for pending in unanswered:
            pending.answer.set_exception(failure)
        atexit.unregister(self._end)

    async def _live(self) -> None:
        """Connect, and answer until nothing is left to do."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            self._wake = lambda: loop.call_soon_threadsafe(woken.set)
            patience = max((pending.timeout_s for pending in self._waiting), default=0.0)
        running: set[asyncio.Task[None]] = set()

        def over(task: asyncio.Task[None]) -> None:
            running.discard(task)
            woken.set()

        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(patience):
                    ask = await self._connect(stack)
                while True:
                    woken.clear()
                    for pending in self._next_questions():
                        task = loop.create_task(self._answer(pending, ask))
                        running.add(task)
                        task.add_done_callback(over)
                    if not running and self._finished():
                        return
                    await self._woken(woken, busy=bool(running))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _woken(self, woken: asyncio.Event, *, busy: bool) -> None:
        """Wait for a question, for an answer, or until it was quiet for long enough: then no more is taken."""
        try:
            async with asyncio.timeout(None if busy else self._idle_s):
                await woken.wait()
        except TimeoutError:
            with self._lock:
                self._open = self._open and bool(self._waiting)

    def _next_questions(self) -> list[_PendingQuestion]:
        with self._lock:
            questions = list(self._waiting)
            self._waiting.clear()
        return questions

    def _finished(self) -> bool:
        with self._lock:
            return not self._open and not self._waiting

    async def _answer(self, pending: _PendingQuestion, ask: Ask) -> None:
        try:
            async with asyncio.timeout(pending.timeout_s), self._room:
                answer = await pending.question(ask)
        except asyncio.CancelledError:
            pending.answer.set_exception(ConnectionLost("the connection was lost"))
            raise
        except Exception as error:  # noqa: BLE001 - told to whoever asked, in that thread
            if not self._settled(error):
                self.close()
            pending.answer.set_exception(error)
        else:
            self.proven = True
            pending.answer.set_result(answer)
