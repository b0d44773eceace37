"""Hostile programs against every engine: what must be true is, and the host stays unharmed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from kdskills.execution import ExecRequest, IsolationLevel
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.abuse import CASES, abuse, run_case

POOLED = {"leftovers", "memory", "output", "injection", "exit codes"}


@pytest.fixture(scope="module")
def bubblewrap():
    """Return the engine."""
    from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor

    return BubblewrapExecutor(ExecutionOptions())


@pytest.fixture(scope="module")
def pooled():
    """Return the engine with sandboxes made ahead of time."""
    from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor

    engine = BubblewrapExecutor(ExecutionOptions(pool=1))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def docker():
    """Return the engine."""
    from kdskills.builtin.executors.docker import DockerExecutor

    return DockerExecutor(ExecutionOptions())


@pytest.fixture
def bare(tmp_path):
    """Return the engine without a wall, with folders of its own."""
    from kdskills.builtin.executors.subprocess import SubprocessExecutor

    return SubprocessExecutor(
        ExecutionOptions(allow_unisolated=True, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state")
    )


async def check(executor, case, environment=None):
    """Run a case, with *environment* in place, and assert that nothing is wrong."""
    verdict = await run_case(executor, case, environment)
    if verdict is None:
        pytest.skip(f"{executor.name} does not enforce {sorted(case.needs)} here")
    assert verdict.problems == (), f"{case.must}: {verdict.problems}"


@pytest.mark.needs("bubblewrap")
@abuse(IsolationLevel.NAMESPACE)
async def test_bubblewrap(bubblewrap, case):
    """What must be true of the program is true of bubblewrap."""
    await check(bubblewrap, case)


@pytest.mark.needs("bubblewrap")
@abuse(IsolationLevel.NAMESPACE)
async def test_with_packages_in_place(bubblewrap, case, packages):
    """An environment opens nothing: what must be true of the program is true with one in place. The suites of the other engines
    that follow, and that of E2B, have one in place throughout.
    """
    await check(bubblewrap, case, packages)


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize("case", [case for case in CASES if case.area in POOLED], ids=lambda case: case.name)
async def test_prepared_sandboxes(pooled, case, packages):
    """Where it could matter that a sandbox was made ahead of time, it does not."""
    await pooled.run(ExecRequest(code="pass", limits=case.limits, environment=packages))
    while pooled.lacking():  # noqa: ASYNC110 - another thread fills the pool
        await asyncio.sleep(0.01)
    await check(pooled, case, packages)


@pytest.mark.needs("bubblewrap")
def test_an_ordinary_user(ordinary_user, repo):
    """What must be true is true for a user without any privilege, but for memory where he has no cgroup."""
    script = repo / ".ci" / "isolation-table"
    done = subprocess.run(
        [*ordinary_user.command, str(script), "bubblewrap-user"],
        env=ordinary_user.env, capture_output=True, text=True, cwd=ordinary_user.home, timeout=500,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    column = json.loads(done.stdout)
    assert column["problems"] == {}
    assert {name for name, cell in column["cells"].items() if cell == "no bound"} <= {
        case.name for case in CASES if "memory" in case.needs
    }


@pytest.mark.needs("docker")
@abuse(IsolationLevel.CONTAINER)
async def test_docker(docker, case, packages):
    """What must be true of the program is true of docker."""
    await check(docker, case, packages)


@abuse(IsolationLevel.NONE)
async def test_bare(bare, case, packages, tmp_path):
    """What does not need a wall is true of the bare engine, and its folders are gone."""
    await check(bare, case, packages)
    assert list((tmp_path / "state" / "local-runs").iterdir()) == []
    deadline = time.monotonic() + 30
    while left := _bearing(str(tmp_path)):  # the kernel takes a moment to clear away what was killed
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.01)


def test_every_case_is_a_file_and_says_what_must_be_true():
    """The table and the folder of programs agree; every area of the spec has cases."""
    import kdskills.testing.abuse

    folder = Path(kdskills.testing.abuse.__file__).parent / "programs"
    assert sorted(case.name for case in CASES) == sorted(path.stem for path in folder.glob("*.py"))
    assert len(CASES) >= 90
    areas = {
        "files",
        "quotas",
        "processes",
        "memory",
        "network",
        "kernel",
        "leftovers",
        "output",
        "injection",
        "exit codes",
    }
    assert {case.area for case in CASES} == areas
    assert all(case.must for case in CASES)


def _bearing(words: str) -> list[int]:
    """Return the processes whose environment holds *words*."""
    found = []
    for name in (path.name for path in Path("/proc").iterdir()):
        if name.isdigit() and int(name) != os.getpid():
            try:
                text = Path("/proc", name, "environ").read_bytes()
            except OSError:
                continue
            if b"KDSKILLS_RUN" in text and words.encode() in text:
                found.append(int(name))
    return found
