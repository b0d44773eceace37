"""What integration tests share: an ordinary user beside root."""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdskills.testing.conformance.packages import small_environment

UID = 10002


@pytest.fixture(scope="session")
def packages():
    """Return the mount of a small environment, for suites that run with one in place."""
    with small_environment() as mount:
        yield mount


@pytest.fixture
def ordinary_user(repo):
    """Return how to run this checkout as a uid that owns nothing: `command` of a script, `env`, and its `home`."""
    if os.geteuid() != 0:
        pytest.skip("already an ordinary user: the other tests show it")
    prefix = ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups", "/usr/bin/python3"]
    wanted = f"import sys, pathlib; sys.exit(not (sys.version_info[:2] == {sys.version_info[:2]!r} and pathlib.Path({str(repo)!r}, 'kdskills').is_dir()))"
    if subprocess.run([*prefix, "-c", wanted], capture_output=True).returncode != 0:
        pytest.skip("no Python of this version, or no checkout, that an ordinary user may read")
    # pytest closes its own temporary folder to everybody else whenever another run of it starts.
    with tempfile.TemporaryDirectory(prefix="kdskills-user-") as home:
        os.chown(home, UID, UID)
        paths = f"{repo}:{repo / 'runtime'}:{sysconfig.get_path('purelib')}"
        env = {"HOME": home, "PATH": "/usr/bin:/bin", "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        yield SimpleNamespace(command=prefix, env=env, home=Path(home), uid=UID)
