"""What children take over from this process: whether it hears of their end, and its own limits (spec execution §3, §5)."""

from __future__ import annotations

import resource
import signal
from collections.abc import Mapping

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
