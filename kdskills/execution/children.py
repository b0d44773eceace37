"""What children take over from this process: signals, whether it hears of their end, and its own limits."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Collection, Mapping
from functools import partial

from kdskills.errors import ExecRefused


def require_endings(engine: str) -> None:
    """Refuse to run programs where the kernel throws away how they end.

    A process started by a parent that ignores SIGCHLD ignores it too, without having said so. Then a failed program
    looks like one that succeeded, and launchers that wait for their children wait for ever.

    Raises:
        ExecRefused: SIGCHLD is ignored in this process.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        raise ExecRefused(
            "this process ignores SIGCHLD, as whoever started it did, so nobody is told how programs end: start kdskills"
            " with SIGCHLD at its default, such as by env --default-signal=CHLD kdskills",
            engine=engine,
        )


def signal_reset() -> Callable[[], None] | None:
    """Return what a child calls before it becomes a program, so that the program ignores and blocks no signal.

    A program started under `nohup`, by a shell in the background, or by a host that ignores SIGINT, would otherwise never hear
    these signals. None when there is nothing to reset: then children start the fast way. Engines whose own watcher starts
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


def within_ours(bounds: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return (soft, hard) *bounds* by short name, none above what this process itself may have.

    A child inherits our hard limits and nothing but privilege raises them, so a wider bound would be refused; the
    narrower one that is in force keeps what was promised.
    """
    kept = {}
    for name, (soft, hard) in bounds.items():
        most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
        kept[name] = (soft, hard) if most == resource.RLIM_INFINITY else (min(soft, most), min(hard, most))
    return kept
