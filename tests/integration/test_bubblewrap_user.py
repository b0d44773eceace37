"""The bubblewrap engine as an ordinary user, without any writable cgroup (spec execution §2, §3)."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("bubblewrap")

UID = "10002"


@pytest.fixture
def seen(repo, tmp_path_factory):
    """Run `as_user.py` as a uid that owns nothing and return what it printed."""
    if os.geteuid() != 0:
        pytest.skip("already an ordinary user: the other tests show it")
    home = tmp_path_factory.mktemp("home")
    as_user = ["setpriv", "--reuid", UID, "--regid", UID, "--clear-groups", "env", "-i", "PATH=/usr/bin:/bin"]
    python = "/usr/bin/python3"
    wanted = f"import sys, pathlib; sys.exit(not (sys.version_info[:2] == {os.sys.version_info[:2]!r} and pathlib.Path({str(repo)!r}, 'kdskills').is_dir()))"
    if subprocess.run([*as_user, python, "-c", wanted], capture_output=True).returncode != 0:
        pytest.skip("no Python of this version, or no checkout, that an ordinary user may read")
    for folder in (home, *list(home.parents)[:2]):
        folder.chmod(0o755)
    os.chown(home, int(UID), int(UID))
    paths = f"{repo}:{repo / 'runtime'}:{sysconfig.get_path('purelib')}"
    script = Path(__file__).with_name("as_user.py")
    done = subprocess.run(
        [*as_user, f"HOME={home}", f"PYTHONPATH={paths}", "PYTHONDONTWRITEBYTECODE=1", python, str(script)],
        capture_output=True, text=True, cwd=home,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_an_ordinary_user_gets_the_same_wall(seen):
    """Probe, files, code, bounds and endings work without root; memory is bounded per process and not claimed."""
    limits = seen.pop("limits")
    assert "memory" not in limits
    assert {"pids", "wall", "work", "network"} <= set(limits)
    assert seen == {
        "probe": True,
        "cure": None,
        "failed": [],
        "plain": ["ok", "data", ["out\n"]],
        "code": ["nonzero", "ValueError: boom"],
        "memory": ["nonzero", True],
        "bomb": "9\n",
        "hang": "timeout",
    }
