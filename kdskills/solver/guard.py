"""Rules without I/O: which calls run together, and when a turn repeats itself and must be ended."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")

RUNS = 2
"""How often an identical call runs without a change of state."""
STUCK = 5
"""The identical call that ends the turn."""
ROUND = 4
"""Most calls of a round whose repetition is recognised."""
READS = frozenset({"skills.read", "react.read"})
"""Tools that only look: the same answer again is a repetition, whatever was called in between."""
INVALID = 3
"""Invalid calls in a row, of one tool, that end the turn."""


def plan(calls: Sequence[T], barriers: Sequence[bool]) -> list[list[T]]:
    """Return groups of calls to run one after the other; the calls of a group run together.

    A barrier is a group of its own, so that calls before it are done and calls after it wait.
    """
    groups: list[list[T]] = []
    open_group = False
    for call, barrier in zip(calls, barriers, strict=True):
        if barrier or not open_group:
            groups.append([])
        groups[-1].append(call)
        open_group = not barrier
    return groups


def canonical(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return a key that is equal for calls that mean the same."""
    text = json.dumps([tool, arguments], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def answer_digest(text: str) -> str:
    """Return a key that is equal for answers that say the same; how long a run took does not count."""
    return hashlib.sha256(_DURATION.sub("", text).encode("utf-8", "surrogatepass")).hexdigest()


_DURATION = re.compile(r'"duration_ms": ?\d+')

Verdict = Literal["run", "repeated", "stuck"]


@dataclass
class _PastCall:
    """A call of the turn, in order."""

    key: str
    step: int
    answer: str | None = None


@dataclass
class CallGuard:
    """Counts identical calls, invalid calls, reads with unchanged answers, and repeated rounds of calls of a turn."""

    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    _invalid: dict[str, int] = field(default_factory=dict)
    _reads: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    _history: list[_PastCall] = field(default_factory=list)

    def state_changed(self) -> None:
        """Forget identical calls: they may answer differently now. Rounds and reads are judged by their answers."""
        self._counts.clear()

    def history_cut(self) -> None:
        """Forget what was read: the answers may no longer stand in the history."""
        self._reads.clear()

    def admit(self, key: str, step: int) -> tuple[Verdict, int]:
        """Count a call; return what to do with it and the step of its first answer."""
        rounds, before = self._rounds(key)
        called = _PastCall(key, step)
        self._history.append(called)
        if before is not None and rounds >= RUNS:
            called.answer = before.answer  # it is not run: its answer would be the same
            return ("stuck" if rounds + 1 >= STUCK else "repeated"), before.step
        count, first = self._counts.get(key, (0, step))
        self._counts[key] = (count + 1, first)
        if count + 1 >= STUCK:
            return "stuck", first
        return ("run" if count < RUNS else "repeated"), first

    def answered(self, key: str, text: str, *, reads: bool) -> tuple[Verdict, int]:
        """Note the answer of a call that was run; return what to do with it and the step of the first such answer.

        Args:
            key: The call.
            text: What it answered.
            reads: Whether it only looked, and changed nothing.
        """
        answer = answer_digest(text)
        called = next((earlier for earlier in reversed(self._history) if earlier.key == key), None)
        step = 0 if called is None else called.step
        if called is not None:
            called.answer = answer
        if not reads:
            return "run", step
        last_answer, count, first = self._reads.get(key, (answer, 0, step))
        if last_answer != answer:
            count, first = 0, step
        self._reads[key] = (answer, count + 1, first)
        if count + 1 >= STUCK:
            return "stuck", first
        return ("run" if count < RUNS else "repeated"), first

    def _rounds(self, key: str) -> tuple[int, _PastCall | None]:
        """Return how often the last calls repeated one round with the same answers, and the round's first call.

        A round is 2 to `ROUND` calls of which *key*, the call to come, would be the first again; (0, None) when there
        is none.
        """
        history = self._history
        for length in range(2, ROUND + 1):
            if (
                len(history) < 2 * length
                or history[-length].key != key
                or len({call.key for call in history[-length:]}) < 2
            ):
                continue
            last = [(call.key, call.answer) for call in history[-length:]]
            rounds, end = 1, len(history) - length
            while end >= length and [(call.key, call.answer) for call in history[end - length : end]] == last:
                rounds, end = rounds + 1, end - length
            if rounds >= RUNS:
                return rounds, history[-length]
        return 0, None

    def valid(self, tool: str) -> None:
        """Note a call with arguments in shape."""
        self._invalid.pop(tool, None)

    def invalid(self, tool: str) -> bool:
        """Note an invalid call; True when it is the one that ends the turn."""
        self._invalid[tool] = self._invalid.get(tool, 0) + 1
        return self._invalid[tool] >= INVALID
