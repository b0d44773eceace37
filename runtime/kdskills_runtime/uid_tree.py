"""Identities and trees of processes, for launchers: becoming a uid for good, and ending everything that has it."""

from __future__ import annotations

import ctypes
import os
import signal
import time

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from typing import Any

PR_CAPBSET_DROP = 24
LAST_CAPABILITY = 63
LEAST_UID = 1000
PATIENCE_S = 2.0


class Stopped(Exception):
    """The kernel refused a step before the program's start."""

    def __init__(self, stage: str, number: int) -> None:
        super().__init__(stage)
        self.stage = stage
        self.number = number


def give_up(uid: int) -> None:
    """Become *uid* for good, without groups and capabilities. Raises Stopped or OSError when any of them remains.

    From here on nothing can be imported: the interpreter's own files may be closed to *uid*.
    """
    if uid < LEAST_UID:
        raise Stopped("identity", 0)
    for capability in range(LAST_CAPABILITY + 1):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except Stopped:
            break  # beyond the last this kernel knows; what it could not drop, the canary sees
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    with open("/proc/self/status", "rb") as stream:  # noqa: PTH123 - pathlib costs 3 ms
        capabilities = [
            int(line.split()[1], 16) for line in stream if line.startswith((b"CapEff", b"CapPrm", b"CapInh"))
        ]
    if os.getresuid() != (uid, uid, uid) or len(capabilities) != 3 or any(capabilities):
        raise Stopped("identity", 0)


def send_all(uid: int | None, number: int) -> None:
    """Send a signal to every process of *uid* at once, as that uid itself, which may signal nobody else.

    One call to `kill(-1)` cannot be outrun by forking. A helper that was killed by the others is followed by another.
    Without a uid of their own, they are the descendants of this process, which orphans are handed to as well.
    """
    if uid is None:
        for pid in descendants(os.getpid()):
            send(pid, number)
        return
    for _ in range(100):
        pid = os.fork()
        if pid == 0:
            try:
                give_up(uid)
                os.kill(-1, number)
            except (OSError, Stopped):
                os._exit(3)  # no process to signal, or not allowed to become that uid: `end_all` counts the survivors
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            return


def end_all(uid: int | None) -> int:
    """KILL every process of *uid*, or without one every descendant of this process; return how many survive for two seconds."""
    until = time.monotonic() + PATIENCE_S
    while True:
        send_all(uid, signal.SIGKILL)
        _reap_all()
        survivors = len(descendants(os.getpid())) if uid is None else _alive(uid)
        if not survivors or time.monotonic() >= until:
            return survivors
        time.sleep(0.002)


def descendants(pid: int) -> list[int]:
    """Return every living descendant of *pid*."""
    pids, queue = [], [pid]
    while queue:
        for task in os.listdir(f"/proc/{queue[0]}/task") if os.path.isdir(f"/proc/{queue[0]}/task") else ():  # noqa: PTH112, PTH208
            try:
                with open(f"/proc/{queue[0]}/task/{task}/children", "rb") as stream:  # noqa: PTH123
                    queue += [int(word) for word in stream.read().split()]
            except OSError:
                continue
        pids.append(queue.pop(0))
    return pids[1:]


def _alive(uid: int) -> int:
    """Return how many processes have *uid*; zombies waiting for another parent do not count."""
    count = 0
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib costs 3 ms to import
        if name.isdigit():
            try:
                with open(f"/proc/{name}/status", "rb") as stream:  # noqa: PTH123 - pathlib costs 3 ms to import
                    fields = dict(line.split(b":", 1) for line in stream if b":" in line)
            except OSError:
                continue
            dead = fields.get(b"State", b"").split()[:1] in ([b"Z"], [b"X"])
            count += not dead and str(uid).encode() in fields.get(b"Uid", b"").split()[:3]
    return count


def _reap_all() -> None:
    """Reap whatever is dead."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def prctl(option: int, value: int, pointer: bytes | None = None) -> None:
    """Set a property of this process. Raises Stopped."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), pointer, None, None):
        raise Stopped("prctl", ctypes.get_errno())


def syscall(stage: str, number: int, *arguments: Any) -> int:
    """Make a system call. Raises Stopped."""
    result = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise Stopped(stage, ctypes.get_errno())
    return int(result)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
