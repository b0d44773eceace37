"""Nobody but the user reads what kdskills keeps, whatever the umask it is run under."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("every_kind_of_state.py")
KINDS = (
    "work.db", "work.db-wal", "work.db-shm", "sessions.db", "sessions.db-wal", "remote/calls.sqlite3", "remote/calls.sqlite3-wal",
    "remote/spool", "remote/probes/x.json", "artifacts", "projects/acme/brief", "runs", "worker.log", "host", "index",
)  # fmt: skip

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.timeout(300)]


def open_to_others(state: Path) -> dict[str, str]:
    """Return what in a folder others can read, write or pass, with its mode."""
    wide = {}
    for path in (Path(top, name) for top, folders, files in os.walk(state) for name in (".", *folders, *files)):
        with suppress(FileNotFoundError):  # removed since
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode) and mode & 0o077:
                wide[str(path.relative_to(state))] = oct(stat.S_IMODE(mode))
    return wide


@pytest.mark.parametrize("umask", [0o022, 0o000], ids=["umask-022", "umask-000"])
@pytest.mark.parametrize("older", [False, True], ids=["new", "made-wide-before"])
def test_state_is_private(tmp_path: Path, umask: int, older: bool) -> None:
    """Every folder has mode 0700 and every file 0600, also those an older release left open to others."""
    state = tmp_path / "state"
    for _ in range(1 + older):
        program = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, umask=umask,
            env={name: value for name, value in os.environ.items() if not name.startswith("KDSKILLS_")},
        )  # fmt: skip
        assert program.stdin is not None
        assert program.stdout is not None
        ready = program.stdout.readline()
        kinds = [name for name in KINDS if not (state / name).exists()]
        wide = open_to_others(state) if state.exists() else {}
        words = program.communicate("\n")[1]
        assert (ready, kinds) == ("ready\n", []), words
        assert wide == {}
        if older:
            for path in [state, *state.rglob("*")]:
                path.chmod(0o755 if path.is_dir() else 0o644)
