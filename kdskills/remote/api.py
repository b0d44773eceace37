"""The facades over a client and the clients of a Codex app-server, async and blocking.

A blocking class runs its async twin's methods on a loop of this package: a client on its own, a facade on the one all share.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

from kdskills.errors import BadRequest
from kdskills.jobs.settings import user_state_dir
from kdskills.remote import turns
from kdskills.remote.calls import AppServerSignal, RemoteSkillDispatch, address, text_or_none
from kdskills.remote.catalog.backend import CodexCatalog
from kdskills.remote.client.base import AsyncAppServerClient, OnCall, Sessions, Signals, SignalStream, ToolCalls, Waits
from kdskills.remote.core import DRAFT, FacadeCore, SessionCore
from kdskills.remote.dispatch import Spool
from kdskills.remote.journal import SqlJournal, journal_url
from kdskills.remote.ports import AppServerGone, CallJournal, JsonObject, ServerProfile
from kdskills.remote.probe import profile_for
from kdskills.remote.publish import take_roots_away
from kdskills.remote.registry import TOOLS_KEYWORDS
from kdskills.remote.session import AsyncRemoteSkillSession, RemoteSkillSession, SessionHandle
from kdskills.session.threads import Blocking, Forwarded, HandlerThreads, LoopThread, blocking, blocking_context
from kdskills.storage.folder import close_state

_LOG = logging.getLogger("kdskills.remote")

_NONE = object()
S = TypeVar("S", bound=SessionHandle)


@dataclass(frozen=True, slots=True)
class RemoteSkillLifecycle(Generic[S]):
    """What `lifecycle` yields: the session's id, the server's answer to its creation, and the session."""

    session_id: str
    created: Any
    skills: S


class FacadeMethods(Generic[S]):
    """The coroutines of both facades; callers get sessions as *handle* shows them."""

    def __init__(self, core: FacadeCore, handle: Callable[[SessionCore], S]) -> None:
        self._core = core
        self._handle = handle

    def session(self, session_id: str) -> S:
        """Return a handle of a session; handles of one id share one registry."""
        return self._handle(self._core.session(session_id))

    async def create_session(
        self, /, *, register: Callable[[S], Any] | None = None, **create_kwargs: Any
    ) -> tuple[Any, S]:
        """Create a session of the server with the skills *register* puts into a draft.

        Args:
            register: May be a coroutine function in an async facade.
            **create_kwargs: Of the client's `sessions.create`.

        Returns:
            The server's answer, and the session with the draft's skills.

        Raises:
            ValueError: The server's answer names no session.
            TypeError: *register* of a sync facade answered with an awaitable; nothing was created.
        """
        owner = self._core
        draft = SessionCore(owner, DRAFT, draft=True)
        if register is not None:
            await owner.call(register, self._handle(draft))
        tools, skills = draft.tools(), draft.registry.skills()
        passed_tools = next((create_kwargs[name] for name in TOOLS_KEYWORDS if name in create_kwargs), _NONE)
        own_tools = {"dynamic_tools": tools} if tools and passed_tools is _NONE else {}
        created = await owner.call(owner.client.sessions.create, **create_kwargs, **own_tools)
        session = created.get("session") if isinstance(created, Mapping) else None
        session_id = session.get("sessionId") if isinstance(session, Mapping) else None
        if text_or_none(session_id) is None:
            raise ValueError("sessions.create response missing session.sessionId")
        core = owner.session(str(session_id))
        core.adopt(draft, skills)
        if own_tools:
            core.remember_pushed(tools, core.registry.skills())
        elif isinstance(passed_tools, (list, tuple)):
            core.remember_pushed([dict(tool) for tool in passed_tools if isinstance(tool, Mapping)], [])
        preference = created.get("strategyAsked")
        if preference in {"native", "reload"} and created.get("strategy") == "dispatcher":
            message = (
                f"strategy {preference!r} is not proven of this server, "
                "so the catalog reaches the model through the dispatcher"
            )
            _LOG.warning("session %s: %s", core.session_id, message)
            fix = "give connect the profile of a probe: connect(url, profile=report.profile)"
            core.note("strategy_not_proven", message, fix=fix)
        return created, self._handle(core)

    @asynccontextmanager
    async def using(
        self, /, session_id: str, name: str, handler: Callable[..., Any], **register_options: Any
    ) -> AsyncIterator[S]:
        """As `session(session_id).using(…)`."""
        core = self._core.session(session_id)
        async with turns.window(core, name, handler, **register_options):
            yield self._handle(core)

    @asynccontextmanager
    async def lifecycle(
        self,
        /,
        *,
        register: Callable[[S], Any] | None = None,
        keep_session: bool = False,
        sync_runtime_on_cleanup: bool = True,
        ignore_cleanup_errors: bool = True,
        **create_kwargs: Any,
    ) -> AsyncIterator[RemoteSkillLifecycle[S]]:
        """Have a session for the body; it is closed afterwards, and deleted unless it is kept."""
        created, skills = await self.create_session(register=register, **create_kwargs)
        close = partial(
            self.close_session, delete_session=not keep_session, sync_runtime_on_cleanup=sync_runtime_on_cleanup
        )
        try:
            yield RemoteSkillLifecycle(skills.session_id, created, skills)
        except BaseException:  # raised again: the clean-up must not hide the body's own error
            await close(skills.session_id, ignore_cleanup_errors=True)
            raise
        await close(skills.session_id, ignore_cleanup_errors=ignore_cleanup_errors)

    async def close_session(
        self,
        session_id: str,
        *,
        delete_session: bool = False,
        sync_runtime_on_cleanup: bool = True,
        ignore_cleanup_errors: bool = True,
    ) -> JsonObject:
        """Clear a session's registry, and delete the session or empty its tools.

        Args:
            session_id: The session.
            delete_session: Whether the server deletes it.
            sync_runtime_on_cleanup: A session that stays gets an empty catalog, if the client has a backend.
            ignore_cleanup_errors: Errors become diagnostics.
        """
        core = self._core.session(session_id)
        report: JsonObject = {"sessionId": core.session_id, "cleared": core.registry.clear(), "deleted": False}
        core.published, core.published_tools, core.view_digest = (), {}, None
        try:
            try:
                if delete_session:
                    answer = await self._core.call(self._core.client.sessions.delete, session_id=core.session_id)
                    report["deleteResponse"] = answer
                    report["deleted"] = isinstance(answer, Mapping) and answer.get("status") in {"ok", "deleted"}
                    if report["deleted"] and self._core.backend is not None:
                        await self._core.call(self._core.backend.forget, core.session_id)
                elif sync_runtime_on_cleanup and self._core.backend is not None:
                    emptied = await turns.change_catalog(core, 10.0, wait=False)
                    if emptied.get("status") == "failed":
                        why = emptied.get("error") or emptied.get("reason")
                        core.note("session_cleanup_failed", f"the tools of the session were not removed: {why}")
            finally:
                await take_roots_away(core)
        except Exception as error:
            if not ignore_cleanup_errors:
                raise
            core.note("session_cleanup_failed", f"closing the session failed: {str(error) or type(error).__name__}")
        finally:
            self._core.forget(core)
        return report

    async def on_call(self, signal: AppServerSignal) -> RemoteSkillDispatch | None:
        """Answer a call of the client's stream by the session it names; a signal that names none is dropped."""
        session_id = address(signal)
        if session_id is None:
            return None
        core = self._core.known(session_id)
        # A worker that does not serve the session waits before it refuses, because another one may serve it.
        served = core or SessionCore(self._core, session_id)
        call = turns.call_of_signal(served, signal)
        return await turns.respond(served, call, turns.SubmitOptions(), knows_session=core is not None)

    async def turn_ended(self, session_id: str, turn_id: str, status: str) -> None:
        """Take note that a turn ended; clients call it for each `turn/completed`."""
        await self._core.turn_ended(session_id, turn_id, status)

    def close(self) -> None:
        """End the facade's own threads; its sessions and the journal stay as they are."""
        self._core.dispatcher.close()


class AsyncRemoteSkillsFacade(FacadeMethods[AsyncRemoteSkillSession]):
    """Python functions as skills of Codex sessions, on the running event loop.

    Args:
        client: An async client with the methods listed in `docs/reference/remote-skills.md`; `AsyncCodexClient` is one.
        profile: Lint rules; the client's `profile`, else those of Codex.
        journal: Keeps calls so that effects happen once; the client's, else memory.
        max_concurrency: Handlers that run at once.
    """

    def __init__(
        self,
        client: Any,
        *,
        profile: ServerProfile | None = None,
        journal: CallJournal | None = None,
        max_concurrency: int = 8,
    ) -> None:
        core = FacadeCore(client, asynchronous=True, profile=profile, journal=journal, max_concurrency=max_concurrency)
        super().__init__(core, AsyncRemoteSkillSession)


class RemoteSkillsFacade(Blocking[FacadeMethods[RemoteSkillSession]]):
    """As `AsyncRemoteSkillsFacade`, for a client that blocks, such as `CodexClient`; no event loop is needed."""

    def __init__(
        self,
        client: Any,
        *,
        profile: ServerProfile | None = None,
        journal: CallJournal | None = None,
        max_concurrency: int = 8,
    ) -> None:
        self._core = FacadeCore(
            client, asynchronous=False, profile=profile, journal=journal, max_concurrency=max_concurrency
        )
        super().__init__(FacadeMethods(self._core, RemoteSkillSession))

    def session(self, session_id: str) -> RemoteSkillSession:
        """Return a handle of a session; handles of one id share one registry."""
        return self._target.session(session_id)

    create_session = blocking(FacadeMethods[RemoteSkillSession].create_session)
    using = blocking_context(FacadeMethods[RemoteSkillSession].using)
    lifecycle = blocking_context(FacadeMethods[RemoteSkillSession].lifecycle)
    close_session = blocking(FacadeMethods.close_session)
    on_call = blocking(FacadeMethods.on_call)
    turn_ended = blocking(FacadeMethods.turn_ended)

    def close(self) -> None:
        """End the facade's own threads; its sessions and the journal stay as they are."""
        self._target.close()


class BlockingSessions(Blocking[Sessions]):
    """`Sessions`, blocking."""

    create = blocking(Sessions.create)
    get = blocking(Sessions.get)
    send_message = blocking(Sessions.send_message)
    resume = blocking(Sessions.resume)
    rollback = blocking(Sessions.rollback)
    tool_calls = blocking(Sessions.tool_calls)
    delete = blocking(Sessions.delete)


class BlockingToolCalls(Blocking[ToolCalls]):
    """`ToolCalls`, blocking."""

    respond = blocking(ToolCalls.respond)


class BlockingWaits(Blocking[Waits]):
    """`Waits`, blocking."""

    turn_status = blocking(Waits.turn_status)
    assistant_reply = blocking(Waits.assistant_reply)


class BlockingCatalog(Blocking[CodexCatalog]):
    """`CodexCatalog`, blocking."""

    apply = blocking(CodexCatalog.apply)
    context_for = blocking(CodexCatalog.context_for)
    facts = blocking(CodexCatalog.facts)
    forget = blocking(CodexCatalog.forget)


class BlockingSignals(Blocking[Signals]):
    """`Signals`, blocking: iterate, or ask for the next one."""

    next = blocking(Signals.next)

    def __iter__(self) -> Iterator[AppServerSignal]:
        return self

    def __next__(self) -> AppServerSignal:
        signal = self.next()
        if signal is None:
            raise StopIteration
        return signal

    def close(self) -> None:
        """Stop listening."""
        self._call(self._target.close)


class BlockingStream(Blocking[SignalStream]):
    """`SignalStream`, blocking."""

    def signals(self, session_id: str | None = None) -> BlockingSignals:
        """Listen to one session, or to all; iterate over what is returned, and close it."""
        return BlockingSignals(self._call(lambda: self._target.signals(session_id)), self._loop)


Probing = Literal["auto", "never"]
StateFolder = str | os.PathLike[str] | None


class AsyncCodexClient(AsyncAppServerClient):
    """A client of a Codex app-server for programs with an event loop.

    `remote_skills` is the facade whose registries answer calls with `dispatch="auto"`. Calls are kept in the state folder's
    journal unless another one is given.
    """

    _facade: AsyncRemoteSkillsFacade | None = None
    own_journal: SqlJournal | None = None  # which this client opened and closes

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
        client = await cls._with_journal(
            state_folder, opts, partial(super().spawn, home=home, binary=binary, cwd=cwd, env=env, config=config)
        )
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
        return await cls._with_journal(_state(state), opts, partial(super().connect, url, token=token))

    @classmethod
    async def _with_journal(cls, state: Path, opts: Mapping[str, Any], start: Callable[..., Awaitable[Self]]) -> Self:
        """Start the client with journal and spool of the state folder where none is given."""
        options, own_journal = dict(opts), None
        with contextlib.suppress(OSError):  # what opens the journal says what is wrong with the folder
            await asyncio.to_thread(close_state, state)
        if options.get("spool") is None:
            options["spool"] = Spool(state / "remote" / "spool")
        if options.get("journal") is None:
            options["journal"] = own_journal = await asyncio.to_thread(SqlJournal, journal_url(state))
        try:
            client = await start(**options)
        except BaseException:  # raised again: the journal has no other owner that would close it
            if own_journal is not None:
                own_journal.close()
            raise
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


class CodexClient(Blocking[AsyncCodexClient]):
    """The same client for programs without an event loop; it runs on a thread of its own.

    Calls of the server are answered on a thread each, so handlers may block and may use this client.
    """

    _loop: LoopThread

    def __init__(self, loop: LoopThread, client: AsyncCodexClient) -> None:
        super().__init__(client, loop)
        self._facade: RemoteSkillsFacade | None = None
        self._facade_lock = threading.Lock()
        self._context = contextvars.copy_context()
        self._threads = HandlerThreads()
        self.on_call: Any = None
        self.sessions = BlockingSessions(client.sessions, loop)
        self.tool_calls = BlockingToolCalls(client.tool_calls, loop)
        self.wait = BlockingWaits(client.wait, loop)
        self.stream = BlockingStream(client.stream, loop)
        self.catalog = BlockingCatalog(client.catalog, loop)
        self.profile: ServerProfile = client.profile
        self.journal: CallJournal = client.journal
        self.spool: Any = client.spool  # where the rest of long answers is kept, or None
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
        return cls._open(
            lambda: AsyncCodexClient.spawn(
                home=home, binary=binary, cwd=cwd, env=env, config=config, probe=probe, **opts
            )
        )

    @classmethod
    def connect(cls, url: str, *, token: str | None = None, **opts: Any) -> Self:
        """See `AsyncAppServerClient.connect`."""
        return cls._open(lambda: AsyncCodexClient.connect(url, token=token, **opts))

    @classmethod
    def _open(cls, start: Callable[[], Coroutine[Any, Any, AsyncCodexClient]]) -> Self:
        loop = LoopThread("kdskills-codex", AppServerGone)
        try:
            return cls(loop, loop.run(start))
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

    connection = Forwarded[str](AsyncAppServerClient.connection)
    connected = Forwarded[bool](AsyncAppServerClient.connected)
    user_agent = Forwarded[str](AsyncAppServerClient.user_agent)
    owned = Forwarded[bool](AsyncAppServerClient.owned)
    codex_home = Forwarded[str | None](AsyncAppServerClient.codex_home)
    request = blocking(AsyncAppServerClient.request)
    reconnect = blocking(AsyncAppServerClient.reconnect)

    def close(self) -> None:
        """Close the connection, stop an owned server, end the thread. May be called twice."""
        if not self._loop.ended:
            self._loop.run(self._target.close)
            self._loop.stop()
        if self._facade is not None:
            self._facade.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _take_call(self, signal: AppServerSignal) -> object:
        """Answer a call on a thread of its own; the reading loop goes on meanwhile."""
        return await self._on_thread(self.on_call or self.remote_skills.on_call, signal)

    async def _turn_ended(self, thread_id: str, turn_id: str, status: str) -> None:
        if self._facade is not None:
            await self._on_thread(self._facade.turn_ended, thread_id, turn_id, status)

    async def _on_thread(self, work: Callable[..., object], *arguments: object) -> object:
        return await self._threads.call(partial(self._context.copy().run, _shown, work, *arguments))


def _shown(work: Callable[..., object], *arguments: object) -> object:
    """Call a function; what would end a loop is shown as a thread's own hook shows it, and its name returned."""
    try:
        return work(*arguments)
    except Exception:  # an ordinary failure is the caller's: it ends no loop
        raise
    except BaseException as error:  # noqa: BLE001 - a loop would stop for these, and the call was answered before
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        return type(error).__name__


def _state(folder: StateFolder) -> Path:
    return Path(folder).absolute() if folder is not None else user_state_dir()
