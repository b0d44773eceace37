"""Output globs: compiled before a run, matched part by part after it."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OutputGlob:
    """One declared output: `*`, `?`, `[...]` within a part, `**` for any number of folders."""

    pattern: str
    parts: tuple[re.Pattern[str] | None, ...]  # None stands for `**`

    @property
    def literal(self) -> bool:
        """Whether the pattern names exactly one path."""
        return not re.search(r"[*?\[]", self.pattern)

    def matches(self, path: tuple[str, ...]) -> bool:
        """Whether the whole path matches."""
        states = self._walk(path)
        return len(self.parts) in states

    def may_lie_below(self, folder: tuple[str, ...]) -> bool:
        """Whether something below *folder* could still match, so that the walk must enter it."""
        return any(state < len(self.parts) for state in self._walk(folder))

    def _walk(self, path: tuple[str, ...]) -> set[int]:
        """Return how many parts of the pattern may have been used up after *path*."""
        states = self._skip({0})
        for name in path:
            states = self._skip({after for state in states for after in self._step(state, name)})
        return states

    def _step(self, state: int, name: str) -> set[int]:
        if state == len(self.parts):
            return set()
        part = self.parts[state]
        if part is None:
            return {state}
        return {state + 1} if part.match(name) else set()

    def _skip(self, states: set[int]) -> set[int]:
        """Add what follows each `**`, which may stand for no folder at all."""
        result = set(states)
        for state in states:
            while state < len(self.parts) and self.parts[state] is None:
                state += 1
                result.add(state)
        return result


def compile_glob(pattern: str) -> OutputGlob:
    """Compile a pattern that `check_request` found clean."""
    return OutputGlob(
        pattern,
        tuple(None if part == "**" else re.compile(fnmatch.translate(part)) for part in pattern.split("/")),
    )
