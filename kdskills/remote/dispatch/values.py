"""Converts the values that handlers return to text for the model."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from datetime import date, datetime, time
from pathlib import PurePath
from typing import Any, Final

MAX_NESTING: Final = 100
"""Deepest nesting of a value; a value that contains itself is deeper."""


class ValueRefused(ValueError):
    """The value cannot be converted to text: it contains itself, or is nested too deeply."""


def as_text(value: object) -> str:
    """Return `null` for None, text as it is, anything else as JSON with sorted keys in ASCII.

    Raises:
        ValueRefused: The value is nested deeper than `MAX_NESTING`.
    """
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
    """Return *value* made of JSON's own kinds.

    Dataclasses and pydantic models become objects, times ISO, paths text, sets sorted lists, bytes base64, NaN and
    infinities their names; whatever else, `str` of it.

    Raises:
        ValueRefused: The value is nested deeper than `MAX_NESTING`.
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
        return _number(value)
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
    return _special(value, level)


def _special(value: object, level: int) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(bytes(value)).decode("ascii")
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, PurePath):
        return sendable(str(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), level + 1) for f in dataclasses.fields(value)}
    if _is_pydantic(value):
        return {name: plain(inner, level + 1) for name, inner in value}  # type: ignore[attr-defined]
    return sendable(str(value))


def _is_pydantic(value: object) -> bool:
    from pydantic import BaseModel

    return isinstance(value, BaseModel)


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(value)


def _key(key: object) -> str:
    if isinstance(key, str):
        return sendable(str.__str__(key))
    if key is None or isinstance(key, bool | int | float):
        plain_key = plain(key)
        return plain_key if isinstance(plain_key, str) else json.dumps(plain_key)
    return sendable(str(plain(key)))
