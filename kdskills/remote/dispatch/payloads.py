"""Builds answers for the wire: checks pre-shaped payloads, cuts long texts and stores them whole."""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from kdskills.remote.dispatch.outcome import AWAITABLE, NotRegistered, failed, refusal, text_payload, unregistered
from kdskills.remote.dispatch.redaction import redact
from kdskills.remote.dispatch.spool import Spool
from kdskills.remote.dispatch.values import ValueRefused, as_text, sendable
from kdskills.remote.ports import JsonObject, StoredAnswer

LIMIT: Final = 11_000
"""Longest answer, in characters, that is not cut; the server itself cuts near 12,000 without a word."""
HEAD: Final = 8_000
TAIL: Final = 2_000

ITEM_FIELDS: Final = {"inputText": "text", "inputImage": "imageUrl", "inputAudio": "audioUrl"}
"""The kinds of content items the server takes, and the one text field each must have."""

_log = logging.getLogger(__name__)


class PayloadRefused(ValueError):
    """A pre-shaped payload that the server would reject."""


def is_payload(value: object) -> bool:
    """Return whether a handler's value has the shape of a payload: a list of items and a bool."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("contentItems"), list)
        and isinstance(value.get("success"), bool)
    )


def checked(payload: JsonObject) -> JsonObject:
    """Return a copy of a pre-shaped payload made of JSON's own kinds.

    Raises:
        PayloadRefused: An item is not `inputText`, `inputImage` with `data:image/`, or `inputAudio`; its index is named.
    """
    for index, item in enumerate(payload["contentItems"]):
        fault = _fault(item)
        if fault is not None:
            raise PayloadRefused(f"contentItems[{index}]: {fault}")
    try:
        copy: JsonObject = json.loads(json.dumps(payload, allow_nan=False))
        return _sendable_items(copy)
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadRefused(f"the payload is no JSON: {error}") from None


class AnswerBuilder:
    """Builds the answers of one facade.

    Args:
        spool: Stores texts that are cut; with None the model reads that the rest was not kept.
    """

    def __init__(self, spool: Spool | None = None) -> None:
        self._spool = spool

    def of_value(self, tool: str, value: object) -> StoredAnswer:
        """Return the answer for what a handler returned; an unusable value is a failure the model reads about."""
        try:
            if is_payload(value):
                return StoredAnswer(self._shortened(checked(value)), handled=True)  # type: ignore[arg-type]
            return StoredAnswer(text_payload(self.cut(as_text(value)), success=True), handled=True)
        except (PayloadRefused, ValueRefused) as error:
            return failed(tool, str(error))
        except RecursionError:
            return failed(tool, "the result is nested too deeply")

    def of_error(self, tool: str, error: BaseException) -> StoredAnswer:
        """Return the answer for what a handler raised: its message, redacted, or the type's name."""
        if isinstance(error, NotRegistered):
            return unregistered(tool)
        try:
            message = str(error).strip()
        except BaseException:  # noqa: BLE001 - an exception whose `__str__` fails is reported by its type
            message = ""
        return self.failure(tool, redact(message) or type(error).__name__)

    def failure(self, tool: str, reason: str) -> StoredAnswer:
        """Return `remote skill <tool> failed: <reason>`, cut when it is long."""
        return refusal(self.cut(sendable(failed(tool, reason).error or "")))

    def awaitable(self, tool: str) -> StoredAnswer:
        """Return the answer for an awaitable a sync session cannot wait for."""
        return failed(tool, AWAITABLE)

    def cut(self, text: str, limit: int = LIMIT) -> str:
        """Return *text*, or its head and tail around a line that says how much is missing and where it is."""
        if len(text) <= limit:
            return text
        head, tail = HEAD * limit // LIMIT, TAIL * limit // LIMIT
        if limit == LIMIT:
            head, tail = HEAD, TAIL
        return f"{text[:head]}\n{self._mark(text, len(text) - head - tail)}\n{text[-tail:]}"

    def _mark(self, text: str, missing: int) -> str:
        if self._spool is None:
            return f"[... {missing} characters cut; they were not kept ...]"
        try:
            path = self._spool.keep(text)
        except OSError as error:
            _log.warning("a long answer could not be kept in %s: %s", self._spool.folder, error.strerror)
            return f"[... {missing} characters cut; they could not be kept ...]"
        return f"[... {missing} characters cut; the whole text is in {path} ...]"

    def _shortened(self, payload: JsonObject) -> JsonObject:
        """Cut the longest text items so that all of them together fit."""
        texts = [item for item in payload["contentItems"] if item["type"] == "inputText"]
        if sum(len(item["text"]) for item in texts) > LIMIT:
            room = fair_share([len(item["text"]) for item in texts], LIMIT)
            for item in texts:
                item["text"] = self.cut(item["text"], room)
        return payload


def fair_share(sizes: list[int], room: int) -> int:
    """Return the largest size each may have so that all together fit *room*: small ones stay whole."""
    ascending = sorted(sizes)
    while ascending and ascending[0] * len(ascending) <= room:
        room -= ascending.pop(0)
    return room // len(ascending) if ascending else room


def _fault(item: Any) -> str | None:
    if not isinstance(item, dict):
        return f"an item is an object, not {type(item).__name__}"
    field = ITEM_FIELDS.get(item["type"]) if isinstance(item.get("type"), str) else None
    if field is None:
        return f"type is one of {', '.join(sorted(ITEM_FIELDS))}, not {str(item.get('type'))[:40]!r}"
    value = item.get(field)
    if not isinstance(value, str):
        return f"{item['type']} needs the text `{field}`"
    if field == "imageUrl" and not value.startswith("data:image/"):
        return "imageUrl must begin with data:image/"
    return None


def _sendable_items(payload: JsonObject) -> JsonObject:
    for item in payload["contentItems"]:
        field = ITEM_FIELDS[item["type"]]
        item[field] = sendable(item[field])
    return payload
