"""Payloads of the bus: commands in, results and progress out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from kdskills.app.wire import json_facts, json_text
from kdskills.doors.nats.subjects import CallAddress
from kdskills.errors import CallerMustAct, KdskillsError

MAX_PAYLOAD: Final = 1024 * 1024
KEY_TAKEN: Final = "idempotency_key"
"""What `details["reason"]` of a `conflict` says when a call's id belongs to another call."""
HEADER_ROOM: Final = 2048
"""Bytes of the bus's limit that the headers of a result may need."""


class Unreadable(CallerMustAct):
    """A message that is no command: it is ended and never delivered again."""

    code = "message_unreadable"


class ResultTooLarge(CallerMustAct):
    """The answer has more bytes than the bus carries; ask for less of it, or at another door."""

    code = "result_too_large"

    @classmethod
    def of_size(cls, size: int, limit: int) -> Self:
        """Return the error for an answer of *size* bytes where the bus carries *limit*."""
        return cls(f"the answer has {size} bytes, the bus carries {limit}", size=size, limit=limit)


class CallCommand(BaseModel):
    """A call. Fields the protocol does not know are ignored: others on the bus may need them; none of them widens anything.

    The id of a call goes into a header, so it is visible ASCII without blanks.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    tool_call_id: str = Field(min_length=1, max_length=200, pattern=r"^[\x21-\x7e]+$")
    tool_name: str = Field(min_length=1, max_length=128)
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """What became of a call: an output or an error, and the call it answers."""

    tool_call_id: str
    operation: str
    output: BaseModel | None = None
    error: KdskillsError | None = None

    def to_bytes(self) -> bytes:
        """Return the payload of the result, whatever its size."""
        facts: dict[str, Any] = {"tool_call_id": self.tool_call_id, "tool_name": self.operation}
        if self.error is not None:
            facts |= {"status": "error", **self.error.to_json()}
        elif self.output is not None:
            facts |= {"status": "ok", "result": json.loads(json_text(self.output))}
        return json_facts(facts).encode()

    def within(self, limit: int) -> tuple[CallAnswer, bytes]:
        """Return the answer and its payload of at most *limit* bytes: what is larger becomes the error that says so."""
        data = self.to_bytes()
        if len(data) <= limit:
            return self, data
        refused = CallAnswer(self.tool_call_id, self.operation, error=ResultTooLarge.of_size(len(data), limit))
        return refused, refused.to_bytes()


def read_command(address: CallAddress, data: bytes) -> CallCommand:
    """Return the command of a payload; its subject, name and arguments must agree.

    Raises:
        Unreadable: It is none.
    """
    if len(data) > MAX_PAYLOAD:
        raise Unreadable(f"a command has at most {MAX_PAYLOAD} bytes")
    try:
        command = CallCommand.model_validate_json(data)
    except ValidationError as error:
        words = "; ".join(f"/{'/'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False))
        raise Unreadable(f"this is no command: {words[:500]}") from None
    if command.tool_name != address.operation:
        raise Unreadable(f"the subject is for {address.operation!r}, the payload names {command.tool_name!r}")
    return command


def message_id(address: CallAddress, answer: CallAnswer, data: bytes) -> str:
    """Return the id that makes a result published twice one result.

    A call that is refused because its id belongs to another call gets an id of its own: it must not be taken for that
    call's result, nor be lost.
    """
    end = "result"
    if answer.error is not None and answer.error.code == "conflict" and answer.error.details.get("reason") == KEY_TAKEN:
        end = f"conflict:{hashlib.sha256(data).hexdigest()[:16]}"
    return f"{address.project}.{address.channel}:{address.operation}:{answer.tool_call_id}:{end}"


def progress(address: CallAddress, tool_call_id: str, event: object) -> bytes | None:
    """Return the payload of a progress event; None for what is no event."""
    if isinstance(event, BaseModel):
        facts = {"tool_call_id": tool_call_id, "tool_name": address.operation, "event": json.loads(json_text(event))}
        return json_facts(facts).encode()
    return None
