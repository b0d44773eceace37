"""How one `async def` core serves both facades, and how it submits answers to the server.

The core is written once as coroutines, which wait only through the methods of a `Driver`: `LoopDriver` waits on the running
event loop, `BlockingDriver` blocks the calling thread and never suspends, so that `drive` can run a coroutine to its end
without any loop. Handlers of a sync session therefore never run inside an event loop of this package.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Protocol, TypeVar

from kdskills.remote.ports import JsonObject

T = TypeVar("T")
Part = Callable[[], Coroutine[Any, Any, T]]

MAX_THREADS = 64
"""Threads a sync session uses to run the calls of one drain; handlers are bounded by the facade's `max_concurrency`."""


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends to its end and return its value.

    Raises:
        RuntimeError: It waited for an event loop.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError("a sync session cannot wait for an event loop; use AsyncRemoteSkillsFacade")


def discard(awaitable: object) -> None:
    """Close or cancel an awaitable that will not be awaited, so that Python does not warn about it."""
    for name in ("close", "cancel"):
        end = getattr(awaitable, name, None)
        if callable(end):
            end()
            return


class Driver(Protocol):
    """The ways in which the core may wait."""

    asynchronous: ClassVar[bool]

    async def call(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Call a client's method; an awaitable answer is awaited, or refused by a sync session."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Pause."""
        ...

    async def gather(self, parts: Sequence[Part[T]]) -> list[T]:
        """Run the parts at once and return their values in order; the first error is raised when all have ended."""
        ...

    async def blocking(self, function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """Call a function that blocks, without blocking others."""
        ...

    async def unbroken(self, part: Part[T]) -> T:
        """Run a part to its end even when its caller is cancelled, because a claimed call must be answered."""
        ...

    def mutex(self) -> AbstractAsyncContextManager[None]:
        """Return a new lock."""
        ...


class LoopDriver:
    """Waits on the running event loop: the driver of async sessions."""

    asynchronous: ClassVar[bool] = True

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def call(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Call a client's method and await what it returns, if that is awaitable."""
        answer = function(*arguments, **keywords)
        return await answer if inspect.isawaitable(answer) else answer

    async def sleep(self, seconds: float) -> None:
        """Pause this task."""
        await asyncio.sleep(seconds)

    async def gather(self, parts: Sequence[Part[T]]) -> list[T]:
        """Run the parts as tasks."""
        if len(parts) == 1:
            return [await parts[0]()]
        outcomes = await asyncio.gather(*(part() for part in parts), return_exceptions=True)
        return _values(outcomes)

    async def blocking(self, function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """Call the function on a thread."""
        return await asyncio.to_thread(function, *arguments, **keywords)

    async def unbroken(self, part: Part[T]) -> T:
        """Run the part as a task of its own."""
        task = asyncio.ensure_future(part())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    def mutex(self) -> AbstractAsyncContextManager[None]:
        """Return a lock of tasks."""
        return asyncio.Lock()


class BlockingDriver:
    """Blocks the calling thread and never suspends: the driver of sync sessions."""

    asynchronous: ClassVar[bool] = False

    async def call(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Call a client's method.

        Raises:
            TypeError: It answered with an awaitable, which is closed: the client is an async one.
        """
        answer = function(*arguments, **keywords)
        if inspect.isawaitable(answer):
            discard(answer)
            raise TypeError(
                f"{_name(function)} returned an awaitable; use AsyncRemoteSkillsFacade with an async client"
            )
        return answer

    async def sleep(self, seconds: float) -> None:
        """Pause this thread."""
        time.sleep(seconds)  # noqa: ASYNC251 - no loop is running: `drive` runs this on the caller's thread

    async def gather(self, parts: Sequence[Part[T]]) -> list[T]:
        """Run the parts on threads, each with the caller's context variables."""
        if len(parts) <= 1:
            return [await part() for part in parts]
        with ThreadPoolExecutor(min(len(parts), MAX_THREADS), thread_name_prefix="kdskills-drain") as pool:
            futures: list[Future[T]] = [pool.submit(copy_context().run, drive, part()) for part in parts]
        errors = [future.exception() for future in futures]
        return _values([error or future.result() for error, future in zip(errors, futures, strict=True)])

    async def blocking(self, function: Callable[..., T], /, *arguments: Any, **keywords: Any) -> T:
        """Call the function directly."""
        return function(*arguments, **keywords)

    async def unbroken(self, part: Part[T]) -> T:
        """Run the part directly: threads are not cancelled."""
        return await part()

    def mutex(self) -> AbstractAsyncContextManager[None]:
        """Return a lock of threads."""
        return _ThreadMutex()


class _ThreadMutex:
    """A thread lock with the shape of a task lock; entering blocks instead of suspending."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def _values(outcomes: Sequence[T | BaseException]) -> list[T]:
    values: list[T] = []
    for value in outcomes:
        if isinstance(value, BaseException):
            raise value
        values.append(value)
    return values


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


RETRIED = frozenset({"error", "exception", "malformed"})


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """How often and how patiently an answer is submitted; odd values are clamped.

    Attributes:
        max_submit_attempts: At least one.
        retry_delay_seconds: Pause after the n-th attempt is n times this.
    """

    max_submit_attempts: int = 3
    retry_delay_seconds: float = 0.05

    @property
    def attempts(self) -> int:
        """Attempts, at least one."""
        return max(1, int(self.max_submit_attempts))

    def pause(self, attempt: int) -> float:
        """Seconds to wait after this attempt, never negative."""
        return max(0.0, float(self.retry_delay_seconds)) * attempt


@dataclass(frozen=True, slots=True)
class Submission:
    """The result of a submission.

    Attributes:
        accepted: Whether the server has the answer.
        status: The server's status, or `exception`, `malformed`, `no_request_id`, `local_duplicate`.
        code: The server's code.
        attempts: How often the answer was sent.
        idempotent: Whether the server had an answer already.
        error: What went wrong.
    """

    accepted: bool
    status: str
    code: str | None = None
    attempts: int = 0
    idempotent: bool = False
    error: str | None = None


NO_REQUEST_ID = Submission(accepted=False, status="no_request_id")
LOCAL_DUPLICATE = Submission(accepted=True, status="local_duplicate", idempotent=True)


def judge(answer: object, attempts: int) -> Submission:
    """Return what a server's answer to a submission means."""
    status = answer.get("status") if isinstance(answer, Mapping) else None
    if not isinstance(answer, Mapping) or not isinstance(status, str) or not status.strip():
        fault = "no status" if isinstance(answer, Mapping) else f"{type(answer).__name__}, not an object"
        return Submission(
            accepted=False,
            status="malformed",
            attempts=attempts,
            error=f"tool call response submit failed: malformed answer: {fault}",
        )
    code = answer.get("code")
    code = None if code is None else str(code)
    if status == "ok":
        return Submission(accepted=True, status=status, code=code, attempts=attempts)
    if status == "not_found" or (status == "conflict" and code == "in_flight"):
        return Submission(accepted=True, status=status, code=code, attempts=attempts, idempotent=True)
    words = f"status={status}, code={code}, message={answer.get('message')}"
    return Submission(accepted=False, status=status, code=code, attempts=attempts, error=words)


async def submit(
    driver: Driver, respond: Callable[..., Any], request_id: str, payload: JsonObject, options: SubmitOptions
) -> Submission:
    """Submit an answer, again after errors and unreadable answers; exceptions of the client become results."""
    attempt = 0
    while True:
        attempt += 1
        try:
            answer = await driver.call(respond, request_id=request_id, response=copy.deepcopy(payload))
            submission = judge(answer, attempt)
        except Exception as error:  # noqa: BLE001 - whatever a client raises is told in the dispatch
            submission = Submission(
                accepted=False,
                status="exception",
                attempts=attempt,
                error=f"tool call response submit failed: {error}",
            )
        if submission.status not in RETRIED or attempt >= options.attempts:
            return submission
        await driver.sleep(options.pause(attempt))
