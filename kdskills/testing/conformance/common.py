"""What every check of the executor suite uses: the promise, the request, the program files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdskills.execution import ExecRequest, ExecResult, Executor, IsolationLevel

Check = Callable[[Executor], Awaitable[None]]

PROGRAMS = Path(__file__).parents[1] / "programs"


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise of an engine, as a check that any engine can be put through.

    Attributes:
        name: What is promised, as an identifier.
        section: Heading of `docs/reference/isolation.md` that states it.
        check: Raises AssertionError when *executor* breaks the promise.
        level: Weakest engine the promise is made for.
    """

    name: str
    section: str
    check: Check
    level: IsolationLevel = IsolationLevel.NONE

    def applies_to(self, executor: Executor) -> bool:
        """Whether an engine of this level makes the promise."""
        return executor.level >= self.level


def program(name: str) -> str:
    """Return the source of a program of this suite."""
    return (PROGRAMS / name).read_text(encoding="utf-8")


def ask(executor: Executor, **request: Any) -> ExecRequest:
    """Return a request; for an engine without a wall, with the profile such engines want to hear."""
    if executor.level is IsolationLevel.NONE:
        request.setdefault("profile", "unsafe-local")
    return ExecRequest(**request)


async def run(executor: Executor, **request: Any) -> ExecResult:
    """Run a request to its end."""
    return await executor.run(ask(executor, **request))


async def sh(executor: Executor, script: str, **request: Any) -> ExecResult:
    """Run a line of shell."""
    return await run(executor, argv=("sh", "-c", script), **request)


def same(expected: object, found: object, result: ExecResult) -> None:
    """Assert equality, showing the whole result when it fails."""
    assert expected == found, f"expected {expected!r}, found {found!r} in {result!r}"
