"""Pages of lists: every operation that lists takes `limit` and `cursor` and answers with `next_cursor`."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

from pydantic import Field

from kdskills.app.operations.models import Input, Output
from kdskills.errors import BadRequest
from kdskills.storage.database import micros, moment_of

Row = TypeVar("Row")
MAX_PAGE = 500


class PageInput(Input):
    """Which page of a list."""

    limit: int = Field(100, ge=1, le=MAX_PAGE, description="How many at most.")
    cursor: str | None = Field(
        None, max_length=2048, description="`next_cursor` of the page before; none means the first page."
    )


class PageOutput(Output):
    """A page of a list; `next_cursor` asks for the page after it, and is null on the last one."""

    next_cursor: str | None = None


def encode_cursor(*parts: str | int) -> str:
    """Return the cursor of a row by what the list is sorted by."""
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, *kinds: type) -> list[str | int]:
    """Return what `encode_cursor` was given.

    Raises:
        BadRequest: It is no cursor of a list that is sorted by values of *kinds*.
    """
    try:
        parts = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, RecursionError):
        parts = None
    if not isinstance(parts, list) or [type(part) for part in parts] != list(kinds):
        raise _cursor_refused()
    return parts


def encode_moment(moment: datetime, item: str) -> str:
    """Return the cursor of a row in a list that is sorted by time and id."""
    return encode_cursor(micros(moment), item)


def decode_moment(cursor: str) -> tuple[datetime, str]:
    """Return time and id of a row. Raises BadRequest."""
    time, item = decode_cursor(cursor, int, str)
    try:
        return moment_of(int(time)), storable_text(str(item))
    except (ValueError, OverflowError):
        raise _cursor_refused() from None


def _cursor_refused() -> BadRequest:
    problem = "is no next_cursor of this list"
    return BadRequest(f"/cursor: {problem}", errors=[{"path": "/cursor", "problem": problem}])


def storable_text(text: str) -> str:
    """Return *text*. Raises ValueError for what no database compares with: NUL, and half a character."""
    text.encode()
    if "\0" in text:
        raise ValueError(text)
    return text


def page_by_name(rows: Sequence[Row], arguments: PageInput, name: Callable[[Row], str]) -> tuple[list[Row], str | None]:
    """Return a page of rows that are sorted by name, and the cursor of the page after it. Raises BadRequest."""
    if arguments.cursor is not None:
        (last,) = decode_cursor(arguments.cursor, str)
        rows = [row for row in rows if name(row) > str(last)]
    has_next = len(rows) > arguments.limit
    page = list(rows[: arguments.limit])
    return page, encode_cursor(name(page[-1])) if has_next else None


def page_by_time(
    rows: Sequence[Row], arguments: PageInput, key: Callable[[Row], tuple[datetime, str]]
) -> tuple[list[Row], str | None]:
    """Return a page of rows that are sorted newest first, those of one moment by id, and the cursor of the next page.

    Raises:
        BadRequest: The cursor is of no such list.
    """
    if arguments.cursor is not None:
        moment, item = decode_moment(arguments.cursor)
        rows = [row for row in rows if key(row)[0] < moment or (key(row)[0] == moment and key(row)[1] > item)]
    has_next = len(rows) > arguments.limit
    page = list(rows[: arguments.limit])
    return page, encode_moment(*key(page[-1])) if has_next else None
