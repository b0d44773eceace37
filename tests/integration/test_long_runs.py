"""Runs of tasks and services: output followed in files, more time than a call has, networks that can be entered."""

import asyncio
import time
from pathlib import Path

import pytest

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.builtin.executors.docker import DockerExecutor
from kdskills.builtin.executors.subprocess import SubprocessExecutor
from kdskills.errors import ExecRefused
from kdskills.execution import ExecRequest, Limits, LogFiles, Reachable
from kdskills.execution.protocol import ExecutionOptions

PROGRAM = "printf 'a\\000b'; printf err >&2; while [ ! -e go ]; do sleep 0.05; done; printf end"

ENGINES = [
    pytest.param(BubblewrapExecutor, marks=pytest.mark.needs("bubblewrap"), id="bubblewrap"),
    pytest.param(DockerExecutor, marks=pytest.mark.needs("docker"), id="docker"),
]


def network_of(pid):
    """Return the number of a process's network."""
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


async def until(condition, what):
    """Wait for *condition* for as long as a busy machine may need."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.02)


@pytest.fixture
def logs(tmp_path):
    """Files for both streams."""
    return LogFiles(tmp_path / "stdout", tmp_path / "stderr")


@pytest.mark.parametrize("engine", ENGINES)
async def test_output_is_in_the_files_while_the_program_runs(engine, logs):
    """Bytes reach the files as they are written, exactly, and the result's tail is the same."""
    executor = engine(ExecutionOptions())
    request = ExecRequest(argv=("sh", "-c", PROGRAM), logs=logs, background=True, limits=Limits(wall_s=3600))
    handle = await executor.start(request)
    try:
        await until(lambda: logs.stdout.exists() and logs.stdout.read_bytes() == b"a\0b", "no live output")
        await until(lambda: logs.stderr.exists() and logs.stderr.read_bytes() == b"err", "no live errors")
    finally:
        await handle.cancel()
    result = await handle.wait()
    assert (result.status, result.stdout.data, result.stderr.data) == ("cancelled", b"a\0b", b"err")


@pytest.mark.parametrize("engine", ENGINES)
async def test_the_network_of_a_run_is_its_own_and_can_be_found(engine, logs):
    """The pid told for a running sandbox has another network than ours, and none is told afterwards."""
    executor = engine(ExecutionOptions())
    handle = await executor.start(ExecRequest(argv=("sleep", "60"), logs=logs, background=True))
    try:
        assert isinstance(handle, Reachable)
        pids = []
        await until(lambda: pids.append(handle.network_namespace()) or pids[-1], "no process to enter")
        assert network_of(pids[-1]) != network_of("self")
    finally:
        await handle.cancel()
    await handle.wait()


@pytest.mark.needs("bubblewrap")
async def test_only_background_runs_have_more_than_ten_minutes(logs):
    """A call cannot take a task's time."""
    executor = BubblewrapExecutor(ExecutionOptions())
    with pytest.raises(ExecRefused, match="at most 600"):
        await executor.run(ExecRequest(argv=("true",), limits=Limits(wall_s=3600)))
    result = await executor.run(ExecRequest(argv=("true",), limits=Limits(wall_s=10 * 365 * 86_400), background=True))
    assert result.status == "ok"


@pytest.mark.needs("bubblewrap")
async def test_a_flood_stays_small_in_memory_and_on_disk(tmp_path):
    """100 MB of output are counted to the byte, and neither kept in memory nor on disk beyond the limit."""
    logs = LogFiles(tmp_path / "out", tmp_path / "err", limit=2 * 1024 * 1024)
    executor = BubblewrapExecutor(ExecutionOptions())
    argv = ("sh", "-c", "head -c 100000000 /dev/zero")
    result = await executor.run(ExecRequest(argv=argv, logs=logs, background=True))
    assert (result.status, result.stdout.total) == ("ok", 100_000_000)
    info = logs.stdout.stat()
    assert info.st_size == 100_000_000
    assert info.st_blocks * 512 < 5 * 1024 * 1024


async def test_the_bare_engine_logs_too(logs):
    """Named with both consents, the bare engine follows output as well."""
    executor = SubprocessExecutor(
        ExecutionOptions(allow_unisolated=True, best_effort=frozenset({"work", "tmp", "memory", "pids", "network"}))
    )
    result = await executor.run(ExecRequest(argv=("sh", "-c", "printf hello"), logs=logs, profile="unsafe-local"))
    assert (result.status, logs.stdout.read_bytes()) == ("ok", b"hello")
