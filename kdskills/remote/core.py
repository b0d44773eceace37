"""The state behind a facade, and behind all handles of one of its sessions.

A sync facade runs the same coroutines on a loop of this package; its client and whatever else blocks is called on the thread that waits.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from kdskills.errors import Diagnostic
from kdskills.remote.calls import Receipts, ReceiptSkillEntry, text_or_none
from kdskills.remote.dispatch import RemoteDispatcher
from kdskills.remote.ports import CallJournal, CatalogBackend, JsonObject, ServerProfile
from kdskills.remote.registry import RemoteSkill, RemoteSkillRegistry, instruction_text, wire_tools
from kdskills.session.threads import discard, on_waiting_thread

if TYPE_CHECKING:
    from kdskills.remote.calls import AnsweredCall

T = TypeVar("T")

DRAFT = "draft"


class FacadeCore:
    """The state behind a facade: client, journal and sessions; client and handlers that are not *asynchronous* block."""

    def __init__(
        self,
        client: Any,
        *,
        asynchronous: bool,
        profile: ServerProfile | None,
        journal: CallJournal | None,
        max_concurrency: int,
    ) -> None:
        self.client = client
        self.asynchronous = asynchronous
        self.epoch = uuid.uuid4().hex
        self._profile = profile
        if journal is None and self.backend is not None:
            journal = getattr(client, "journal", None)
        spool = getattr(client, "spool", None)
        self.dispatcher = RemoteDispatcher(
            journal, asynchronous=asynchronous, max_concurrency=max_concurrency, spool=spool
        )
        self.receipts = Receipts(self.dispatcher.journal)
        self._turnstiles: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._unbroken: set[asyncio.Task[Any]] = set()
        self._sessions: dict[str, SessionCore] = {}
        self._closed: WeakValueDictionary[str, SessionCore] = WeakValueDictionary()
        self._lock = threading.RLock()

    @property
    def profile(self) -> ServerProfile:
        """The rules in force: those passed to the facade, the client's, or those of Codex."""
        profile = self._profile or getattr(self.client, "profile", None)
        return profile if isinstance(profile, ServerProfile) else ServerProfile.codex()

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

    async def call(self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
        """Call a client's method and await what it returns; raises `TypeError` when a sync facade gets an awaitable."""
        if self.asynchronous:
            answer = function(*arguments, **keywords)
            return await answer if inspect.isawaitable(answer) else answer
        answer = await on_waiting_thread(partial(function, *arguments, **keywords))
        if inspect.isawaitable(answer):
            discard(answer)
            name = getattr(function, "__qualname__", type(function).__name__)
            raise TypeError(f"{name} returned an awaitable; use AsyncRemoteSkillsFacade with an async client")
        return answer

    async def blocking(self, function: Callable[..., T], /, *arguments: Any) -> T:
        """Call a function that blocks, without blocking the loop."""
        if not self.asynchronous:
            return await on_waiting_thread(partial(function, *arguments))
        return await asyncio.to_thread(function, *arguments)

    async def unbroken(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end even when its caller is cancelled, because a claimed call must be answered."""
        if not self.asynchronous:  # only an interrupt of the waiting thread cancels, and that ends its work, too
            return await work
        task = asyncio.ensure_future(work)
        self._unbroken.add(task)
        task.add_done_callback(self._unbroken.discard)
        return await asyncio.shield(task)

    def turnstile(self, key: str) -> asyncio.Lock:
        """Return the lock that serializes what has this key; it lives as long as somebody has it."""
        return self._turnstiles.setdefault(key, asyncio.Lock())

    def session(self, session_id: str) -> SessionCore:
        """Return the core of a session, which all handles of one id share; raises `ValueError` for a blank id."""
        if text_or_none(session_id) is None:
            raise ValueError("session_id must be non-empty text")
        with self._lock:
            if session_id not in self._sessions:
                closed_core = self._closed.get(session_id)
                self._sessions[session_id] = closed_core if closed_core is not None else SessionCore(self, session_id)
            return self._sessions[session_id]

    def known(self, session_id: str) -> SessionCore | None:
        """Return the core of a session that is open, or closed while a handle of it is in use."""
        with self._lock:
            return self._sessions.get(session_id) or self._closed.get(session_id)

    def others(self, core: SessionCore) -> list[SessionCore]:
        """Return the cores of the open sessions but for this one."""
        with self._lock:
            return [other for other in dict.fromkeys(self._sessions.values()) if other is not core]

    def move(self, core: SessionCore, session_id: str) -> None:
        """Continue a session in its successor thread; the old id leads to the same registry."""
        with self._lock:
            core.session_id, core.active = session_id, None
            self._sessions[session_id] = core

    def forget(self, core: SessionCore) -> None:
        """Take a closed session from the open ones; it is the same again while a handle of it is in use."""
        self.dispatcher.forget(core.session_id)
        with self._lock:
            for session_id in [key for key, session in self._sessions.items() if session is core]:
                del self._sessions[session_id]
                self._closed[session_id] = core

    async def turn_ended(self, session_id: str, turn_id: str, status: str) -> None:
        """Record that a turn ended; after a completed one the model has seen every answer."""
        core = self._sessions.get(session_id)
        if core is not None and core.active_turn == turn_id:
            core.active = None
        if status == "completed":
            await self.blocking(self.dispatcher.journal.settle, session_id, turn_id)


class SessionCore:
    """The state behind every handle of one session, or of a draft, which collects skills for a session to come."""

    def __init__(self, owner: FacadeCore, session_id: str, *, draft: bool = False) -> None:
        self.owner = owner
        self.session_id = session_id
        self.draft = draft
        self.registry = RemoteSkillRegistry(owner.profile)
        self.last_catalog: JsonObject | None = None
        self.pushed: list[JsonObject] | None = None
        self.pushed_skills: list[RemoteSkill] = []
        self.active: tuple[str, str] | None = None  # the turn last started here, and on which connection
        self.published: tuple[ReceiptSkillEntry, ...] = ()
        self.published_tools: Mapping[str, RemoteSkill] = {}  # what `publish` registered, by qualified name
        self.view_digest: str | None = None  # of the view that is published here
        self.roots_digest: str | None = None  # the same, where it is published as roots
        self.roots_folder: str | None = None
        self.listeners: tuple[Callable[[AnsweredCall], None], ...] = ()

    def live(self) -> None:
        """Raise `RuntimeError` for a draft: there is no session yet."""
        if self.draft:
            raise RuntimeError("a draft session only collects skills; the session exists once create_session returned")

    def note(self, code: str, message: str, *, fix: str | None = None) -> None:
        """Add a warning about this session to the diagnostics."""
        self.registry.note(Diagnostic(code, "warning", message, ref=self.session_id, fix=fix))

    def tools(self) -> list[JsonObject]:
        """Return the wire tools of the visible skills."""
        return wire_tools(self.registry.skills())

    def text(self) -> str:
        """Return the instruction text of the visible skills."""
        return instruction_text(self.registry.skills())

    def adopt(self, draft: SessionCore, skills: Sequence[RemoteSkill]) -> None:
        """Take over the skills of a draft, and the records of those that were published there."""
        for skill in skills:
            self.registry.register(skill)
        if draft.view_digest is not None:
            self.published, self.published_tools = draft.published, draft.published_tools
            self.view_digest = draft.view_digest
        for diagnostic in draft.registry.diagnostics:
            self.registry.note(diagnostic)

    @contextmanager
    def listening(self, hear: Callable[[AnsweredCall], None]) -> Iterator[None]:
        """Call *hear* with every call that is answered in the body of the `with`."""
        self.listeners = (*self.listeners, hear)
        try:
            yield
        finally:
            self.listeners = tuple(listener for listener in self.listeners if listener is not hear)

    @property
    def active_turn(self) -> str | None:
        """The running turn as far as this session knows; a turn of an earlier connection counts as ended."""
        return self.active[0] if self.active is not None and self.active[1] == self.owner.connection else None

    def remember_pushed(self, tools: list[JsonObject], skills: Sequence[RemoteSkill]) -> None:
        """Remember the catalog that was pushed to the model."""
        self.pushed, self.pushed_skills = copy.deepcopy(tools), list(skills)
