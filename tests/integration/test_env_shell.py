"""`kdskills env shell` on a real terminal: the sandbox of a script, with job control, its window's size and its files."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from kdskills.execution import terminal

pytestmark = pytest.mark.needs("bubblewrap")
PATIENCE_S = 60.0


def test_keys_that_the_sandbox_did_not_take_are_not_for_the_next_program():
    """What was typed, or answered to the sandbox, and read by nobody is gone when the person has the terminal again."""
    master, screen = pty.openpty()
    tty.setraw(screen)
    with terminal._raw(screen):
        os.write(master, b"rm -r x\n")
        assert select.select([screen], [], [], PATIENCE_S)[0]
    assert not select.select([screen], [], [], 0)[0]
    os.close(master)
    os.close(screen)


class Screen:
    """A terminal with `kdskills` on it, as a person has it."""

    def __init__(self, *words: str, cwd: Path) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
        self.before = termios.tcgetattr(slave)
        command = [str(Path(sys.executable).with_name("kdskills")), *words]
        env = {**os.environ, "TERM": "dumb", "KDSKILLS_EXECUTOR": "bubblewrap"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env=env, start_new_session=True
        )
        self.slave = slave

    def type(self, text: str) -> None:
        """Type *text*."""
        os.write(self.master, text.encode())

    def read_until(self, text: str) -> str:
        """Return what is shown up to *text*; fails when that does not come."""
        shown, end = b"", time.monotonic() + PATIENCE_S
        while text.encode() not in shown:
            assert time.monotonic() < end, shown
            if select.select([self.master], [], [], 0.2)[0]:
                shown += os.read(self.master, 4096)
        return shown.decode(errors="replace")

    def close(self) -> None:
        """End what is still there."""
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    """A shell in the sandbox of the only script of a bundle."""
    scripts = tmp_path / "lab/skills/pdf/scripts"
    scripts.mkdir(parents=True)
    (tmp_path / "lab/skills_descriptor.yaml").write_text("custom_skills_root: skills\n")
    (tmp_path / "lab/skills/pdf/SKILL.md").write_text("---\nname: pdf\ndescription: For a test.\n---\nDo it.\n")
    (scripts / "size.py").write_text("import os\nprint('size', os.get_terminal_size().columns, os.getuid())\n")
    (tmp_path / "in.csv").write_text("1")
    shell = Screen("env", "shell", "--file", "in.csv", "--out", "out", "lab", "pdf", cwd=tmp_path)
    yield shell
    shell.close()


def test_a_shell_is_the_sandbox_of_the_script(screen, tmp_path):
    """Skill and files are there, the window has its size, Ctrl-C ends the program and not the shell, new files come back."""
    screen.read_until("$ ")
    screen.type("echo $(ls) $KDSKILLS_SKILL_DIR; python3 $KDSKILLS_SKILL_DIR/scripts/size.py; echo done-$((1 + 1))\n")
    shown = screen.read_until("done-2")
    assert "in.csv /skills/public.pdf" in shown
    assert "size 101 10001" in shown
    screen.type("sh -c 'echo asleep-$((1 + 1)); exec sleep 300'\n")
    screen.read_until("asleep-2")
    screen.type("\x03")
    screen.read_until("$ ")
    screen.type("echo x > new.txt; ls /home /root 2>&1 | head -1; echo still-$((1 + 1))\n")
    screen.read_until("still-2")
    screen.type("exit 5\n")
    assert screen.process.wait(PATIENCE_S) == 5
    assert (tmp_path / "out/new.txt").read_text() == "x\n"
    assert termios.tcgetattr(screen.slave) == screen.before


def test_without_a_terminal_there_is_no_shell(tmp_path):
    """Standard input that is no terminal is refused with a code, before anything is opened."""
    command = [str(Path(sys.executable).with_name("kdskills")), "env", "shell", "lab", "pdf"]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert result.returncode == 2
    assert "terminal_missing" in result.stderr
