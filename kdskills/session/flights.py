"""One read for many callers, and loads that can be interrupted.

Callers may sit on any loop of any thread. Locks guard dictionaries only; none is held while waiting or reading.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from kdskills.errors import KdskillsError, SessionError

T = TypeVar("T")


class Abandoned(Exception):
    """The last caller left; the work stops."""


class _Flight(Generic[T]):
    def __init__(self) -> None:
        self.future: Future[T] = Future()
        self.abandoned = threading.Event()
        self.waiters = 0


class Flights(Generic[T]):
    """Runs blocking work once for all who ask for the same key while it runs.

    The work receives an event that is set when the last waiter has left, and should stop then by raising `Abandoned`.
    """

    def __init__(self, workers: int = 4) -> None:
        self._lock = threading.Lock()
        self._flying: dict[Hashable, _Flight[T]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._workers = workers

    async def fetch(self, key: Hashable, work: Callable[[threading.Event], T]) -> T:
        """Return the result of *work*, joining the flight of *key* if there is one."""
        flight = self._join(key, work)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake(_: Future[T]) -> None:
            with suppress(RuntimeError):  # this waiter's loop is closed: nobody is left to wake
                loop.call_soon_threadsafe(_settle, waiter)

        flight.future.add_done_callback(wake)
        try:
            await waiter
        finally:
            self._leave(key, flight)
        try:
            return flight.future.result()
        except (Abandoned, CancelledError) as error:  # stopped by `close`, not by this waiter
            raise SessionError("the runtime was closed", code="cancelled") from error

    def close(self) -> None:
        """Stop the workers; what runs is abandoned."""
        with self._lock:
            pool, self._pool = self._pool, None
            flying, self._flying = list(self._flying.values()), {}
        for flight in flying:
            flight.abandoned.set()
            flight.future.cancel()  # one not begun yet never will be
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _join(self, key: Hashable, work: Callable[[threading.Event], T]) -> _Flight[T]:
        with self._lock:
            flight = self._flying.get(key)
            if flight is not None:
                flight.waiters += 1
                return flight
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="kdskills-read")
            flight = self._flying[key] = _Flight()
            flight.waiters = 1
            self._pool.submit(self._run, key, flight, work)
            return flight

    def _run(self, key: Hashable, flight: _Flight[T], work: Callable[[threading.Event], T]) -> None:
        if not flight.future.set_running_or_notify_cancel():
            return
        try:
            result = work(flight.abandoned)
        except BaseException as error:  # noqa: BLE001 - carried to every waiter, none is swallowed
            self._forget(key, flight)
            flight.future.set_exception(error)
        else:
            self._forget(key, flight)
            flight.future.set_result(result)

    def _forget(self, key: Hashable, flight: _Flight[T]) -> None:
        with self._lock:
            if self._flying.get(key) is flight:
                del self._flying[key]

    def _leave(self, key: Hashable, flight: _Flight[T]) -> None:
        with self._lock:
            flight.waiters -= 1
            last = flight.waiters == 0 and not flight.future.done()
            if last and self._flying.get(key) is flight:
                del self._flying[key]
        if last:
            flight.abandoned.set()


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Ticket:
    """One load on its way. It ends early when a skill it watches is removed or its session is closed."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self._lock = threading.Lock()
        self._removed: dict[str, KdskillsError] = {}
        self._watched: frozenset[str] = frozenset()
        self._error: KdskillsError | None = None
        self._wakers: list[Callable[[], None]] = []

    def watch(self, ids: Iterable[str]) -> None:
        """End the load when one of *ids* is removed, or was since the ticket was opened."""
        with self._lock:
            self._watched = frozenset(ids)
        self._look()

    def removed(self, full_id: str, error: KdskillsError) -> None:
        """Tell that a skill was removed."""
        with self._lock:
            self._removed.setdefault(full_id, error)
        self._look()

    def interrupt(self, error: KdskillsError) -> None:
        """End the load with *error*; the first one stays."""
        with self._lock:
            self._error = self._error or error
            wakers = list(self._wakers)
        for wake in wakers:
            wake()

    def check(self) -> None:
        """Raise what ended the load, if anything did."""
        if self._error is not None:
            raise self._error

    async def race(self, work: Coroutine[Any, Any, T]) -> T:
        """Await *work*, leaving it at once when the ticket is interrupted."""
        loop = asyncio.get_running_loop()
        stop: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_settle, stop)

        with self._lock:
            self._wakers.append(wake)
            interrupted = self._error is not None
        if interrupted:
            work.close()
            self.check()
        task = asyncio.ensure_future(work)
        try:
            waited: set[asyncio.Future[Any]] = {task, stop}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return task.result()
        finally:
            with self._lock:
                self._wakers.remove(wake)
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif not task.cancelled():
                task.exception()  # looked at, so that an interrupted load leaves no warning behind

    def _look(self) -> None:
        with self._lock:
            hit = next((error for name, error in self._removed.items() if name in self._watched), None)
        if hit is not None:
            self.interrupt(hit)


class Tickets:
    """The loads on their way in one runtime."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Ticket] = set()

    @contextmanager
    def opened(self, session_id: str) -> Iterator[Ticket]:
        """Open a ticket for the length of a load."""
        ticket = Ticket(session_id)
        with self._lock:
            self._open.add(ticket)
        try:
            yield ticket
        finally:
            with self._lock:
                self._open.discard(ticket)

    def skill_removed(self, full_id: str, error: KdskillsError) -> None:
        """Tell every load that a skill is gone."""
        for ticket in self._all():
            ticket.removed(full_id, error)

    def session_closed(self, session_id: str, error: KdskillsError) -> None:
        """End the loads of one session."""
        for ticket in self._all():
            if ticket.session_id == session_id:
                ticket.interrupt(error)

    def _all(self) -> list[Ticket]:
        with self._lock:
            return list(self._open)
