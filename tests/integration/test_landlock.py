"""The landlock engine: what its wall holds, what it refuses, and that nothing outlives a run."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kdskills.builtin.executors import landlock
from kdskills.builtin.executors.landlock import LandlockExecutor
from kdskills.errors import ExecRefused
from kdskills.execution import ExecRequest, Limits
from kdskills.execution.landlock import processes_of
from kdskills.execution.owner import process_start
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.conformance.limits import host_is_out_of_sight

pytestmark = pytest.mark.needs("landlock")

EFFORT = frozenset({"work", "tmp", "memory"})
OWN_FILES = """
import os, kdskills_runtime
found = {}
for name, act in (("chmod", lambda: os.chmod(PLACE, 0o600)), ("utime", lambda: os.utime(PLACE)),
                  ("truncate", lambda: os.truncate(PLACE, 0)), ("write", lambda: open(PLACE, "ab").close()),
                  ("read", lambda: open(PLACE, "rb").close()), ("link", lambda: os.link(PLACE, "here")),
                  ("rename", lambda: os.rename(PLACE, "here")), ("unlink", lambda: os.unlink(PLACE)),
                  ("make", lambda: open(PLACE + ".new", "x").close()), ("mkdir", lambda: os.mkdir(PLACE + ".d"))):
    try:
        act()
        found[name] = "worked"
    except OSError as error:
        found[name] = "refused"
kdskills_runtime.report(found)
"""
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        os.execve(sys.executable, [sys.executable, "-I", "-c", "import time; time.sleep(60)"], {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]})
    os._exit(0)
time.sleep(0.3)
print(os.getuid())
"""
PAIRS = """
import asyncio, multiprocessing, os, socket
async def main():
    process = await asyncio.create_subprocess_exec("echo", "child", stdout=-1)
    print((await process.communicate())[0].decode().strip())
asyncio.run(main())
a, b = socket.socketpair()
a.send(b"pair"); print(b.recv(9).decode())
try:
    b.connect("\\0x")
except OSError:
    print("refused")
"""


@pytest.fixture
def executor():
    """Return an engine with what it cannot hold exactly as best effort."""
    return LandlockExecutor(ExecutionOptions(best_effort=EFFORT))


@pytest.fixture
def open_place():
    """A folder and file every uid may write, as far as file modes go."""
    folder = Path(tempfile.mkdtemp(prefix="kdskills-landlock-", dir="/var/tmp"))
    folder.chmod(0o777)
    file = folder / "file"
    file.write_bytes(b"host")
    file.chmod(0o666)
    yield file
    shutil.rmtree(folder)


@pytest.mark.parametrize("version", [1, 2, 3, 5, None])
async def test_files_open_to_everybody_are_closed(executor, open_place, monkeypatch, version):
    """What modes would allow, Landlock of any version and the filter do not; modes and times need an owner."""
    if version is not None:
        monkeypatch.setattr("kdskills.builtin.executors.landlock.landlock_version", lambda: (version, ""))
    result = await executor.run(ExecRequest(code=OWN_FILES, globals={"PLACE": str(open_place)}))
    found = {name for name, word in result.value.items() if word == "worked"}
    assert found <= {"utime"}  # setting the time of a file one may write to "now" needs no owner, only write permission
    assert open_place.read_bytes() == b"host"
    assert sorted(path.name for path in open_place.parent.iterdir()) == ["file"]


async def test_host_files_cannot_be_read(executor):
    """A promise of stronger levels that holds here too."""
    await host_is_out_of_sight(executor)


async def test_a_daemon_that_cleared_its_environment_is_ended(executor):
    """Leaving session, group, pipes and environment is no way out: the whole uid ends."""
    result = await executor.run(ExecRequest(code=DAEMON))
    assert result.status == "ok"
    assert processes_of(int(result.stdout.text)) == []


async def test_each_run_has_a_uid_of_its_own(executor):
    """Two runs at a time have two uids, and neither can signal the other."""
    first = await executor.start(ExecRequest(argv=("sh", "-c", "id -u; sleep 600")))
    while not first.tail()[0]:  # noqa: ASYNC110 - a program's output is no event of ours
        await asyncio.sleep(0.01)
    uid = int(first.tail()[0])
    pid = processes_of(uid)[0]
    second = await executor.run(ExecRequest(argv=("sh", "-c", f"id -u; kill -9 {pid} || echo refused")))
    assert second.stdout.text.split()[1:] == ["refused"]
    assert int(second.stdout.text.split()[0]) != uid
    await first.cancel()
    assert processes_of(uid) == []


async def test_event_loops_and_pairs_work(executor):
    """What leads nowhere stays: asyncio with children, and connected pairs that cannot be connected elsewhere."""
    result = await executor.run(ExecRequest(code=PAIRS))
    assert (result.stdout.text.split(), result.stderr.text) == (["child", "pair", "refused"], "")


async def test_a_workdir_that_outgrows_its_bound_ends_the_run(executor):
    """The guard looks now and then; what it stops is a `limit`, and is not claimed to be exact."""
    script = "i=0; while :; do head -c 8000000 /dev/zero > f$i; i=$((i+1)); sleep 0.05; done"
    limits = Limits(wall_s=300, work_size=8 << 20)
    result = await executor.run(ExecRequest(argv=("sh", "-c", script), limits=limits))
    assert (result.status, result.error.code) == ("limit", "work")
    assert "work" not in result.limits_enforced


async def test_what_cannot_be_held_must_be_best_effort():
    """Without the operator's word nothing is run, and the refusal names the limits; the probe says the same."""
    engine = LandlockExecutor(ExecutionOptions())
    with pytest.raises(ExecRefused) as caught:
        await engine.run(ExecRequest(argv=("true",)))
    assert caught.value.code == "limit_not_enforceable"
    assert {"work", "tmp"} <= set(caught.value.details["limits"])
    report = await engine.probe()
    assert not report.ok
    assert "best effort" in report.cure


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((0, "this kernel is built without Landlock"), "without Landlock"),
        ((0, "boot with lsm=landlock"), "lsm=landlock"),
    ],
)
async def test_a_kernel_without_landlock_is_told(executor, monkeypatch, answer, words):
    """The probe fails with the reason, and never raises."""
    monkeypatch.setattr("kdskills.builtin.executors.landlock.landlock_version", lambda: answer)
    report = await executor.probe()
    assert (report.ok, words in report.cure) == (False, True)


async def test_missing_capabilities_are_named(executor, monkeypatch):
    """Root without the right to change uids is refused with what to give the container."""
    monkeypatch.setattr(landlock, "effective_capabilities", lambda: 0)
    report = await executor.probe()
    assert "CAP_SETUID" in report.cure


async def test_an_ordinary_user_is_refused_with_a_cure(executor, monkeypatch):
    """Landlock leaves modes and times of a user's own files open, so a user without a second uid gets no run."""
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    report = await executor.probe()
    assert not report.ok
    assert "root of its container" in report.cure
    assert await executor.reap() is not None


def kill_owner(state: Path, *, watcher_too: bool) -> int:
    """Start a run in another process, kill that, and return the run's uid."""
    program = Path(__file__).with_name("owner_that_dies.py")
    words = [sys.executable, str(program), "kdskills.builtin.executors.landlock", "LandlockExecutor", str(state)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        try:
            uid, watcher = map(int, owner.stdout.readline().split())
            end = time.monotonic() + 60  # one walk of /proc may miss a process whose parent ends meanwhile
            while len(processes_of(uid)) < 2 and time.monotonic() < end:
                time.sleep(0.02)
            assert len(processes_of(uid)) >= 2
            if watcher_too:
                os.kill(watcher, signal.SIGSTOP)
        finally:
            owner.kill()  # whatever was wrong: leaving the block waits for its end
            owner.wait()
        if watcher_too:
            os.kill(watcher, signal.SIGKILL)
            while process_start(watcher) is not None and time.monotonic() < end:
                time.sleep(0.02)
    return uid


@pytest.fixture
def state():
    """A state folder programs' uids can reach."""
    folder = Path(tempfile.mkdtemp(prefix="kdskills-state-", dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


async def test_a_killed_owner_takes_its_runs_along(state):
    """When kdskills is killed the watcher ends the tree by itself; `reap` removes the folder and says so."""
    uid = kill_owner(state, watcher_too=False)
    until = time.monotonic() + 60
    while processes_of(uid) and time.monotonic() < until:  # noqa: ASYNC110 - nor is its end
        await asyncio.sleep(0.02)
    assert processes_of(uid) == []
    report = await LandlockExecutor(ExecutionOptions(state_dir=state, best_effort=EFFORT)).reap()
    assert any(line.startswith("run ") for line in report.ended)
    assert list((state / "landlock-runs").iterdir()) == []


async def test_what_outlives_owner_and_watcher_is_reaped(state):
    """Both killed, a daemon lives on; `reap` ends every process of the run's uid."""
    uid = kill_owner(state, watcher_too=True)
    assert processes_of(uid) != []
    report = await LandlockExecutor(ExecutionOptions(state_dir=state, best_effort=EFFORT)).reap()
    assert processes_of(uid) == []
    assert any(line.startswith("process ") for line in report.ended)
    assert list((state / "landlock-runs").iterdir()) == []


@pytest.mark.needs("docker")
@pytest.mark.skipif(platform.system() != "Linux", reason="containers of this host")
def test_it_works_inside_an_ordinary_container(repo):
    """In a container with the engine's default profile, where bubblewrap cannot start, landlock runs programs."""
    import json

    import docker

    from kdskills.builtin.executors.docker import DockerExecutor

    assert asyncio.run(DockerExecutor(ExecutionOptions()).probe()).ok
    client = docker.from_env()
    try:
        image = client.images.list("kdskills/sandbox")[0].id
    finally:
        client.close()
    shown = ["/usr", "/etc/alternatives", str(repo)]
    shown += [
        path for path in {sys.prefix, os.path.realpath(sys.base_prefix)} if not path.startswith(("/usr", str(repo)))
    ]
    out = subprocess.run(
        [
            *("docker", "run", "--rm", "--network", "none", "-u", "0", "-e", "PATH=/usr/local/bin:/usr/bin:/bin"),
            *(word for path in shown for word in ("-v", f"{path}:{path}:ro")),
            *("--entrypoint", sys.executable, image, str(repo / "tests/integration/in_container.py")),
        ],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    seen = json.loads(out.stdout)
    assert not seen.pop("bubblewrap")
    assert seen.pop("cure") is None
    assert {"network", "pids"} <= set(seen.pop("limits"))
    assert seen.pop("plain")[1].startswith("data\n")
    assert seen == {"probe": True, "code": ["nonzero", "ValueError: boom"]}
