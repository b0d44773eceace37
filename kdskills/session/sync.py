"""The blocking facade: the same methods, run on a loop of its own thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any

from kdskills.errors import BadRequest, SessionError


class SyncFacade:
    """Calls the async methods of a runtime or session and waits.

    The loop's thread starts with the first call and ends with `aclose`, which ends what other threads are waiting for
    (`cancelled`). Inside a running loop every call is refused (`sync_in_loop`): it would block that loop.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closings = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        attribute = getattr(self._target, name)
        return self._blocking(attribute) if inspect.iscoroutinefunction(attribute) else attribute

    def _blocking(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._wait(method, args, kwargs)

        call.__name__ = method.__name__
        call.__doc__ = method.__doc__
        return call

    def _wait(self, method: Callable[..., Coroutine[Any, Any, Any]], args: Any, kwargs: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise BadRequest("this thread runs an event loop: await the method instead", code="sync_in_loop")
        closing = method.__name__ == "aclose"
        future = self._begin(method(*args, **kwargs), closing=closing)
        try:
            result = future.result()
        except CancelledError as error:
            raise SessionError("the runtime was closed", code="cancelled") from error
        except BaseException:  # raised again: an interrupted caller leaves no work on the loop
            future.cancel()
            raise
        finally:
            if closing:
                self._stop()
        return result

    def _begin(self, work: Coroutine[Any, Any, Any], *, closing: bool) -> Future[Any]:
        with self._lock:  # under the lock, so that no work is handed to a loop that was told to stop
            self._closings += closing
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._serve, args=(self._loop,), name="kdskills-sync", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            unfinished = asyncio.all_tasks(loop)  # a thread waits for each of them
            for task in unfinished:
                task.cancel()
            if unfinished:
                loop.run_until_complete(asyncio.gather(*unfinished, return_exceptions=True))
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    def _stop(self) -> None:
        with self._lock:
            self._closings -= 1
            if self._closings == 0 and self._loop is not None:  # the last of several closings at once
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None
