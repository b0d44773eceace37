"""Rows completed by a resolver, such as the title and URL that belong to a DOI, before they get their numbers."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kdskills.errors import Diagnostic, KdskillsError

MAX_ROWS: Final = 200
"""Rows of one skill that a resolver is asked about; further ones stay as written."""

WAIT_SECONDS: Final = 5.0
"""How long all rows of a skill may take together."""

SILENT_SECONDS: Final = 60.0
"""How long a row that was not resolved is not asked about again."""

_MOST_ANSWERS: Final = 4_096
_MOST_THREADS: Final = 4

ResolveSource = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
"""Gives a row in a fuller form, or None for the row as written (hook `kdskills_resolve_source`)."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What became of a row: its fuller form, None as written; or a code and the reason why there is none, until then."""

    row: Mapping[str, Any] | None = None
    problem: tuple[str, str] | None = None
    until: float = float("inf")


class SourceResolver:
    """Asks a resolver about the rows of skills, so that whatever it does loses no source. Safe to use from any thread.

    Answers of the last 4,096 rows are remembered. A row keeps its `sid`, whatever is answered.

    Args:
        resolve: Answers for one row; called in a thread of its own, one row after the other.
        wait: Seconds that the rows of one call may take together.
    """

    def __init__(self, resolve: ResolveSource, *, wait: float = WAIT_SECONDS) -> None:
        self._resolve, self._wait = resolve, wait
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_MOST_THREADS)
        self._answers: OrderedDict[str, _Answer] = OrderedDict()

    def complete(
        self, rows: Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[Mapping[str, Any], ...], tuple[Diagnostic, ...]]:
        """Return the rows of one skill in their order, and why some are as written: `plugin_failed`, `source_unresolved`.

        Takes no longer than the seconds to wait, and asks nothing about rows whose answer is known.
        """
        keys = [_digest(row) for row in rows[:MAX_ROWS]]
        unknown = {key: row for key, row in zip(keys, rows, strict=False) if self._known(key) is None}
        if unknown:
            self._ask(unknown)
        complete: list[Mapping[str, Any]] = []
        problems: dict[tuple[str, str], int] = {}
        for key, row in zip(keys, rows, strict=False):
            answer = self._known(key) or _Answer()
            if answer.problem is not None:
                problems[answer.problem] = problems.get(answer.problem, 0) + 1
            complete.append(row if answer.row is None else _numbered_as(row, answer.row))
        if len(rows) > MAX_ROWS:
            message = f"no more than {MAX_ROWS} rows of a skill are resolved"
            problems["source_unresolved", message] = len(rows) - MAX_ROWS
        findings = (
            Diagnostic(code, "warning", f"{_count(number)} as written: {message}", ref="sources")
            for (code, message), number in problems.items()
        )
        return (*complete, *rows[MAX_ROWS:]), tuple(findings)

    def _known(self, key: str) -> _Answer | None:
        with self._lock:
            answer = self._answers.get(key)
            if answer is None or answer.until < time.monotonic():
                return None
            self._answers.move_to_end(key)
            return answer

    def _note(self, key: str, answer: _Answer) -> None:
        with self._lock:
            self._answers[key] = answer
            self._answers.move_to_end(key)
            while len(self._answers) > _MOST_ANSWERS:
                self._answers.popitem(last=False)

    def _ask(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Ask about *rows* in a thread that is waited for no longer than allowed; a late answer counts from then on."""
        if self._free.acquire(blocking=False):
            thread = threading.Thread(target=self._work, args=(rows,), name="kdskills-sources", daemon=True)
            thread.start()
            thread.join(self._wait)
            problem = f"the resolver gave no answer within {self._wait:g} s"
        else:
            problem = "the resolver has not answered earlier questions yet"
        until = time.monotonic() + SILENT_SECONDS
        for key in rows:
            if self._known(key) is None:
                self._note(key, _Answer(problem=("source_unresolved", problem), until=until))

    def _work(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        try:
            for key, row in rows.items():
                self._note(key, self._answer(row))
        finally:
            self._free.release()

    def _answer(self, row: Mapping[str, Any]) -> _Answer:
        until = time.monotonic() + SILENT_SECONDS
        try:
            answer = self._resolve(dict(row))
            return _Answer(None if answer is None else dict(answer))
        except KdskillsError as error:
            return _Answer(problem=(error.code, error.message), until=until)
        except BaseException as error:  # noqa: BLE001 - whatever a resolver raises, the row stays as written
            return _Answer(problem=("source_unresolved", f"{type(error).__name__}: {str(error)[:200]}"), until=until)


def _numbered_as(row: Mapping[str, Any], answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *answer* under the number of *row*, or under none."""
    fields = {key: value for key, value in answer.items() if key != "sid"}
    return {**fields, "sid": row["sid"]} if "sid" in row else fields


def _digest(row: Mapping[str, Any]) -> str:
    return hashlib.blake2b(repr(row).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _count(number: int) -> str:
    return "1 row stays" if number == 1 else f"{number} rows stay"
