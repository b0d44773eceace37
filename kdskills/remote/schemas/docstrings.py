"""Google docstrings: the first paragraph, what is said of each parameter, and of the result."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

_PARAMETERS = frozenset({"args", "arguments", "parameters", "params", "keyword args", "keyword arguments"})
_MEMBERS = frozenset({"attributes", "attrs"})
_RETURNS = frozenset({"returns", "return"})
_OTHER_SECTIONS = frozenset(
    {
        "example",
        "examples",
        "note",
        "notes",
        "raises",
        "references",
        "see also",
        "todo",
        "warning",
        "warnings",
        "warns",
        "yield",
        "yields",
    }
)
_SECTIONS = _PARAMETERS | _MEMBERS | _RETURNS | _OTHER_SECTIONS
_HEADER = re.compile(r"([A-Za-z]+(?: [A-Za-z]+)?):\s*")
_ITEM = re.compile(r"\*{0,2}([A-Za-z_]\w*)\s*(?:\(.*?\))?\s*:(?:\s+(.*))?")
_WORD = r"[\w.]+(?:\[[^:]*\])?"
_TYPE = re.compile(rf"`{{0,2}}{_WORD}(?:\s*(?:\||\bor\b|\bof\b)\s*{_WORD})*`{{0,2}}\s*:(?:\s+|$)")


@dataclass(frozen=True, slots=True)
class Docstring:
    """What a docstring says.

    Attributes:
        summary: The first paragraph in one line, or None.
        parameters: What is said of each parameter or attribute.
        returns: What is said of the result, without its type, or None.
    """

    summary: str | None = None
    parameters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    returns: str | None = None


def parse_docstring(text: str | None) -> Docstring:
    """Return what a docstring says; nothing of it is guessed."""
    if not text or not text.strip():
        return Docstring()
    lines = _lines(text)
    sections = _sections(lines)
    parameters: dict[str, str] = {}
    for name in (*_MEMBERS, *_PARAMETERS):
        parameters.update(_items(sections.get(name, ())))
    result = next((section for name in _RETURNS if (section := sections.get(name))), ())
    returns = _joined(result)
    typed = _TYPE.match(returns)
    returns = returns[typed.end() :].strip() if typed else returns
    return Docstring(_summary(lines), MappingProxyType(parameters), returns or None)


def _lines(text: str) -> list[str]:
    """Return the lines without the common margin; a lone section on the first line keeps its body indented."""
    lines = inspect.cleandoc(text).splitlines()
    body = next((line for line in lines[1:] if line.strip()), None)
    if _section(lines[0]) and body is not None and not body[0].isspace() and not _section(body):
        lines[1:] = [f"    {line}" for line in lines[1:]]
    return lines


def _summary(lines: Sequence[str]) -> str | None:
    summary_lines: list[str] = []
    for line in lines:
        if not line.strip() or _section(line):
            break
        summary_lines.append(line)
    return _joined(summary_lines) or None


def _sections(lines: Sequence[str]) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in lines:
        name = _section(line)
        if name:
            current = sections.setdefault(name, [])
        elif line.strip() and not line[0].isspace():
            current = None  # text at the left edge ends a section
        elif current is not None:
            current.append(line)
    return sections


def _section(line: str) -> str | None:
    match = _HEADER.fullmatch(line)
    name = match.group(1).lower() if match else ""
    return name if name in _SECTIONS else None


def _items(lines: Sequence[str]) -> dict[str, str]:
    items: dict[str, list[str]] = {}
    edge = min((_indent(line) for line in lines if line.strip()), default=0)
    current: list[str] = []
    for line in lines:
        item = _ITEM.fullmatch(line.strip()) if _indent(line) == edge else None
        if item:
            current = items.setdefault(item.group(1), [])
            current.append(item.group(2) or "")
        else:
            current.append(line)
    return {name: text for name, item_lines in items.items() if (text := _joined(item_lines))}


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _joined(lines: Sequence[str]) -> str:
    return " ".join(part for line in lines if (part := line.strip()))
