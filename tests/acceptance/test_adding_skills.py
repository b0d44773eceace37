"""`kdskills add` at a terminal, where a person is asked, stops in the middle, or has no room left on the disk."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.supply.conftest import write_skill

PROGRAM = str(Path(sys.executable).parent / "kdskills")
QUESTION = "into the bundle?"
PATIENCE_S = 60.0


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A folder with skills of others, a bundle with one of its own, and a place for state."""
    write_skill(tmp_path / "theirs/brief", "brief", "\x1b[2J\u202eRead, then write.")
    write_skill(tmp_path / "mine/skills/own/notes", "notes")
    return tmp_path


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, and every other name."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def asked(top: Path, answer: bytes, *words: str) -> tuple[str, int]:
    """Run a command at a terminal that is its own, type *answer* once it asks, and return what it said and its exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        variables = {
            "TERM": "dumb",
            "KDSKILLS_STATE_DIR": str(top / "state"),
            "KDSKILLS_ENVIRONMENT_CACHE_DIR": str(top / "cache"),
        }
        os.chdir(top)
        os.execve(PROGRAM, [PROGRAM, *words, "--bundle", "mine"], {**os.environ, **variables})
    said, until, typed = b"", time.monotonic() + PATIENCE_S, False
    while time.monotonic() < until:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            said += os.read(terminal, 65536)
        except OSError:  # nobody holds the other end any more
            break
        if not typed and QUESTION.encode() in said:
            os.write(terminal, answer)
            typed = True
    else:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    return said.decode(), code


@pytest.mark.parametrize("answer", [b"n\n", b"\x03", b"\x04"], ids=["no", "Ctrl-C", "Ctrl-D"])
def test_without_a_yes_nothing_changes(top: Path, answer: bytes) -> None:
    """After a no, Ctrl-C or Ctrl-D at the question the bundle is as before; what was shown draws nothing on the terminal."""
    before = tree(top / "mine")
    said, code = asked(top, answer, "add", "theirs", "--pin")
    assert said.count(QUESTION) == 1
    assert code not in {0, -signal.SIGKILL}
    assert "Traceback" not in said
    assert not [mark for mark in ("\x1b[2J", "\u202e") if mark in said]
    assert tree(top / "mine") == before


def test_a_yes_brings_what_was_shown(top: Path) -> None:
    """After a yes the skill and its lock are there, and an update asks again, showing the difference."""
    said, code = asked(top, b"y\n", "add", "theirs", "--pin")
    assert (code, "public/brief new" in said, "the bundle and its lock are changed" in said) == (0, True, True)
    assert 'skill."public/brief"' in (top / "mine/kdskills.lock").read_text()
    write_skill(top / "theirs/brief", "brief", "Read twice.")
    before = tree(top / "mine")
    said, code = asked(top, b"n\n", "add", "theirs", "--pin")
    assert (code != 0, "+Read twice." in said) == (True, True)
    assert tree(top / "mine") == before


@pytest.fixture
def small_disk(top: Path) -> Iterator[Path]:
    """The bundle on a disk of one MiB, which is nearly full."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(top / "mine")]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no disk can be mounted here: it needs root and the right to mount")
    write_skill(top / "mine/skills/own/notes", "notes")
    (top / "mine/ballast").write_bytes(bytes(900_000))
    yield top / "mine"
    subprocess.run(["umount", "-l", str(top / "mine")], check=True)


def test_a_full_disk_changes_nothing(top: Path, small_disk: Path) -> None:
    """Where the disk ends in the middle of a skill, the code says so, the bundle is as before, and with room it comes."""
    write_skill(top / "theirs/brief", "brief", noise__bin="x" * 300_000)
    before = tree(small_disk)
    said, code = asked(top, b"y\n", "add", "theirs", "--pin")
    assert (code != 0, "supply_no_space" in said, "Traceback" in said) == (True, True, False)
    assert tree(small_disk) == before
    (small_disk / "ballast").unlink()
    assert asked(top, b"y\n", "add", "theirs", "--pin")[1] == 0
    assert (small_disk / "skills/public/brief/noise.bin").stat().st_size == 300_000
