"""Calls as they reach a session: signals of the server's stream and rows of the pending store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kdskills.remote.ports import JsonObject

TOOL_CALL_EVENT = "app_server.request.item.tool.call"


@dataclass(frozen=True, slots=True)
class AppServerSignal:
    """One event of the app-server's stream.

    Attributes:
        event_type: `app_server.request.item.tool.call` for a call of a tool.
        method: The wire's method.
        signal_type: `request`, `notification` or what the client says.
        received_at: When it came, as the client writes times.
        context: What the client knows around it: perhaps `threadId`, `turnId`.
        params: The message's own parameters.
        session: The session it belongs to, with `id`, or None.
        request_id: The handle an answer needs, when it is a request.
    """

    event_type: str
    method: str = ""
    signal_type: str = ""
    received_at: Any = None
    context: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    session: Mapping[str, Any] | None = None
    request_id: str | int | None = None


@dataclass(frozen=True, slots=True)
class IncomingCall:
    """A call of a tool, however it came.

    Attributes:
        tool: The tool's name, stripped.
        arguments: Any JSON value.
        namespace: The tool's namespace, or None.
        request_id: The handle for the answer, as text; None when there is none to answer under.
        call_id: The model's id of the call.
        thread_id: The thread that called.
        turn_id: The turn that called.
    """

    tool: str
    arguments: Any = None
    namespace: str | None = None
    request_id: str | None = None
    call_id: str | None = None
    thread_id: str | None = None
    turn_id: str | None = None

    @property
    def label(self) -> str:
        """The tool's name in messages: `namespace.tool`, or the tool alone."""
        return f"{self.namespace}.{self.tool}" if self.namespace else self.tool


def text_or_none(value: object) -> str | None:
    """Return non-blank text stripped; None for anything else."""
    return (value.strip() or None) if isinstance(value, str) else None


def request_text(request_id: object) -> str | None:
    """Return a request id as the text an answer is sent under: integers in decimal, 0 included; None when there is none.

    A bool is no id, though Python counts it as an integer.
    """
    if isinstance(request_id, int) and not isinstance(request_id, bool):
        return str(request_id)
    return text_or_none(request_id)


def address(signal: AppServerSignal) -> str | None:
    """Return the session a signal is for, or None when it names none."""
    sources: tuple[tuple[object, str], ...] = (
        (signal.session, "id"),
        (signal.context, "threadId"),
        (signal.params, "threadId"),
    )
    for source, key in sources:
        session_id = text_or_none(source.get(key)) if isinstance(source, Mapping) else None
        if session_id is not None:
            return session_id
    return None


def call_of_signal(signal: AppServerSignal) -> IncomingCall | None:
    """Return the call a signal carries, or None when it carries none."""
    if signal.event_type != TOOL_CALL_EVENT or not isinstance(signal.params, Mapping):
        return None
    return _call(signal.params, signal.request_id, address(signal))


def call_of_row(row: Mapping[str, Any]) -> IncomingCall | None:
    """Return the call a pending row holds, or None when it names no tool."""
    return _call(row, row.get("requestId"), None)


def rows_of(answer: object) -> list[JsonObject]:
    """Return the rows of a `sessions.tool_calls` answer; empty for deleted and system sessions.

    Raises:
        ValueError: The answer has no list of data.
    """
    if isinstance(answer, Mapping):
        if answer.get("status") == "deleted":
            return []
        if answer.get("status") == "error" and answer.get("code") == "system_session":
            return []
        data = answer.get("data")
        if isinstance(data, list):
            return [dict(row) for row in data if isinstance(row, Mapping)]
    raise ValueError("sessions.tool_calls response missing data list")


def _call(params: Mapping[str, Any], request_id: object, thread: str | None) -> IncomingCall | None:
    tool = text_or_none(params.get("tool"))
    if tool is None:
        return None
    return IncomingCall(
        tool,
        params.get("arguments"),
        text_or_none(params.get("namespace")),
        request_text(request_id),
        text_or_none(params.get("callId")),
        text_or_none(params.get("threadId")) or thread,
        text_or_none(params.get("turnId")),
    )
