"""What this process has to let its children tell it: how they ended (spec execution §5)."""

from __future__ import annotations

import signal

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
