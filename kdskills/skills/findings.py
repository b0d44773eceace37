"""Collects findings about one file under one verdict."""

from __future__ import annotations

from kdskills.errors import Diagnostic, Severity
from kdskills.skills.codes import code_row
from kdskills.skills.model import Verdict


class Findings:
    """Findings of one file; what a verdict does not report is left out.

    Args:
        verdict: Decides on severities.
        at: Posix path of the file, relative to its root.
    """

    __slots__ = ("at", "items", "verdict")

    def __init__(self, verdict: Verdict, at: str) -> None:
        self.verdict: Verdict = verdict
        self.at = at
        self.items: list[Diagnostic] = []

    def add(
        self,
        code: str,
        message: str,
        *,
        place: tuple[int, int] | None = None,
        ref: str | None = None,
        fix: str | None = None,
        severity: Severity | None = None,
    ) -> None:
        """Report *code*, with the severity of the table unless another is given.

        Args:
            code: A code of the table.
            message: One sentence.
            place: Line and column, both from 1.
            ref: Field or id.
            fix: What mends it; the table's cure when omitted.
            severity: Instead of the table's, where the table names an exception.
        """
        row = code_row(code)
        found = row.severity(self.verdict)
        if found is None:
            return
        line, column = place or (None, None)
        self.items.append(
            Diagnostic(code, severity or found, message, self.at, line, column, ref, row.cure if fix is None else fix)
        )

    @property
    def refused(self) -> bool:
        """Whether one of them is an error."""
        return bool(self.items) and any(item.severity == "error" for item in self.items)


def shown(path: str) -> str:
    """Return *path* as text that can be printed; bytes that are no UTF-8 become U+FFFD."""
    return path if path.isascii() else path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
