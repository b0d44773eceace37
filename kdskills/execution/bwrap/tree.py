"""Finding and ending the processes of one sandbox, seen from the host."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path


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
