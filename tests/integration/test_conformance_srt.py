"""srt keeps every promise of the executor suite for its level."""

from __future__ import annotations

import pytest

from kdskills.builtin.executors.srt import SrtExecutor
from kdskills.execution import IsolationLevel
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.executors import conformance

pytestmark = pytest.mark.needs("srt")


@pytest.fixture(scope="module")
def executor():
    """Return one engine for all checks, with what it cannot hold as best effort."""
    return SrtExecutor(ExecutionOptions(best_effort=frozenset({"work", "tmp", "memory"})))


@conformance(IsolationLevel.LANDLOCK)
async def test_srt_keeps_its_promise(executor, promise):
    """One promise of the suite, by name."""
    await promise.check(executor)
