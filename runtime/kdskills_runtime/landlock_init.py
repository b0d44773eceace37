"""Start a program under Landlock and a uid of its own, watch its whole tree, and end it.

::

    python3 -I landlock_init.py ORDER_FD STATUS_FD CONTROL_FD     run one order
    python3 -I landlock_init.py --end UID                         end everything that has UID

Started by the host as root, before the wall: it carries the wall to the program. The order is one JSON object, read to
the end of ORDER_FD:

    argv, env, cwd      the program; text is UTF-8 with surrogateescape
    uid                 the uid and gid nobody else has; null keeps ours, and the tree is what descends from us
    limits              {rlimit: [soft, hard]}
    ruleset             hex of struct landlock_ruleset_attr; null for a program that brings a wall of its own
    rules               [[path, rights]]
    proc                [[name, rights]] of files below the program's own folder in /proc
    seccomp             hex of the filter, or null
    keep                descriptors the program inherits beside 0, 1 and 2
    cgroups             cgroup.procs files the program writes itself into
    guard               [[folder, bytes]]: the run is ended when a folder grows beyond

JSON lines on STATUS_FD: {"event": "failed", "stage", "errno"} when no program was started, or {"event": "started"} and
then {"event": "ended", "code" | "signal", "over": folder or null, "left": number of processes that would not die}.

One byte on CONTROL_FD is a signal number for the program; 0 is TERM to the whole tree, 255 KILL. Its end means that
the host is gone, which ends the tree too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time

sys.path.append(__file__.rpartition("/")[0].rpartition("/")[0])  # started as a file, maybe of a plain folder

from kdskills_runtime import processes
from kdskills_runtime.processes import call, encoded, end_all, prctl, reaped, send, send_all

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from typing import Any

SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH = 1
TERM_ALL, KILL_ALL = 0, 255
GUARD_S = 0.25


def main(argv: list[str]) -> int:
    """Run one order, or end the processes of a uid."""
    if len(argv) == 2 and argv[0] == "--end":
        return 1 if end_all(int(argv[1])) else 0
    order_fd, status_fd, control_fd = map(int, argv)
    with open(order_fd, "rb") as stream:  # noqa: PTH123 - a descriptor, not a path
        order = json.loads(stream.read())
    prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the host handles signals of a terminal
    return _Watch(order, status_fd, control_fd).run()


class _Watch:
    """One program, from its start until its last process is gone."""

    def __init__(self, order: dict[str, Any], status_fd: int, control_fd: int) -> None:
        self._order, self._status, self._control = order, status_fd, control_fd
        self._guard: subprocess.Popen[bytes] | None = None
        self._look_again = time.monotonic() + GUARD_S
        self._over: str | None = None

    def run(self) -> int:
        """Start the program, watch it, end its whole tree and report."""
        trouble, theirs = os.pipe()
        wake = processes.wake_pipe()
        signal.signal(signal.SIGCHLD, processes.NO_HANDLER)
        try:
            ruleset = make_ruleset(self._order)
        except OSError as error:
            return self._tell({"event": "failed", "stage": "landlock", "errno": error.errno or 0})
        pid = os.fork()
        if pid == 0:
            _become(self._order, ruleset, theirs)
        proc_fds = []
        for name, _ in self._order["proc"]:  # a Landlock rule about such a file lasts as long as its inode is kept
            with contextlib.suppress(OSError):
                proc_fds.append(os.open(f"/proc/{pid}/{name}", os.O_PATH | os.O_CLOEXEC))
        if ruleset is not None:
            os.close(ruleset)
        os.close(theirs)
        # Our copies of the program's descriptors are closed, so that the host sees when the program closes them.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        for fd in self._order["keep"]:
            os.close(fd)
        words = os.read(trouble, 4096)
        if words:
            end_all(self._order["uid"])
            stage, number, error_text = words.decode("utf-8", "replace").split(":", 2)
            return self._tell({"event": "failed", "stage": stage, "errno": int(number), "found": error_text})
        self._tell({"event": "started"})
        status = self._until_the_end(pid, wake)
        survivors = end_all(self._order["uid"])
        for fd in proc_fds:
            os.close(fd)
        if self._guard is not None:
            self._guard.kill()
        end: dict[str, Any] = {"event": "ended", "over": self._over, "left": survivors}
        if os.WIFSIGNALED(status):
            end["signal"] = os.WTERMSIG(status)
        else:
            end["code"] = os.WEXITSTATUS(status)
        return self._tell(end)

    def _tell(self, line: dict[str, Any]) -> int:
        """Write a line about the run; returns 1 when the host is gone."""
        try:
            os.write(self._status, json.dumps(line).encode() + b"\n")
        except BrokenPipeError:
            return 1
        return 0

    def _until_the_end(self, pid: int, wake: int) -> int:
        """Reap children, carry out commands and measure folders until the program ends; return its wait status."""
        readers = [wake, self._control]
        while True:
            ready, _, _ = select.select(readers, [], [], GUARD_S)
            if wake in ready:
                os.read(wake, 4096)
            if self._control in ready and not self._obey(pid):
                readers.remove(self._control)
            statuses = dict(reaped())
            if self._guard is not None and self._guard.pid in statuses:
                self._judge(self._guard, statuses[self._guard.pid])
            if pid in statuses:
                return statuses[pid]
            self._look()

    def _obey(self, pid: int) -> bool:
        """Carry out the host's commands; False when the host is gone."""
        words = os.read(self._control, 64)
        for word in words:
            if word in (TERM_ALL, KILL_ALL):
                send_all(self._order["uid"], signal.SIGTERM if word == TERM_ALL else signal.SIGKILL)
            else:
                send(pid, word)
        if not words:
            send_all(self._order["uid"], signal.SIGKILL)
        return bool(words)

    def _look(self) -> None:
        """Measure the guarded folders from time to time, with `du`, which copes with trees of any depth."""
        if self._guard is None and self._order["guard"] and time.monotonic() >= self._look_again:
            self._guard_started = time.monotonic()
            command = ["du", "-sxB1", "--", *(folder for folder, _ in self._order["guard"])]
            self._guard = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def _judge(self, guard: subprocess.Popen[bytes], status: int) -> None:
        """End the run when a folder has outgrown its bound."""
        guard.returncode = os.waitstatus_to_exitcode(status)
        assert guard.stdout is not None
        with guard.stdout as stream:
            lines = stream.read().splitlines()
        self._guard = None
        took = time.monotonic() - self._guard_started
        self._look_again = time.monotonic() + max(GUARD_S, 4 * took)
        for line, (folder, max_bytes) in zip(lines, self._order["guard"], strict=False):
            if int(line.split(b"\t")[0]) > max_bytes and self._over is None:
                self._over = folder
                send_all(self._order["uid"], signal.SIGKILL)


def make_ruleset(order: dict[str, Any]) -> int | None:
    """Return a ruleset's descriptor. Raises OSError."""
    if order["ruleset"] is None:
        return None
    attr = bytes.fromhex(order["ruleset"])
    ruleset = call("syscall", ctypes.c_long(SYS_CREATE_RULESET), attr, ctypes.c_size_t(len(attr)), ctypes.c_uint32(0))
    for path, rights in order["rules"]:
        _allow(ruleset, path, rights)
    return ruleset


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Add a rule for *path*; a path that does not exist needs none."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        beneath = rights.to_bytes(8, "little") + fd.to_bytes(4, "little", signed=True)
        kind, no_flags = ctypes.c_int(RULE_PATH_BENEATH), ctypes.c_uint32(0)
        call("syscall", ctypes.c_long(SYS_ADD_RULE), ctypes.c_int(ruleset), kind, beneath, no_flags)
    finally:
        os.close(fd)


def _become(order: dict[str, Any], ruleset: int | None, trouble: int) -> None:
    """In the child: give up everything the program must not have, and become the program. Never returns."""
    stage = "setup"
    try:
        os.setsid()
        for name in signal.valid_signals():
            if name not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(name, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(0o022)
        for path in order["cgroups"]:
            with open(path, "wb", buffering=0) as stream:  # noqa: PTH123 - pathlib costs 3 ms to import
                stream.write(b"0")
        if ruleset is not None:
            for name, rights in order["proc"]:
                _allow(ruleset, f"/proc/{os.getpid()}/{name}", rights)
        for fd in order["keep"]:
            os.set_inheritable(fd, True)
        stage = "limits"
        for name, bound in order["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), tuple(bound))
        stage = "identity"
        if order["uid"] is not None:
            processes.give_up(order["uid"])
        prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
        stage = "workdir"
        os.chdir(encoded(order["cwd"]))
        stage = "landlock"
        prctl(processes.PR_SET_NO_NEW_PRIVS, 1)
        if ruleset is not None:
            call("syscall", ctypes.c_long(SYS_RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint32(0))
        stage = "seccomp"
        if order["seccomp"] is not None:
            processes.set_filter(bytes.fromhex(order["seccomp"]))
        stage = "exec"
        low = 0
        for fd in sorted({0, 1, 2, trouble, *order["keep"]}):
            if low < fd:  # an empty range, as close_range(2) counts, ends at the last descriptor of all
                os.closerange(low, fd)
            low = fd + 1
        os.closerange(low, 1 << 20)
        env = {encoded(name): encoded(value) for name, value in order["env"].items()}
        argv = [encoded(word) for word in order["argv"]]
        os.execvpe(argv[0], argv, env)  # noqa: S606 - argv by execve is the contract
    except BaseException as error:  # noqa: BLE001 - whatever it was, no program was started and the host must know
        os.write(trouble, f"{stage}:{getattr(error, 'errno', None) or 0}:{error!r}".encode())
    finally:
        os._exit(127)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
