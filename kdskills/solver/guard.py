"""When calls run together, and when a turn goes round in circles: pure rules (spec runtime §4, "Dispatch")."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")

RUNS = 2
"""How often an identical call runs without a change of state."""
STUCK = 5
"""The identical call that ends the turn."""
INVALID = 3
"""Invalid calls in a row, of one tool, that end the turn."""


def plan(calls: Sequence[T], barriers: Sequence[bool]) -> list[list[T]]:
    """Return groups of calls to run one after the other; the calls of a group run together.

    A barrier is a group of its own, so that calls before it are done and calls after it wait.
    """
    groups: list[list[T]] = []
    open_group = False
    for one, barrier in zip(calls, barriers, strict=True):
        if barrier or not open_group:
            groups.append([])
        groups[-1].append(one)
        open_group = not barrier
    return groups


def canonical(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return a key that is equal for calls that mean the same."""
    text = json.dumps([tool, arguments], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass
class CallGuard:
    """Counts identical and invalid calls of a turn."""

    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    _invalid: dict[str, int] = field(default_factory=dict)

    def state_changed(self) -> None:
        """Forget what was called: the same call may answer differently now."""
        self._seen.clear()

    def admit(self, key: str, step: int) -> tuple[Literal["run", "repeated", "stuck"], int]:
        """Count a call; return what to do with it and the step of its first answer."""
        count, first = self._seen.get(key, (0, step))
        self._seen[key] = (count + 1, first)
        if count + 1 >= STUCK:
            return "stuck", first
        return ("run" if count < RUNS else "repeated"), first

    def valid(self, tool: str) -> None:
        """Note a call with arguments in shape."""
        self._invalid.pop(tool, None)

    def invalid(self, tool: str) -> bool:
        """Note an invalid call; True when it is the one that ends the turn."""
        self._invalid[tool] = self._invalid.get(tool, 0) + 1
        return self._invalid[tool] >= INVALID
