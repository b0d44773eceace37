"""Whoever cancels while a run is being started leaves no process behind, whatever the engine."""

import asyncio
import importlib
import secrets
import shutil
import tempfile
from pathlib import Path

import pytest

from kdskills.execution import ExecRequest, Limits
from kdskills.execution.protocol import ExecutionOptions

ENGINES = [
    pytest.param(f"{module}:{name}", id=module, marks=[pytest.mark.needs(*needs)] if needs else [])
    for module, name, *needs in [
        ("subprocess", "SubprocessExecutor"),
        ("landlock", "LandlockExecutor", "landlock"),
        ("bubblewrap", "BubblewrapExecutor", "bubblewrap"),
        ("docker", "DockerExecutor", "docker"),
    ]
]


@pytest.fixture(params=ENGINES)
def engine(request):
    """Each engine, with folders its programs' uids can reach."""
    state = Path(tempfile.mkdtemp(prefix="kdskills-state-", dir="/var/tmp"))
    state.chmod(0o755)
    module, _, name = request.param.partition(":")
    effort = frozenset({"work", "tmp", "memory"})
    options = ExecutionOptions(allow_unisolated=True, best_effort=effort, state_dir=state)
    yield getattr(importlib.import_module(f"kdskills.builtin.executors.{module}"), name)(options)
    shutil.rmtree(state)


def running(mark):
    """Return the processes of this machine whose command line holds *mark*."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def test_a_cancelled_start_leaves_nothing(engine):
    """Cancelled at many moments between the call and the program's first line, no program goes on."""
    seconds = 80_000 + secrets.randbelow(10_000)
    mark = f"{seconds}.{secrets.randbelow(10**9):09}"
    warm = ExecRequest(argv=("true",), profile="unsafe-local")
    assert (await engine.run(warm)).status == "ok"
    for pause in (0.0, 0.001, 0.003, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3):
        request = ExecRequest(argv=("sleep", mark), profile="unsafe-local", limits=Limits(wall_s=120))
        task = asyncio.create_task(engine.run(request))
        await asyncio.sleep(pause)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert running(mark) == []
    assert (await engine.run(warm)).status == "ok"
