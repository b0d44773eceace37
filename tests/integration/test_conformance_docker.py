"""Docker keeps every promise of the executor suite."""

from __future__ import annotations

import pytest

from kdskills.builtin.executors.docker import DockerExecutor
from kdskills.execution import IsolationLevel
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.executors import conformance

pytestmark = pytest.mark.needs("docker")


@pytest.fixture(scope="module")
def executor():
    """Return one engine for all checks: probing and importing the image happen once."""
    return DockerExecutor(ExecutionOptions())


@conformance(IsolationLevel.CONTAINER)
async def test_docker_keeps_its_promise(executor, promise):
    """One promise of the suite, by name."""
    await promise.check(executor)
