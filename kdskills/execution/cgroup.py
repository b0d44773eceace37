"""A cgroup leaf per run: the only bound on a whole tree's memory and number of processes.

Version 2, version 1 and hosts without a writable hierarchy are told apart by trying, not by guessing.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
PARENT = "kdskills"


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A run's leaf, or the cgroup in which leaves are made: its folder per controller (the same one under version 2)."""

    memory: Path
    pids: Path
    version: int

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders to join and to remove."""
        return tuple(dict.fromkeys((self.memory, self.pids)))

    def join(self, pid: int) -> None:
        """Move a process in; children it has later are born inside."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def oom_kills(self) -> int:
        """Return how many processes the kernel killed because memory ran out."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        try:
            lines = (self.memory / name).read_text(encoding="ascii").splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.split()[:1] == ["oom_kill"])

    def members(self) -> list[int]:
        """Return the processes inside."""
        pids: set[int] = set()
        for folder in self.folders:
            with suppress(OSError):
                pids.update(map(int, (folder / "cgroup.procs").read_text(encoding="ascii").split()))
        return sorted(pids)

    def bounds(self) -> dict[str, int]:
        """Return the limits the kernel enforces."""
        memory = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        return {
            "memory": int((self.memory / memory).read_text(encoding="ascii")),
            "pids": int((self.pids / "pids.max").read_text(encoding="ascii")),
        }

    def bound(self, memory: int, pids: int) -> None:
        """Set the limits, and no swap. Raises OSError when the kernel refuses them."""
        if self.version == 2:
            _write(self.memory / "memory.max", memory)
            _write(self.memory / "memory.swap.max", 0, optional=True)
        else:
            swap = self.memory / "memory.memsw.limit_in_bytes"  # may never be below the other one: widen, set, narrow
            _write(swap, memory, optional=True)
            _write(self.memory / "memory.limit_in_bytes", memory)
            _write(swap, memory, optional=True)
        _write(self.pids / "pids.max", pids)

    def remove(self, patience_s: float = 5.0) -> bool:
        """Kill every process inside and remove the leaf; False when that fails for *patience_s*."""
        end = time.monotonic() + patience_s
        folders = list(self.folders)
        while True:
            for pid in self.members():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for folder in folders:
                with suppress(OSError):
                    folder.rmdir()
            folders = [folder for folder in folders if folder.exists()]
            if not folders or time.monotonic() >= end:
                return not folders
            time.sleep(0.002)

    def leaf(self, name: str, memory: int, pids: int) -> Cgroup:
        """Make a leaf with these bounds. Raises OSError when the hierarchy is no longer writable."""
        leaf = Cgroup(self.memory / name, self.pids / name, self.version)
        for folder in leaf.folders:
            folder.mkdir()
        try:
            leaf.bound(memory, pids)
        except OSError:
            leaf.remove(0)
            raise
        return leaf

    def leaves(self) -> list[Cgroup]:
        """Return every leaf there is, made by us or by others before."""
        folders = (folder for folder in self.folders if folder.is_dir())
        names = {
            entry.name for folder in folders for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)
        }
        return [Cgroup(self.memory / name, self.pids / name, self.version) for name in sorted(names)]


def find_parent(mount: Path = MOUNT, own_cgroups: str | None = None) -> Cgroup | None:
    """Return the folder in which leaves can be made, tested by making one; None when there is none.

    Args:
        mount: Where the hierarchies are mounted.
        own_cgroups: Text of `/proc/self/cgroup`; read when None.
    """
    if (mount / "cgroup.controllers").is_file():
        text = own_cgroups if own_cgroups is not None else Path("/proc/self/cgroup").read_text(encoding="utf-8")
        # Version 2: at the top, or in the highest folder above us that was delegated to us.
        path = next((line[3:] for line in text.splitlines() if line.startswith("0::/")), "/").lstrip("/")
        parts = path.split("/") if path else []
        above = [mount.joinpath(*parts[:count]) for count in range(1, len(parts))]
        folders = [mount, *(folder for folder in above if os.access(folder, os.W_OK))]
        candidates = [Cgroup(folder / PARENT, folder / PARENT, 2) for folder in folders]
    else:
        candidates = [Cgroup(mount / "memory" / PARENT, mount / "pids" / PARENT, 1)]
    return next((parent for parent in candidates if _usable(parent)), None)


def _usable(parent: Cgroup) -> bool:
    try:
        for folder in {parent.memory, parent.pids}:
            if parent.version == 2:
                _write(folder.parent / "cgroup.subtree_control", "+memory +pids")
            folder.mkdir(exist_ok=True)
            if parent.version == 2:
                _write(folder / "cgroup.subtree_control", "+memory +pids")
        leaf = parent.leaf(f"probe-{os.getpid()}-{time.monotonic_ns()}", 64 * 1024 * 1024, 8)
    except OSError:
        return False
    leaf.remove()
    return True


def _write(path: Path, value: int | str, *, optional: bool = False) -> None:
    # Opened without O_CREAT: a hierarchy has its files, and where it has none the limit cannot be set.
    absent, refused = ((FileNotFoundError,), (OSError,)) if optional else ((), ())
    with suppress(*absent):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            with suppress(*refused):
                os.write(fd, str(value).encode())
        finally:
            os.close(fd)
