"""Answers that are kept: a call that comes again gets the first one's.

Operations that start work keep the call's id with their record in the database. Others that change something have no
record, so the bus itself keeps their answers for as long as it keeps commands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig
from nats.js.errors import BucketNotFoundError, KeyNotFoundError
from nats.js.kv import KeyValue
from pydantic import BaseModel, JsonValue, RootModel

from kdskills.app.operations import Operation
from kdskills.app.wire import json_text
from kdskills.doors.nats.messages import KEY_TAKEN, CallAddress, CallAnswer, CallCommand, ResultTooLarge
from kdskills.doors.nats.streams import KEPT_S
from kdskills.errors import Conflict

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
