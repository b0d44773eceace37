"""Engines in a process that itself may open few files, as some supervisors start it."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("low_limits.py")


@pytest.fixture
def state():
    """A state folder programs' uids can reach."""
    folder = Path(tempfile.mkdtemp(prefix="kdskills-state-", dir="/var/tmp"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("engine", "profile"),
    [
        pytest.param("bubblewrap BubblewrapExecutor", "", marks=pytest.mark.needs("bubblewrap"), id="bubblewrap"),
        pytest.param("landlock LandlockExecutor", "", marks=pytest.mark.needs("landlock"), id="landlock"),
        pytest.param("subprocess SubprocessExecutor", "unsafe-local", id="subprocess"),
    ],
)
def test_programs_run_within_what_we_may_have_ourselves(state, engine, profile):
    """A limit below the request's default is no failure: it is the limit."""
    module, name = engine.split()
    words = [sys.executable, str(PROGRAM), f"kdskills.builtin.executors.{module}", name, str(state), profile]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [["ok", "64 64\n", None]] * 2
