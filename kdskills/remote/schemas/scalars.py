"""Types that are one JSON scalar, and how they are read back."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import PurePath
from types import MappingProxyType
from typing import Any
from uuid import UUID


def _schema(kind: str, **keywords: str) -> Mapping[str, Any]:
    return MappingProxyType({"type": kind, **keywords})


SCALARS: tuple[tuple[type, Mapping[str, Any]], ...] = (
    (bool, _schema("boolean")),
    (int, _schema("integer")),
    (float, _schema("number")),
    (str, _schema("string")),
    (bytes, _schema("string", contentEncoding="base64")),
    (datetime, _schema("string", format="date-time")),
    (date, _schema("string", format="date")),
    (time, _schema("string", format="time")),
    (Decimal, _schema("number")),
    (PurePath, _schema("string")),
    (UUID, _schema("string", format="uuid")),
)
"""Classes and the schemas of them and their subclasses; the first that fits counts, so bool before int."""


def _bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error


def _as_integer(value: Any) -> Any:
    """Return 3 for 3.0, which JSON Schema counts as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


READERS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (bool, lambda value: value),
    (int, _as_integer),
    (bytes, _bytes),
    (datetime, datetime.fromisoformat),
    (date, date.fromisoformat),
    (time, time.fromisoformat),
    (Decimal, lambda value: Decimal(str(value))),
    (UUID, UUID),
)
"""How a JSON scalar becomes an object of the class; paths are made by their own class."""
