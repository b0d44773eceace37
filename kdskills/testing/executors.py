"""The conformance suite of execution engines: every promise of `docs/reference/isolation.md` as a named check.

In a test file of an engine's author:

    from kdskills.testing.executors import conformance

    @pytest.fixture
    def executor():
        return MyExecutor(ExecutionOptions())

    @conformance()
    async def test_promise(executor, promise):
        await promise.check(executor)

Without pytest, `failures(executor)` runs them all and returns what is broken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.execution import Executor, IsolationLevel
from kdskills.testing.conformance import ending, environments, files, limits, results
from kdskills.testing.conformance.common import Check, Promise

if TYPE_CHECKING:
    import pytest

__all__ = ["CONFORMANCE", "Check", "Promise", "conformance", "failures"]

CONFORMANCE: tuple[Promise, ...] = (
    *(*results.PROMISES, *files.PROMISES, *environments.PROMISES, *ending.PROMISES, *limits.PROMISES),
)
"""Every promise, in the order of the story: what a result says, files, environments, endings, limits."""


def conformance(level: IsolationLevel = IsolationLevel.VM) -> pytest.MarkDecorator:
    """Return the mark that runs a test once for every promise an engine of *level* makes, as argument `promise`."""
    import pytest

    made = [promise for promise in CONFORMANCE if promise.level <= level]
    return pytest.mark.parametrize("promise", made, ids=[promise.name for promise in made])


async def failures(executor: Executor) -> dict[str, str]:
    """Run every promise *executor* makes and return {name: what was found} of the broken ones."""
    broken: dict[str, str] = {}
    for promise in CONFORMANCE:
        if not promise.applies_to(executor):
            continue
        try:
            await promise.check(executor)
        except AssertionError as error:
            broken[promise.name] = str(error)
    return broken
