"""The argument list of one sandbox, as a pure function.

Everything the wall is made of stands on the launcher's own command line. What differs from run to run (skills, inputs,
variables) follows by descriptor, because bwrap reads it before it makes its first namespace: until we have put it into
its cgroup and written these arguments, nothing happens. The last of them makes a marker; `--chmod` of that marker
fails when they were cut short, so a sandbox never starts with less than was meant.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kdskills.execution.request import Limits

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
