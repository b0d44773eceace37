"""The state of one facade: its client and sessions, and how sessions are created and closed."""

from __future__ import annotations

import inspect
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kdskills.remote.core import Driver, discard
from kdskills.remote.core_calls import Turnstile, respond_to_signal
from kdskills.remote.core_catalog import sync_runtime
from kdskills.remote.core_session import DRAFT, SessionCore
from kdskills.remote.dispatch import RemoteDispatcher
from kdskills.remote.ports import CallJournal, CatalogBackend, JsonObject, ServerProfile
from kdskills.remote.publish_roots import take_roots_away
from kdskills.remote.receipts import Receipts
from kdskills.remote.results import RemoteSkillDispatch
from kdskills.remote.signals import AppServerSignal, address, text_or_none
from kdskills.remote.submitting import SubmitOptions
from kdskills.remote.text import TOOLS_KEYWORDS

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
            driver, journal, max_concurrency=max_concurrency, spool=getattr(client, "spool", None)
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
