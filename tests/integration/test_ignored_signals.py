"""Programs hear every signal, whatever the process they were started by ignores or blocks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HOST = Path(__file__).with_name("ignoring_host.py")
OF_THE_C_LIBRARY = 0b11 << 31
"""Signals 32 and 33: glibc keeps them for its threads, lets nobody set them, and its `posix_spawn` leaves them ignored."""


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("bubblewrap", marks=pytest.mark.needs("bubblewrap")),
        pytest.param("bubblewrap-pool", marks=pytest.mark.needs("bubblewrap")),
        pytest.param("landlock", marks=pytest.mark.needs("landlock")),
        "subprocess",
    ],
)
def test_programs_ignore_and_block_nothing(engine: str) -> None:
    """Under `nohup`, or a host that ignores SIGINT, a program starts with every signal at its default and none blocked."""
    state = tempfile.mkdtemp(prefix="kdskills-signals-", dir="/var/tmp")
    try:
        host = subprocess.run(
            [sys.executable, str(HOST), engine, state], capture_output=True, text=True, check=False, timeout=120
        )
    finally:
        shutil.rmtree(state)
    assert host.returncode == 0, host.stderr
    status, text, error = json.loads(host.stdout.splitlines()[-1])
    masks = {
        name: int(bits, 16) & ~OF_THE_C_LIBRARY for name, bits in (line.split(":\t") for line in text.splitlines())
    }
    assert (status, masks) == ("ok", {"SigBlk": 0, "SigIgn": 0}), error
