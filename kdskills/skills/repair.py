"""Quote the plain values that keep a frontmatter from parsing."""

from __future__ import annotations

import re
from typing import NamedTuple

from kdskills.skills.yaml_core import YamlRefused, load_yaml

_LINE = re.compile(r"(?P<head>(?P<key>[^\s#\-?:,\[\]{}&*!|>'\"%@`][^:#]*+):[ \t]++)(?P<rest>\S.*+)")  # linear
_COMMENT = re.compile(r"[ \t]#")
_DOUBLE = re.compile(r'"(?:[^"\\]|\\.)*"')
_SINGLE = re.compile(r"'(?:[^']|'')*'")
_HINTS = frozenset({"argument-hint", "argument_hint", "description", "compatibility", "license"})
_CLOSERS = {"[": "]", "{": "}"}


class Repair(NamedTuple):
    """One line that was quoted: `line` is 0-based, `key` the field."""

    line: int
    key: str
    before: str
    after: str


def repair_lines(text: str) -> tuple[str, tuple[Repair, ...]]:
    """Return *text* with the top-level one-line values quoted which need it, and what was changed.

    A plain value is quoted if it contains `: `, ends in `:` or begins with `@`, `%` or a backtick; a quoted one if it
    goes on after its closing quote, and a bracketed one if it is no YAML by itself in a field that is text
    (`argument-hint: [file] [options]`). Flow collections, block scalars and comments stay as they are.
    """
    lines = text.split("\n")
    done: list[Repair] = []
    waiting = ""  # what closes a quoted or flow value that runs over several lines
    for number, line in enumerate(lines):
        if waiting:
            waiting = _still_open(line, waiting)
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        key, written = match["key"].rstrip(" \t"), match["rest"].rstrip(" \t")
        value, comment = _without_comment(written)
        waiting = _opens(value)
        if waiting or _goes_on(lines, number) or not _needs_quotes(key, value):
            continue
        lines[number] = f"{match['head']}{single_quoted(value)}{comment}{match['rest'][len(written) :]}"
        done.append(Repair(number, key, line, lines[number]))
    return "\n".join(lines), tuple(done)


def single_quoted(value: str) -> str:
    """Return *value* as a single-quoted YAML scalar."""
    return "'" + value.replace("'", "''") + "'"


def _without_comment(value: str) -> tuple[str, str]:
    """Return the value and the comment after it; quoted texts may hold a number sign."""
    quoted = _quoted(value)
    start = quoted.end() if quoted else 0
    found = _COMMENT.search(value, start)
    if found is None:
        return value, ""
    kept = value[: found.start()].rstrip(" \t")
    return kept, value[len(kept) :]


def _quoted(value: str) -> re.Match[str] | None:
    if value.startswith('"'):
        return _DOUBLE.match(value)
    return _SINGLE.match(value) if value.startswith("'") else None


def _opens(value: str) -> str:
    """Return what closes *value* when it does not end on its line, else ""."""
    first = value[0]
    if first in "\"'":
        return "" if _quoted(value) else first
    closer = _CLOSERS.get(first)
    return closer if closer is not None and closer not in value else ""


def _still_open(line: str, waiting: str) -> str:
    return "" if waiting in line else waiting


def _goes_on(lines: list[str], number: int) -> bool:
    return number + 1 < len(lines) and lines[number + 1][:1] in {" ", "\t"} and bool(lines[number + 1].strip())


def _needs_quotes(key: str, value: str) -> bool:
    first = value[0]
    if first in "\"'":
        quoted = _quoted(value)
        return quoted is not None and quoted.end() < len(value)
    if first in _CLOSERS:
        return key in _HINTS and _slips(value)
    if first in "|>&*!#":
        return False
    return first in "@%`" or value.endswith(":") or ": " in value or ":\t" in value


def _slips(value: str) -> bool:
    """Whether a field cannot hold *value*, for a slip of syntax."""
    try:
        load_yaml(f"key: {value}")
    except YamlRefused as refusal:
        return refusal.repairable
    return False
