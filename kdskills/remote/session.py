"""The handles of one session, async and blocking; all handles of a session share its state."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from kdskills.errors import Diagnostic
from kdskills.remote import turns
from kdskills.remote.calls import (
    AnsweredCall,
    AppServerSignal,
    RemoteSkillDispatch,
    RemoteSkillSendResult,
    address,
    request_text,
    text_or_none,
)
from kdskills.remote.core import SessionCore
from kdskills.remote.names import clean_name
from kdskills.remote.ports import CallIdentity, JsonObject
from kdskills.remote.publish import publish
from kdskills.remote.registry import RemoteSkill, inject
from kdskills.remote.turns import SubmitOptions, change_catalog, refuse_unapplied
from kdskills.session.threads import Blocking, blocking, blocking_context

if TYPE_CHECKING:
    from kdskills.remote.calls import Receipt
    from kdskills.remote.publish import PublishReport
    from kdskills.turn import SkillView

H = TypeVar("H", bound=Callable[..., Any])


class SessionHandle:
    """Base of both handles of a session: the methods that never wait. Handles of one session share its *core*."""

    def __init__(self, core: SessionCore) -> None:
        self._core = core

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.session_id!r}, {len(self.list())} skills)"

    @property
    def session_id(self) -> str:
        """The server's thread id, or `draft`."""
        return self._core.session_id

    @property
    def diagnostics(self) -> list[Diagnostic]:
        """What was noticed so far, oldest first."""
        return self._core.registry.diagnostics

    @property
    def last_catalog(self) -> JsonObject | None:
        """The last report of a catalog change, or None."""
        return copy.deepcopy(self._core.last_catalog)

    def register(
        self,
        name: str,
        handler: Callable[..., Any],
        *,
        description: str | None = None,
        input_schema: JsonObject | None = None,
        output_schema: JsonObject | None = None,
        namespace: str | None = None,
        deadline_seconds: float | None = 120.0,
        idempotent: bool = False,
        defer_loading: bool = False,
    ) -> RemoteSkill:
        """Register a function as a skill of this session.

        Args:
            name: The tool's name; white space around it is dropped.
            handler: Called with the model's arguments as keywords.
            description: What the model reads; from the docstring when blank.
            input_schema: JSON Schema of the arguments; derived from annotations when it is no dict.
            output_schema: JSON Schema of the result, for the instruction text; from the return annotation when no dict.
            namespace: The tool's namespace.
            deadline_seconds: How long a call may take, queueing included; None for no bound.
            idempotent: Whether a call whose worker died may run again.
            defer_loading: Whether the server may keep the tool out of the first request; needs a namespace.

        Returns:
            The skill, with schemas of the caller's own.

        Raises:
            ValueError: The name is blank.
            CatalogError: The server would refuse, drop or shadow the skill, or a schema is invalid.
        """
        options = (namespace, deadline_seconds, idempotent, defer_loading)
        skill = self._core.registry.build(name, handler, description, input_schema, output_schema, *options)
        return self._core.registry.register(skill).copied()

    def skill(self, *, name: str | None = None, **register_options: Any) -> Callable[[H], H]:
        """Return a decorator that registers a function under its own name, or another, and returns it unchanged."""

        def decorate(handler: H) -> H:
            self.register(name if name is not None else getattr(handler, "__name__", ""), handler, **register_options)
            return handler

        return decorate

    def unregister(self, name: str) -> bool:
        """Drop a skill with all its layers, by qualified name; False when there was none."""
        return self._core.registry.unregister(clean_name(name))

    def clear(self) -> int:
        """Drop every skill; returns how many were visible."""
        return self._core.registry.clear()

    def dynamic_tools(self) -> list[JsonObject]:
        """Return the wire tools, sorted by qualified name."""
        return self._core.tools()

    def instruction_text(self) -> str:
        """Return the catalog as text; empty without skills."""
        return self._core.text()

    def inject_request(self, text: str) -> str:
        """Return the catalog's text with the user's request below; just the request without skills."""
        return inject(self._core.text(), text)

    def matches_signal(self, signal: AppServerSignal) -> bool:
        """Return whether a signal is for this session, or names none."""
        return address(signal) in {None, self.session_id}

    def receipt(self, turn_id: str) -> Receipt | None:
        """Return what is known of a turn: catalog, context, calls; None for unknown turns.

        Reads the journal here and now: keep an event loop free by `await asyncio.to_thread(session.receipt, turn_id)`.
        """
        return self._core.owner.receipts.receipt(self.session_id, turn_id)

    def list(self) -> list[RemoteSkill]:
        """Return the visible skills in registration order."""
        return [skill.copied() for skill in self._core.registry.skills()]


class AsyncRemoteSkillSession(SessionHandle):
    """A session of an async facade: what asks the client is a coroutine."""

    @asynccontextmanager
    async def using(
        self, /, name: str, handler: Callable[..., Any], **register_options: Any
    ) -> AsyncIterator[AsyncRemoteSkillSession]:
        """Have a skill for the body of an `async with`; what it hid returns afterwards."""
        async with turns.window(self._core, name, handler, **register_options):
            yield self

    async def publish(
        self,
        view: SkillView,
        *,
        route: str = "tools",
        python_tools: Mapping[str, Callable[..., Any]] | None = None,
        renew: Callable[[], SkillView] | None = None,
    ) -> PublishReport:
        """Publish the skills a view lists in this session, as tools or as roots.

        Args:
            view: Whose skills; what an earlier call published goes.
            route: `tools` or `roots`.
            python_tools: Python functions by tool id; those a skill names become `<skill>__<tool>`.
            renew: Gives the view of this moment; asked at each call in place of *view*.

        Raises:
            CatalogError: Names collide or do not fit, or this server cannot have roots.
        """
        return await publish(self._core, view, route=route, python_tools=python_tools, renew=renew)

    async def sync_runtime(self, *, timeout_seconds: float = 10.0) -> JsonObject:
        """Make the model's catalog that of the registry, now or with a reason why not."""
        return await change_catalog(self._core, timeout_seconds, wait=False)

    async def prepare_catalog(self, *, timeout_seconds: float = 90.0) -> JsonObject:
        """As `sync_runtime`, waiting for an idle thread."""
        return await change_catalog(self._core, timeout_seconds, wait=True)

    async def wait_catalog(self, *, timeout_seconds: float = 90.0) -> JsonObject:
        """Wait until a deferred change is applied; without one, the same as `prepare_catalog` for what is not yet pushed."""
        core = self._core
        core.live()
        settled = core.last_catalog is not None and core.last_catalog.get("status") in {"ok", "noop"}
        if core.owner.backend is None and settled and core.pushed == core.tools():
            return self.last_catalog or {}
        return await change_catalog(core, timeout_seconds, wait=True)

    async def send(self, /, request_text: str, *, inject_skills: bool = True, **kwargs: Any) -> Any:
        """Send one message with the catalog as it is."""
        return await turns.send(self._core, request_text, inject_skills=inject_skills, keywords=kwargs)

    async def send_prepared(
        self,
        /,
        request_text: str,
        *,
        inject_skills: bool = True,
        prepare_timeout_seconds: float = 90.0,
        **kwargs: Any,
    ) -> Any:
        """Prepare the catalog, then send; raises `CatalogNotApplied` and sends nothing when it was not applied."""
        refuse_unapplied(await change_catalog(self._core, prepare_timeout_seconds, wait=True))
        return await turns.send(self._core, request_text, inject_skills=inject_skills, keywords=kwargs)

    async def send_and_handle(
        self,
        /,
        request_text: str,
        *,
        inject_skills: bool = True,
        timeout_seconds: float = 60.0,
        interval_seconds: float = 0.25,
        terminal_statuses: str | Iterable[str] | None = None,
        require_assistant_reply: bool = False,
        max_submit_attempts: int = 3,
        retry_delay_seconds: float = 0.05,
        **kwargs: Any,
    ) -> RemoteSkillSendResult:
        """Send one message and answer its calls until its turn has ended.

        Raises:
            ValueError: A time is not positive, or the answer has no `turnId`.
            WaitTimeoutError: The turn did not end, or its reply did not come, in time.
            CatalogNotApplied: A backend could not change the catalog; nothing was sent.
        """
        core, answered = self._core, list[AnsweredCall]()
        core.live()
        if not timeout_seconds > 0 or not interval_seconds > 0:
            times = f"{timeout_seconds!r} and {interval_seconds!r}"
            raise ValueError(f"timeout_seconds and interval_seconds must be positive, got {times}")
        words = [terminal_statuses] if isinstance(terminal_statuses, str) else terminal_statuses
        terminal = turns.TERMINAL if words is None else frozenset(word.strip().lower() for word in words)
        with core.listening(answered.append):
            if core.owner.backend is not None:
                refuse_unapplied(await change_catalog(core, 90.0, wait=True))
            accepted = await turns.send(core, request_text, inject_skills=inject_skills, keywords=kwargs)
            turn_id = text_or_none(accepted.get("turnId")) if isinstance(accepted, Mapping) else None
            if turn_id is None:
                raise ValueError("sessions.send_message response missing turnId")
            pause = turns.pauses(core, turn_id, timeout_seconds, interval_seconds)
            options = SubmitOptions(max_submit_attempts, retry_delay_seconds)
            status = await turns.settled(core, turn_id, terminal, options, pause)
            detail, reply = await turns.reply(core, turn_id, pause, required=require_assistant_reply)
        dispatches = turns.of_turn(answered, turn_id)
        return RemoteSkillSendResult(core.session_id, turn_id, dict(accepted), detail, status, reply, dispatches)

    async def dispatch_tool_call(
        self, *, tool: str, arguments: Any = None, request_id: object = None, call_id: str | None = None
    ) -> RemoteSkillDispatch:
        """Run a call for the program; submits nothing and asks no journal."""
        self._core.live()
        session_id, handle = self.session_id, request_text(request_id)
        identity = CallIdentity(
            session_id, tool.strip(), "", session_id, call_id=text_or_none(call_id), request_id=handle
        )
        return await turns.dispatch_tool_call(self._core, turns.IncomingCall(identity, arguments))

    async def respond_to_signal(
        self, signal: AppServerSignal, *, max_submit_attempts: int = 3, retry_delay_seconds: float = 0.05
    ) -> RemoteSkillDispatch | None:
        """Answer the call a signal carries; None, and nothing run, when it is none of this session's."""
        self._core.live()
        call = turns.call_of_signal(self._core, signal) if self.matches_signal(signal) else None
        return await turns.respond(self._core, call, SubmitOptions(max_submit_attempts, retry_delay_seconds))

    async def respond_to_pending_call(
        self, row: Mapping[str, Any], *, max_submit_attempts: int = 3, retry_delay_seconds: float = 0.05
    ) -> RemoteSkillDispatch | None:
        """Answer the call of a pending row; None when it is another thread's or names no tool."""
        self._core.live()
        call = turns.call_of_row(self._core, row)
        return await turns.respond(self._core, call, SubmitOptions(max_submit_attempts, retry_delay_seconds))

    async def drain_pending_calls(
        self, *, max_submit_attempts: int = 3, retry_delay_seconds: float = 0.05
    ) -> list[RemoteSkillDispatch]:
        """Answer every pending call of the session, in the order of its rows."""
        self._core.live()
        return await turns.drain(self._core, SubmitOptions(max_submit_attempts, retry_delay_seconds))


class RemoteSkillSession(SessionHandle, Blocking[AsyncRemoteSkillSession]):
    """A session of a sync facade: the methods of `AsyncRemoteSkillSession`, of which those that ask the client block."""

    def __init__(self, core: SessionCore) -> None:
        SessionHandle.__init__(self, core)
        Blocking.__init__(self, AsyncRemoteSkillSession(core))

    @contextmanager
    def using(self, name: str, handler: Callable[..., Any], **register_options: Any) -> Iterator[RemoteSkillSession]:
        """Have a skill for the body of a `with`; what it hid returns afterwards."""
        with self._window(name, handler, **register_options):
            yield self

    _window = blocking_context(AsyncRemoteSkillSession.using)
    publish = blocking(AsyncRemoteSkillSession.publish)
    sync_runtime = blocking(AsyncRemoteSkillSession.sync_runtime)
    prepare_catalog = blocking(AsyncRemoteSkillSession.prepare_catalog)
    wait_catalog = blocking(AsyncRemoteSkillSession.wait_catalog)
    send = blocking(AsyncRemoteSkillSession.send)
    send_prepared = blocking(AsyncRemoteSkillSession.send_prepared)
    send_and_handle = blocking(AsyncRemoteSkillSession.send_and_handle)
    dispatch_tool_call = blocking(AsyncRemoteSkillSession.dispatch_tool_call)
    respond_to_signal = blocking(AsyncRemoteSkillSession.respond_to_signal)
    respond_to_pending_call = blocking(AsyncRemoteSkillSession.respond_to_pending_call)
    drain_pending_calls = blocking(AsyncRemoteSkillSession.drain_pending_calls)
