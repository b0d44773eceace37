"""What child processes inherit from this one: ignored signals, SIGCHLD and resource limits."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Collection, Mapping
from functools import partial

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
