"""Payloads of the bus: commands in, results and progress out."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from kdskills.app.identity import LOCAL, Identity
from kdskills.app.settings import BusSettings
from kdskills.app.wire import json_facts, json_text
from kdskills.errors import CallerMustAct, CallRefused, KdskillsError

Kind = Literal["cmd", "req", "evt"]

TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
SKILLS: Final = "skills."
OTHER_OPERATIONS: Final = "kd."
"""Operations that are not called `skills.…` have their subjects under this reserved name."""


@dataclass(frozen=True, slots=True)
class CallAddress:
    """A subject, understood: the caller is a channel of its project.

    Attributes:
        version: Of the protocol, such as `v1`.
        kind: `cmd` for commands, `req` for quick reads, `evt` for results and progress.
    """

    version: str
    project: str
    channel: str
    kind: Kind
    operation: str

    def subject(self, kind: Kind, suffix: str = "") -> str:
        """Return the subject of another kind for the same call."""
        tail = f".{suffix}" if suffix else ""
        return f"cg.{self.version}.{self.project}.{self.channel}.{kind}.tool.{tool_of(self.operation)}{tail}"


def tool_of(operation: str) -> str:
    """Return the part of a subject that names an operation."""
    return operation if operation.startswith(SKILLS) else OTHER_OPERATIONS + operation


def parse(subject: str) -> CallAddress | None:
    """Return the address of a command's or read's subject; None for any other."""
    parts = subject.split(".")
    if len(parts) < 8 or parts[0] != "cg" or parts[5] != "tool" or not all(TOKEN.fullmatch(part) for part in parts):
        return None
    version, project, channel, kind = parts[1:5]
    tool = ".".join(parts[6:])
    operation = tool.removeprefix(OTHER_OPERATIONS)
    if kind not in {"cmd", "req"} or operation.startswith(SKILLS) != tool.startswith(SKILLS):
        return None
    if not tool.startswith((SKILLS, OTHER_OPERATIONS)):
        return None
    return CallAddress(version, project, channel, kind, operation)  # type: ignore[arg-type]  # checked


def filters(version: str, kind: Kind) -> tuple[str, str]:
    """Return the subjects of every operation, of one version and kind, in any project and channel."""
    return f"cg.{version}.*.*.{kind}.tool.skills.>", f"cg.{version}.*.*.{kind}.tool.kd.>"


def identity_of(address: CallAddress, settings: BusSettings) -> Identity:
    """Return the caller a subject names. Raises CallRefused where the bus is not open to its project, or channel.

    A channel that happens to be called like the account kdskills runs as is not that account: only a setting of its own
    makes it so.
    """
    if address.project not in settings.projects:
        raise CallRefused(f"the bus is not open to project {address.project!r}", code="project_not_open")
    agent = settings.channels.get(address.channel, settings.channels.get("*"))
    if agent is None or (address.channel == LOCAL.agent and agent == "*"):
        raise CallRefused(f"no agent is set for channel {address.channel!r}", code="channel_not_open")
    return Identity(
        project=address.project,
        agent=address.channel if agent == "*" else agent,
        alias=address.channel,
        scopes=frozenset(settings.scopes),
        person=settings.person,
        tools=frozenset(settings.tools),
        door="nats",
    )


MAX_PAYLOAD: Final = 1024 * 1024
KEY_TAKEN: Final = "idempotency_key"
"""What `details["reason"]` of a `conflict` says when a call's id belongs to another call."""
HEADER_ROOM: Final = 2048
"""Bytes of the bus's limit that the headers of a result may need."""


class Unreadable(CallerMustAct, code="message_unreadable"):
    """A message that is no command: it is ended and never delivered again."""


class ResultTooLarge(CallerMustAct, code="result_too_large"):
    """The answer has more bytes than the bus carries; ask for less of it, or at another door."""

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
    """Return the command of a payload; its subject, name and arguments must agree. Raises Unreadable."""
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
