"""What `ps` shows of our processes."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

from kdskills.testing.work import WorkLab


def titles(pid="[0-9]*"):
    """Return the title of each process of this machine, or of one."""
    found = []
    for path in Path("/proc").glob(f"{pid}/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
    return found


async def test_a_worker_has_its_title():
    """A worker is told from everything else that the same program runs, by its slot."""
    with tempfile.TemporaryDirectory(prefix="kdskills-work-", ignore_cleanup_errors=True) as top:
        lab = WorkLab(Path(top))
        worker = lab.start(3)
        try:
            await lab.started(3)
            assert titles(worker.pid) == ["kdskills: worker 3"]
        finally:
            await lab.aclose()


@pytest.mark.needs("bubblewrap")
async def test_each_process_of_an_attempt_has_its_title(lab):
    """Launcher, shim and runner are three things in `ps`, and the last two name their task and attempt."""
    attempt = await lab.attempts.start(lab.order("echo up; sleep 600", task=f"task_titles_{os.getpid()}"))
    name = f"{attempt.folder.parent.name}/1"
    try:
        await lab.until(lambda: f"kdskills: runner {name}" in titles())
        assert {f"kdskills: shim {name}", "kdskills: launcher"} <= set(titles())
    finally:
        attempt.cancel()
        await attempt.wait()
