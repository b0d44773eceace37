"""One sandbox from its argument list to its last process.

Everything the wall is made of stands on the launcher's own command line. What differs from run to run (skills, inputs,
variables) follows by descriptor, because bwrap reads it before it makes its first namespace: until we have put it into
its cgroup and written these arguments, nothing happens. The last of them makes a marker; `--chmod` of that marker
fails when they were cut short, so a sandbox never starts with less than was meant.

The payload waits behind a gate until we hold its first process by descriptor and an open descriptor of its `/work`.
That descriptor keeps the tmpfs alive after every process and mount of the sandbox is gone, so outputs are read from
memory nobody can change any more; no helper runs inside, and nothing the program could forge is believed.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdskills.errors import ExecFailed
from kdskills.execution import processes
from kdskills.execution.cgroup import CgroupLeaf
from kdskills.execution.processes import signal_reset
from kdskills.execution.request import Limits

SETUP_S = 30.0
"""Seconds a sandbox may take to come up: many times what a busy machine needs."""
KILLED_S = 10.0
"""Seconds after SIGKILL within which every process of a sandbox must be gone."""
_POLL_S = 0.0003
_SIZE = 64 * 1024


class BoxFailed(ExecFailed):
    """The sandbox did not come up; the message ends with the launcher's own."""


@dataclass(slots=True)
class Pipes:
    """Our ends of the pipes of one sandbox, and the launcher's, closed once it has them."""

    ours: dict[str, int]
    theirs: dict[str, int]

    @classmethod
    def make(cls, *, code: bool) -> Pipes:
        """Make the pipes of a run; `code` adds payload and report."""
        pipes = cls({}, {})
        for name, we_read in (("stdout", True), ("stderr", True), ("status", True), ("report", True)):
            if code or name != "report":
                pipes._add(name, we_read=we_read)
        for name in ("stdin", "args", "block", "payload"):
            if code or name != "payload":
                pipes._add(name, we_read=False)
        return pipes

    def _add(self, name: str, *, we_read: bool) -> None:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self.ours[name], self.theirs[name] = (reading, writing) if we_read else (writing, reading)

    def take(self, name: str) -> int:
        """Return one of our ends; the caller closes it."""
        return self.ours.pop(name)

    def close_theirs(self) -> None:
        """Close the launcher's ends in this process."""
        while self.theirs:
            os.close(self.theirs.popitem()[1])

    def close(self) -> None:
        """Close every end that is still open here."""
        self.close_theirs()
        while self.ours:
            os.close(self.ours.popitem()[1])


class BwrapBox:
    """A sandbox whose program waits for `release`.

    Attributes:
        init: Host pid of the sandbox's first process.
        namespace: Inode of its pid namespace.
        host_uid: Uid of its processes as the host sees them.
        work: Open descriptor of its `/work`.
    """

    def __init__(self, launcher: subprocess.Popen[bytes], pipes: Pipes) -> None:
        self._launcher = launcher
        self._pipes = pipes
        self._stack = ExitStack()
        self.launcher_fd = self._hold(os.pidfd_open(launcher.pid))
        self.init = -1
        self.init_fd = -1
        self.namespace = -1
        self.host_uid = -1
        self.work = -1
        self._status = b""

    @property
    def pid(self) -> int:
        """Host pid of the launcher."""
        return self._launcher.pid

    def bring_up(self, arguments: bytes, rootfs: Path, leaf: CgroupLeaf | None, nproc: int | None) -> None:
        """Let the launcher build the sandbox and wait until it stands, with its program not yet started.

        Raises:
            BoxFailed: The launcher gave up, or took longer than `SETUP_S`.
        """
        end = time.monotonic() + SETUP_S
        try:
            # The launcher waits for its arguments, so everything it starts is born inside the cgroup.
            if leaf is not None:
                leaf.join(self._launcher.pid)
            fd = self._pipes.take("args")
            try:
                _write_all(fd, arguments)
            finally:
                os.close(fd)
            facts = self._first_status(end)
            self.init = int(facts["child-pid"])
            self.init_fd = self._hold(os.pidfd_open(self.init))
            self._await_root(rootfs, end)
            self.namespace = Path(f"/proc/{self.init}/ns/pid").stat().st_ino
            self.host_uid = Path(f"/proc/{self.init}").stat().st_uid
            self.work = self._hold(os.open(f"/proc/{self.init}/root/work", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            if nproc is not None:
                resource.prlimit(self.init, resource.RLIMIT_NPROC, (nproc, nproc))
        except (OSError, ValueError, KeyError) as error:
            raise BoxFailed(f"the sandbox did not start: {self._last_words() or error}") from error

    def release(self) -> None:
        """Let the program start."""
        fd = self._pipes.take("block")
        try:
            os.write(fd, b"1")
        except BrokenPipeError:
            return  # the sandbox died meanwhile; the pump sees that next
        finally:
            os.close(fd)

    def program(self) -> int | None:
        """Return the host pid of the program itself, or None before it starts and after it ended."""
        return next(iter(children), None) if (children := processes.children(self.init)) else None

    def signal(self, number: int) -> bool:
        """Send a signal to the program itself."""
        pid = self.program()
        return pid is not None and processes.send(pid, number, self.namespace)

    def terminate(self) -> None:
        """Ask the whole tree to end."""
        if self.init > 0:
            processes.terminate(self.init, self.namespace)

    def kill(self) -> None:
        """End the whole tree; the launcher goes with it."""
        if self.init_fd >= 0:
            processes.kill(self.init_fd)
        processes.kill(self.launcher_fd)

    def finish(self) -> int | None:
        """Wait until every process is gone and return the program's exit code, None when it never started or left none.

        Raises:
            BoxFailed: A process survived KILL.
        """
        self.kill()
        self._launcher.wait()
        if self.init_fd >= 0 and not processes.wait_for_exit(self.init_fd, KILLED_S):
            raise BoxFailed("a process of the sandbox survived SIGKILL", pid=self.init)
        end = time.monotonic() + 0.2
        while self._read_status(end):
            pass
        for line in self._status.splitlines():
            facts = json.loads(line)
            if "exit-code" in facts:
                return int(facts["exit-code"])
        return None

    def close(self) -> None:
        """Close every descriptor; a sandbox that is still running is ended."""
        self.kill()
        self._launcher.wait()
        self._stack.close()
        self._pipes.close()

    def _hold(self, fd: int) -> int:
        self._stack.callback(os.close, fd)
        return fd

    def _first_status(self, end: float) -> dict[str, Any]:
        while b"\n" not in self._status:
            if not self._read_status(end):
                raise ValueError("bwrap reported nothing")
        facts: dict[str, Any] = json.loads(self._status.splitlines()[0])
        return facts

    def _read_status(self, end: float) -> bool:
        """Read more of bwrap's status lines; False at their end or when none comes in time."""
        fd = self._pipes.ours["status"]
        if len(self._status) > _SIZE or not select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
            return False
        data = os.read(fd, 4096)
        self._status += data
        return bool(data)

    def _await_root(self, rootfs: Path, end: float) -> None:
        """Wait until the sandbox's root is the prepared tree, which is the last thing bwrap does before it blocks."""
        rootfs_status = rootfs.stat()
        process = os.open(f"/proc/{self.init}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            while True:
                root_status = os.stat("root", dir_fd=process)
                if (root_status.st_dev, root_status.st_ino) == (rootfs_status.st_dev, rootfs_status.st_ino):
                    return
                if time.monotonic() >= end or select.select([self.launcher_fd], [], [], 0)[0]:
                    raise ValueError("bwrap did not switch to the prepared tree")
                time.sleep(_POLL_S)
        finally:
            os.close(process)

    def _last_words(self) -> str:
        """Return what the launcher wrote to stderr; no program has run yet, so these are its own words."""
        self.kill()
        self._launcher.wait()
        fd = self._pipes.ours.get("stderr")
        if fd is None or not select.select([fd], [], [], 0.2)[0]:
            return ""
        return os.read(fd, 4096).decode("utf-8", "replace").strip()


def launch(spawner: ThreadPoolExecutor, command: Sequence[str], pipes: Pipes, extra: Sequence[int]) -> BwrapBox:
    """Start the launcher from the spawner's one long-lived thread, which `--die-with-parent` is tied to.

    Raises:
        BoxFailed: The launcher cannot be executed.
    """
    child_fds = [
        pipes.theirs[name] for name in ("args", "status", "block", "payload", "report") if name in pipes.theirs
    ]

    def spawn() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(command),
            stdin=pipes.theirs["stdin"],
            stdout=pipes.theirs["stdout"],
            stderr=pipes.theirs["stderr"],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
            cwd="/",
            pass_fds=[*child_fds, *extra],
            start_new_session=True,
            umask=0o022,
            preexec_fn=signal_reset(),  # noqa: PLW1509 - two system calls and no lock, and only where there is something to reset
        )

    try:
        process = spawner.submit(spawn).result()
    except OSError as error:
        raise BoxFailed(f"the launcher {command[0]} cannot be started: {error.strerror}") from error
    pipes.close_theirs()
    return BwrapBox(process, pipes)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


PATH = "/usr/local/bin:/usr/bin:/bin"
DEFAULT_ENV = ((b"PATH", PATH.encode()), (b"HOME", b"/work"), (b"LANG", b"C.UTF-8"), (b"TMPDIR", b"/tmp"))
UID = 10001
_MARKER = "/run/complete"
_RUN_SIZE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Fds:
    """Descriptors the launcher inherits."""

    args: int
    status: int
    block: int
    seccomp: int


@dataclass(frozen=True, slots=True)
class Launcher:
    """Programs and identity a sandbox is started with.

    Attributes:
        bwrap: Absolute path of bwrap.
        prlimit: Absolute path of prlimit.
        setpriv: Absolute path of setpriv, used when `drop_to` is given.
        drop_to: Host uid and gid the launcher takes on before anything else; None keeps ours.
    """

    bwrap: str
    prlimit: str
    setpriv: str
    drop_to: int | None


def command_line(
    launcher: Launcher, rootfs: Path, limits: Limits, cwd: str, argv: Sequence[str], fds: Fds, bounds: Sequence[str]
) -> list[str]:
    """Return the launcher's command line.

    Args:
        launcher: Programs and identity.
        rootfs: The prepared tree.
        limits: Sizes of the sandbox's tmpfs.
        cwd: Absolute folder the program starts in.
        argv: The program.
        fds: Descriptors the launcher inherits.
        bounds: What prlimit sets before anything else; see `rlimit_words`.
    """
    return [
        *(launcher.prlimit, *bounds),
        *_identity(launcher),
        launcher.bwrap,
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--disable-userns", "--cap-drop", "ALL", "--new-session", "--die-with-parent", "--clearenv"),
        *("--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"),
        *("--seccomp", str(fds.seccomp), "--json-status-fd", str(fds.status), "--block-fd", str(fds.block)),
        *("--ro-bind", str(rootfs), "/", "--proc", "/proc", "--dev", "/dev"),
        *_tmpfs("/tmp", limits.tmp_size, "1777"),  # noqa: S108 - inside the sandbox
        *_tmpfs("/dev/shm", limits.tmp_size, "1777"),  # noqa: S108 - inside the sandbox
        *_tmpfs("/work", limits.work_size, "0755"),
        *_tmpfs("/run", _RUN_SIZE, "0755"),
        *_tmpfs("/skills", _RUN_SIZE, "0755"),
        *("--args", str(fds.args)),
        *("--chmod", "0755", _MARKER, "--remount-ro", "/run", "--remount-ro", "/skills"),
        *("--ro-bind", "/proc/sys", "/proc/sys", "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", cwd, "--", *argv),
    ]


def run_arguments(
    cwd: str,
    skills: Sequence[tuple[str, Path]],
    inputs: Sequence[tuple[str, int]],
    env: Sequence[tuple[bytes, bytes]],
    executable: Collection[str] = (),
) -> bytes:
    """Return the arguments that travel by descriptor, each ended by NUL.

    Args:
        cwd: Absolute folder the program starts in.
        skills: (full id, staged copy) pairs.
        inputs: (path below /work, descriptor to copy from) pairs.
        env: Variables set inside, byte-exact.
        executable: Paths of inputs that may be executed.
    """
    words: list[str | bytes] = []
    for name, folder in skills:
        words += ["--ro-bind", str(folder), f"/skills/{name}"]
    for folder_path in _folders(cwd, [path for path, _ in inputs]):
        words += ["--perms", "0755", "--dir", folder_path]
    for path, fd in inputs:
        words += ["--perms", "0755" if path in executable else "0644", "--file", str(fd), f"/work/{path}"]
    for key, value in {**dict(DEFAULT_ENV), **dict(env)}.items():
        words += ["--setenv", key, value]
    words += ["--dir", _MARKER]
    return b"".join(
        (word if isinstance(word, bytes) else word.encode("utf-8", "surrogateescape")) + b"\0" for word in words
    )


def _folders(cwd: str, paths: Sequence[str]) -> list[str]:
    """Return every folder below /work that inputs and the workdir need, parents first."""
    folders: set[str] = set()
    for path in paths:
        folders.update(str(parent) for parent in Path("/work", path).parents)
    folders.add(cwd)
    folders.update(str(parent) for parent in Path(cwd).parents)
    return sorted(folder for folder in folders if folder.startswith("/work/"))


def _tmpfs(mount_point: str, size: int, mode: str) -> tuple[str, ...]:
    return ("--perms", mode, "--size", str(size), "--tmpfs", mount_point)


def rlimits(limits: Limits, *, memory: bool) -> dict[str, tuple[int, int]]:
    """Return the (soft, hard) rlimits of a run by their short names; *memory* adds the bound on address space."""
    cpu = math.ceil(limits.wall_s if limits.cpu_s is None else limits.cpu_s)
    bounds = {
        "core": (0, 0),
        "nofile": (limits.nofile, limits.nofile),
        "fsize": (limits.fsize, limits.fsize),
        "cpu": (cpu, cpu + 1),  # the soft limit is SIGXCPU, which says what happened; the hard one kills
    }
    return {**bounds, "as": (limits.memory, limits.memory)} if memory else bounds


def rlimit_words(bounds: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return *bounds* as arguments of prlimit."""
    return [f"--{name}={soft}:{hard}" for name, (soft, hard) in bounds.items()]


def _identity(launcher: Launcher) -> list[str]:
    if launcher.drop_to is None:
        return []
    uid = str(launcher.drop_to)
    return [launcher.setpriv, "--reuid", uid, "--regid", uid, "--clear-groups", "--inh-caps", "-all"]
