"""The same client for callers without an event loop: a private loop on a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from kdskills.remote.catalog.backend import CodexCatalog
from kdskills.remote.client.calls import ToolCalls, Waits
from kdskills.remote.client.sessions import Sessions
from kdskills.remote.client.stream import Signals, SignalStream
from kdskills.remote.ports import AppServerGone, CatalogChange, CatalogContext, JsonObject
from kdskills.remote.signals import AppServerSignal

T = TypeVar("T")


class LoopThread:
    """An event loop on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the loop is closed, or runs in another process only: a fork does not take it along."""
        return self._loop.is_closed() or self._process != os.getpid()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop and wait for its value; an interrupted wait cancels it.

        Raises:
            AppServerGone: The loop has ended.
            RuntimeError: Called on the loop's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking client cannot be used on its own event loop; use AsyncCodexClient")
        if self._process != os.getpid():
            raise AppServerGone("the client belongs to the process that opened it; open one after the fork")
        if self._loop.is_closed() or not self._thread.is_alive():
            raise AppServerGone("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except CancelledError:
            raise AppServerGone("the client was closed meanwhile") from None
        finally:
            future.cancel()

    def call(self, work: Callable[[], T]) -> T:
        """Run a plain function on the loop and wait for its value."""

        async def run() -> T:
            return work()

        return self.run(run)

    def stop(self) -> None:
        """End the loop and its thread; may be called twice."""
        if self.ended:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())


class BlockingSessions:
    """`Sessions`, blocking."""

    def __init__(self, loop: LoopThread, sessions: Sessions) -> None:
        self._loop = loop
        self._sessions = sessions

    def create(self, **keywords: Any) -> JsonObject:
        """See `Sessions.create`."""
        return self._loop.run(lambda: self._sessions.create(**keywords))

    def get(self, session_id: str) -> JsonObject:
        """See `Sessions.get`."""
        return self._loop.run(lambda: self._sessions.get(session_id))

    def send_message(self, session_id: str, text: str, **keywords: Any) -> JsonObject:
        """See `Sessions.send_message`."""
        return self._loop.run(lambda: self._sessions.send_message(session_id, text, **keywords))

    def resume(self, session_id: str, dynamic_tools: list[JsonObject] | None = None, **keywords: Any) -> JsonObject:
        """See `Sessions.resume`."""
        return self._loop.run(lambda: self._sessions.resume(session_id, dynamic_tools, **keywords))

    def rollback(self, session_id: str, num_turns: int) -> JsonObject:
        """See `Sessions.rollback`."""
        return self._loop.run(lambda: self._sessions.rollback(session_id, num_turns))

    def tool_calls(self, session_id: str) -> JsonObject:
        """See `Sessions.tool_calls`."""
        return self._loop.run(lambda: self._sessions.tool_calls(session_id))

    def delete(self, session_id: str) -> JsonObject:
        """See `Sessions.delete`."""
        return self._loop.run(lambda: self._sessions.delete(session_id))


class BlockingToolCalls:
    """`ToolCalls`, blocking."""

    def __init__(self, loop: LoopThread, calls: ToolCalls) -> None:
        self._loop = loop
        self._calls = calls

    def respond(self, request_id: str, response: JsonObject) -> JsonObject:
        """See `ToolCalls.respond`."""
        return self._loop.run(lambda: self._calls.respond(request_id, response))


class BlockingWaits:
    """`Waits`, blocking."""

    def __init__(self, loop: LoopThread, waits: Waits) -> None:
        self._loop = loop
        self._waits = waits

    def turn_status(self, session_id: str, turn_id: str) -> JsonObject:
        """See `Waits.turn_status`."""
        return self._loop.run(lambda: self._waits.turn_status(session_id, turn_id))

    def assistant_reply(
        self, session_id: str, turn_id: str, timeout_seconds: float = 60.0, interval_seconds: float = 0.25
    ) -> JsonObject:
        """See `Waits.assistant_reply`."""
        return self._loop.run(
            lambda: self._waits.assistant_reply(session_id, turn_id, timeout_seconds, interval_seconds)
        )


class BlockingSignals:
    """`Signals`, blocking: iterate, or ask for the next one."""

    def __init__(self, loop: LoopThread, signals: Signals) -> None:
        self._loop = loop
        self._signals = signals

    def __iter__(self) -> Iterator[AppServerSignal]:
        return self

    def __next__(self) -> AppServerSignal:
        signal = self.next()
        if signal is None:
            raise StopIteration
        return signal

    def next(self, timeout_seconds: float | None = None) -> AppServerSignal | None:
        """See `Signals.next`."""
        return self._loop.run(lambda: self._signals.next(timeout_seconds))

    def close(self) -> None:
        """See `Signals.close`."""
        self._loop.call(self._signals.close)


class BlockingStream:
    """`SignalStream`, blocking."""

    def __init__(self, loop: LoopThread, stream: SignalStream) -> None:
        self._loop = loop
        self._stream = stream

    def signals(self, session_id: str | None = None) -> BlockingSignals:
        """See `SignalStream.signals`."""
        return BlockingSignals(self._loop, self._loop.call(lambda: self._stream.signals(session_id)))


class BlockingCatalog:
    """`CodexCatalog`, blocking."""

    def __init__(self, loop: LoopThread, catalog: CodexCatalog) -> None:
        self._loop = loop
        self._catalog = catalog

    def apply(self, change: CatalogChange) -> JsonObject:
        """See `CodexCatalog.apply`."""
        return self._loop.run(lambda: self._catalog.apply(change))

    def context_for(self, session_id: str, tools: Sequence[JsonObject], instruction_text: str) -> CatalogContext:
        """See `CodexCatalog.context_for`."""
        return self._loop.run(lambda: self._catalog.context_for(session_id, tools, instruction_text))

    def facts(self, session_id: str) -> JsonObject:
        """See `CodexCatalog.facts`."""
        return self._loop.run(lambda: self._catalog.facts(session_id))

    def forget(self, session_id: str) -> None:
        """See `CodexCatalog.forget`."""
        self._loop.run(lambda: self._catalog.forget(session_id))
