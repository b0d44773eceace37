"""The launcher's lines: what it answers, when it starts nothing, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdskills.app.settings import Settings, settings_line
from kdskills.app.worker.launcher import MODULE
from kdskills.jobs import shim

COMMAND = (sys.executable, "-m", MODULE)


@pytest.fixture(scope="module")
def ask():
    """Return what asks one launcher to start the attempt in a folder; it must end well when nobody asks any more."""
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(settings_line(Settings()) + b"\n")

    def ask(folder):
        process.stdin.write(json.dumps({"start": str(folder)}).encode() + b"\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    _, words = process.communicate(timeout=60)
    assert (process.returncode, words) == (0, b"")


@pytest.fixture
def folder(tmp_path, make_order):
    """The folder of an attempt that has its order."""
    shim.write_json(tmp_path / shim.ORDER, make_order().to_json())
    return tmp_path


def test_folder_without_an_order_is_an_error(ask, tmp_path):
    """An order that is not there is said, and the launcher goes on."""
    assert ask(tmp_path)["error"].startswith("KeyError")
    assert "error" in ask(tmp_path / "none")


def test_attempt_somebody_holds_is_left_alone(ask, folder):
    """While its lock is held, an attempt is not started again."""
    lock = shim.take_lock(folder)
    assert ask(folder) == {"held": True}
    os.close(lock)


def test_an_attempt_after_which_another_came_is_left_alone(ask, tmp_path, make_order):
    """An order that arrives late is for an attempt that was judged not to have begun, and begun again as the next one."""
    for number in ("1", "2"):
        (tmp_path / number).mkdir()
    shim.write_json(tmp_path / "1" / shim.ORDER, make_order().to_json())
    assert ask(tmp_path / "1") == {"held": True}


def test_attempt_that_began_is_left_alone(ask, folder):
    """An attempt that died is lost, not begun anew, even when nobody said so yet."""
    (folder / shim.LOCK).write_text(json.dumps(shim.identity(1)), encoding="utf-8")
    assert ask(folder) == {"held": True}
    assert sorted(path.name for path in folder.iterdir()) == [shim.LOCK, shim.ORDER]


def test_attempt_that_is_over_is_left_alone(ask, folder):
    """A verdict is final: nothing runs after it."""
    shim.write_json(folder / shim.EXIT, {"status": "ok"})
    assert ask(folder) == {"held": True}


def test_cancelled_attempt_gets_its_verdict_from_a_shim(ask, folder):
    """A shim names itself in the lock and gives its verdict without running what was cancelled before."""
    shim.write_json(folder / shim.CANCEL, {"reason": "not today"})
    pid = ask(folder)["shim"]
    wait_for_verdict(folder)
    assert shim.read_identity(folder)["pid"] == pid
    assert shim.read_json(folder / shim.EXIT)["status"] == "cancelled"
    assert (folder / shim.LOG).read_text() == ""


def test_hosts_that_the_settings_here_do_not_grant_are_refused(ask, tmp_path, make_order):
    """What a task was submitted with is no grant: a worker whose settings say otherwise starts no program."""
    order = make_order()
    placement = order.spec.placement.model_copy(update={"network": ("api.example.net",)})
    order = order.model_copy(update={"spec": order.spec.model_copy(update={"placement": placement})})
    shim.write_json(tmp_path / shim.ORDER, order.to_json())
    assert "shim" in ask(tmp_path)
    wait_for_verdict(tmp_path)
    verdict = shim.read_json(tmp_path / shim.EXIT)
    assert (verdict["status"], verdict["error_code"]) == ("refused", "network_not_granted")
    assert "api.example.net" in verdict["error_message"]


def test_reaping_an_engine_that_is_not_there_fails():
    """A name no engine has is an exit code, not a traceback."""
    done = subprocess.run(
        [*COMMAND, "--reap", "nowhere"], input=settings_line(Settings()) + b"\n", capture_output=True, timeout=100
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (1, False)


def test_launcher_of_a_killed_worker_ends_without_a_word(folder):
    """With nobody left to answer, the attempt goes on, and the launcher's end is no trouble to report."""
    shim.write_json(folder / shim.CANCEL, {"reason": "not today"})
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    process.stdin.write(settings_line(Settings()) + b"\n" + json.dumps({"start": str(folder)}).encode() + b"\n")
    process.stdin.close()
    words = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), words) == (0, b"")
    wait_for_verdict(folder)


def test_launcher_in_the_background_ignores_nothing(tmp_path):
    """Signals a shell makes its background jobs ignore are heard again by what the launcher starts."""
    shell = ["sh", "-c", 'trap "" HUP INT QUIT USR1; exec "$@"', "sh", *COMMAND]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(settings_line(Settings()) + b"\n" + json.dumps({"start": str(tmp_path)}).encode() + b"\n")
        process.stdin.flush()
        assert b"error" in process.stdout.readline()
        facts = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        process.stdin.close()
    ignored = {number for number in signal.valid_signals() if int(facts["SigIgn"], 16) >> (number - 1) & 1}
    assert ignored == {signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ}


def test_launcher_nobody_ever_spoke_to_ends_without_a_word():
    """A worker killed before its first word leaves no traceback behind."""
    done = subprocess.run(COMMAND, input=b"", capture_output=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def wait_for_verdict(folder):
    """Wait until the attempt in *folder* has its verdict."""
    end = time.monotonic() + 60
    while shim.read_json(folder / shim.EXIT) is None:
        assert time.monotonic() < end, (folder / shim.LOG).read_text()
        time.sleep(0.01)
