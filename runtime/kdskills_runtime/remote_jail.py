"""Walls inside a remote machine: namespaces, fresh folders, a cgroup leaf, a program without privileges.

The machine is the wall towards us; these walls keep runs apart from each other and from what delivers them: code,
skills and control files belong to root, programs run as uid 10001 and see a machine that is read-only but for `/work`,
`/tmp` and `/dev/shm`. Everything here runs as root of that machine, standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct
import time
from pathlib import Path

from kdskills_runtime import processes
from kdskills_runtime.processes import call
from kdskills_runtime.stage0 import LIMITS

TYPE_CHECKING = False  # the name type checkers know
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

UID = 10001
CGROUPS = "/sys/fs/cgroup"
PARENT = "kdskills"

NEW_NS = 0x00020000
NEW_MACHINE = 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Namespaces of host name, IPC, processes and network."""
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE, _RDONLY = 2, 4, 4096, 16384, 1 << 18, 1
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Mount *source* at *target*."""
    call("mount", source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), data.encode())


def read_only(path: str, *, recursive: bool, off: bool = False) -> None:
    """Make the mount at *path* read-only and free of setuid programs; or *off*, writable again."""
    attributes = struct.pack("=QQQQ", 0 if off else _RDONLY | _NOSUID, _RDONLY if off else 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    call("syscall", _MOUNT_SETATTR, -100, path.encode(), flags, attributes, len(attributes))


def fresh_folders(work_size: int, tmp_size: int, skills: dict[str, str]) -> None:
    """Take this process into mounts of its own, with empty folders for a program and its *skills* (id: folder) only."""
    call("unshare", NEW_NS)
    mount("none", "/", None, _REC | _PRIVATE)
    inside = f"uid={UID},gid={UID},mode=0700,nr_inodes=16384,size="
    for mount_point, size in (("/work", work_size), ("/tmp", tmp_size), ("/dev/shm", tmp_size)):  # noqa: S108 - fresh here
        Path(mount_point).mkdir(parents=True, exist_ok=True)
        mount("tmpfs", mount_point, "tmpfs", _NOSUID | _NODEV, f"{inside}{size}")
    Path("/skills").mkdir(exist_ok=True)
    mount("tmpfs", "/skills", "tmpfs", _NOSUID | _NODEV, "mode=0755,size=1m")
    for name, folder in skills.items():
        mount_point = f"/skills/{name}"
        Path(mount_point).mkdir()
        mount(folder, mount_point, None, _BIND)


def close_machine() -> None:
    """As pid 1 of new namespaces: mount /proc, make everything but the fresh folders read-only, bring loopback up."""
    call("unshare", NEW_NS)
    read_only("/", recursive=True)
    mount("proc", "/proc", "proc", _NOSUID | _NODEV)
    mount("/proc/sys", "/proc/sys", None, _BIND)
    read_only("/proc/sys", recursive=False)
    for mount_point in ("/work", "/tmp", "/dev/shm"):  # noqa: S108 - fresh here
        read_only(mount_point, recursive=False, off=True)
    socket.sethostname("sandbox")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, _GET_FLAGS, name))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


def give_up_privileges(limits: dict[str, Any], seccomp: bytes) -> None:
    """Become uid 10001 for good: rlimits, no groups, no capabilities, no new privileges, the system call filter."""
    Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    for name, bound in limits.items():
        resource.setrlimit(LIMITS[name], tuple(bound))
    processes.give_up(UID)
    processes.prctl(processes.PR_SET_NO_NEW_PRIVS, 1)
    processes.set_filter(seccomp)


class RunLeaf:
    """A cgroup leaf of one run, in hierarchies of version 1 or 2."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def doors(self) -> list[int]:
        """Return descriptors; a process that writes `0` to each moves itself into the leaf."""
        return [os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in self._folders]

    def oom_kills(self) -> int:
        """Return how many processes the kernel killed because memory ran out."""
        count = 0
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                for line in _lines(folder / name):
                    count += int(line.split()[1]) if line.startswith("oom_kill ") else 0
        return count

    def remove(self) -> None:
        """KILL what is inside and remove the leaf; gives up after a second."""
        until = time.monotonic() + 1
        while any(folder.is_dir() for folder in self._folders) and time.monotonic() < until:
            for folder in self._folders:
                for pid in _lines(folder / "cgroup.procs"):
                    processes.send(int(pid), signal.SIGKILL)
                with contextlib.suppress(OSError):  # still in use; tried again
                    folder.rmdir()
            time.sleep(0.002)


def make_leaf(name: str, memory: int, pids: int) -> RunLeaf | None:
    """Return a new leaf with these bounds, or None where cgroups cannot be made."""
    try:
        if Path(CGROUPS, "cgroup.controllers").exists():
            parent = Path(CGROUPS, PARENT)
            _write(Path(CGROUPS, "cgroup.subtree_control"), "+memory +pids")
            parent.mkdir(exist_ok=True)
            _write(parent / "cgroup.subtree_control", "+memory +pids")
            folders = [parent / name]
            bounds = [(0, "memory.max", memory), (0, "pids.max", pids)]
            swap = (0, "memory.swap.max", 0)
        else:
            folders = [Path(CGROUPS, "memory", PARENT, name), Path(CGROUPS, "pids", PARENT, name)]
            bounds = [(0, "memory.limit_in_bytes", memory), (1, "pids.max", pids)]
            swap = (0, "memory.memsw.limit_in_bytes", memory)
        for folder in folders:
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
        for index, knob, bound in bounds:
            _write(folders[index] / knob, str(bound))
    except OSError:
        return None
    if (folders[0] / swap[1]).exists():
        with contextlib.suppress(OSError):  # a machine without swap accounting has no swap to use up either
            _write(folders[0] / swap[1], str(swap[2]))
    return RunLeaf(folders)


def leaves(prefix: str) -> Iterator[RunLeaf]:
    """Return the leaves whose names begin with *prefix*."""
    if Path(CGROUPS, "cgroup.controllers").exists():
        tops = [Path(CGROUPS, PARENT)]
    else:
        tops = [Path(CGROUPS, "memory", PARENT), Path(CGROUPS, "pids", PARENT)]
    for top in tops:
        for folder in sorted(top.glob(f"{prefix}*")) if top.is_dir() else ():
            yield RunLeaf([folder])


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
