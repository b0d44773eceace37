"""The results of calls and sent requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kdskills.remote.ports import JsonObject


@dataclass(frozen=True, slots=True)
class RemoteSkillDispatch:
    """The result of one call.

    Attributes:
        handled: Whether the call found its skill, the handler answered, and the answer was accepted.
        tool: The tool's name, `namespace.name` when the call came with a namespace.
        arguments: What the model gave.
        request_id: The handle of the answer, as text; None when there is none.
        call_id: The model's id of the call.
        response_payload: `{"contentItems": [...], "success": bool}`.
        result: What the handler returned; None for replays and failures.
        error: What went wrong, or None.
        submission_status: The server's word for the answer, or `error`, `exception`, `malformed`, `no_request_id`,
            `local_duplicate`; None when nothing was to be submitted.
        submission_code: The server's code beside it.
        submission_attempts: How often the answer was sent.
        submission_idempotent: Whether the answer had been given before.
        replayed: The answer was stored; the handler did not run for this delivery.
        late: A result came after the model had got another answer.
        call_key: The call's identity in the journal, or None.
    """

    handled: bool
    tool: str
    arguments: Any = None
    request_id: str | None = None
    call_id: str | None = None
    response_payload: JsonObject = field(default_factory=dict)
    result: Any = None
    error: str | None = None
    submission_status: str | None = None
    submission_code: str | None = None
    submission_attempts: int = 0
    submission_idempotent: bool = False
    replayed: bool = False
    late: bool = False
    call_key: str | None = None


@dataclass(frozen=True, slots=True)
class RemoteSkillSendResult:
    """The result of `send_and_handle`.

    Attributes:
        session_id: The session.
        turn_id: The turn the request started or steered.
        accepted: The answer to the message, as the client gave it.
        detail: The last `sessions.get` answer, or None when the client has none.
        status: The terminal status, as the client gave it.
        assistant_reply: The turn's last complete assistant entry of the transcript, or None.
        dispatches: The result of each call, in order.
    """

    session_id: str
    turn_id: str
    accepted: JsonObject
    detail: JsonObject | None
    status: str
    assistant_reply: JsonObject | None = None
    dispatches: tuple[RemoteSkillDispatch, ...] = ()
