"""The bare engine keeps the promises that do not need a wall."""

from __future__ import annotations

import pytest

from kdskills.builtin.executors.subprocess import SubprocessExecutor
from kdskills.execution import IsolationLevel
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.executors import conformance


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
