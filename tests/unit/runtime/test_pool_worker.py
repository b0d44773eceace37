"""The process that waits in a prepared sandbox: ready, one order, done."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[3] / "runtime/kdskills_runtime/pool_worker.py"
PATH = "/usr/local/bin:/usr/bin:/bin"


@pytest.fixture
def serve():
    """Start a worker, send it bytes, and return what came: exit code, report, stdout, stderr."""

    def run(data, *options):
        payload, our_payload = os.pipe()
        our_report, report = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-I", str(WORKER), str(payload), str(report), *options],
            pass_fds=(payload, report), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        os.close(payload)
        os.close(report)
        try:
            assert os.read(our_report, 1) == b"\n"
            with os.fdopen(our_payload, "wb") as sink:
                sink.write(data)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()  # it has ended, or never will
        with os.fdopen(our_report, "rb") as told:
            return process.returncode, told.read(), out, err

    return run


def order(**changes):
    """Return an order as the host writes it."""
    fields = {"argv": ["true"], "env": {"PATH": PATH}, "cwd": "/tmp", "limits": {}, "inputs": [], "code": False}
    head = json.dumps({**fields, **changes}).encode()
    return len(head).to_bytes(8, "big") + head


def failure(report):
    """Return stage and code of the one line a worker writes when no program starts."""
    line = json.loads(report)
    assert line["event"] == "failed"
    return line["stage"], line["code"], line["message"]


def test_it_becomes_the_program(serve):
    """Arguments, variables, folder and limits are the order's; nothing is told, and no descriptor stays open."""
    program = 'echo "$0|$1|$NAME|$PWD|$(ulimit -n)"; ls /proc/self/fd | wc -l; exit 7'
    code, report, out, err = serve(
        order(
            argv=["sh", "-c", program, "a b", "$(c)"],
            env={"PATH": PATH, "NAME": "v\udcff"},
            limits={"nofile": [64, 64]},
        )
    )
    assert (code, report, err) == (7, b"", b"")
    assert out == b"a b|$(c)|v\xff|/tmp|64\n4\n"


def test_signals_the_interpreter_ignores_are_restored(serve):
    """A program dies by SIGPIPE as it does anywhere else."""
    _, _, out, _ = serve(order(argv=["sh", "-c", "grep SigIgn /proc/self/status"]))
    ignored = int(out.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))


@pytest.mark.parametrize("name", ["no-such-program", "/no/such", "/etc/passwd", ""])
def test_a_missing_program_is_told(serve, name):
    """What cannot be executed is told on the report, with its name."""
    code, report, _, _ = serve(order(argv=[name]))
    stage, kind, message = failure(report)
    assert (code, stage, kind) == (125, "exec", "program_missing")
    assert message.startswith(f"{name}: ")


def test_a_file_without_a_first_line_is_the_shells(serve, tmp_path):
    """As execvp has it."""
    script = tmp_path / "script"
    script.write_text("echo shell $1\n")
    script.chmod(0o755)
    assert serve(order(argv=[str(script), "x"]))[2] == b"shell x\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"cwd": "/no/such"}, "inputs"), ({"limits": {"nofile": [1 << 40, 1 << 40]}}, "limits")],
    ids=["folder", "limit"],
)
def test_what_cannot_be_set_up_is_told(serve, changes, words):
    """A folder that is not there, a limit that cannot be had: no program, and the reason."""
    code, report, out, _ = serve(order(argv=["echo", "ran"], **changes))
    stage, kind, message = failure(report)
    assert (code, stage, kind, out) == (125, "setup", "setup_failed", b"")
    assert message.startswith(words)


def test_an_order_that_never_comes_ends_it(serve):
    """A worker whose host is gone ends without a word."""
    assert serve(b"")[:3] == (125, b"", b"")
    assert serve(order()[:20])[:3] == (125, b"", b"")


def test_code_runs_in_the_waiting_process(serve, tmp_path):
    """Without argv the payload that follows is carried out, and reported as the entry reports it."""
    payload = {
        "version": 1,
        "program": {"path": str(tmp_path / "p/main.py"), "source": "import os, sys\nprint(sys.argv, __name__)\n1 / 0\n"},
        "workdir": "/tmp", "globals": {}, "limits": {}, "verify": "none",
    }  # fmt: skip
    code, report, out, err = serve(order(argv=None, code=True) + json.dumps(payload).encode())
    events = [json.loads(line) for line in report.splitlines()]
    assert [event["event"] for event in events] == ["started", "ended"]
    assert (code, events[1]["exception"]) == (1, "ZeroDivisionError")
    assert out == f"['{tmp_path}/p/main.py'] __main__\n".encode()
    assert b"line 3" in err


def test_stage_one_is_imported_while_it_waits(serve):
    """With `skills` the waiting process has the subsystem's code ready."""
    assert serve(order(), "skills")[:2] == (0, b"")
