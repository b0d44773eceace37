"""The first program of a container: takes the work order, runs the program, ends everything, sends the outputs.

::

    host  -> stdin    8 bytes: length; the order, JSON; then the bytes it announces: input files, standard input, payload
    stdout, stderr    the program's own, live
    init  -> stdout   after every other process is dead: the order's nonce, then JSON lines, some followed by bytes

Order: {"nonce": hex, "argv", "env": {name: value}, "cwd", "wall", "grace", "limits": {rlimit: number}, "inputs":
[[path, size]], "executable": [path], "stdin": size, "payload": size or null, "outputs": [glob], "max_files",
"max_bytes", "network": null or [socket, port], "seccomp": absent or {machine: hex}}. Text is UTF-8 with surrogateescape.
`{payload_fd}` and `{report_fd}` in argv become descriptor numbers.

Answer: {"kind": "end", "reason": "exited" | "timeout", "code"?, "signal"?, "duration", "errno"?, "stage"?, "oom"},
{"kind": "report", "size"} + bytes, {"kind": "file", "path", "mode", "size"} + bytes,
{"kind": "problem", "path", "code", "message"}, {"kind": "done"}.

The program runs under the same uid. It cannot forge an answer: the nonce is known to this process alone, whose memory
other processes of its uid cannot read (it is not dumpable), and it is written when no other process is left. A program
that kills this process ends its container, and the host finds no answer.

Where orders come by a command of their own, as in a pod, `container_init hold` is the container's first process until it is
told to end from outside, and `container_init signal NUMBER` hands a signal to the one that serves an order; KILL is for everything.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time

from kdskills_runtime import egress, processes
from kdskills_runtime.outbox import exactly, place_inputs, send_outputs
from kdskills_runtime.processes import FORWARDED, NO_HANDLER, memory_file, reaped, send
from kdskills_runtime.stage0 import LIMITS

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from typing import Any

MAX_REPORT = 2 * 1024 * 1024
CLOSED_S = 10.0
HOLDS = b"container_init\0hold\0"
"""How the words end by which the process was started that holds a container."""
OOM_COUNTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Where a container reads about itself, with cgroups of version 2 and 1."""


def main(words: list[str]) -> int:
    """Serve one order, or what *words* ask for."""
    if words[:1] == ["hold"]:
        return hold()
    if words[:1] == ["signal"]:
        number = int(words[1])
        pids = [-1] if number == signal.SIGKILL else serving()[:1]
        return 0 if any(send(pid, number) for pid in pids) else 1
    alone = b"container_init" in command(1)  # else every process this one may KILL would be somebody's
    if os.getuid() == 0 or not alone:
        sys.stderr.write("container_init: not the first program of a container; nothing was run\n")
        return 125
    try:
        processes.prctl(processes.PR_SET_DUMPABLE, 0)
        processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
    except OSError as error:
        sys.stderr.write(f"container_init: {error.strerror}\n")
        return 125
    if not first_is_closed():
        sys.stderr.write("container_init: the container's first process can be read by others; nothing was run\n")
        return 125
    order = json.loads(exactly(0, int.from_bytes(exactly(0, 8), "big")))
    place_inputs(lambda size: exactly(0, size), order["inputs"], order.get("executable", []))
    stdin_fd = memory_file(exactly(0, order["stdin"]))
    payload_fd = None if order["payload"] is None else memory_file(exactly(0, order["payload"]))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if order["network"] is not None:
        egress.start_helper_at(*order["network"])
    end, report = _Program(order, stdin_fd, payload_fd).run()
    with open(1, "wb", closefd=False) as out:
        out.write(bytes.fromhex(order["nonce"]))
        out.write(json.dumps({"kind": "end", **end}).encode() + b"\n")
        if report is not None:
            out.write(json.dumps({"kind": "report", "size": len(report)}).encode() + b"\n" + report)
        send_outputs(out, "/work", order["outputs"], order["max_files"], order["max_bytes"])
        out.write(b'{"kind": "done"}\n')
    return 0


def hold() -> int:
    """Be the first process of a container until TERM comes from outside; then end the others, politely at first."""
    processes.prctl(processes.PR_SET_DUMPABLE, 0)
    watched = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    while True:
        arrived = signal.sigwaitinfo(watched)
        dict(reaped())
        if arrived.si_signo == signal.SIGTERM and arrived.si_pid == 0:  # a program's own has a process id here
            break
    if send(-1, signal.SIGTERM):
        time.sleep(0.5)
    return 0


def first_is_closed() -> bool:
    """Wait until no program of this uid can read the process that holds the container; False when that takes too long.

    It was started a moment before us, and closes itself first of all. Any other first process is not ours to wait for.
    """
    end = time.monotonic() + CLOSED_S
    while command(1).endswith(HOLDS):
        try:
            os.close(os.open("/proc/1/environ", os.O_RDONLY))
        except OSError:
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.002)
    return True


def serving() -> list[int]:
    """Return the processes that serve an order; the first is no child that is about to become a program."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - pathlib costs 3 ms to import
    return [pid for pid in sorted(pids) if command(pid).removesuffix(b"\0").endswith(b"container_init")]


def command(pid: int) -> bytes:
    """Return the words a process was started by; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - pathlib costs 3 ms to import
            return file.read()
    except OSError:
        return b""


def oom_kills() -> int:
    """Return how many processes of this container the kernel killed because memory ran out, as far as that is told here."""
    for path in OOM_COUNTS:
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - pathlib costs 3 ms to import
                return sum(int(line.split()[1]) for line in file if line.startswith(b"oom_kill "))
        except OSError:
            continue
    return 0


class _Program:
    def __init__(self, order: dict[str, Any], stdin_fd: int, payload_fd: int | None) -> None:
        self._order, self._stdin_fd, self._payload_fd = order, stdin_fd, payload_fd
        self._report = bytearray()

    def run(self) -> tuple[dict[str, Any], bytes | None]:
        """Return how the program ended, and the report of generated code."""
        trouble_read, trouble_write = os.pipe()
        report_read, report_write = os.pipe()
        wake_read = processes.wake_pipe()
        signal.signal(signal.SIGCHLD, NO_HANDLER)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            order, payload = self._order, self._payload_fd
            processes.become(order, self._stdin_fd, payload, report_write, trouble_write, self._prepare)
        for forwarded in FORWARDED:
            signal.signal(forwarded, NO_HANDLER)
        os.close(trouble_write)
        os.close(report_write)
        trouble = os.read(trouble_read, 4096)
        status, reason = self._watch(pid, report_read, wake_read, started + self._order["wall"])
        duration = time.monotonic() - started
        while send(-1, signal.SIGKILL):  # until no other process of this container but its pid 1 is left to get it
            dict(reaped())
            time.sleep(0.001)
        dict(reaped())
        while self._read_report(report_read):
            pass  # the end comes because every writer is dead
        end: dict[str, Any] = {"reason": reason, "duration": duration, "oom": oom_kills() > 0}
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
                send(-1, signal.SIGTERM)
                continue
            ready, _, _ = select.select(readers, [], [], seconds_left)
            if wake in ready:
                for number in set(os.read(wake, 4096)) & FORWARDED:
                    send(pid, number)
            if report in ready and not self._read_report(report):
                readers.remove(report)
            status = dict(reaped()).get(pid)
        return status, reason

    def _read_report(self, fd: int) -> bool:
        """Read one piece of the report, of which only the beginning is kept; False at its end."""
        piece = os.read(fd, 65536)
        self._report += piece[: MAX_REPORT - len(self._report)]
        return bool(piece)

    def _prepare(self) -> None:
        signal.set_wakeup_fd(-1)
        for name, bound in self._order["limits"].items():
            resource.setrlimit(LIMITS[name], tuple(bound))
        filters = self._order.get("seccomp")
        if filters is not None:  # of this machine's kind; with none, setting it fails, and no program runs
            processes.prctl(processes.PR_SET_NO_NEW_PRIVS, 1)
            processes.set_filter(bytes.fromhex(filters.get(os.uname().machine, "")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
