"""Printing: one console for people, one JSON form for machines, one place that turns errors into exit codes.

Every command imports this module, also those that print JSON or their help: what only people need is imported there.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kdskills.errors import KdskillsError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console
    from rich.table import Table

#: Exit codes, documented in docs/reference/cli.md: who must act decides.
EXIT_OK, EXIT_NEGATIVE, EXIT_USAGE, EXIT_AUTHOR, EXIT_OPERATOR = 0, 1, 2, 3, 4
EXITS = {
    "caller": EXIT_USAGE,
    "model": EXIT_USAGE,
    "author": EXIT_AUTHOR,
    "operator": EXIT_OPERATOR,
    "user": EXIT_NEGATIVE,
}

#: What a terminal could obey or be fooled by, and what stands for bytes that are no text.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
SURROGATE = re.compile(r"[\ud800-\udfff]")

STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


def console(*, stderr: bool = False) -> Console:
    """Return a console for stdout, or stderr; it honours NO_COLOR and plain pipes."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def lenient_streams() -> None:
    """Let stdout and stderr write what their encoding lacks as escapes, whatever the locale."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_json(value: BaseModel) -> None:
    """Print an answer as JSON; bytes of a path that are no UTF-8 become U+FFFD."""
    from pydantic_core import PydanticSerializationError

    try:
        text = value.model_dump_json(indent=2)
    except PydanticSerializationError:  # a lone surrogate somewhere: JSON is text, and that is none
        text = json.dumps(_as_text(value.model_dump()), indent=2, ensure_ascii=False)
    sys.stdout.write(text + "\n")


def _as_text(value: object) -> object:
    if isinstance(value, str):
        return SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_as_text(key): _as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else _as_text(str(value))


@contextmanager
def failing(*, as_json: bool) -> Iterator[None]:
    """Turn an error into one clear line, or its JSON form, and the exit code of who must act."""
    try:
        yield
    except KdskillsError as error:
        if as_json:
            sys.stdout.write(json.dumps(_as_text(error.to_json()), ensure_ascii=False) + "\n")
        else:
            from rich.text import Text

            said = Text.assemble((f"{error.code}: ", "bold red"), one_line(error.message))
            console(stderr=True).print(said, soft_wrap=True)
        raise SystemExit(EXITS.get(error.who, EXIT_USAGE)) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(EXIT_OK) from None


def table(*columns: str) -> Table:
    """Return an empty table in the house's style."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def plain(text: str | None) -> str:
    """Return *text* with console markup disarmed and terminal control characters shown: skill texts are hostile."""
    from rich.markup import escape

    return escape(disarmed(text or ""))


def one_line(text: str) -> str:
    """Return *text* disarmed and on one line, so that a file name or message cannot forge further lines."""
    return disarmed(text).replace("\n", "\\n").replace("\t", "\\t")


def line(text: str | None) -> str:
    """Return *text* as `plain` does, on one line."""
    return plain(one_line(text or ""))


def disarmed(text: str) -> str:
    """Return *text* with terminal control and bidirectional override characters written as escapes."""
    return CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def mark(*, ok: bool) -> str:
    """Return a green or red mark."""
    return "[green]ok[/]" if ok else "[red]no[/]"
