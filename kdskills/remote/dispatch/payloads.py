"""Answers for the wire: values as text, secrets masked, pre-shaped payloads checked, long texts cut and stored whole."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from kdskills.models import MASK, MIN_TEXT, Redactor
from kdskills.remote.names import qualify
from kdskills.remote.ports import JournalRow, JsonObject, StoredAnswer
from kdskills.skills.private_files import private_folder, replace_file

OUTCOME_UNKNOWN: Final = "outcome unknown: the worker stopped before recording a result"


class NotRegistered(LookupError):
    """Raised by the handler of a published skill that was revoked: the model reads the answer for an unknown skill."""


def text_payload(text: str, *, success: bool) -> JsonObject:
    """Return a payload with one text."""
    return {"contentItems": [{"type": "inputText", "text": text}], "success": success}


def refusal(text: str) -> StoredAnswer:
    """Return the answer that reports a failure to the model."""
    return StoredAnswer(text_payload(text, success=False), handled=False, error=text)


def failed(tool: str, reason: str) -> StoredAnswer:
    """Return the refusal of a call that failed."""
    return refusal(f"remote skill {tool} failed: {reason}")


def unregistered(tool: str) -> StoredAnswer:
    """Return the refusal of a call whose skill is not registered."""
    return refusal(f"no remote skill registered for {tool}")


def overdue(tool: str, deadline_seconds: float) -> StoredAnswer:
    """Return the refusal of a call that missed its deadline."""
    return failed(tool, f"no result within {deadline_seconds:g} s; it may still finish")


CONTEXT_NAME: Final = "kdskills_outcomes"
MAX_CALLS: Final = 20
MAX_WORDS: Final = 600

INTRODUCTION: Final = (
    "Outcomes of earlier tool calls. The history may show these calls as aborted or without a result; "
    "this is what became of them. Do not repeat a call only because its result is missing there."
)


def outcomes_text(rows: Sequence[JournalRow]) -> str | None:
    """Return the rows of `CallJournal.outcomes` as text for the model, one line a call; None without rows.

    The newest calls are told; of the others only their number.
    """
    if not rows:
        return None
    lines = [INTRODUCTION]
    if len(rows) > MAX_CALLS:
        lines.append(f"({len(rows) - MAX_CALLS} earlier calls are not listed.)")
    for row in rows[-MAX_CALLS:]:
        call = f"- {qualify(row.namespace, row.tool)} (call {row.call_id or '-'}, turn {row.turn_id or '-'})"
        if row.late is not None:
            lines.append(f"{call}: late: {_words(row.late)}")
        elif row.answer is None or row.state == "unknown":
            lines.append(f"{call}: unknown: {OUTCOME_UNKNOWN}")
        else:
            lines.append(f"{call}: recorded: {_words(row.answer)}")
    return "\n".join(lines)


def _words(answer: StoredAnswer) -> str:
    items: list[JsonObject] = answer.payload["contentItems"]
    text = " ".join(" ".join(str(item.get("text") or f"[{item.get('type')}]") for item in items).split())
    return text if len(text) <= MAX_WORDS else f"{text[:MAX_WORDS]}…"


NAMES_OF_SECRETS: Final = "password|passwd|passphrase|secret|token|key|authorization|cookie"

_KEY_BLOCK: Final = re.compile(
    r"-----BEGIN ([A-Z0-9 ]{0,40}(?:PRIVATE KEY|CERTIFICATE)[A-Z0-9 ]{0,20})-----.*?(?:-----END \1-----|\Z)", re.DOTALL
)
_URL_CREDENTIALS: Final = re.compile(r"(?<=://)[^\s/?#@'\"<>]{0,500}(?=@)")
_SCHEME: Final = re.compile(r"\b(bearer|basic|digest|negotiate)(\s+)[A-Za-z0-9._~+/=:\-]{4,}", re.IGNORECASE)
_HEADER: Final = re.compile(
    r"(?i)(\b[\w-]{0,60}(?:authorization|cookie)['\"]?\s{0,3}[:=]\s{0,3})([^\r\n'\"]+|'[^'\n]*'|\"[^\"\n]*\")"
)
_ASSIGNED_SECRET: Final = re.compile(
    rf"(?i)((?:{NAMES_OF_SECRETS})(?!error|exception)[\w-]{{0,40}}(?:\\?['\"])?\]?\s{{0,3}}(?::|=>?|\bis\b)\s{{0,3}})"
    r"(\\[\"'][^\"'\\\n]*\\[\"']|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[\"'][^\n]*|[^\s,;&)\]}'\"]+)"
)
_VARIABLE: Final = re.compile(rf"(?i)(?:{NAMES_OF_SECRETS}|credential)")


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Return *text* with secrets masked; *environment* is this process's own when omitted.

    Masked are values after `password secret token key authorization cookie`, bearer tokens, credentials in URLs, key
    blocks, the values of environment variables whose names say secret, and the path of this user's home.
    """
    variables = os.environ if environment is None else environment
    text = Redactor(secret_values(variables)).text(text)
    text = _KEY_BLOCK.sub(MASK, text)
    text = _URL_CREDENTIALS.sub(MASK, text)
    text = _HEADER.sub(rf"\1{MASK}", text)
    text = _SCHEME.sub(rf"\1\2{MASK}", text)
    text = _ASSIGNED_SECRET.sub(_masked, text)
    home = variables.get("HOME", "").rstrip("/")  # `/` identifies no user
    return re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text) if "/" in home and len(home) > 1 else text


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of variables whose names say secret, long enough to be told from ordinary words."""
    return [value for name, value in environment.items() if _VARIABLE.search(name) and len(value) >= MIN_TEXT]


def _masked(match: re.Match[str]) -> str:
    value = match[2]
    if value.strip("\\\"'") == MASK:
        return match[0]
    quote = re.match(r"\\?['\"]", value)
    return f"{match[1]}{quote[0]}{MASK}{quote[0]}" if quote else f"{match[1]}{MASK}"


KEPT_S: Final = 7 * 86_400.0  # files older than this are deleted when another one is written


class Spool:
    """Keeps whole texts in files only this user may read, in *folder*, which is made when the first one is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, text: str) -> str:
        """Write *text* whole and return the file's path. Raises OSError."""
        private_folder(self.folder)
        for path in self.folder.glob("*.txt*"):
            with suppress(FileNotFoundError):  # another worker swept it
                if path.stat().st_mtime < time.time() - KEPT_S:
                    path.unlink()
        path = self.folder / f"{int(time.time())}-{secrets.token_hex(8)}.txt"
        replace_file(path, text.encode("utf-8", "replace"))  # in one step: half a text would be taken for the whole
        return str(path)


MAX_NESTING: Final = 100  # deepest nesting of a value; a value that contains itself is deeper
_NOT_FINITE: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class ValueRefused(ValueError):
    """A value that is nested too deeply to become text, or a pre-shaped payload that the server would reject."""


def as_text(value: object) -> str:
    """Return `null` for None, text as it is, anything else as JSON with sorted keys in ASCII. Raises ValueRefused."""
    if isinstance(value, str):
        return sendable(str.__str__(value))
    return json.dumps(plain(value), sort_keys=True, ensure_ascii=True, allow_nan=False)


def sendable(text: str) -> str:
    """Return *text* with halves of surrogate pairs joined or replaced: a server drops a message that holds one."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def plain(value: object, level: int = 0) -> Any:
    """Return *value* made of JSON's own kinds. Raises ValueRefused for one nested deeper than `MAX_NESTING`.

    Dataclasses and pydantic models become objects, times ISO, paths text, sets sorted lists, bytes base64, NaN and
    infinities their names; whatever else, `str` of it.
    """
    if level > MAX_NESTING:
        raise ValueRefused(f"the result is nested deeper than {MAX_NESTING} levels")
    if isinstance(value, str):
        return sendable(str.__str__(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _NOT_FINITE[repr(float(value))]
    if isinstance(value, Mapping):
        return {_key(key): plain(inner, level + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, level + 1) for inner in value]
    if isinstance(value, set | frozenset):
        members = [plain(inner, level + 1) for inner in value]
        try:
            return sorted(members)
        except TypeError:  # kinds that have no order among each other
            return sorted(members, key=lambda member: json.dumps(member, sort_keys=True))
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(bytes(value)).decode("ascii")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), level + 1) for f in dataclasses.fields(value)}
    if isinstance(value, BaseModel):
        return {name: plain(inner, level + 1) for name, inner in value}
    return sendable(value.isoformat() if isinstance(value, dt.datetime | dt.date | dt.time) else str(value))


def _key(key: object) -> str:
    plain_key = plain(key)
    is_scalar = not isinstance(plain_key, str) and (key is None or isinstance(key, bool | int | float))
    return json.dumps(plain_key) if is_scalar else sendable(str(plain_key))


LIMIT: Final = 11_000
"""Longest answer, in characters, that is not cut; the server itself cuts near 12,000 without a word."""
HEAD: Final = 8_000
TAIL: Final = 2_000

ITEM_FIELDS: Final = {"inputText": "text", "inputImage": "imageUrl", "inputAudio": "audioUrl"}
"""The kinds of content items the server takes, and the one text field each must have."""

_log = logging.getLogger(__name__)


def is_payload(value: object) -> bool:
    """Return whether a handler's value has the shape of a payload: a list of items and a bool."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("contentItems"), list)
        and isinstance(value.get("success"), bool)
    )


def checked(payload: JsonObject) -> JsonObject:
    """Return a copy of a pre-shaped payload in JSON's own kinds. Raises ValueRefused, which names the item."""
    for index, item in enumerate(payload["contentItems"]):
        kind = item.get("type") if isinstance(item, dict) else None
        field = ITEM_FIELDS.get(kind) if isinstance(kind, str) else None
        if not isinstance(item, dict):
            fault = f"an item is an object, not {type(item).__name__}"
        elif field is None:
            fault = f"type is one of {', '.join(sorted(ITEM_FIELDS))}, not {str(kind)[:40]!r}"
        elif not isinstance(item.get(field), str):
            fault = f"{kind} needs the text `{field}`"
        elif field == "imageUrl" and not item[field].startswith("data:image/"):
            fault = "imageUrl must begin with data:image/"
        else:
            continue
        raise ValueRefused(f"contentItems[{index}]: {fault}")
    try:
        copy: JsonObject = json.loads(json.dumps(payload, allow_nan=False))
        for item in copy["contentItems"]:
            field = ITEM_FIELDS[item["type"]]
            item[field] = sendable(item[field])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueRefused(f"the payload is no JSON: {error}") from None
    return copy


class AnswerBuilder:
    """Builds the answers of one facade; without a *spool* the model reads that the rest of a long one was not kept."""

    def __init__(self, spool: Spool | None = None) -> None:
        self._spool = spool

    def of_value(self, tool: str, value: object) -> StoredAnswer:
        """Return the answer for what a handler returned; an unusable value is a failure the model reads about."""
        try:
            if isinstance(value, dict) and is_payload(value):
                payload = checked(value)
                texts = [item for item in payload["contentItems"] if item["type"] == "inputText"]
                sizes = [len(item["text"]) for item in texts]
                for item in texts if sum(sizes) > LIMIT else ():
                    item["text"] = self.cut(item["text"], fair_share(sizes, LIMIT))
                return StoredAnswer(payload, handled=True)
            return StoredAnswer(text_payload(self.cut(as_text(value)), success=True), handled=True)
        except ValueRefused as error:
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

    def cut(self, text: str, limit: int = LIMIT) -> str:
        """Return *text*, or its head and tail around a line that says how much is missing and where it is."""
        if len(text) <= limit:
            return text
        head, tail = HEAD * limit // LIMIT, TAIL * limit // LIMIT
        if self._spool is None:
            rest = "they were not kept"
        else:
            try:
                rest = f"the whole text is in {self._spool.keep(text)}"
            except OSError as error:
                _log.warning("a long answer could not be kept in %s: %s", self._spool.folder, error.strerror)
                rest = "they could not be kept"
        mark = f"[... {len(text) - head - tail} characters cut; {rest} ...]"
        return f"{text[:head]}\n{mark}\n{text[len(text) - tail :]}"


def fair_share(sizes: list[int], room: int) -> int:
    """Return the largest size each may have so that all together fit *room*: small ones stay whole."""
    ascending = sorted(sizes)
    while ascending and ascending[0] * len(ascending) <= room:
        room -= ascending.pop(0)
    return room // len(ascending) if ascending else room
