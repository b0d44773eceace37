"""kdskills itself may be killed: its sandboxes die with it, and `reap` clears what is left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.execution.owner import find_parent, leaf_name
from kdskills.execution.protocol import ExecutionOptions

pytestmark = pytest.mark.needs("bubblewrap")

OWNER = """
import asyncio, sys
from pathlib import Path
from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.execution import ExecRequest
from kdskills.execution.protocol import ExecutionOptions

async def main():
    handle = await BubblewrapExecutor(ExecutionOptions(state_dir=Path(sys.argv[1]))).start(
        ExecRequest(argv=("sh", "-c", f"trap '' TERM HUP INT; (sleep {sys.argv[2]} &) ; sleep {sys.argv[2]}"))
    )
    print("started", flush=True)
    await handle.wait()

asyncio.run(main())
"""


#: How long the payload sleeps, which tells its processes from those of the same test in another process.
SLEEP = str(1_000_000 + os.getpid())


def sleepers() -> list[int]:
    """Return the processes the owner's sandbox runs."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if line == f"sleep\0{SLEEP}\0".encode():
                found.append(int(entry.name))
    return found


@pytest.fixture
def killed_owner(tmp_path, repo):
    """Start a run in another process, kill that process, and return its pid."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), SLEEP], stdout=subprocess.PIPE, cwd=repo)
    try:
        with process.stdout:
            first = process.stdout.readline()
        end = time.monotonic() + 60
        while len(sleepers()) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        running = len(sleepers())
    finally:
        process.kill()
        process.wait()
    assert (first, running) == (b"started\n", 2)
    return process.pid


def test_a_killed_owner_takes_its_sandbox_along(killed_owner):
    """No process outlives the kdskills that started it, even one that ignores every polite signal."""
    end = time.monotonic() + 60
    while sleepers() and time.monotonic() < end:
        time.sleep(0.02)
    assert sleepers() == []


def test_reap_clears_what_is_left_and_says_so(killed_owner, tmp_path):
    """Cgroups and records of the dead owner are gone afterwards; a second reap finds nothing of it."""
    engine = BubblewrapExecutor(ExecutionOptions(state_dir=tmp_path))
    report = asyncio.run(engine.reap())
    assert report.failed == ()
    parent = find_parent()
    left = [] if parent is None else [leaf.memory.name for leaf in parent.leaves()]
    assert [name for name in left if f"-{killed_owner}-" in name] == []
    assert list(tmp_path.glob("runs/*")) == []
    assert [line for line in asyncio.run(engine.reap()).ended if f"-{killed_owner}-" in line] == []


def test_reap_leaves_living_owners_alone(tmp_path):
    """A leaf of this very process stays."""
    parent = find_parent()
    if parent is None:
        pytest.skip("no cgroup is writable here")
    leaf = parent.leaf(leaf_name(), 1 << 26, 8)
    try:
        asyncio.run(BubblewrapExecutor(ExecutionOptions(state_dir=tmp_path)).reap())
        assert all(folder.is_dir() for folder in leaf.folders)
    finally:
        assert leaf.remove()


def test_a_record_without_cgroup_ends_its_launcher(tmp_path):
    """Where there are no cgroups, the launcher named by a dead owner's record is ended."""
    from kdskills.execution.owner import RUN_LABEL, boot_id, process_start

    launcher = subprocess.Popen(["sleep", "600"])
    labels = {
        RUN_LABEL: "r1",
        "kdskills.boot": boot_id(),
        "kdskills.pid": str(launcher.pid),
        "kdskills.started": "1",
        "kdskills.pidns": os.readlink("/proc/self/ns/pid"),  # noqa: PTH115 - the text itself
    }
    (tmp_path / "runs").mkdir()
    record = {"labels": labels, "launcher": launcher.pid, "started": process_start(launcher.pid)}
    (tmp_path / "runs/a.json").write_text(json.dumps(record))
    (tmp_path / "runs/broken.json").write_text("{")
    report = asyncio.run(BubblewrapExecutor(ExecutionOptions(state_dir=tmp_path)).reap())
    assert launcher.wait(timeout=60) == -signal.SIGKILL
    assert [line for line in report.ended if line.startswith("run")] == [
        f"run r1: launcher {launcher.pid}", "run broken: its record",
    ]  # fmt: skip
    assert list((tmp_path / "runs").iterdir()) == []
