"""What `react.read` may be asked for: pure parsing of its refs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kdskills.errors import ToolCallRefused

_SHORT = re.compile(r"SK[0-9]+\Z")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?\Z")
_LINES = re.compile(r"#L([0-9]{1,9})(?:-L?([0-9]{1,9}))?\Z")


@dataclass(frozen=True, slots=True)
class SkillRef:
    """A skill, or with `path` a file of it."""

    ref: str
    path: str | None = None


@dataclass(frozen=True, slots=True)
class SourceRef:
    """Sources by number, as ascending ranges: a huge one costs nothing until it meets the pool."""

    ranges: tuple[tuple[int, int], ...]

    def holds(self, sid: int) -> bool:
        """Whether *sid* is asked for."""
        return any(low <= sid <= high for low, high in self.ranges)


@dataclass(frozen=True, slots=True)
class TurnFileRef:
    """A file of the turn, or its lines from `first` to `last`, both 1-based and included."""

    path: str
    first: int | None = None
    last: int | None = None


Ref = SkillRef | SourceRef | TurnFileRef


def parse_ref(text: str) -> Ref:
    """Return what *text* asks for.

    Raises:
        ToolCallRefused: `invalid_ref`, saying which forms there are.
    """
    stripped = text.strip()
    kind, colon, target = stripped.partition(":")
    if colon and kind == "sk" and target.strip():
        return _skill(f"sk:{target.strip()}")
    if colon and kind == "src":
        return _sources(target, text)
    if colon and kind == "turn" and target.strip():
        return _file(target.strip(), text)
    bare, _, _ = stripped.partition("/")
    if _SHORT.match(bare) or (bare.startswith("skills.") and len(bare) > len("skills.")):
        return _skill(stripped)
    raise _invalid(text, "it is none of the forms that can be read")


def _skill(text: str) -> SkillRef:
    ref, slash, path = text.partition("/")
    return SkillRef(ref, path if slash else None)


def _sources(items: str, text: str) -> SourceRef:
    ranges = []
    for item in items.split(","):
        match = _RANGE.match(item.strip())
        if match is None:
            raise _invalid(text, "sources are numbers and ranges, such as src:1-3,5")
        low = int(match[1])
        high = int(match[2] or low)
        ranges.append((min(low, high), max(low, high)))
    return SourceRef(tuple(ranges))


def _file(target: str, text: str) -> TurnFileRef:
    match = _LINES.search(target)
    if match is None:
        return TurnFileRef(target)
    first = int(match[1])
    last = int(match[2] or first)
    if first < 1 or last < first or match.start() == 0:
        raise _invalid(text, "lines are counted from 1, such as turn:notes.md#L10-40")
    return TurnFileRef(target[: match.start()], first, last)


def _invalid(text: str, problem: str) -> ToolCallRefused:
    message = (
        f"cannot read {text[:200]!r}: {problem}. Forms: sk:<skill>, sk:<skill>/<path>, src:1-3,5, turn:<path>#L10-40"
    )
    return ToolCallRefused(message, code="invalid_ref", ref=text[:200])
