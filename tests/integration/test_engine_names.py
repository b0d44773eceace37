"""An engine built on a shipped one is itself: what it ran is told under its own name, as the guide for authors begins."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest

from kdskills.execution import Executor
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.e2b_server import E2bServer
from kdskills.testing.executors import CONFORMANCE, Promise
from tests.integration.kubernetes_cluster import FakeCluster

ENGINES = {
    "bubblewrap": "BubblewrapExecutor",
    "docker": "DockerExecutor",
    "e2b": "E2bExecutor",
    "kubernetes": "KubernetesExecutor",
    "landlock": "LandlockExecutor",
    "srt": "SrtExecutor",
    "subprocess": "SubprocessExecutor",
}
NAMES = {"success", "exception_is_named", "missing_program"}
PROMISES = [promise for promise in CONFORMANCE if promise.name in NAMES]


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.needs(name) if name != "subprocess" else ()) for name in ENGINES]
)
def renamed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """Each shipped engine as the base of one with another name."""
    base = getattr(import_module(f"kdskills.builtin.executors.{request.param}"), ENGINES[request.param])
    engine = type("Renamed", (base,), {"name": "renamed"})
    options = {"allow_unisolated": True, "best_effort": frozenset({"work", "tmp", "memory"})}
    if request.param == "kubernetes":
        with FakeCluster(tmp_path_factory.mktemp("cluster")) as cluster:
            yield engine(ExecutionOptions(**options, kubernetes=cluster.options()))
        return
    if request.param != "e2b":
        yield engine(ExecutionOptions(**options))
        return
    with E2bServer() as server:
        yield engine(ExecutionOptions(**options, e2b=server.options(), state_dir=tmp_path_factory.mktemp("state")))


def test_the_promises_are_there() -> None:
    """The promises about results that are looked at are those of the suite."""
    assert {promise.name for promise in PROMISES} == NAMES


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.name)
async def test_an_engine_built_on_it_keeps_the_promise_under_its_own_name(renamed: Executor, promise: Promise) -> None:
    """Results carry the name of the engine that was asked, whichever it is built on."""
    await promise.check(renamed)
