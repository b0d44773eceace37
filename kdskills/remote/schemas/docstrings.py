"""Reads Google docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

_PARAMETERS = ("attributes", "attrs", "args", "arguments", "parameters", "params", "keyword args", "keyword arguments")
_RETURNS = ("returns", "return")
_OTHER_SECTIONS = (
    *("example", "examples", "note", "notes", "raises", "references", "see also", "todo"),
    *("warning", "warnings", "warns", "yield", "yields"),
)
_SECTIONS = frozenset({*_PARAMETERS, *_RETURNS, *_OTHER_SECTIONS})
_HEADER = re.compile(r"([A-Za-z]+(?: [A-Za-z]+)?):\s*")
_ITEM = re.compile(r"\*{0,2}([A-Za-z_]\w*)\s*(?:\(.*?\))?\s*:(?:\s+(.*))?")
_WORD = r"[\w.]+(?:\[[^:]*\])?"
_TYPE = re.compile(rf"`{{0,2}}{_WORD}(?:\s*(?:\||\bor\b|\bof\b)\s*{_WORD})*`{{0,2}}\s*:(?:\s+|$)")


@dataclass(frozen=True, slots=True)
class Docstring:
    """What a docstring says."""

    summary: str | None = None  # the first paragraph in one line
    parameters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # or attributes
    returns: str | None = None  # what is said of the result, without its type


def parse_docstring(text: str | None) -> Docstring:
    """Return what a docstring says; nothing of it is guessed."""
    if not text or not text.strip():
        return Docstring()
    lines = inspect.cleandoc(text).splitlines()
    body = next((line for line in lines[1:] if line.strip()), None)
    if _section(lines[0]) and body is not None and not body[0].isspace() and not _section(body):
        lines[1:] = [f"    {line}" for line in lines[1:]]  # a lone section on the first line keeps its body indented
    summary: list[str] = []
    sections: dict[str, list[str]] = {}
    current: list[str] | None = summary
    for line in lines:
        blank = not line.strip()
        if name := _section(line):
            current = sections.setdefault(name, [])
        elif blank if current is summary else not (blank or line[0].isspace()):
            current = None  # a blank line ends the summary, text at the left edge a section
        elif current is not None:
            current.append(line)
    parameters: dict[str, str] = {}
    for name in _PARAMETERS:
        parameters.update(_entries(sections.get(name, ())))
    returns = _joined(next((section for name in _RETURNS if (section := sections.get(name))), ()))
    typed = _TYPE.match(returns)
    returns = returns[typed.end() :].strip() if typed else returns
    return Docstring(_joined(summary) or None, MappingProxyType(parameters), returns or None)


def _section(line: str) -> str | None:
    match = _HEADER.fullmatch(line)
    return match[1].lower() if match and match[1].lower() in _SECTIONS else None


def _entries(lines: Sequence[str]) -> dict[str, str]:
    items: dict[str, list[str]] = {}
    indents = [len(line) - len(line.lstrip()) for line in lines]
    edge = min((indent for indent, line in zip(indents, lines, strict=True) if line.strip()), default=0)
    current: list[str] = []
    for indent, line in zip(indents, lines, strict=True):
        item = _ITEM.fullmatch(line.strip()) if indent == edge else None
        if item:
            current = items.setdefault(item[1], [])
        current.append((item[2] or "") if item else line)
    return {name: text for name, item_lines in items.items() if (text := _joined(item_lines))}


def _joined(lines: Sequence[str]) -> str:
    return " ".join(part for line in lines if (part := line.strip()))
