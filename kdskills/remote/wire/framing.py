"""One JSON object per line or frame, without a `jsonrpc` member; pure functions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kdskills.remote.ports import JsonObject

MAX_LINE_BYTES = 256 * 1024 * 1024
"""A line longer than this is not a message: the connection is closed instead of filling memory."""

RawId = int | str
"""An id as it stands on the wire. Ids are strict about their type: `"0"` is not `0`."""

IdKey = tuple[type, RawId]


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the other side: it must be answered under exactly this id."""

    id: RawId
    method: str
    params: JsonObject


@dataclass(frozen=True, slots=True)
class Notification:
    """A message that needs no reply."""

    method: str
    params: JsonObject


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request of this client: `result`, or `error` with `code`, `message`, perhaps `data`."""

    id: RawId
    result: Any
    error: JsonObject | None


@dataclass(frozen=True, slots=True)
class Malformed:
    """A line that is no message, with the reason; such lines are counted, never fatal."""

    reason: str


Message = Request | Notification | Reply | Malformed


def id_key(raw_id: RawId) -> IdKey:
    """Return a dictionary key under which `0`, `"0"` and `False` differ."""
    return (type(raw_id), raw_id)


def is_id(value: object) -> bool:
    """Return whether this can be an id: text or a whole number; a bool is neither."""
    return isinstance(value, (int, str)) and not isinstance(value, bool)


def encode(message: JsonObject) -> bytes:
    """Return the message as one line without its end; line breaks inside strings are escaped by JSON itself."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "surrogatepass"
    )


def decode(line: bytes | str) -> Message:
    """Decode a line; one that is no message becomes `Malformed`, not an exception."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as problem:
        return Malformed(f"not JSON: {type(problem).__name__}")
    if not isinstance(value, dict):
        return Malformed("not an object")
    method, has_id = value.get("method"), "id" in value
    if has_id and not is_id(value["id"]):
        return Malformed("an id that is neither text nor a whole number")
    if method is not None:
        if not isinstance(method, str) or not method:
            return Malformed("a method that is no text")
        params = value.get("params")
        if params is None:
            params = {}
        if not isinstance(params, dict):
            return Malformed("params that are no object")
        return Request(value["id"], method, params) if has_id else Notification(method, params)
    return _answer(value) if has_id else Malformed("neither method nor id")


def _answer(value: JsonObject) -> Message:
    error = value.get("error")
    if error is not None:
        return Reply(value["id"], None, error if isinstance(error, dict) else {"message": str(error)})
    if "result" not in value:
        return Malformed("an answer without result or error")
    return Reply(value["id"], value["result"], None)


class LineTooLong(ValueError):
    """The other side sent more than `MAX_LINE_BYTES` without ending the line."""


class LineBuffer:
    """Splits a stream of bytes into lines of any length, in time linear to their size.

    Args:
        limit: Longest line in bytes.
    """

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._parts: list[bytes] = []
        self._pending_bytes = 0
        self._limit = limit

    @property
    def pending_bytes(self) -> int:
        """How many bytes of an unfinished line are buffered."""
        return self._pending_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines this chunk completes, without their ends; blank ones are left out.

        Raises:
            LineTooLong: No end of line within the limit.
        """
        *ended, tail = chunk.split(b"\n")
        lines: list[bytes] = []
        for piece in ended:
            self._parts.append(piece)
            line = b"".join(self._parts)
            self._parts, self._pending_bytes = [], 0
            if len(line) > self._limit:
                raise LineTooLong(f"a line of {len(line)} bytes")
            if line.strip():
                lines.append(line)
        if tail:
            self._parts.append(tail)
            self._pending_bytes += len(tail)
        if self._pending_bytes > self._limit:
            raise LineTooLong(f"more than {self._limit} bytes without an end of line")
        return lines
