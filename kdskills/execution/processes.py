"""Processes of this host: what children inherit from us, and finding and ending those of one sandbox."""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from kdskills.errors import ExecRefused


def require_endings(engine: str) -> None:
    """Refuse to run programs where the kernel discards their exit codes.

    A process started by a parent that ignores SIGCHLD inherits that. Then a failed program
    looks like one that succeeded, and launchers that wait for their children wait for ever.

    Raises:
        ExecRefused: SIGCHLD is ignored in this process.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        raise ExecRefused(
            "this process ignores SIGCHLD, like the program that started it, so exit codes of programs are lost: start kdskills"
            " with SIGCHLD at its default, such as by env --default-signal=CHLD kdskills",
            engine=engine,
        )


def signal_reset() -> Callable[[], None] | None:
    """Return a function that a child calls before it becomes a program, so that the program ignores and blocks no signal.

    A program started under `nohup`, by a shell in the background, or by a host that ignores SIGINT, would otherwise never
    receive these signals. None when there is nothing to reset: then children start the fast way. Engines whose own watcher starts
    the program reset every signal there.
    """
    ignored = [
        number
        for number in signal.valid_signals()
        - {signal.SIGPIPE, signal.SIGXFSZ}  # the interpreter's own: `Popen` resets them
        if signal.getsignal(number) is signal.SIG_IGN
    ]
    if not ignored and not signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return None
    return partial(_reset, ignored)


def _reset(ignored: Collection[int]) -> None:
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def within_own_limits(bounds: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return (soft, hard) *bounds* by short name, none above the hard limits of this process.

    A child inherits our hard limits and only privilege raises them, so the kernel would refuse a wider bound. The
    narrower limit in force keeps the promise too.
    """
    narrowed = {}
    for name, (soft, hard) in bounds.items():
        hard_limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        narrowed[name] = (
            (soft, hard) if hard_limit == resource.RLIM_INFINITY else (min(soft, hard_limit), min(hard, hard_limit))
        )
    return narrowed


def children(pid: int) -> list[int]:
    """Return the direct children of *pid*, oldest first."""
    pids: list[int] = []
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            pids += [int(word) for word in Path(task.path, "children").read_text(encoding="ascii").split()]
    except OSError:
        return pids
    return pids


def descendants(pid: int) -> list[int]:
    """Return everything below *pid*; orphans of a pid namespace are children of its first process."""
    pids: list[int] = []
    queue = children(pid)
    visited: set[int] = set()
    while queue:
        current = queue.pop()
        if current not in visited:
            visited.add(current)
            pids.append(current)
            queue += children(current)
    return pids


def send(pid: int, number: int, namespace: int) -> bool:
    """Send a signal to *pid* if it still belongs to the pid namespace with this inode; a reused pid is left alone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if Path(f"/proc/{pid}/ns/pid").stat().st_ino != namespace:
            return False
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def terminate(init: int, namespace: int) -> None:
    """Send TERM to every process in the sandbox but its first, which ignores it."""
    for pid in descendants(init):
        send(pid, signal.SIGTERM, namespace)


def kill(pidfd: int) -> None:
    """Send KILL to a process by its descriptor; when it is a namespace's first process, all others go with it."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_for_exit(pidfd: int, patience_s: float) -> bool:
    """Wait until the process is dead; False when it still lives after *patience_s*."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(patience_s * 1000))
