"""The bare engine keeps the promises that do not need a wall."""

from __future__ import annotations

import pytest

from kdskills.builtin.executors.subprocess import SubprocessExecutor
from kdskills.execution import IsolationLevel
from kdskills.execution.options import ExecutionOptions
from kdskills.testing.executors import CONFORMANCE, conformance


@pytest.fixture
def executor(tmp_path):
    """Return the engine with the operator's consent and folders of its own."""
    return SubprocessExecutor(
        ExecutionOptions(allow_unisolated=True, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state")
    )


@conformance(IsolationLevel.NONE)
async def test_subprocess_keeps_its_promise(executor, promise):
    """One promise of the suite, by name."""
    await promise.check(executor)


class Renamed(SubprocessExecutor):
    """An engine built on the shipped one, as the guide for authors begins."""

    name = "renamed"


@pytest.mark.parametrize("promise", [one for one in CONFORMANCE if one.name in {"success", "exception_is_named", "missing_program"}],
                         ids=lambda one: one.name)  # fmt: skip
async def test_an_engine_built_on_it_keeps_the_promise_under_its_own_name(tmp_path, promise):
    """A subclass with another name passes: results carry the name of the engine that was asked."""
    executor = Renamed(
        ExecutionOptions(allow_unisolated=True, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state")
    )
    await promise.check(executor)
