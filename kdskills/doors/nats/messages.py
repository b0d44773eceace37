"""Payloads of the bus: commands in, results and progress out (spec service §3)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from kdskills.doors.nats.subjects import Address
from kdskills.errors import CallerMustAct, KdskillsError

MAX_PAYLOAD: Final = 1024 * 1024


class Unreadable(CallerMustAct):
    """A message that is no command: it is ended and never delivered again (spec service §3)."""

    code = "message_unreadable"


class Command(BaseModel):
    """A call. Fields the protocol does not know are ignored: others on the bus may need them; none of them widens anything."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    tool_call_id: str = Field(min_length=1, max_length=200)
    tool_name: str = Field(min_length=1, max_length=128)
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a call: an output or an error, and the call it answers."""

    tool_call_id: str
    operation: str
    output: BaseModel | None = None
    error: KdskillsError | None = None

    def to_bytes(self) -> bytes:
        """Return the payload of the result."""
        facts: dict[str, Any] = {"tool_call_id": self.tool_call_id, "tool_name": self.operation}
        if self.error is not None:
            facts |= {"status": "error", **self.error.to_json()}
        elif self.output is not None:
            facts |= {"status": "ok", "result": self.output.model_dump(mode="json")}
        return json.dumps(facts, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")


def read_command(address: Address, data: bytes) -> Command:
    """Return the command of a payload; its subject, name and arguments must agree.

    Raises:
        Unreadable: It is none.
    """
    if len(data) > MAX_PAYLOAD:
        raise Unreadable(f"a command has at most {MAX_PAYLOAD} bytes")
    try:
        command = Command.model_validate_json(data)
    except ValidationError as error:
        words = "; ".join(f"/{'/'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False))
        raise Unreadable(f"this is no command: {words[:500]}") from None
    if command.tool_name != address.operation:
        raise Unreadable(f"the subject is for {address.operation!r}, the payload names {command.tool_name!r}")
    return command


def message_id(address: Address, tool_call_id: str, suffix: str = "result") -> str:
    """Return the id that makes a result published twice one result."""
    return f"{address.project}.{address.channel}:{tool_call_id}:{suffix}"


def progress(address: Address, tool_call_id: str, event: object) -> bytes | None:
    """Return the payload of a progress event; None for what is no event."""
    if isinstance(event, BaseModel):
        found: Mapping[str, Any] = event.model_dump(mode="json")
        facts = {"tool_call_id": tool_call_id, "tool_name": address.operation, "event": found}
        return json.dumps(facts, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
    return None
