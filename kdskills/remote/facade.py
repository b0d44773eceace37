"""The facades over a client, sync and async, and the state they share: client, sessions, and how these are created and closed."""

from __future__ import annotations

import inspect
import logging
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kdskills.remote.core import BlockingDriver, Driver, LoopDriver, SubmitOptions, discard, drive
from kdskills.remote.core_session import DRAFT, SessionCore, sync_runtime
from kdskills.remote.dispatch import RemoteDispatcher
from kdskills.remote.ports import CallJournal, CatalogBackend, JsonObject, ServerProfile
from kdskills.remote.publish import take_roots_away
from kdskills.remote.receipts import Receipts, RemoteSkillDispatch
from kdskills.remote.registry import TOOLS_KEYWORDS
from kdskills.remote.session import AsyncRemoteSkillSession, RemoteSkillSession
from kdskills.remote.signals import AppServerSignal, address, text_or_none
from kdskills.remote.turns import Turnstile, respond_to_signal

_LOG = logging.getLogger("kdskills.remote")

_NONE = object()
DELETED_STATUSES = frozenset({"ok", "deleted"})


@dataclass(frozen=True, slots=True)
class CleanupOptions:
    """How a session ends.

    Attributes:
        sync_runtime_on_cleanup: A session that stays gets an empty catalog, if the client has a backend.
        ignore_cleanup_errors: Errors become diagnostics.
    """

    sync_runtime_on_cleanup: bool = True
    ignore_cleanup_errors: bool = True


class FacadeCore:
    """The state behind a facade.

    Args:
        client: The duck-typed client.
        driver: How to wait and call: on an event loop, or blocking.
        profile: Lint rules; the client's own when omitted.
        journal: Stores calls; when omitted, the client's own if it has a backend, else one in memory.
        max_concurrency: How many handlers may run at the same time.
    """

    def __init__(
        self,
        client: Any,
        driver: Driver,
        *,
        profile: ServerProfile | None,
        journal: CallJournal | None,
        max_concurrency: int,
    ) -> None:
        self.client = client
        self.driver = driver
        self.epoch = uuid.uuid4().hex
        self.turnstile = Turnstile(driver)
        self._profile = profile
        if journal is None and self.backend is not None:
            journal = getattr(client, "journal", None)
        self.dispatcher = RemoteDispatcher(
            journal,
            asynchronous=driver.asynchronous,
            max_concurrency=max_concurrency,
            spool=getattr(client, "spool", None),
        )
        self.receipts = Receipts(self.dispatcher.journal)
        self._sessions: dict[str, SessionCore] = {}
        self._closed: weakref.WeakValueDictionary[str, SessionCore] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    @property
    def profile(self) -> ServerProfile:
        """The rules in force: those passed to the facade, the client's, or those of Codex."""
        if self._profile is not None:
            return self._profile
        client_profile = getattr(self.client, "profile", None)
        return client_profile if isinstance(client_profile, ServerProfile) else ServerProfile.codex()

    @property
    def backend(self) -> CatalogBackend | None:
        """The client's catalog backend, or None."""
        catalog = getattr(self.client, "catalog", None)
        return catalog if isinstance(catalog, CatalogBackend) else None

    @property
    def connection(self) -> str:
        """The name of the client's present connection; empty when it has none."""
        name = getattr(self.client, "connection", None)
        return name if isinstance(name, str) else ""

    def session(self, session_id: str) -> SessionCore:
        """Return the core of a session; all handles of one id share it.

        Raises:
            ValueError: The id is blank.
        """
        if text_or_none(session_id) is None:
            raise ValueError("session_id must be non-empty text")
        with self._lock:
            if session_id not in self._sessions:
                closed_core = self._closed.get(session_id)
                self._sessions[session_id] = closed_core if closed_core is not None else SessionCore(self, session_id)
            return self._sessions[session_id]

    def sessions(self) -> list[SessionCore]:
        """Return the cores of the open sessions."""
        with self._lock:
            return list(dict.fromkeys(self._sessions.values()))

    def move(self, core: SessionCore, session_id: str) -> None:
        """Continue a session in its successor thread; the old id leads to the same registry."""
        with self._lock:
            core.session_id, core.active = session_id, None
            self._sessions[session_id] = core

    def draft(self) -> SessionCore:
        """Return a core that collects skills for a session that does not exist yet."""
        return SessionCore(self, DRAFT, draft=True)

    async def fill_draft(self, register: Callable[[Any], Any] | None, draft: SessionCore, handle: object) -> None:
        """Call the program's *register* with a draft.

        Raises:
            TypeError: It answered a sync facade with an awaitable, which is closed.
        """
        if register is None:
            return
        answer = register(handle)
        if not inspect.isawaitable(answer):
            return
        if not self.driver.asynchronous:
            discard(answer)
            raise TypeError("register returned an awaitable; use AsyncRemoteSkillsFacade")
        await answer

    async def create(self, draft: SessionCore, create_kwargs: Mapping[str, Any]) -> tuple[Any, SessionCore]:
        """Create the server's session with the draft's tools, and bind the draft's skills to it.

        Raises:
            ValueError: The answer names no session.
        """
        tools, layers = draft.tools(), draft.registry.layers()
        passed_tools = next((create_kwargs[name] for name in TOOLS_KEYWORDS if name in create_kwargs), _NONE)
        own_tools = {"dynamic_tools": tools} if tools and passed_tools is _NONE else {}
        created = await self.driver.call(self.client.sessions.create, **create_kwargs, **own_tools)
        session = created.get("session") if isinstance(created, Mapping) else None
        session_id = session.get("sessionId") if isinstance(session, Mapping) else None
        if text_or_none(session_id) is None:
            raise ValueError("sessions.create response missing session.sessionId")
        core = self.session(str(session_id))
        core.adopt(draft, [layer.skill for layer in layers])
        if own_tools:
            core.remember_pushed(tools, core.registry.layers())
        elif isinstance(passed_tools, (list, tuple)):
            core.remember_pushed([dict(tool) for tool in passed_tools if isinstance(tool, Mapping)], [])
        for diagnostic in draft.registry.diagnostics:
            core.registry.note(diagnostic)
        _note_fallback(core, created)
        return created, core

    async def close(self, session_id: str, *, delete_session: bool, options: CleanupOptions) -> JsonObject:
        """Clear a session's registry; delete the session, or empty its catalog if it stays."""
        core = self.session(session_id)
        report: JsonObject = {"sessionId": core.session_id, "cleared": core.registry.clear(), "deleted": False}
        core.unpublish()
        try:
            try:
                if delete_session:
                    await self._delete(core, report)
                elif options.sync_runtime_on_cleanup and core.backend is not None:
                    await self._empty_catalog(core)
            finally:
                await take_roots_away(core)
        except Exception as error:
            if not options.ignore_cleanup_errors:
                raise
            core.note("session_cleanup_failed", f"closing the session failed: {str(error) or type(error).__name__}")
        finally:
            self._forget(core)
        return report

    async def on_call(self, signal: AppServerSignal, options: SubmitOptions) -> RemoteSkillDispatch | None:
        """Answer a call of the client's stream by the session it names; a signal that names none is dropped."""
        session_id = address(signal)
        if session_id is None:
            return None
        with self._lock:
            core = self._sessions.get(session_id) or self._closed.get(session_id)
        if core is not None:
            return await respond_to_signal(core, signal, options)
        # This worker does not serve the session, but another may, so the dispatcher waits before it refuses.
        return await respond_to_signal(SessionCore(self, session_id), signal, options, knows_session=False)

    async def turn_ended(self, session_id: str, turn_id: str, status: str) -> None:
        """Record that a turn ended; after a completed one the model has seen every answer."""
        with self._lock:
            core = self._sessions.get(session_id)
        if core is not None and core.active_turn == turn_id:
            core.active = None
        if status == "completed":
            await self.driver.blocking(self.dispatcher.journal.settle, session_id, turn_id)

    async def _delete(self, core: SessionCore, report: JsonObject) -> None:
        answer = await self.driver.call(self.client.sessions.delete, session_id=core.session_id)
        report["deleteResponse"] = answer
        report["deleted"] = isinstance(answer, Mapping) and answer.get("status") in DELETED_STATUSES
        if report["deleted"] and core.backend is not None:
            await self.driver.call(core.backend.forget, core.session_id)

    async def _empty_catalog(self, core: SessionCore) -> None:
        report = await sync_runtime(core, 10.0)
        if report.get("status") == "failed":
            core.note(
                "session_cleanup_failed",
                f"the tools of the session were not removed: {report.get('error') or report.get('reason')}",
            )

    def _forget(self, core: SessionCore) -> None:
        self.dispatcher.forget(core.session_id)
        with self._lock:
            for session_id in [key for key, session in self._sessions.items() if session is core]:
                del self._sessions[session_id]
                self._closed[session_id] = core


def _note_fallback(core: SessionCore, created: Mapping[str, Any]) -> None:
    """Warn that the requested strategy is not in force, because it is not proven of the server."""
    preference = created.get("strategyAsked")
    if preference not in {"native", "reload"} or created.get("strategy") != "dispatcher":
        return
    message = (
        f"strategy {preference!r} is not proven of this server, so the catalog reaches the model through the dispatcher"
    )
    _LOG.warning("session %s: %s", core.session_id, message)
    core.note(
        "strategy_not_proven", message, fix="give connect the profile of a probe: connect(url, profile=report.profile)"
    )


S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class RemoteSkillLifecycle(Generic[S]):
    """What `lifecycle` yields: the session's id, the server's answer to its creation, and the session."""

    session_id: str
    created: Any
    skills: S


class RemoteSkillsFacade:
    """Python functions as skills of Codex sessions, without an event loop.

    Args:
        client: A client with the methods listed in `docs/reference/remote-skills.md`; `CodexClient` is one.
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
        driver = BlockingDriver()
        self._core = FacadeCore(client, driver, profile=profile, journal=journal, max_concurrency=max_concurrency)

    def session(self, session_id: str) -> RemoteSkillSession:
        """Return a handle of a session; handles of one id share one registry."""
        return RemoteSkillSession(self._core.session(session_id))

    def create_session(
        self, *, register: Callable[[RemoteSkillSession], Any] | None = None, **create_kwargs: Any
    ) -> tuple[Any, RemoteSkillSession]:
        """Create a session of the server with the skills *register* puts into a draft.

        Returns:
            The server's answer, and the session with the draft's skills.

        Raises:
            TypeError: *register* answered with an awaitable; nothing was created.
            ValueError: The server's answer names no session.
        """
        draft = self._core.draft()
        drive(self._core.fill_draft(register, draft, RemoteSkillSession(draft)))
        created, core = drive(self._core.create(draft, create_kwargs))
        return created, RemoteSkillSession(core)

    @contextmanager
    def using(
        self, session_id: str, name: str, handler: Callable[..., Any], **register_options: Any
    ) -> Iterator[RemoteSkillSession]:
        """As `session(session_id).using(…)`."""
        with self.session(session_id).using(name, handler, **register_options) as session:
            yield session

    @contextmanager
    def lifecycle(
        self,
        *,
        register: Callable[[RemoteSkillSession], Any] | None = None,
        keep_session: bool = False,
        sync_runtime_on_cleanup: bool = True,
        ignore_cleanup_errors: bool = True,
        **create_kwargs: Any,
    ) -> Iterator[RemoteSkillLifecycle[RemoteSkillSession]]:
        """Have a session for the body of a `with`; it is closed afterwards, and deleted unless it is kept."""
        created, skills = self.create_session(register=register, **create_kwargs)
        ending = _Ending(CleanupOptions(sync_runtime_on_cleanup, ignore_cleanup_errors))
        try:
            yield RemoteSkillLifecycle(skills.session_id, created, skills)
        except BaseException:  # raised again: the clean-up must not hide the body's own error
            ending.failed()
            raise
        finally:
            drive(self._core.close(skills.session_id, delete_session=not keep_session, options=ending.options))

    def close_session(
        self,
        session_id: str,
        *,
        delete_session: bool = False,
        sync_runtime_on_cleanup: bool = True,
        ignore_cleanup_errors: bool = True,
    ) -> JsonObject:
        """Clear a session's registry, and delete the session or empty its tools."""
        options = CleanupOptions(sync_runtime_on_cleanup, ignore_cleanup_errors)
        return drive(self._core.close(session_id, delete_session=delete_session, options=options))

    def on_call(self, signal: AppServerSignal) -> RemoteSkillDispatch | None:
        """Answer a call of the client's stream; the session it names is found here."""
        return drive(self._core.on_call(signal, SubmitOptions()))

    def turn_ended(self, session_id: str, turn_id: str, status: str) -> None:
        """Take note that a turn ended; clients call it for each `turn/completed`."""
        drive(self._core.turn_ended(session_id, turn_id, status))

    def close(self) -> None:
        """End the facade's own threads; its sessions and the journal stay as they are."""
        self._core.dispatcher.close()


class AsyncRemoteSkillsFacade:
    """As `RemoteSkillsFacade`, on the running event loop, for a client of coroutines.

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
        driver = LoopDriver()
        self._core = FacadeCore(client, driver, profile=profile, journal=journal, max_concurrency=max_concurrency)

    def session(self, session_id: str) -> AsyncRemoteSkillSession:
        """As `RemoteSkillsFacade.session`."""
        return AsyncRemoteSkillSession(self._core.session(session_id))

    async def create_session(
        self, *, register: Callable[[AsyncRemoteSkillSession], Any] | None = None, **create_kwargs: Any
    ) -> tuple[Any, AsyncRemoteSkillSession]:
        """As `RemoteSkillsFacade.create_session`; *register* may be a coroutine function."""
        draft = self._core.draft()
        await self._core.fill_draft(register, draft, AsyncRemoteSkillSession(draft))
        created, core = await self._core.create(draft, create_kwargs)
        return created, AsyncRemoteSkillSession(core)

    @asynccontextmanager
    async def using(
        self, session_id: str, name: str, handler: Callable[..., Any], **register_options: Any
    ) -> AsyncIterator[AsyncRemoteSkillSession]:
        """As `session(session_id).using(…)`."""
        async with self.session(session_id).using(name, handler, **register_options) as session:
            yield session

    @asynccontextmanager
    async def lifecycle(
        self,
        *,
        register: Callable[[AsyncRemoteSkillSession], Any] | None = None,
        keep_session: bool = False,
        sync_runtime_on_cleanup: bool = True,
        ignore_cleanup_errors: bool = True,
        **create_kwargs: Any,
    ) -> AsyncIterator[RemoteSkillLifecycle[AsyncRemoteSkillSession]]:
        """As `RemoteSkillsFacade.lifecycle`."""
        created, skills = await self.create_session(register=register, **create_kwargs)
        ending = _Ending(CleanupOptions(sync_runtime_on_cleanup, ignore_cleanup_errors))
        try:
            yield RemoteSkillLifecycle(skills.session_id, created, skills)
        except BaseException:  # raised again: the clean-up must not hide the body's own error
            ending.failed()
            raise
        finally:
            await self._core.close(skills.session_id, delete_session=not keep_session, options=ending.options)

    async def close_session(
        self,
        session_id: str,
        *,
        delete_session: bool = False,
        sync_runtime_on_cleanup: bool = True,
        ignore_cleanup_errors: bool = True,
    ) -> JsonObject:
        """As `RemoteSkillsFacade.close_session`."""
        options = CleanupOptions(sync_runtime_on_cleanup, ignore_cleanup_errors)
        return await self._core.close(session_id, delete_session=delete_session, options=options)

    async def on_call(self, signal: AppServerSignal) -> RemoteSkillDispatch | None:
        """As `RemoteSkillsFacade.on_call`."""
        return await self._core.on_call(signal, SubmitOptions())

    async def turn_ended(self, session_id: str, turn_id: str, status: str) -> None:
        """As `RemoteSkillsFacade.turn_ended`."""
        await self._core.turn_ended(session_id, turn_id, status)

    def close(self) -> None:
        """End the facade's own threads; its sessions and the journal stay as they are."""
        self._core.dispatcher.close()


class _Ending:
    """How a lifecycle is to end: after an error of the body, errors of the cleanup must not hide it."""

    def __init__(self, options: CleanupOptions) -> None:
        self.options = options

    def failed(self) -> None:
        """Take note that the body raised."""
        self.options = CleanupOptions(self.options.sync_runtime_on_cleanup, ignore_cleanup_errors=True)
