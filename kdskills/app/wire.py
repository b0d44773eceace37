"""Answers as JSON that every transport carries, and the status of HTTP that an error has: names of files may hold bytes that are no text, JSON may not.

Half of a surrogate pair, as the system gives for such a byte, becomes U+FFFD. Light to import: the command line pays for it
at every start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date
from typing import TYPE_CHECKING, Final

from kdskills.errors import (
    AuthorMustAct,
    BadRequest,
    CallRefused,
    Conflict,
    KdskillsError,
    NotFound,
    OperatorMustAct,
    UserMustAct,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

SURROGATE: Final = re.compile(r"[\ud800-\udfff]")


def as_text(value: object) -> object:
    """Return a JSON value with every text made encodable; what JSON has no form for becomes its text."""
    if isinstance(value, str):
        return SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {as_text(key): as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_text(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return as_text(value.isoformat() if isinstance(value, date) else str(value))


def json_text(answer: BaseModel, *, indent: int | None = None) -> str:
    """Return an answer as JSON text.

    Args:
        answer: What is said.
        indent: Blanks each level is set in by; none for one line.
    """
    from pydantic_core import PydanticSerializationError

    try:
        return answer.model_dump_json(indent=indent)
    except PydanticSerializationError:  # a lone surrogate somewhere
        return json.dumps(as_text(answer.model_dump(mode="python")), ensure_ascii=False, indent=indent)


def json_facts(facts: object) -> str:
    """Return a JSON value as text on one line."""
    return json.dumps(as_text(facts), ensure_ascii=False)


#: Codes whose status says more than their class does.
STATUS: Final[Mapping[str, int]] = {
    "body_too_large": 413,
    "host_refused": 421,
    "host_unreachable": 502,
    "conflict": 409,
    "internal_error": 500,
    "method_not_allowed": 405,
    "missing_extra": 501,
    "range_not_satisfiable": 416,
    "quota_exceeded": 429,
    "rate_limited": 429,
    "too_many_turns": 429,
    "too_much_work": 429,
    "service_down": 502,
    "storage_full": 507,
    "unauthenticated": 401,
    "unknown_operation": 404,
    "unsupported_media_type": 415,
}

#: Classes, the most special first. What a caller or model must change is a 4xx, what the operator must mend a 503.
BY_CLASS: Final[tuple[tuple[type[KdskillsError], int], ...]] = (
    (NotFound, 404),
    (Conflict, 409),
    (CallRefused, 403),
    (BadRequest, 400),
    (UserMustAct, 403),
    (AuthorMustAct, 422),
    (OperatorMustAct, 503),
)


def status_of(error: KdskillsError) -> int:
    """Return the status of HTTP that *error* is answered with."""
    status = next((status for kind, status in BY_CLASS if isinstance(error, kind)), 400)
    return STATUS.get(error.code, status)


RETRY_S: Final = 5
"""Seconds after which a caller may ask again that was told 503, where nobody knows better."""


def headers_of(error: KdskillsError) -> dict[str, str]:
    """Return what an answer over HTTP with *error* says beside its status: that a token is asked for, or when to come again."""
    status = status_of(error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if "retry_after" in error.details or status == 503:
        headers["Retry-After"] = str(error.details.get("retry_after", RETRY_S))
    return headers
