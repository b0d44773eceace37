"""A machine for the local E2B server: a sandbox of namespaces on this host that commands enter and leave.

It is a stand-in for a virtual machine, made for tests: commands run as root inside, so it needs root outside, and it is
no wall against hostile programs. Files, processes and their ids are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from kdskills.execution.rootfs import Rootfs

CHUNK: Final = 32 * 1024
ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
USER: Final = 1000
CGROUPS: Final = Path("/sys/fs/cgroup")

Event = tuple[str, bytes | int]
"""`("stdout", bytes)`, `("stderr", bytes)` and at last `("end", exit code)`."""


class Vm:
    """One machine.

    Args:
        tree: What it sees as its read-only `/`.
        memory: Whether its processes may make cgroups, as root of a real machine can.
    """

    def __init__(self, tree: Rootfs, *, memory: bool = True) -> None:
        self._top = Path(tempfile.mkdtemp(prefix="kdskills-vm-"))
        disk = self._top / "opt"
        disk.mkdir()
        self._cgroups = Cgroups(self._top.name) if memory else None
        info_read, info_write = os.pipe()
        argv = [
            *("bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"),
            *("--cap-add", "ALL", "--info-fd", str(info_write), "--clearenv", "--hostname", "machine"),
            *("--ro-bind", str(tree.path), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/sys"),
            *(self._cgroups.words() if self._cgroups is not None else ()),
            *("--tmpfs", "/tmp", "--tmpfs", "/work", "--tmpfs", "/skills", "--tmpfs", "/env", "--tmpfs", "/home"),  # noqa: S108 - inside
            *("--bind", str(disk), "/opt", "/bin/sh", "-c", "echo up; exec sleep infinity >&2"),
        ]
        self._bwrap = subprocess.Popen(
            argv, pass_fds=(info_write,), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        os.close(info_write)
        with open(info_read, "rb") as stream:  # noqa: PTH123 - a descriptor, not a path
            said = stream.read()
        self._init = int(json.loads(said)["child-pid"]) if said else 0
        assert self._bwrap.stdout is not None
        with self._bwrap.stdout as told:
            told.readline()  # its mounts stand now, and it can be entered

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._bwrap.poll() is None

    def entering(self, user: int) -> list[str]:
        """Return the words that start a program inside."""
        inside = ("--mount", "--pid", "--net", "--ipc", "--uts")
        return ["nsenter", "-t", str(self._init), *inside, "-S", str(user), "-G", str(user), "--"]

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, *, user: int = 0, stdin: bool = False
    ) -> Command:
        """Start a command; its process id is the one inside."""
        script = 'echo $$ >&"$0"; eval "exec $0>&-"; cd "$1" && shift && exec "$@"'
        return Command(
            [*self.entering(user), "/bin/bash", "-c", script],
            [cwd or "/", *argv],
            ENVIRONMENT | dict(env),
            stdin=stdin,
        )

    def kill(self, pid: int, name: str) -> bool:
        """Send a signal inside; False when there is no such process."""
        words = ["/bin/bash", "-c", 'kill -s "$0" "$1"', name, str(pid)]
        return subprocess.run([*self.entering(0), *words], capture_output=True, check=False).returncode == 0

    def read(self, path: str, user: int) -> bytes | None:
        """Return a file's bytes, or None when there is none to read."""
        done = subprocess.run([*self.entering(user), "/bin/cat", "--", path], capture_output=True, check=False)
        return done.stdout if done.returncode == 0 else None

    def write(self, path: str, data: bytes, user: int) -> bool:
        """Write a file, and the folders it lies in."""
        script = 'umask 022; mkdir -p -- "$(dirname -- "$0")" && cat > "$0"'
        words = [*self.entering(user), "/bin/bash", "-c", script, path]
        return subprocess.run(words, input=data, capture_output=True, check=False).returncode == 0

    def end(self) -> None:
        """End it, and everything in it."""
        if self._init:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._bwrap.wait(timeout=3)  # it goes when its first process, and with that every other, is gone
        self._bwrap.kill()
        self._bwrap.wait()
        if self._cgroups is not None:
            self._cgroups.remove()
        shutil.rmtree(self._top, ignore_errors=True)


class Cgroups:
    """The part of this host's cgroups that one machine takes for all there is.

    Args:
        name: A name nobody else has.
    """

    def __init__(self, name: str) -> None:
        if (CGROUPS / "cgroup.controllers").exists():
            (CGROUPS / "cgroup.subtree_control").write_text("+memory +pids", encoding="ascii")
            self._places = {CGROUPS: CGROUPS / name}
        else:
            self._places = {CGROUPS / kind: CGROUPS / kind / name for kind in ("memory", "pids")}
        for place in self._places.values():
            place.mkdir()

    def words(self) -> list[str]:
        """Return bwrap's words that show them inside."""
        binds = [word for inside, place in self._places.items() for word in ("--bind", str(place), str(inside))]
        return ["--dir", "/sys/fs", "--dir", str(CGROUPS), *binds]

    def remove(self) -> None:
        """Remove them; whoever was in them is gone."""
        for place in self._places.values():
            for folder in sorted(place.rglob("*"), reverse=True):
                if folder.is_dir():
                    folder.rmdir()
            place.rmdir()


@dataclass
class Command:
    """A command in a machine: it goes on whether anybody listens or not.

    Args:
        head: How the machine is entered, up to where the process id is said.
        words: Folder, program and arguments.
        env: Its whole environment.
        stdin: Whether its standard input can be written to.
    """

    head: list[str]
    words: list[str]
    env: dict[str, str]
    stdin: bool = False
    pid: int = field(init=False, default=0)
    _events: SimpleQueue[Event] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        told_read, told_write = os.pipe()
        self._process = subprocess.Popen(
            [*self.head, str(told_write), *self.words],
            env=self.env,
            stdin=subprocess.PIPE if self.stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(told_write,),
            start_new_session=True,
        )
        os.close(told_write)
        # The command inherits the descriptor; a line is all that is waited for.
        self.pid = int(os.read(told_read, 32).split(b"\n")[0] or 0)
        os.close(told_read)
        self._readers = [
            threading.Thread(target=self._pump, args=(stream, name), daemon=True)
            for stream, name in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr"))
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def events(self, timeout_s: float | None) -> Iterator[Event]:
        """Return what happens, to the end; a command over *timeout_s* is killed, as envd does."""
        timer = threading.Timer(timeout_s, self.end) if timeout_s else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            while True:
                event = self._events.get()
                yield event
                if event[0] == "end":
                    return
        finally:
            # The listener may be gone, the deadline stays: only a command that ended needs no timer.
            if timer is not None and self._process.poll() is not None:
                timer.cancel()

    def feed(self, data: bytes) -> None:
        """Write to its standard input."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(data)
                self._process.stdin.flush()

    def close_stdin(self) -> None:
        """End its standard input."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """KILL it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def over(self) -> bool:
        """Whether it ended."""
        return self._process.poll() is not None

    def _pump(self, stream: object, name: str) -> None:
        assert hasattr(stream, "fileno")
        assert hasattr(stream, "close")
        fd = stream.fileno()
        while data := os.read(fd, CHUNK):
            self._events.put((name, data))
        stream.close()

    def _wait(self) -> None:
        code = self._process.wait()
        for reader in self._readers:
            reader.join(timeout=2)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._events.put(("end", code if code >= 0 else 128 - code))
