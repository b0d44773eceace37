"""kdskills killed with SIGKILL while hostile payloads run: the next start finds nothing left."""

import json
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kdskills.execution.owner import find_parent

pytestmark = pytest.mark.timeout(400)

OWNER = Path(__file__).with_name("kill_owner.py")
MODES = ("deaf", "daemon", "forks", "disk", "memory")
CASES = [
    pytest.param("bubblewrap", MODES, False, marks=pytest.mark.needs("bubblewrap"), id="bubblewrap"),
    pytest.param("pool", ("deaf", "daemon", "forks"), False, marks=pytest.mark.needs("bubblewrap"), id="pool"),
    pytest.param("bubblewrap", MODES, True, marks=pytest.mark.needs("bubblewrap"), id="bubblewrap-user"),
    pytest.param("pool", ("deaf", "daemon"), True, marks=pytest.mark.needs("bubblewrap"), id="pool-user"),
    pytest.param("docker", ("deaf", "forks"), False, marks=pytest.mark.needs("docker"), id="docker"),
    pytest.param("docker", ("daemon", "disk"), False, marks=pytest.mark.needs("docker"), id="docker-daemon-disk"),
    pytest.param("subprocess", ("deaf", "daemon", "forks"), False, id="subprocess"),
]


def marked(mark):
    """Return the living processes of the host whose command line carries *mark*."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark.encode() in words and b"payload.py" in words and state != "Z":
                found.append(int(entry.name))
    return found


def wait_until_none(mark, seconds):
    """Return what is left of *mark* after at most *seconds*."""
    end = time.monotonic() + seconds
    while (found := marked(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def wait_until_marked(mark, count):
    """Return how many bear *mark*, at most 60 seconds later: one walk of /proc may miss what is forked meanwhile."""
    end = time.monotonic() + 60
    while (found := len(marked(mark))) < count and time.monotonic() < end:
        time.sleep(0.02)
    return found


@pytest.fixture
def command(request, tmp_path):
    """Return how to start the owner, its state folder and its environment: as we are, or as an ordinary user."""

    def make(*, as_user):
        if not as_user:
            return [sys.executable, str(OWNER)], tmp_path / "state", None
        user = request.getfixturevalue("ordinary_user")
        return [*user.command, str(OWNER)], user.home / "state", user.env

    return make


def read_line(process, seconds):
    """Return the process's first line, or fail with what it said instead."""
    if not select.select([process.stdout], [], [], seconds)[0]:
        process.kill()
        raise AssertionError(f"no payload got ready: {process.communicate(timeout=60)}")
    return process.stdout.readline()


def containers(owner):
    """Return the names of docker containers of the process *owner*."""
    import docker

    client = docker.from_env(timeout=30)
    try:
        found = client.containers.list(all=True, filters={"label": f"kdskills.pid={owner}"}, ignore_removed=True)
        return [container.name for container in found]
    finally:
        client.close()


def leaves(owner):
    """Return the names of cgroups of the process *owner*."""
    parent = find_parent()
    found = [] if parent is None else [leaf.memory.name for leaf in parent.leaves()]
    return [name for name in found if f"-{owner}-" in name]


@pytest.mark.parametrize(("engine", "modes", "as_user"), CASES)
def test_the_next_start_finds_nothing_left(command, engine, modes, as_user):
    """No process, cgroup, container, record or folder of the killed owner is left, and the report names them."""
    argv, state, env = command(as_user=as_user)
    mark = f"mark-{secrets.token_hex(8)}"
    owner = subprocess.Popen(
        [*argv, "run", engine, str(state), mark, *modes], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    with owner:
        try:
            first = read_line(owner, 120)
            assert first == b"ready\n", first
            assert wait_until_marked(mark, len(modes)) >= len(modes)
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
    if engine in {"bubblewrap", "pool"}:
        assert wait_until_none(mark, 60) == []  # sandboxes die with the thread that started them
    done = subprocess.run([*argv, "reap", engine, str(state)], capture_output=True, text=True, env=env, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["failed"] == []
    assert wait_until_none(mark, 60) == []
    assert sorted(path.name for path in state.glob("*/*")) == []
    # The daemon and the cgroups are everybody's: another kdskills that starts meanwhile may have been quicker, or half
    # way there. What it names then is missing from our report.
    shared = engine == "docker" or (engine in {"bubblewrap", "pool"} and not as_user and find_parent() is not None)
    look = containers if engine == "docker" else leaves
    deadline = time.monotonic() + 60
    while look(owner.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert look(owner.pid) == []
    assert list(Path(tempfile.gettempdir()).glob(f"kdskills-network-*-{owner.pid}-*")) == []
    assert shared or len(report["ended"]) >= len(modes), report
    again = subprocess.run([*argv, "reap", engine, str(state)], capture_output=True, text=True, env=env, timeout=120)
    assert [line for line in json.loads(again.stdout)["ended"] if f"-{owner.pid}-" in line] == []
