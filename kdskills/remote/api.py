"""`AsyncCodexClient` and `CodexClient`: the app-server's client with its probe and its facade.

The sync one serves callers without an event loop: the same client runs in a private loop on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from kdskills.errors import BadRequest
from kdskills.jobs.settings import user_state_dir
from kdskills.remote.catalog.backend import CodexCatalog
from kdskills.remote.client.base import AsyncAppServerClient, OnCall, Signals, SignalStream, ToolCalls, Waits
from kdskills.remote.client.sessions import Sessions
from kdskills.remote.dispatch import Spool
from kdskills.remote.facade import AsyncRemoteSkillsFacade, RemoteSkillsFacade
from kdskills.remote.journal import SqlJournal, journal_url
from kdskills.remote.ports import AppServerGone, CallJournal, CatalogChange, CatalogContext, JsonObject, ServerProfile
from kdskills.remote.probe import profile_for
from kdskills.remote.signals import AppServerSignal
from kdskills.storage.folder import close_state

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


Probing = Literal["auto", "never"]
StateFolder = str | os.PathLike[str] | None


class AsyncCodexClient(AsyncAppServerClient):
    """A client of a Codex app-server for programs with an event loop.

    `remote_skills` is the facade whose registries answer calls with `dispatch="auto"`. Calls are kept in the state folder's
    journal unless another one is given.

    Attributes:
        own_journal: The journal this client opened and closes, or None.
    """

    _facade: AsyncRemoteSkillsFacade | None = None
    own_journal: SqlJournal | None = None

    @classmethod
    async def spawn(
        cls,
        *,
        home: str | os.PathLike[str],
        binary: str = "codex",
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        probe: Probing = "auto",
        state: StateFolder = None,
        **opts: Any,
    ) -> Self:
        """Start a private app-server, and probe its binary if no probe of it is cached.

        Args:
            home: The child's `CODEX_HOME` and `HOME`; there is no default, and the user's own codex home is never used.
            binary: The program.
            cwd: The child's working folder.
            env: Further variables; of this process only `PATH` and `LANG` pass.
            config: Values of the server's configuration by dotted key.
            probe: `auto` uses the cached probe of this binary or probes it; with `never` nothing counts as proven.
            state: The folder of durable state, with the journal and the probes' cache; the user's own when omitted.
            **opts: `journal strategy dispatch unload allow_successor profile` and more, see `ClientOptions`. `journal` wins
                over the state folder's; `MemoryJournal()` keeps calls in this process only.

        Raises:
            AppServerGone: It cannot be started, or ended at once.
            BadRequest: An option that is not known.
            JournalUnavailable: The state folder's journal cannot be opened.
        """
        if probe not in ("auto", "never"):
            raise BadRequest(f"probe is auto or never, not {probe!r}", option="probe")
        state_folder = _state(state)
        options, own_journal = await _completed_options(state_folder, opts)
        with _closing_on_error(own_journal):
            client = await super().spawn(home=home, binary=binary, cwd=cwd, env=env, config=config, **options)
            client.own_journal = own_journal
        if probe == "auto" and opts.get("profile") is None:
            try:
                client.trust(await profile_for(client.server, binary, state=state_folder))
            except BaseException:  # raised again: a client that cannot be trusted leaves no server
                await client.close()
                raise
        return client

    @classmethod
    async def connect(cls, url: str, *, token: str | None = None, state: StateFolder = None, **opts: Any) -> Self:
        """Talk to an app-server that listens on a websocket; see `AsyncAppServerClient.connect`.

        Args:
            url: `ws://127.0.0.1:PORT`.
            token: A capability token, sent as a bearer.
            state: The folder of durable state, with the journal; the user's own when omitted.
            **opts: As for `spawn`. Without a `profile` nothing is proven of this server.

        Raises:
            AppServerGone: There is no server.
            JournalUnavailable: The state folder's journal cannot be opened.
        """
        options, own_journal = await _completed_options(_state(state), opts)
        with _closing_on_error(own_journal):
            client = await super().connect(url, token=token, **options)
            client.own_journal = own_journal
        return client

    async def close(self) -> None:
        """Close the connection, the facade's threads and the journal this client opened; may be called twice.

        Handlers that still run write their results down when they end.
        """
        await super().close()
        if self._facade is not None:
            await asyncio.to_thread(self._facade.close)
        if self.own_journal is not None:
            await asyncio.to_thread(self.own_journal.close)

    @property
    def remote_skills(self) -> AsyncRemoteSkillsFacade:
        """The facade of this client."""
        if self._facade is None:
            self._facade = AsyncRemoteSkillsFacade(self)
        return self._facade

    def _handler(self) -> OnCall | None:
        return self.on_call or self.remote_skills.on_call

    async def _turn_ended(self, thread_id: str, turn_id: str, status: str) -> None:
        await super()._turn_ended(thread_id, turn_id, status)
        if self._facade is not None:
            await self._facade.turn_ended(thread_id, turn_id, status)


class CodexClient:
    """The same client for programs without an event loop; it runs on a thread of its own.

    Calls of the server are answered on a thread each, so handlers may block and may use this client.
    """

    def __init__(self, loop: LoopThread, client: AsyncAppServerClient) -> None:
        self._loop = loop
        self._client = client
        self._facade: RemoteSkillsFacade | None = None
        self._facade_lock = threading.Lock()
        self._context = contextvars.copy_context()
        self.on_call: Any = None
        self.sessions = BlockingSessions(loop, client.sessions)
        self.tool_calls = BlockingToolCalls(loop, client.tool_calls)
        self.wait = BlockingWaits(loop, client.wait)
        self.stream = BlockingStream(loop, client.stream)
        self.catalog = BlockingCatalog(loop, client.catalog)
        self.profile: ServerProfile = client.profile
        self.journal: CallJournal = client.journal
        client.on_call = self._take_call
        client.on_turn_ended = self._turn_ended

    @classmethod
    def spawn(
        cls,
        *,
        home: str | os.PathLike[str],
        binary: str = "codex",
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        probe: Probing = "auto",
        **opts: Any,
    ) -> Self:
        """See `AsyncCodexClient.spawn`."""
        loop = LoopThread("kdskills-codex")
        return cls._open(
            loop,
            lambda: AsyncCodexClient.spawn(
                home=home, binary=binary, cwd=cwd, env=env, config=config, probe=probe, **opts
            ),
        )

    @classmethod
    def connect(cls, url: str, *, token: str | None = None, **opts: Any) -> Self:
        """See `AsyncAppServerClient.connect`."""
        return cls._open(LoopThread("kdskills-codex"), lambda: AsyncCodexClient.connect(url, token=token, **opts))

    @classmethod
    def _open(cls, loop: LoopThread, make: Any) -> Self:
        try:
            return cls(loop, loop.run(make))
        except BaseException:  # raised again: no thread stays for a client that did not open
            loop.stop()
            raise

    @property
    def remote_skills(self) -> RemoteSkillsFacade:
        """The facade of this client."""
        with self._facade_lock:
            if self._facade is None:
                self._facade = RemoteSkillsFacade(self)
            return self._facade

    @property
    def connection(self) -> str:
        """The name of the present connection; answers are accepted on one."""
        return self._client.connection

    @property
    def connected(self) -> bool:
        """Whether there is a connection at this moment."""
        return self._client.connected

    @property
    def user_agent(self) -> str:
        """What the server calls itself."""
        return self._client.user_agent

    @property
    def owned(self) -> bool:
        """Whether this client started the server and is its only user."""
        return self._client.owned

    @property
    def codex_home(self) -> str | None:
        """The server's home, as it says."""
        return self._client.codex_home

    @property
    def spool(self) -> Any:
        """Where the rest of long answers is kept, or None."""
        return self._client.spool

    def request(self, method: str, **params: Any) -> Any:
        """See `AsyncAppServerClient.request`."""
        return self._loop.run(lambda: self._client.request(method, **params))

    def reconnect(self) -> None:
        """See `AsyncAppServerClient.reconnect`."""
        self._loop.run(self._client.reconnect)

    def close(self) -> None:
        """Close the connection, stop an owned server, end the thread. May be called twice."""
        if not self._loop.ended:
            self._loop.run(self._client.close)
            self._loop.stop()
        if self._facade is not None:
            self._facade.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _take_call(self, signal: AppServerSignal) -> object:
        """Answer a call on a thread of its own; the reading loop goes on meanwhile."""
        handler = self.on_call or self.remote_skills.on_call
        return await _on_thread(f"kdskills-call-{signal.request_id}", self._context.copy(), handler, signal)

    async def _turn_ended(self, thread_id: str, turn_id: str, status: str) -> None:
        facade = self._facade
        if facade is not None:
            name = f"kdskills-turn-{turn_id}"
            await _on_thread(name, self._context.copy(), facade.turn_ended, thread_id, turn_id, status)


def _state(folder: StateFolder) -> Path:
    return Path(folder).absolute() if folder is not None else user_state_dir()


async def _completed_options(state: Path, opts: Mapping[str, Any]) -> tuple[dict[str, Any], SqlJournal | None]:
    """Return the options with journal and spool of the state folder where none is given, and the journal opened for them."""
    options, own_journal = dict(opts), None
    with contextlib.suppress(OSError):  # what opens the journal says what is wrong with the folder
        await asyncio.to_thread(close_state, state)
    if options.get("spool") is None:
        options["spool"] = Spool(state / "remote" / "spool")
    if options.get("journal") is None:
        options["journal"] = own_journal = await asyncio.to_thread(SqlJournal, journal_url(state))
    return options, own_journal


@contextlib.contextmanager
def _closing_on_error(journal: SqlJournal | None) -> Iterator[None]:
    try:
        yield
    except BaseException:  # raised again: the journal has no other owner that would close it
        if journal is not None:
            journal.close()
        raise


async def _on_thread(name: str, context: contextvars.Context, work: Any, *arguments: object) -> object:
    """Run a function on a daemon thread of its own: one that never ends holds neither a pool nor the interpreter's exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[object] = loop.create_future()

    def settle(value: object, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            done.set_exception(error)
        else:
            # A loop would stop for these; the thread's own hook has shown them, and the call was answered before.
            done.set_result(type(error).__name__)

    def run() -> None:
        value: object = None
        error: BaseException | None = None
        try:
            value = context.run(work, *arguments)
        except BaseException as problem:
            error = problem
            if not isinstance(problem, Exception):
                raise
        finally:
            with contextlib.suppress(RuntimeError):  # the client was closed, so the result is not needed
                loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
