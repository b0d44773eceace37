"""E2B keeps every promise of the executor suite, its SDK speaking to the local server."""

from __future__ import annotations

import pytest

from kdskills.builtin.executors.e2b import E2bExecutor
from kdskills.execution import IsolationLevel
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.abuse import abuse, run_case
from kdskills.testing.e2b_server import E2bServer
from kdskills.testing.executors import conformance

pytestmark = pytest.mark.needs("e2b")


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    """Return one engine for all checks: its sandbox is made once."""
    with E2bServer() as server:
        yield E2bExecutor(ExecutionOptions(e2b=server.options(), state_dir=tmp_path_factory.mktemp("state")))


@conformance(IsolationLevel.VM)
async def test_e2b_keeps_its_promise(executor, promise):
    """One promise of the suite, by name."""
    await promise.check(executor)


@abuse(IsolationLevel.VM)
async def test_hostile_program(executor, case, packages):
    """What must be true of the program is true of a sandbox of E2B, with packages in place; its own walls see to it."""
    verdict = await run_case(executor, case, packages)
    if verdict is None:
        pytest.skip(f"e2b does not enforce {sorted(case.needs)} here")
    assert verdict.problems == (), f"{case.must}: {verdict.problems}"
