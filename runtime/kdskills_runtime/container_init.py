"""The first program of a container: takes the work order, runs the program, ends everything, sends the outputs.

::

    host  -> stdin    8 bytes: length; the order, JSON; then the bytes it announces: input files, standard input, payload
    stdout, stderr    the program's own, live
    init  -> stdout   after every other process is dead: the order's nonce, then JSON lines, some followed by bytes

Order: {"nonce": hex, "argv", "env": {name: value}, "cwd", "wall", "grace", "limits": {rlimit: number}, "inputs":
[[path, size]], "executable": [path], "stdin": size, "payload": size or null, "outputs": [glob], "max_files",
"max_bytes"}. Text is UTF-8 with surrogateescape. `{payload_fd}` and `{report_fd}` in argv become descriptor numbers.

Answer: {"kind": "end", "reason": "exited" | "timeout", "code"?, "signal"?, "duration", "errno"?, "stage"?},
{"kind": "report", "size"} + bytes, {"kind": "file", "path", "mode", "size"} + bytes,
{"kind": "problem", "path", "code", "message"}, {"kind": "done"}.

The program runs under the same uid. It cannot forge an answer: the nonce is known to this process alone, whose memory
other processes of its uid cannot read (it is not dumpable), and it is written when no other process is left. A program
that kills this process ends its container, and the host finds no answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time

from kdskills_runtime.outbox import send_outputs
from kdskills_runtime.receiving import exactly, place_inputs
from kdskills_runtime.stage0 import LIMITS

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from typing import Any

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
MAX_REPORT = 2 * 1024 * 1024
#: Signals arrive through the wakeup descriptor. Their handler is a C function that does nothing: a handler in Python
#: could be interrupted by the next signal, and a flood would nest handlers until the stack is full.
NO_HANDLER = dict[int, object]().get
FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def main() -> int:
    """Serve one order."""
    if os.getuid() == 0 or not _alone():
        sys.stderr.write("container_init: not the first program of a container; nothing was run\n")
        return 125
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) or libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.stderr.write(f"container_init: prctl: {os.strerror(ctypes.get_errno())}\n")
        return 125
    order = json.loads(exactly(0, int.from_bytes(exactly(0, 8), "big")))
    place_inputs(0, order["inputs"], order.get("executable", []))
    stdin_fd = _memory_file("stdin", order["stdin"])
    payload_fd = None if order["payload"] is None else _memory_file("payload", order["payload"])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    end, report = _Program(order, stdin_fd, payload_fd).run()
    with open(1, "wb", closefd=False) as out:
        out.write(bytes.fromhex(order["nonce"]))
        out.write(json.dumps({"kind": "end", **end}).encode() + b"\n")
        if report is not None:
            out.write(json.dumps({"kind": "report", "size": len(report)}).encode() + b"\n" + report)
        send_outputs(out, "/work", order["outputs"], order["max_files"], order["max_bytes"])
        out.write(b'{"kind": "done"}\n')
    return 0


def _alone() -> bool:
    """Whether pid 1 was started to run this program, which will KILL every process it may."""
    with open("/proc/1/cmdline", "rb") as file:  # noqa: PTH123 - pathlib costs 3 ms to import
        return b"container_init.py" in file.read()


def _memory_file(name: str, size: int) -> int:
    """Return a descriptor of a file in memory holding the next *size* bytes of the order, at its beginning."""
    fd = os.memfd_create(name)
    with open(fd, "wb", closefd=False) as file:
        file.write(exactly(0, size))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


class _Program:
    """The program, from its start until its last process is gone."""

    def __init__(self, order: dict[str, Any], stdin_fd: int, payload_fd: int | None) -> None:
        self._order = order
        self._stdin_fd = stdin_fd
        self._payload_fd = payload_fd
        self._report = bytearray()

    def run(self) -> tuple[dict[str, Any], bytes | None]:
        """Return how the program ended, and the report of generated code."""
        trouble_read, trouble_write = os.pipe()
        report_read, report_write = os.pipe()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, NO_HANDLER)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._become(trouble_write, report_write)
        for forwarded in FORWARDED:
            signal.signal(forwarded, NO_HANDLER)
        os.close(trouble_write)
        os.close(report_write)
        trouble = os.read(trouble_read, 4096)
        status, reason = self._watch(pid, report_read, wake_read, started + self._order["wall"])
        duration = time.monotonic() - started
        _end_everything()
        self._drain(report_read)
        end: dict[str, Any] = {"reason": reason, "duration": duration}
        if trouble:
            stage, _, number = trouble.decode().partition(":")
            end.update(stage=stage, errno=int(number))
        elif status is not None and os.WIFSIGNALED(status):
            end["signal"] = os.WTERMSIG(status)
        elif status is not None:
            end["code"] = os.WEXITSTATUS(status)
        return end, None if self._payload_fd is None else bytes(self._report)

    def _watch(self, pid: int, report: int, wake: int, deadline: float) -> tuple[int | None, str]:
        """Read the report and reap children until the program ends or its time is over; then TERM and a grace."""
        reason, status, readers = "exited", None, [report, wake]
        while status is None:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                if reason == "timeout":
                    break
                reason, deadline = "timeout", time.monotonic() + self._order["grace"]
                _send(-1, signal.SIGTERM)
                continue
            ready, _, _ = select.select(readers, [], [], seconds_left)
            if wake in ready:
                for number in set(os.read(wake, 4096)) & FORWARDED:
                    _send(pid, number)
            if report in ready and not self._read_report(report):
                readers.remove(report)
            status = _reap(pid)
        return status, reason

    def _read_report(self, fd: int) -> bool:
        """Read one piece of the report, of which only the beginning is kept; False at its end."""
        piece = os.read(fd, 65536)
        self._report += piece[: MAX_REPORT - len(self._report)]
        return bool(piece)

    def _drain(self, fd: int) -> None:
        """Read the report to its end, which comes because every writer is dead."""
        while self._read_report(fd):
            pass

    def _become(self, trouble: int, report: int) -> None:
        """In the child: put everything in place and become the program. Never returns."""
        stage = "limits"
        try:
            os.setsid()
            for restored in (*FORWARDED, signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(restored, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            for name, bound in self._order["limits"].items():
                resource.setrlimit(LIMITS[name], tuple(bound))
            os.dup2(self._stdin_fd, 0)
            argv = [_bytes(word) for word in self._order["argv"]]
            if self._payload_fd is not None:
                os.set_inheritable(self._payload_fd, True)
                os.set_inheritable(report, True)
                numbers = {b"{payload_fd}": self._payload_fd, b"{report_fd}": report}
                argv = [str(numbers[word]).encode() if word in numbers else word for word in argv]
            stage, cwd = "workdir", _bytes(self._order["cwd"])
            if cwd.startswith(b"/work/"):
                os.makedirs(cwd, exist_ok=True)  # noqa: PTH103 - pathlib costs 3 ms to import
            os.chdir(cwd)
            stage = "exec"
            env = {_bytes(name): _bytes(value) for name, value in self._order["env"].items()}
            os.execvpe(argv[0], argv, env)  # noqa: S606 - argv by execve is the contract
        except (OSError, ValueError) as error:
            os.write(trouble, f"{stage}:{getattr(error, 'errno', 0) or 0}".encode())
        finally:
            os._exit(127)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _send(pid: int, number: int) -> bool:
    """Send a signal; False when there is no process to receive it."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _reap(pid: int) -> int | None:
    """Reap every dead child; return the status of *pid* when it is among them."""
    status = None
    while True:
        try:
            child, child_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if child == 0:
            return status
        if child == pid:
            status = child_status


def _end_everything() -> None:
    """KILL every other process of this container but its pid 1, until none is left to get the signal."""
    while _send(-1, signal.SIGKILL):
        _reap(0)
        time.sleep(0.001)
    _reap(0)


if __name__ == "__main__":
    sys.exit(main())
