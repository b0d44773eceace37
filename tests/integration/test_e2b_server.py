"""The local server behaves to E2B's own SDK as E2B does, so that what is tested against it holds."""

from __future__ import annotations

import http.client
import json
import secrets
import subprocess
import time
from urllib.parse import urlsplit

import pytest

from kdskills.execution.owner import process_start
from kdskills.testing.e2b_server import E2bServer

e2b = pytest.importorskip("e2b")
pytestmark = pytest.mark.needs("e2b")


@pytest.fixture(scope="module")
def server():
    """Return one server for all."""
    with E2bServer() as server:
        yield server


@pytest.fixture(scope="module")
def how(server):
    """Return the SDK's words for where it is."""
    return {"api_key": server.key, "api_url": server.url, "sandbox_url": server.url}


@pytest.fixture(scope="module")
def sandbox(how):
    """Return a sandbox made by the SDK."""
    return e2b.Sandbox.create(template="base", timeout=60, metadata={"a": "b"}, **how)


def until(true) -> None:
    """Wait until something is so."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it never came to be so"
        time.sleep(0.1)


def test_a_sandbox_is_made_found_and_asked_about(sandbox, how):
    """Creating, connecting and asking give the same sandbox with its metadata and times."""
    assert e2b.Sandbox.connect(sandbox.sandbox_id, **how).sandbox_id == sandbox.sandbox_id
    info = e2b.Sandbox.get_info(sandbox.sandbox_id, **how)
    assert (info.sandbox_id, info.metadata, sandbox.is_running()) == (sandbox.sandbox_id, {"a": "b"}, True)
    assert (info.end_at - info.started_at).total_seconds() > 50


def test_times_can_be_set(sandbox, server):
    """A new timeout counts from now, and may be shorter."""
    before = time.time()
    sandbox.set_timeout(40)
    assert before <= server.sandboxes[sandbox.sandbox_id].ends - 40 <= time.time() + 1
    sandbox.set_timeout(300)


def test_commands_run_as_whom_they_are_asked_to(sandbox):
    """Root is root and others are not; variables and folders arrive; the process id is the machine's."""
    assert sandbox.commands.run("id -u", user="root").stdout == "0\n"
    result = sandbox.commands.run('echo "$A:$PWD:$(id -u)"', envs={"A": "x"}, cwd="/tmp")
    assert (result.stdout, result.exit_code) == ("x:/tmp:1000\n", 0)
    handle = sandbox.commands.run("echo $$; sleep 5", background=True)
    said = []
    for out, _, _ in handle:
        said.append(int(out))
        handle.kill()
    assert said == [handle.pid]


def test_a_code_other_than_0_is_an_exception_with_everything(sandbox):
    """CommandExitException has code, stdout and stderr."""
    with pytest.raises(e2b.CommandExitException) as caught:
        sandbox.commands.run("echo out; echo err >&2; exit 42")
    assert (caught.value.exit_code, caught.value.stdout, caught.value.stderr) == (42, "out\n", "err\n")


def test_text_is_what_the_sdk_makes_of_bytes(sandbox):
    """The SDK decodes with replacement, which is why outputs travel as files."""
    assert sandbox.commands.run(r"printf '\377'").stdout == "\N{REPLACEMENT CHARACTER}"


def test_a_command_ends_at_its_deadline_but_not_with_its_client(sandbox):
    """A command is killed when its time is over; when its client goes away it runs on."""
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("sleep 600; touch /home/late", timeout=0.5, user="root")
    handle = sandbox.commands.run("sleep 1; touch /home/alone", background=True, user="root")
    handle.disconnect()
    until(lambda: sandbox.commands.run("ls /home", user="root").stdout == "alone\n")


def test_standard_input_and_lists(sandbox):
    """A command started with standard input gets it; running commands are listed, ended ones are not."""
    handle = sandbox.commands.run("read line; echo got $line", background=True, stdin=True)
    assert handle.pid in [one.pid for one in sandbox.commands.list()]
    sandbox.commands.send_stdin(handle.pid, "words\n")
    assert handle.wait().stdout == "got words\n"
    assert handle.pid not in [one.pid for one in sandbox.commands.list()]
    assert sandbox.commands.kill(handle.pid) is False


def test_files_are_bytes_with_owners(sandbox):
    """Files come back as they went, folders are made, others' files and missing ones are refused."""
    data = bytes(range(256)) * 1000
    sandbox.files.write("/opt/deep/er/file.bin", data, user="root")
    assert bytes(sandbox.files.read("/opt/deep/er/file.bin", format="bytes", user="root")) == data
    for path in ("/opt/missing", "/opt"):
        with pytest.raises(e2b.NotFoundException):
            sandbox.files.read(path, user="root")
    with pytest.raises(e2b.InvalidArgumentException):
        sandbox.files.write("/opt/mine", b"x")


def test_errors_are_e2bs(server, how, sandbox):
    """Wrong keys, unknown and ended sandboxes raise what the SDK raises for them."""
    with pytest.raises(e2b.AuthenticationException):
        e2b.Sandbox.create(**{**how, "api_key": "e2b_" + "0" * 40})
    gone = e2b.Sandbox.create(timeout=60, **how)
    assert (gone.kill(), e2b.Sandbox.kill(gone.sandbox_id, **how)) == (True, False)
    assert gone.is_running() is False
    with pytest.raises(e2b.NotFoundException):
        e2b.Sandbox.get_info(gone.sandbox_id, **how)
    with pytest.raises(e2b.TimeoutException):
        gone.commands.run("true")


def test_a_sandbox_ends_with_its_time_and_everything_in_it(server, how):
    """A machine over its time is gone, its processes with it."""
    short = e2b.Sandbox.create(timeout=60, **how)
    words = f"sleep {10**6 + secrets.randbelow(10**9)}"
    short.commands.run(words, background=True)
    server.sandboxes[short.sandbox_id].ends = time.time() + 0.2
    until(lambda: short.is_running() is False)
    until(lambda: words not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout)


def raw(server, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict]:
    """Send one request by hand."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request(method, path, json.dumps(body or {}), {"X-API-KEY": server.key, **headers})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text) if text else {}


def test_paths_of_older_and_newer_sdks(server):
    """Creating and connecting answer with and without `/v2`; the rest of the API has no version."""
    for version in ("", "/v2"):
        status, made = raw(server, "POST", f"{version}/sandboxes", {"templateID": "t", "timeout": 60})
        assert (status, set(made) >= {"sandboxID", "envdVersion", "envdAccessToken"}) == (201, True)
        assert raw(server, "POST", f"{version}/sandboxes/{made['sandboxID']}/connect", {"timeout": 60})[0] == 200
        assert raw(server, "GET", f"/sandboxes/{made['sandboxID']}")[1]["state"] == "running"
        assert raw(server, "DELETE", f"/sandboxes/{made['sandboxID']}")[0] == 204
        assert raw(server, "GET", f"/sandboxes/{made['sandboxID']}")[0] == 404


def test_sandboxes_are_closed_to_strangers(server, sandbox):
    """The agent inside answers nobody without the sandbox's own token."""
    status, answer = raw(server, "GET", "/health", **{"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": "x"})
    assert (status, answer["message"]) == (401, "invalid access token")
    assert raw(server, "GET", "/nothing", **{"E2b-Sandbox-Id": "unknown"})[0] == 502


def test_nothing_is_left_when_the_server_ends():
    """Leaving the server ends its machines and removes their disks."""
    with E2bServer() as server:
        made = e2b.Sandbox.create(timeout=60, api_key=server.key, api_url=server.url, sandbox_url=server.url)
        vm = server.sandboxes[made.sandbox_id].vm
        init, disk = vm._init, vm._top
    assert (process_start(init), disk.exists(), vm.alive) == (None, False, False)
