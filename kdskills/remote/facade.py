"""The ways in: facades over a client, sync and async, on one core."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kdskills.remote.core import BlockingDriver, LoopDriver, drive
from kdskills.remote.core_facade import CleanupOptions, FacadeCore
from kdskills.remote.ports import CallJournal, JsonObject, ServerProfile
from kdskills.remote.results import RemoteSkillDispatch
from kdskills.remote.session import AsyncRemoteSkillSession, RemoteSkillSession
from kdskills.remote.signals import AppServerSignal
from kdskills.remote.submitting import SubmitOptions

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
