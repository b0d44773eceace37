"""Answers as JSON that every transport carries: names of files may hold bytes that are no text, JSON may not.

Half of a surrogate pair, as the system gives for such a byte, becomes U+FFFD. Light to import: the command line pays for it
at every start.
"""

from __future__ import annotations

import json
import re
from datetime import date
from typing import TYPE_CHECKING, Final

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
