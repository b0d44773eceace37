"""The bubblewrap engine as an ordinary user, without any writable cgroup."""

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("bubblewrap")


@pytest.fixture
def seen(ordinary_user):
    """Run `as_user.py` as a uid that owns nothing and return what it printed."""
    script = Path(__file__).with_name("as_user.py")
    done = subprocess.run(
        [*ordinary_user.command, str(script)],
        env=ordinary_user.env,
        capture_output=True,
        text=True,
        cwd=ordinary_user.home,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_an_ordinary_user_gets_the_same_wall(seen):
    """Probe, files, code, bounds, endings and packages work without root; memory is bounded per process and not claimed."""
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
        "network": [403, ["not_granted"]],
        "packages": [],
    }
