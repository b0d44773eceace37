"""The protocol of the bus: payloads, commands in, results and progress out, and what the bus keeps: streams and answers.

Streams that are there are used, nothing that overlaps is made. Operations that start work keep the call's id with their
record in the database. Others that change something have no record: the bus keeps their answers as long as commands.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    KeyValueConfig,
    RetentionPolicy,
    StreamConfig,
    StreamInfo,
)
from nats.js.errors import BucketNotFoundError, KeyNotFoundError, NotFoundError
from nats.js.kv import KeyValue
from pydantic import BaseModel, ConfigDict, Field, JsonValue, RootModel, ValidationError

from kdskills.app.identity import LOCAL, Identity
from kdskills.app.operations import Operation
from kdskills.app.settings import BusSettings
from kdskills.app.wire import json_facts, json_text
from kdskills.errors import CallerMustAct, CallRefused, Conflict, KdskillsError, OperatorMustAct
from kdskills.errors.traces import TRACEPARENT, Trace

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
    """What became of a call: an output or an error, the call it answers, and the step of its trace that answered."""

    tool_call_id: str
    operation: str
    output: BaseModel | None = None
    error: KdskillsError | None = None
    trace: Trace | None = None

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
        too_large = ResultTooLarge.of_size(len(data), limit)
        refused = CallAnswer(self.tool_call_id, self.operation, error=too_large, trace=self.trace)
        return refused, refused.to_bytes()


def sent_trace(headers: Mapping[str, str] | None) -> str | None:
    """Return what the headers of a message say of its trace, whatever that is; the bus does not change the case of a name."""
    return next((value for name, value in (headers or {}).items() if name.lower() == TRACEPARENT), None)


def trace_headers(trace: Trace | None) -> dict[str, str]:
    """Return the headers that tell of a trace."""
    return {} if trace is None else {TRACEPARENT: str(trace)}


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


_LOG = logging.getLogger("kdskills.nats")

STREAMS: Final[dict[Kind, str]] = {"cmd": "KDSKILLS_COMMANDS", "evt": "KDSKILLS_RESULTS"}
KEPT_S: Final = 7 * 24 * 3600
DUPLICATES_S: Final = 24 * 3600


@dataclass(frozen=True, slots=True)
class Served:
    """The name of the stream that commands are read from, and the subjects of commands it has."""

    stream: str
    subjects: tuple[str, ...]


class StreamsDisagree(OperatorMustAct, code="streams_disagree"):
    """The streams of the bus cover subjects in a way that no one consumer can read."""


async def ensure_streams(js: JetStreamContext, version: str) -> Served:
    """Return what commands are read from; streams are made where none has their subjects. Raises as `plan`."""
    infos: list[StreamInfo] = []
    while page := await js.streams_info(offset=len(infos)):
        infos.extend(page)
    streams = {str(info.config.name): tuple(info.config.subjects or ()) for info in infos}
    served = plan(streams, version)
    for subject in filters(version, "req"):
        for name in streams_with(streams, subject):
            words = "stream %s has the subjects of reads, %s: it answers requests before any tool can"
            _LOG.warning(words, name, subject)
    if served is None:
        served = Served(f"{STREAMS['cmd']}_{version}", filters(version, "cmd"))
        await _make(js, served.stream, served.subjects)
    elif missing := sorted(set(filters(version, "cmd")) - set(served.subjects)):
        words = "stream %s has no subjects of %s: those commands are not served"
        _LOG.warning(words, served.stream, ", ".join(missing))
    results = [subject for subject in filters(version, "evt") if not streams_with(streams, subject)]
    if results:
        await _make(js, f"{STREAMS['evt']}_{version}", tuple(results))
    return served


def plan(streams: Mapping[str, Sequence[str]], version: str) -> Served | None:
    """Return which existing stream, by name with its subjects, commands are read from; None when none has them.

    Raises StreamsDisagree when several do: no one consumer can read them.
    """
    streams_of = {subject: streams_with(streams, subject) for subject in filters(version, "cmd")}
    names = sorted({name for stream_names in streams_of.values() for name in stream_names})
    if not names:
        return None
    if len(names) > 1:
        raise StreamsDisagree(f"the subjects of commands lie in different streams: {', '.join(names)}", streams=names)
    return Served(names[0], tuple(subject for subject, stream_names in streams_of.items() if stream_names))


def streams_with(streams: Mapping[str, Sequence[str]], subject: str) -> list[str]:
    """Return the names of streams that have some of *subject*."""
    return [name for name, subjects in streams.items() if any(overlaps(pattern, subject) for pattern in subjects)]


def overlaps(pattern: str, second_pattern: str) -> bool:
    """Whether a subject exists that both patterns match; `*` is one token, `>` one or more at the end."""
    tokens, second_tokens = pattern.split("."), second_pattern.split(".")
    for a, b in zip(tokens, second_tokens, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(tokens) == len(second_tokens)


async def _make(js: JetStreamContext, name: str, subjects: tuple[str, ...]) -> None:
    config = StreamConfig(
        name=name,
        subjects=list(subjects),
        retention=RetentionPolicy.LIMITS,
        max_age=KEPT_S,
        duplicate_window=DUPLICATES_S,
    )
    await js.add_stream(config)


FETCH_S: Final = 1.0
RETRY_S: Final = 2.0
LOOK: Final = 5
"""After so many fetches without a command somebody looks whether the consumer is there: a bus that has none is silent."""


class Commands:
    """The commands of one version of the protocol."""

    def __init__(self, js: JetStreamContext, settings: BusSettings) -> None:
        self._js = js
        self._settings = settings
        self._subscription: JetStreamContext.PullSubscription | None = None
        self._quiet = 0

    async def open(self) -> None:
        """Make what is missing of streams and consumer, and read from there. Raises NatsError, StreamsDisagree."""
        before = self._subscription
        served, settings = await ensure_streams(self._js, self._settings.version), self._settings
        durable = f"kdskills-{settings.version}"  # the one consumer of a version, shared by every gateway
        config = ConsumerConfig(
            durable_name=durable,
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=settings.ack_wait_s,
            max_deliver=settings.max_deliver,
            max_ack_pending=20_000,
            filter_subjects=list(served.subjects),
        )
        await self._js.add_consumer(served.stream, config)
        self._subscription = await self._js.pull_subscribe_bind(durable, served.stream)
        if before is not None:
            with suppress(NatsError):
                await before.unsubscribe()

    async def next(self) -> Msg | None:
        """Return the next command, or None when there is none for a while. Raises StreamsDisagree, as `open`."""
        assert self._subscription is not None
        try:
            messages = await self._subscription.fetch(1, timeout=FETCH_S)
        except TimeoutError:
            self._quiet += 1
            if self._quiet % LOOK == 0:
                await self._look(self._subscription)
            return None
        except NatsError as error:
            _LOG.warning("the bus does not answer: %s", error)
            await asyncio.sleep(RETRY_S)
            await self._reopen()
            return None
        self._quiet = 0
        return messages[0]

    async def close(self) -> None:
        """Let nothing more be delivered here."""
        if self._subscription is not None:
            with suppress(NatsError):
                await self._subscription.unsubscribe()

    async def _look(self, subscription: JetStreamContext.PullSubscription) -> None:
        try:
            await subscription.consumer_info()
        except NotFoundError:
            _LOG.warning("the consumer of commands is gone: it is made again, and commands that are kept come again")
            await self._reopen()
        except NatsError as error:
            _LOG.warning("the bus does not answer: %s", error)

    async def _reopen(self) -> None:
        try:
            await self.open()
        except NatsError as error:  # told, and tried again after the next fetch
            _LOG.warning("commands cannot be read now: %s", error)


BUCKET: Final = "KDSKILLS_ANSWERS"
RECORDED: Final = frozenset(("skills.run_cmd", "skills.run_cmd_async", "skills.run_service", "skills.start_job"))
"""Operations whose records carry the call's id."""


class StoredAnswer(BaseModel):
    """An answer, and a digest of the call it answered; `too_large` are the size and limit of one the bus cannot carry."""

    body: str
    result: JsonValue
    too_large: tuple[int, int] | None = None


class AnswerBucket:
    """The kept answers of one version of the protocol."""

    def __init__(self, js: JetStreamContext, version: str) -> None:
        self._js = js
        self._name = f"{BUCKET}_{version}"
        self._bucket: KeyValue | None = None

    @staticmethod
    def keeps(operation: Operation | None, arguments: Mapping[str, object]) -> bool:
        """Whether the answer of a call is kept: it changes something and has no record of its own."""
        return operation is not None and not operation.only_reads(arguments) and operation.name not in RECORDED

    async def answer_of(self, address: CallAddress, call: str, body: str) -> CallAnswer | None:
        """Return the answer that the call had before. Raises Conflict: the id belongs to another call."""
        try:
            entry = await (await self._opened()).get(_key(address, call))
        except KeyNotFoundError:
            return None
        stored = StoredAnswer.model_validate_json(entry.value or b"")
        if stored.body != body:
            raise Conflict("this idempotency key was used with another request", reason=KEY_TAKEN)
        if stored.too_large is not None:
            return CallAnswer(call, address.operation, error=ResultTooLarge.of_size(*stored.too_large))
        return CallAnswer(call, address.operation, output=RootModel[JsonValue](stored.result))

    async def keep(self, address: CallAddress, answer: CallAnswer, body: str) -> None:
        """Keep the answer of a call that succeeded, also when it is one that only says how large it was."""
        if answer.output is not None:
            stored = StoredAnswer(body=body, result=json.loads(json_text(answer.output)))
        elif isinstance(answer.error, ResultTooLarge):
            size = (answer.error.details["size"], answer.error.details["limit"])
            stored = StoredAnswer(body=body, result=None, too_large=size)
        else:
            return
        await (await self._opened()).put(_key(address, answer.tool_call_id), stored.model_dump_json().encode())

    def forget(self) -> None:
        """Open the bucket anew at the next use: it may have been deleted."""
        self._bucket = None

    async def _opened(self) -> KeyValue:
        if self._bucket is None:
            try:
                self._bucket = await self._js.key_value(self._name)
            except BucketNotFoundError:
                self._bucket = await self._js.create_key_value(KeyValueConfig(bucket=self._name, ttl=KEPT_S))
        return self._bucket


def body_of(command: CallCommand) -> str:
    """Return a digest of what a call asks for."""
    text = json.dumps([command.tool_name, command.arguments], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _key(address: CallAddress, call: str) -> str:
    return hashlib.sha256(json.dumps([address.project, address.channel, call]).encode()).hexdigest()
