"""The srt engine: its allow-list, what it shows and hides, whose exit code it is, its ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kdskills.builtin.executors import srt
from kdskills.builtin.executors.srt import SrtExecutor
from kdskills.errors import ExecRefused
from kdskills.execution import ExecRequest, IsolationLevel, Limits
from kdskills.execution.landlock import processes_of
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.conformance.limits import host_is_out_of_sight

pytestmark = pytest.mark.needs("srt")

EFFORT = frozenset({"work", "tmp", "memory"})
ALLOWED = "registry.npmjs.org"
REACH = """
import socket, urllib.error, urllib.request, kdskills_runtime
found = {}
for url in URLS:
    try:
        with urllib.request.urlopen(url, timeout=15) as answer:
            found[url] = answer.status
    except urllib.error.HTTPError as error:
        found[url] = error.code
    except OSError as error:
        found[url] = "403" if "403" in str(error) else "refused"
for name, family in (("inet", socket.AF_INET), ("vsock", socket.AF_VSOCK), ("unix", socket.AF_UNIX), ("netlink", socket.AF_NETLINK)):
    try:
        with socket.socket(family, socket.SOCK_STREAM if name != "netlink" else socket.SOCK_RAW) as s:
            if name == "inet":
                s.settimeout(2)
                s.connect(("1.1.1.1", 443))
        found[name] = "open"
    except OSError:
        found[name] = "refused"
kdskills_runtime.report(found)
"""


@pytest.fixture(scope="module")
def executor():
    """Return an engine with what it cannot hold as best effort."""
    return SrtExecutor(ExecutionOptions(best_effort=EFFORT))


async def test_the_allow_list_lets_through_what_it_names(executor):
    """A named host answers; another, the metadata service and everything past the proxy do not."""
    if not _answers():
        pytest.skip(f"needs network: {ALLOWED} does not answer here")
    urls = [f"https://{ALLOWED}/", "https://pypi.org/", "http://169.254.169.254/", f"http://{ALLOWED}.example.org/"]
    result = await executor.run(ExecRequest(code=REACH, globals={"URLS": urls}, network=(ALLOWED,)))
    assert result.error is None
    assert result.value == {
        urls[0]: 200, urls[1]: "403", urls[2]: 403, urls[3]: 403,
        "inet": "refused", "vsock": "refused", "unix": "refused", "netlink": "refused",
    }  # fmt: skip
    assert "network" in result.limits_enforced


async def test_without_an_allow_list_nothing_is_reached(executor):
    """No network is none at all, and no proxy is told of."""
    urls = [f"https://{ALLOWED}/"]
    result = await executor.run(ExecRequest(code=REACH, globals={"URLS": urls}))
    assert set(result.value.values()) == {"refused"}
    env = await executor.run(ExecRequest(argv=("env",)))
    assert "proxy" not in env.stdout.text.lower()


@pytest.mark.parametrize(
    "name", ["*", "*.com:x", "10.0.0.1", "localhost", "a b.org", "http://x.org", "[::1]", "x.org/", "-a.org", ""]
)
async def test_an_allow_list_holds_hosts_only(executor, name):
    """Addresses, bare stars, single words and URLs are refused before anything runs."""
    with pytest.raises(ExecRefused) as caught:
        await executor.run(ExecRequest(argv=("true",), network=(name,)))
    assert caught.value.code == "bad_request"


async def test_the_host_is_out_of_sight(executor):
    """By itself srt shows the whole host read-only; through this engine `/` is closed."""
    await host_is_out_of_sight(executor)
    result = await executor.run(ExecRequest(argv=("sh", "-c", "cat /etc/passwd /root/.bashrc; ls /root /home /etc")))
    assert "root:x:" not in result.stdout.text


async def test_a_weak_level_is_said():
    """Its level is below namespaces, so `auto` and the default minimum never take it."""
    assert SrtExecutor.level is IsolationLevel.LANDLOCK


async def test_the_exit_code_is_the_programs(executor):
    """What srt says is 0 when TERM ends its child and 1 for its own faults; neither is taken for the program's."""
    for code in (0, 1, 77):
        result = await executor.run(ExecRequest(argv=("sh", "-c", f"exit {code}")))
        assert (result.exit_code, result.status) == (code, "nonzero" if code else "ok")
    handle = await executor.start(ExecRequest(argv=("sh", "-c", "echo ready; sleep 30")))
    while not handle.tail()[0]:  # noqa: ASYNC110 - a program's output is no event of ours
        await asyncio.sleep(0.01)
    for pid in _named(b"dist/cli.js"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 15)
    result = await handle.wait()
    assert (result.status, result.exit_code) in {("infra_error", None), ("nonzero", 143)}


async def test_never_as_root(executor):
    """As root, srt and the program have a uid of their own."""
    result = await executor.run(ExecRequest(argv=("id", "-u")))
    assert int(result.stdout.text) != 0
    report = await executor.probe()
    assert report.ok
    assert "memory" not in report.limits


async def test_nothing_of_srt_is_left(executor):
    """Node, relays and program end together when the time is over."""
    handle = await executor.start(
        ExecRequest(argv=("sh", "-c", "id -u; trap '' TERM; sleep 600 & sleep 600"), limits=Limits(wall_s=5))
    )
    result = await handle.wait()
    assert result.status == "timeout"
    uid = int(result.stdout.text)
    assert uid == os.getuid() or processes_of(uid) == []


async def test_what_is_missing_is_named(monkeypatch, tmp_path):
    """Without the package or its helpers the probe says what to install."""
    monkeypatch.setattr(srt, "find_srt", lambda _cache=None: None)
    report = await SrtExecutor(ExecutionOptions(best_effort=EFFORT)).probe()
    assert "npm install" in report.cure
    which = shutil.which  # the prepared tree is still made of this machine's programs
    monkeypatch.setattr(srt.shutil, "which", lambda tool, path=None: path and which(tool, path=path))
    report = await SrtExecutor(ExecutionOptions(best_effort=EFFORT)).probe()
    assert "ripgrep" in report.cure


async def test_a_killed_owner_takes_its_runs_along():
    """When kdskills is killed srt ends with everything in it, and `reap` removes the folder."""
    if os.geteuid() != 0:
        pytest.skip("runs are told apart by their uid")
    state = Path(tempfile.mkdtemp(prefix="kds-", dir="/var/tmp"))
    uid = _killed(state)
    until = time.monotonic() + 60
    while processes_of(uid) and time.monotonic() < until:  # noqa: ASYNC110 - no event of ours
        await asyncio.sleep(0.02)
    assert processes_of(uid) == []
    report = await SrtExecutor(ExecutionOptions(state_dir=state, best_effort=EFFORT)).reap()
    assert any(line.startswith("run ") for line in report.ended)
    shutil.rmtree(state)


def _killed(state: Path) -> int:
    """Start a run in another process, kill that, and return the run's uid."""
    state.chmod(0o755)
    program = Path(__file__).with_name("owner_that_dies.py")
    words = [sys.executable, str(program), "kdskills.builtin.executors.srt", "SrtExecutor", str(state)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        try:
            uid = int(owner.stdout.readline().split()[0])
        finally:
            owner.kill()  # whatever was wrong: leaving the block waits for its end
            owner.wait()
    return uid


def _answers() -> bool:
    """Whether the registry can be reached from this machine at all."""
    return subprocess.run(["npm", "view", "is-odd", "version"], capture_output=True, timeout=60).returncode == 0


def _named(words: bytes) -> list[int]:
    """Return the processes started by this one whose command line holds *words*."""
    found, queue = [], [os.getpid()]
    while queue:
        pid = queue.pop()
        with contextlib.suppress(OSError):  # it ended meanwhile
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                queue += map(int, task.read_text().split())
            if words in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found
