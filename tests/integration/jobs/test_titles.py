"""What `ps` shows of our processes."""

import contextlib
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("bubblewrap")


def titles():
    """Return the title of each process of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
    return found


async def test_each_process_of_an_attempt_has_its_title(lab):
    """Launcher, shim and runner are three things in `ps`, and the last two name their attempt."""
    attempt = await lab.attempts.start(lab.order("echo up; sleep 600", task=f"task_titles_{os.getpid()}"))
    name = attempt.folder.name
    try:
        await lab.until(lambda: f"kdskills: runner {name}" in titles())
        assert {f"kdskills: shim {name}", "kdskills: launcher"} <= set(titles())
    finally:
        attempt.cancel()
        await attempt.wait()
