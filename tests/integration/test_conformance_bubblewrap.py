"""Bubblewrap keeps every promise of the executor suite."""

from __future__ import annotations

import pytest

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.execution import IsolationLevel
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.executors import conformance

pytestmark = pytest.mark.needs("bubblewrap")


@pytest.fixture(scope="module")
def executor():
    """Return one engine for all checks: probing and building the tree happen once."""
    return BubblewrapExecutor(ExecutionOptions())


@conformance(IsolationLevel.NAMESPACE)
async def test_bubblewrap_keeps_its_promise(executor, promise):
    """One promise of the suite, by name."""
    await promise.check(executor)
