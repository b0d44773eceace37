"""The handles of one session: sync and async, over the same core."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from kdskills.errors import Diagnostic
from kdskills.remote import core_session, turns
from kdskills.remote.core import SubmitOptions, drive
from kdskills.remote.core_session import SessionCore
from kdskills.remote.names import clean_name
from kdskills.remote.ports import JsonObject
from kdskills.remote.publish import publish
from kdskills.remote.receipts import RemoteSkillDispatch, RemoteSkillSendResult
from kdskills.remote.registry import RemoteSkill, inject
from kdskills.remote.signals import AppServerSignal, address

if TYPE_CHECKING:
    from kdskills.remote.publish import PublishReport
    from kdskills.remote.receipts import Receipt
    from kdskills.turn import SkillView

H = TypeVar("H", bound=Callable[..., Any])


class SessionHandle:
    """Base of both handles of a session: the methods that never wait.

    Args:
        core: The session itself; handles of one session share it.
    """

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
        options = {
            "description": description,
            "input_schema": input_schema,
            "output_schema": output_schema,
            "namespace": namespace,
            "deadline_seconds": deadline_seconds,
            "idempotent": idempotent,
            "defer_loading": defer_loading,
        }
        return self._core.register(name, handler, options).copied()

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

        Reads the journal here and now, in an async session, too. With a journal in a database, and most of all in one
        across a network, keep the event loop free: `await asyncio.to_thread(session.receipt, turn_id)`.
        """
        return self._core.owner.receipts.receipt(self.session_id, turn_id)

    def list(self) -> list[RemoteSkill]:
        """Return the visible skills in registration order."""
        return [skill.copied() for skill in self._core.registry.skills()]


class RemoteSkillSession(SessionHandle):
    """A session of a sync facade."""

    @contextmanager
    def using(self, name: str, handler: Callable[..., Any], **register_options: Any) -> Iterator[RemoteSkillSession]:
        """Have a skill for the body of a `with`; what it hid returns afterwards."""
        layer = self._core.open_window(name, handler, register_options)
        try:
            yield self
        finally:
            drive(core_session.leave_window(self._core, layer))

    def publish(
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
        return drive(publish(self._core, view, route=route, python_tools=python_tools, renew=renew))

    def sync_runtime(self, *, timeout_seconds: float = 10.0) -> JsonObject:
        """Make the model's catalog that of the registry, now or with a reason why not."""
        return drive(core_session.sync_runtime(self._core, timeout_seconds))

    def prepare_catalog(self, *, timeout_seconds: float = 90.0) -> JsonObject:
        """As `sync_runtime`, waiting for an idle thread."""
        return drive(core_session.prepare_catalog(self._core, timeout_seconds))

    def wait_catalog(self, *, timeout_seconds: float = 90.0) -> JsonObject:
        """Wait until a deferred change is applied."""
        return drive(core_session.wait_catalog(self._core, timeout_seconds))

    def send(self, request_text: str, *, inject_skills: bool = True, **kwargs: Any) -> Any:
        """Send one message with the catalog as it is."""
        return drive(turns.send(self._core, request_text, inject_skills=inject_skills, keywords=kwargs))

    def send_prepared(
        self, request_text: str, *, inject_skills: bool = True, prepare_timeout_seconds: float = 90.0, **kwargs: Any
    ) -> Any:
        """Prepare the catalog, then send; raises `CatalogNotApplied` and sends nothing when it was not applied."""
        return drive(
            turns.send_prepared(
                self._core,
                request_text,
                inject_skills=inject_skills,
                prepare_timeout_seconds=prepare_timeout_seconds,
                keywords=kwargs,
            )
        )

    def send_and_handle(
        self,
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
        """Send one message and answer its calls until its turn has ended."""
        return drive(
            turns.send_and_handle(
                self._core,
                request_text,
                inject_skills=inject_skills,
                timeout_seconds=timeout_seconds,
                interval_seconds=interval_seconds,
                terminal_statuses=terminal_statuses,
                require_assistant_reply=require_assistant_reply,
                options=SubmitOptions(max_submit_attempts, retry_delay_seconds),
                keywords=kwargs,
            )
        )

    def dispatch_tool_call(
        self, *, tool: str, arguments: Any = None, request_id: object = None, call_id: str | None = None
    ) -> RemoteSkillDispatch:
        """Run a call for the program; submits nothing and asks no journal."""
        return drive(
            turns.dispatch_tool_call(self._core, tool=tool, arguments=arguments, request_id=request_id, call_id=call_id)
        )

    def respond_to_signal(
        self, signal: AppServerSignal, *, max_submit_attempts: int = 3, retry_delay_seconds: float = 0.05
    ) -> RemoteSkillDispatch | None:
        """Answer the call a signal carries; None, and nothing run, when it is none of this session's."""
        options = SubmitOptions(max_submit_attempts, retry_delay_seconds)
        return drive(turns.respond_to_signal(self._core, signal, options))

    def respond_to_pending_call(
        self, row: Mapping[str, Any], *, max_submit_attempts: int = 3, retry_delay_seconds: float = 0.05
    ) -> RemoteSkillDispatch | None:
        """Answer the call of a pending row; None when it is another thread's or names no tool."""
        options = SubmitOptions(max_submit_attempts, retry_delay_seconds)
        return drive(turns.respond_to_row(self._core, row, options))

    def drain_pending_calls(
        self, *, max_submit_attempts: int = 3, retry_delay_seconds: float = 0.05
    ) -> list[RemoteSkillDispatch]:
        """Answer every pending call of the session, in the order of its rows."""
        return drive(turns.drain(self._core, SubmitOptions(max_submit_attempts, retry_delay_seconds)))


class AsyncRemoteSkillSession(SessionHandle):
    """A session of an async facade: what asks the client is a coroutine."""

    @asynccontextmanager
    async def using(
        self, name: str, handler: Callable[..., Any], **register_options: Any
    ) -> AsyncIterator[AsyncRemoteSkillSession]:
        """Have a skill for the body of an `async with`; what it hid returns afterwards."""
        layer = self._core.open_window(name, handler, register_options)
        try:
            yield self
        finally:
            await core_session.leave_window(self._core, layer)

    async def publish(
        self,
        view: SkillView,
        *,
        route: str = "tools",
        python_tools: Mapping[str, Callable[..., Any]] | None = None,
        renew: Callable[[], SkillView] | None = None,
    ) -> PublishReport:
        """As `RemoteSkillSession.publish`."""
        return await publish(self._core, view, route=route, python_tools=python_tools, renew=renew)

    async def sync_runtime(self, *, timeout_seconds: float = 10.0) -> JsonObject:
        """As `RemoteSkillSession.sync_runtime`."""
        return await core_session.sync_runtime(self._core, timeout_seconds)

    async def prepare_catalog(self, *, timeout_seconds: float = 90.0) -> JsonObject:
        """As `RemoteSkillSession.prepare_catalog`."""
        return await core_session.prepare_catalog(self._core, timeout_seconds)

    async def wait_catalog(self, *, timeout_seconds: float = 90.0) -> JsonObject:
        """As `RemoteSkillSession.wait_catalog`."""
        return await core_session.wait_catalog(self._core, timeout_seconds)

    async def send(self, request_text: str, *, inject_skills: bool = True, **kwargs: Any) -> Any:
        """As `RemoteSkillSession.send`."""
        return await turns.send(self._core, request_text, inject_skills=inject_skills, keywords=kwargs)

    async def send_prepared(
        self, request_text: str, *, inject_skills: bool = True, prepare_timeout_seconds: float = 90.0, **kwargs: Any
    ) -> Any:
        """As `RemoteSkillSession.send_prepared`."""
        return await turns.send_prepared(
            self._core,
            request_text,
            inject_skills=inject_skills,
            prepare_timeout_seconds=prepare_timeout_seconds,
            keywords=kwargs,
        )

    async def send_and_handle(
        self,
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
        """As `RemoteSkillSession.send_and_handle`."""
        return await turns.send_and_handle(
            self._core,
            request_text,
            inject_skills=inject_skills,
            timeout_seconds=timeout_seconds,
            interval_seconds=interval_seconds,
            terminal_statuses=terminal_statuses,
            require_assistant_reply=require_assistant_reply,
            options=SubmitOptions(max_submit_attempts, retry_delay_seconds),
            keywords=kwargs,
        )

    async def dispatch_tool_call(
        self, *, tool: str, arguments: Any = None, request_id: object = None, call_id: str | None = None
    ) -> RemoteSkillDispatch:
        """As `RemoteSkillSession.dispatch_tool_call`."""
        return await turns.dispatch_tool_call(
            self._core, tool=tool, arguments=arguments, request_id=request_id, call_id=call_id
        )

    async def respond_to_signal(
        self, signal: AppServerSignal, *, max_submit_attempts: int = 3, retry_delay_seconds: float = 0.05
    ) -> RemoteSkillDispatch | None:
        """As `RemoteSkillSession.respond_to_signal`."""
        options = SubmitOptions(max_submit_attempts, retry_delay_seconds)
        return await turns.respond_to_signal(self._core, signal, options)

    async def respond_to_pending_call(
        self, row: Mapping[str, Any], *, max_submit_attempts: int = 3, retry_delay_seconds: float = 0.05
    ) -> RemoteSkillDispatch | None:
        """As `RemoteSkillSession.respond_to_pending_call`."""
        options = SubmitOptions(max_submit_attempts, retry_delay_seconds)
        return await turns.respond_to_row(self._core, row, options)

    async def drain_pending_calls(
        self, *, max_submit_attempts: int = 3, retry_delay_seconds: float = 0.05
    ) -> list[RemoteSkillDispatch]:
        """As `RemoteSkillSession.drain_pending_calls`."""
        return await turns.drain(self._core, SubmitOptions(max_submit_attempts, retry_delay_seconds))
