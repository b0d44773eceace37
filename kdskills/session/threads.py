"""Blocking use of coroutines: an event loop on a thread of its own, proxies that wait for it, and threads for functions that block."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from queue import SimpleQueue
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")

IDLE_S: Final = 10.0


class HandlerThreads:
    """Runs functions on daemon threads, reusing those that are idle; the caller bounds how many run at once.

    The functions passed to `start` must not raise.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._waiting: deque[Callable[[], None]] = deque()
        self._idle = 0
        self._ready = threading.Condition()

    def start(self, function: Callable[[], None]) -> None:
        """Run *function* on a thread at once.

        Raises:
            RuntimeError: No thread can be started; *function* will not run.
        """
        if self._process != os.getpid():  # after a fork: idle threads and the lock's owner are in the parent
            self._begin()
        with self._ready:
            self._waiting.append(function)
            if self._idle >= len(self._waiting):
                self._ready.notify()
                return
        try:
            threading.Thread(target=self._work, name="kdskills-handler", daemon=True).start()
        except RuntimeError:
            with self._ready:
                if function not in self._waiting:  # a thread that became idle has taken it
                    return
                self._waiting.remove(function)
            raise

    async def call(self, function: Callable[[], T], *, on_loop_closed: Callable[[T], None] | None = None) -> T:
        """Run *function* on a thread and wait for it on the running loop; a waiter that is cancelled does not stop it.

        Args:
            function: May raise; the waiter gets what it raises.
            on_loop_closed: Called with the value if the loop was closed meanwhile, so that it can be released.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                value, error = function(), None
            except BaseException as raised:  # noqa: BLE001 - raised again where it is waited for
                value, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, ended, value, error)
            except RuntimeError:  # the loop is closed
                if on_loop_closed is not None and error is None:
                    on_loop_closed(value)  # type: ignore[arg-type]

        self.start(work)
        return await ended

    def _work(self) -> None:
        while True:
            with self._ready:
                if not self._waiting:
                    self._idle += 1
                    try:
                        self._ready.wait_for(lambda: self._waiting, timeout=IDLE_S)
                    finally:
                        self._idle -= 1
                if not self._waiting:
                    return
                function = self._waiting.popleft()
            function()


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # a future refuses it, as a coroutine does
        future.set_exception(RuntimeError(f"a function raised {error!r}"))
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def discard(awaitable: object) -> None:
    """Close or cancel an awaitable that will not be awaited, so that Python does not warn about it."""
    for name in ("close", "cancel"):
        end = getattr(awaitable, name, None)
        if callable(end):
            end()
            return


class _Wait(Generic[T]):
    """One thread's wait for work on a loop; meanwhile it runs the functions that the work hands to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._loop = loop
        self._work = work
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._task: asyncio.Task[None] | None = None
        self._result: tuple[T] | BaseException | None = None
        loop.call_soon_threadsafe(self._start)

    def result(self) -> T:
        """Wait for the work's value; an interrupt of this thread cancels the work, and is raised when that has ended."""
        interrupt: BaseException | None = None
        while True:
            try:
                function = self._inbox.get()
                if function is None:
                    break
                function()
            except BaseException as error:
                if interrupt is not None:
                    raise
                interrupt = error
                with contextlib.suppress(RuntimeError):  # the loop was closed, so the work has ended
                    self._loop.call_soon_threadsafe(self._cancel)
        result, self._result = self._result, None
        try:
            if interrupt is not None:
                raise interrupt
            if isinstance(result, tuple):
                return result[0]
            raise result or asyncio.CancelledError  # None: cancelled before it began
        finally:
            del interrupt, result  # a reference cycle with its traceback would live on

    async def run_here(self, function: Callable[[], Any]) -> Any:
        """Run *function* on the waiting thread."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            value, error = None, None
            try:
                value = function()
            except Exception as raised:  # noqa: BLE001 - raised again where it is waited for
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_settle, ended, value, error)

        self._inbox.put(run)
        return await ended

    def _start(self) -> None:
        self._task = self._loop.create_task(self._guarded())
        self._task.add_done_callback(lambda _: self._inbox.put(None))
        _WAITS[self._task] = self

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _guarded(self) -> None:
        try:
            self._result = (await self._work(),)
        except BaseException as error:  # noqa: BLE001 - a `KeyboardInterrupt` that leaves a task ends the loop
            self._result = error


_WAITS: WeakKeyDictionary[asyncio.Task[None], _Wait[Any]] = WeakKeyDictionary()
_THREADS = HandlerThreads()


async def on_waiting_thread(function: Callable[[], T]) -> T:
    """Run a blocking function on the thread that waits for the running task in `LoopThread.run`, else on a thread of its own.

    Blocking callers find their functions on their own thread, with its context variables and its locks.
    """
    task = asyncio.current_task()
    wait = _WAITS.get(task) if task is not None else None
    value: T = await (_THREADS.call(function) if wait is None else wait.run_here(function))
    return value


class LoopThread:
    """An event loop on a daemon thread.

    Args:
        name: The thread's name.
        gone: Makes the error for work that is asked of an ended loop, or that its end cancels.
    """

    def __init__(self, name: str, gone: Callable[[str], Exception] = RuntimeError) -> None:
        self._process = os.getpid()
        self._gone = gone
        self._closing = threading.Lock()
        self._stopped = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # raised again: this process may have no further thread
            self._loop.close()
            raise

    @property
    def ended(self) -> bool:
        """Whether the loop is closed, or runs in another process only: a fork does not take it along."""
        return self._stopped or self._process != os.getpid()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop, with this thread's context variables, and wait for its value.

        Functions it passes to `on_waiting_thread` run on this thread. An interrupted wait cancels the coroutine.

        Raises:
            RuntimeError: Called on the loop's own thread, which would wait for itself.
            Exception: What `gone` makes: the loop has ended, or ends meanwhile.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking client cannot be used on its own event loop; use AsyncCodexClient")
        if self._process != os.getpid():
            raise self._gone("the client belongs to the process that opened it; open one after the fork")
        with self._closing:  # so that no work is handed to a loop that was told to stop
            if self._stopped:
                raise self._gone("the client is closed")
            wait = _Wait(self._loop, work)
        try:
            return wait.result()
        except asyncio.CancelledError:
            raise self._gone("the client was closed meanwhile") from None

    def call(self, work: Callable[[], T]) -> T:
        """Run a plain function on the loop and wait for its value."""

        async def run() -> T:
            return work()

        return self.run(run)

    def stop(self, *, wait: bool = True) -> None:
        """End the loop, and wait for its thread's end; may be called twice."""
        with self._closing:
            if self.ended:
                return
            self._stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if wait:
            self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            while tasks := asyncio.all_tasks(self._loop):  # a thread may wait for each of them
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(tasks))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()


_SHARED_LOCK = threading.Lock()


@functools.cache
def _shared_loop(_process: int) -> LoopThread:
    return LoopThread("kdskills-sync")


def shared_loop() -> LoopThread:
    """Return the loop of all blocking proxies that have none of their own: one per process, for as long as that lives."""
    with _SHARED_LOCK:
        return _shared_loop(os.getpid())


class Blocking(Generic[T]):
    """Base of blocking proxies: methods made by `blocking` run the target's coroutines on a loop.

    Args:
        target: The object with the coroutines.
        loop: Where they run; the shared loop when omitted.
    """

    def __init__(self, target: T, loop: LoopThread | None = None) -> None:
        self._target = target
        self._loop = loop

    def _run(self, work: Callable[[], Coroutine[Any, Any, V]]) -> V:
        return (self._loop or shared_loop()).run(work)

    def _call(self, work: Callable[[], V]) -> V:
        return (self._loop or shared_loop()).call(work)


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a coroutine method of a proxy's target as a method of the proxy that waits; signature and docstring stay."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        value: T = self._run(lambda: getattr(self._target, method.__name__)(*args, **kwargs))
        return value

    return call


def blocking_context(
    method: Callable[Concatenate[Any, P], contextlib.AbstractAsyncContextManager[T]],
) -> Callable[Concatenate[Any, P], contextlib.AbstractContextManager[T]]:
    """As `blocking`, for an async context manager: entered and left on the loop, while its body runs on the caller's thread."""

    @functools.wraps(method)
    @contextlib.contextmanager
    def manage(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        manager = getattr(self._target, method.__name__)(*args, **kwargs)
        value: T = self._run(manager.__aenter__)
        try:
            yield value
        except BaseException as raised:
            error = raised
            if not self._run(lambda: manager.__aexit__(type(error), error, error.__traceback__)):
                raise
        else:
            self._run(lambda: manager.__aexit__(None, None, None))

    return manage


class Forwarded(Generic[V]):
    """A property of a proxy's target as one of the proxy."""

    def __init__(self, of: Any) -> None:
        self._of: property = of
        self.__doc__ = of.__doc__

    def __get__(self, proxy: Any, _owner: type) -> V:
        value: Any = self if proxy is None else self._of.__get__(proxy._target)  # noqa: SLF001 - of the proxy it is part of
        forwarded: V = value
        return forwarded
