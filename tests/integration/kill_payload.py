"""Payload of `test_kill.py`, run behind a wall: does what its mode says, prints `ready`, and stays."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path


def deaf():
    """Ignore every signal that can be ignored."""
    for number in range(1, 65):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)


def stay():
    """Be there for longer than anybody waits."""
    end = time.monotonic() + 600
    while time.monotonic() < end:
        time.sleep(1)
    os._exit(0)


def child(act):
    """Run *act* in a child, or nowhere when no process can be made."""
    try:
        if os.fork() == 0:
            act()
            os._exit(0)
    except OSError:
        return False
    return True


def daemon():
    """Fork twice, leave the session, and hold the pipes."""
    os.setsid()
    child(stay)


def forks():
    """Fork until refused, or often enough where nothing refuses."""
    for _ in range(60):
        if not child(stay):
            return


def disk():
    """Fill every temporary folder."""
    for folder in (".", os.environ.get("TMPDIR", "/tmp"), "/dev/shm" if Path("/work").is_dir() else "."):
        with contextlib.suppress(OSError):
            for number in range(16):
                Path(folder, f"fill{number}").write_bytes(bytes(1 << 20))


def memory():
    """Take most of the memory there is."""
    kept.append(b"x" * (48 << 20))


kept = []
deaf()
mode = sys.argv[2]
{"deaf": lambda: None, "daemon": lambda: child(daemon), "forks": forks, "disk": disk, "memory": memory}[mode]()
sys.stdout.write("ready\n")
sys.stdout.flush()
stay()
