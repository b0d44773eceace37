"""Processes of this host: what children get from us, and finding and ending those of one sandbox."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from kdskills.errors import ExecRefused
from kdskills.execution.request import Limits


def require_calls(engine: str) -> None:
    """Refuse to run programs of this host where calls are missing that only Linux has. Raises ExecRefused."""
    missing = [name for name in ("pidfd_open", "pipe2") if not hasattr(os, name)]
    if find_spec("fcntl") is None:
        missing.append("flock")
    if missing:
        raise ExecRefused(
            f"{engine} needs calls of Linux that this system has not ({', '.join(missing)}): Docker is the wall here, with"
            " executor = docker",
            engine=engine,
        )


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

    def reset() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return reset


@dataclass(slots=True)
class Pipes:
    """The pipes of one run by name: our ends, and the program's until it has them."""

    ours: dict[str, int] = field(default_factory=dict)
    theirs: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make(cls, read: Sequence[str], write: Sequence[str]) -> Pipes:
        """Make a pipe for every name: we read the first, and write the others."""
        pipes = cls()
        for name in (*read, *write):
            reading, writing = os.pipe2(os.O_CLOEXEC)
            pipes.ours[name], pipes.theirs[name] = (reading, writing) if name in read else (writing, reading)
        return pipes

    def take(self, name: str) -> int:
        """Return one of our ends; the caller closes it."""
        return self.ours.pop(name)

    def close_theirs(self) -> None:
        """Close the program's ends in this process."""
        while self.theirs:
            os.close(self.theirs.popitem()[1])

    def close(self) -> None:
        """Close every end that is still open here."""
        self.close_theirs()
        while self.ours:
            os.close(self.ours.popitem()[1])


def start_program(
    argv: Sequence[str],
    pipes: Pipes,
    *,
    cwd: str,
    env: Mapping[str, str] | Mapping[bytes, bytes],
    fds: Sequence[int] = (),
    reset: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, and close its ends of *pipes* here once it has them. Raises OSError. It
    inherits *fds* beside its standard streams; with *reset* signals are reset, which else a watcher of ours does.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=pipes.theirs["stdin"],
        stdout=pipes.theirs["stdout"],
        stderr=pipes.theirs["stderr"],
        cwd=cwd,
        env=env,
        pass_fds=fds,
        start_new_session=True,
        umask=0o022,
        preexec_fn=signal_reset() if reset else None,  # noqa: PLW1509 - two system calls and no lock, and only where there is something to reset
    )
    pipes.close_theirs()
    return process


def rlimits(limits: Limits, *, memory: bool = False) -> dict[str, tuple[int, int]]:
    """Return the (soft, hard) rlimits of a program by their short names; *memory* adds the bound on address space."""
    cpu = math.ceil(limits.wall_s if limits.cpu_s is None else limits.cpu_s)
    bounds = {
        "core": (0, 0),
        "nofile": (limits.nofile, limits.nofile),
        "fsize": (limits.fsize, limits.fsize),
        "cpu": (cpu, cpu + 1),  # the soft limit is SIGXCPU, which says what happened; the hard one kills
    }
    return {**bounds, "as": (limits.memory, limits.memory)} if memory else bounds


def within_own_limits(bounds: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return (soft, hard) *bounds* by short name, none above the hard limits of this process.

    A child inherits our hard limits and only privilege raises them, so the kernel would refuse a wider bound. The
    narrower limit in force keeps the promise too.
    """
    narrowed = {}
    for name, (soft, hard) in bounds.items():
        own = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        narrowed[name] = (soft, hard) if own == resource.RLIM_INFINITY else (min(soft, own), min(hard, own))
    return narrowed


def children(pid: int) -> list[int]:
    """Return the direct children of *pid*, oldest first."""
    pids: list[int] = []
    with suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            pids += [int(word) for word in Path(task.path, "children").read_text(encoding="ascii").split()]
    return pids


def descendants(pid: int) -> list[int]:
    """Return everything below *pid*; orphans of a pid namespace are children of its first process."""
    pids: dict[int, None] = {}
    queue = children(pid)
    while queue:
        if (current := queue.pop()) not in pids:
            pids[current] = None
            queue += children(current)
    return list(pids)


def send(pid: int, number: int, namespace: int) -> bool:
    """Send a signal to *pid* if it still belongs to the pid namespace with this inode; a reused pid is left alone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        ours = Path(f"/proc/{pid}/ns/pid").stat().st_ino == namespace
        if ours:
            signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return ours


def kill(pidfd: int) -> None:
    """Send KILL to a process by its descriptor; when it is a namespace's first process, all others go with it."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
