"""Kubernetes keeps every promise of the executor suite, the official client speaking to a stand-in of a cluster."""

from __future__ import annotations

import pytest

from kdskills.builtin.executors.kubernetes import KubernetesExecutor
from kdskills.execution import IsolationLevel
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.abuse import abuse, run_case
from kdskills.testing.executors import conformance
from tests.integration.kubernetes_cluster import FakeCluster

pytestmark = [
    pytest.mark.needs("kubernetes"),
    pytest.mark.xdist_group("kubernetes"),
]  # uids of pods bound what they start


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    """Return one engine for all checks."""
    with FakeCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield KubernetesExecutor(ExecutionOptions(kubernetes=cluster.options()))


@conformance(IsolationLevel.CONTAINER)
async def test_kubernetes_keeps_its_promise(executor, promise):
    """One promise of the suite, by name."""
    await promise.check(executor)


@abuse(IsolationLevel.CONTAINER)
async def test_hostile_program(executor, case, packages):
    """What must be true of the program is true of a pod, whose network leads somewhere."""
    verdict = await run_case(executor, case, packages)
    assert verdict is not None
    assert verdict.problems == (), f"{case.must}: {verdict.problems}"
