"""One finding about a file, a rule or a citation: the value every room reports with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

Severity = Literal["error", "warning", "info"]

_RANK = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One sentence about what was found, where, and what would mend it.

    Attributes:
        code: Stable identifier, listed in `docs/reference`.
        severity: `error` refuses the thing, `warning` keeps it, `info` only informs.
        message: One sentence for people.
        path: Posix path relative to its root, or None when the finding has no file.
        line: 1-based, or None.
        column: 1-based, or None.
        ref: Full id, consumer, rule, field or sid the finding is about.
        fix: What would mend it, in words, or None.
    """

    code: str
    severity: Severity
    message: str
    path: str | None = None
    line: int | None = None
    column: int | None = None
    ref: str | None = None
    fix: str | None = None

    @property
    def rank(self) -> int:
        """0 for errors, 1 for warnings, 2 for infos."""
        return _RANK[self.severity]

    def at(self, path: str | None) -> Diagnostic:
        """Return the same finding with *path*."""
        return replace(self, path=path)

    def to_json(self) -> dict[str, str | int | None]:
        """Return the finding as JSON, absent facts left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        position = ":".join(str(p) for p in (self.path, self.line, self.column) if p is not None)
        return f"{position + ': ' if position else ''}{self.severity}[{self.code}] {self.message}"
