"""The order for `kdskills_runtime.landlock_init`: what Landlock can hold back on this kernel, and the rules of one run.

Rights are those of the kernel's documented interface, by the version (ABI) each came with. What a version lacks is
made up for elsewhere, so that the wall is the same on all of them: `kdskills.execution.seccomp` for `truncate`, and the
uid of their own for signals.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kdskills.execution.check import RunPlan
from kdskills.execution.container import rlimits
from kdskills.execution.local_tree import RunFolder
from kdskills.execution.processes import within_own_limits

CREATE_RULESET: Final = 444
_VERSION_FLAG: Final = 1

EXECUTE: Final = 1 << 0
WRITE_FILE: Final = 1 << 1
READ_FILE: Final = 1 << 2
READ_DIR: Final = 1 << 3
REMOVE_DIR: Final = 1 << 4
REMOVE_FILE: Final = 1 << 5
MAKE_CHAR: Final = 1 << 6
MAKE_DIR: Final = 1 << 7
MAKE_REG: Final = 1 << 8
MAKE_SOCK: Final = 1 << 9
MAKE_FIFO: Final = 1 << 10
MAKE_BLOCK: Final = 1 << 11
MAKE_SYM: Final = 1 << 12
REFER: Final = 1 << 13
TRUNCATE: Final = 1 << 14
IOCTL_DEV: Final = 1 << 15

_FILE_RIGHTS: Final = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""The rights that mean something for what is no folder; the kernel refuses others there."""

LOOK: Final = EXECUTE | READ_FILE | READ_DIR
READ: Final = READ_FILE | READ_DIR
WRITE: Final = (
    LOOK | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM | REFER | TRUNCATE
)
DEVICE: Final = READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV

DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
FACTS: Final = (
    *("/proc/cpuinfo", "/proc/loadavg", "/proc/meminfo", "/proc/stat", "/proc/uptime", "/proc/version"),
    *("/sys/devices/system/cpu", "/etc/ld.so.cache", "/etc/localtime"),
)
"""What a program may read of the machine, beside the files of its own process in /proc."""

PROC_FILES: Final = (
    *(
        "auxv",
        "cgroup",
        "cmdline",
        "comm",
        "environ",
        "io",
        "limits",
        "maps",
        "mounts",
        "smaps",
        "stat",
        "statm",
        "status",
    ),
    *("gid_map", "uid_map"),
)
PROC_FOLDERS: Final = ("fd", "fdinfo")
"""What a program may read of itself below /proc; `net` is left out: it lists the connections of every program."""

SHEBANGS: Final = ("/bin/sh", "/bin/bash", "/usr/bin/bash", "/usr/bin/env")
"""Programs that first lines of scripts name by path, and which are therefore allowed where the host has them."""


@dataclass(frozen=True, slots=True)
class Handled:
    """The rights a ruleset takes away unless a rule gives them back, as the kernel's masks."""

    fs: int
    net: int
    scoped: int
    size: int

    def attr(self) -> bytes:
        """Return `struct landlock_ruleset_attr`, as long as this kernel knows it."""
        return b"".join(value.to_bytes(8, "little") for value in (self.fs, self.net, self.scoped))[: self.size]


@dataclass(frozen=True, slots=True)
class PathRule:
    """One hierarchy, or one file, and what may be done there."""

    path: str
    access: int


def landlock_version() -> tuple[int, str]:
    """Return (ABI version, why it is 0): Landlock's version on this kernel, asked of the kernel itself."""
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(ctypes.c_long(CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    if abi > 0:
        return int(abi), ""
    number = ctypes.get_errno()
    reasons = {
        errno.ENOSYS: "this kernel is built without Landlock",
        errno.EOPNOTSUPP: "Landlock is built into this kernel but not enabled: boot with lsm=landlock,...",
        errno.EPERM: "the container's system call filter refuses landlock_create_ruleset: use a newer container engine,"
        " or a seccomp profile that allows the landlock calls",
    }
    return 0, reasons.get(number, f"landlock_create_ruleset: {os.strerror(number)}")


def handled(abi: int) -> Handled:
    """Return everything version *abi* can take away."""
    fs_rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)
    return Handled(
        fs=(1 << fs_rights) - 1,
        net=0b11 if abi >= 4 else 0,  # binding and connecting TCP sockets
        scoped=0b11 if abi >= 6 else 0,  # abstract sockets and signals of processes outside
        size=24 if abi >= 6 else 16 if abi >= 4 else 8,
    )


def path_rules(tree: Path, skills: Sequence[Path], control: Path, writable: Sequence[Path], abi: int) -> list[PathRule]:
    """Return the rules of one run, for the rights version *abi* knows; paths that are not there are left out.

    Args:
        tree: The prepared tree: read and execute.
        skills: Staged skills: read and execute.
        control: Folder of generated code: read.
        writable: The run's own folders.
        abi: Landlock's version here.
    """
    all_rules = [
        PathRule(str(tree), LOOK),
        *(PathRule(str(skill), LOOK) for skill in skills),
        PathRule(str(control), READ),
        *(PathRule(str(folder), WRITE) for folder in writable),
        *(PathRule(path, EXECUTE | READ_FILE) for path in host_programs(tree)),
        *(PathRule(path, DEVICE) for path in DEVICES),
        *(PathRule(path, READ) for path in FACTS),
    ]
    fs_mask = handled(abi).fs
    return [PathRule(rule.path, access) for rule in all_rules if (access := _fitting(rule, fs_mask))]


def host_programs(tree: Path) -> Iterator[str]:
    """Return files of the host that programs of *tree* need by absolute path: the loader, shared libraries, shells.

    These are the originals of files in the tree, one rule each; their folders stay closed.
    """
    for folder in library_folders(tree):
        for path in sorted((tree / folder).iterdir()):
            if not path.is_dir() and Path("/", folder, path.name).is_file():
                yield str(Path("/", folder, path.name))
    yield from (path for path in SHEBANGS if Path(path).is_file())


def library_folders(tree: Path) -> list[str]:
    """Return the folders of *tree* that hold shared libraries, relative to it."""
    folders = {str(path.parent.relative_to(tree)) for top in ("usr/lib", "usr/lib64", "lib", "lib64")
             if (tree / top).is_dir() and not (tree / top).is_symlink()
             for path in (tree / top).rglob("*.so*")}  # fmt: skip
    return sorted(folders)


def _fitting(rule: PathRule, fs_mask: int) -> int:
    """Return the rights of *rule* that this kernel knows and that apply to its file or folder; 0 when there is none."""
    path = Path(rule.path)
    if not path.exists():
        return 0
    return rule.access & fs_mask if path.is_dir() else rule.access & fs_mask & _FILE_RIGHTS


TERM_ALL, KILL_ALL = b"\x00", b"\xff"
"""Commands on the control pipe; any other byte is a signal for the program."""

GUARD_SLACK: Final = 16 * 1024 * 1024
"""Bytes a folder may take on disk beyond its bound: subfolders take room on disk, but none in a tmpfs."""


@dataclass(frozen=True, slots=True)
class Wall:
    """What every Landlock run shares.

    Attributes:
        tree: The prepared tree.
        abi: Landlock's version.
        seccomp: The system call filter.
    """

    tree: Path
    abi: int
    seccomp: bytes


def build_order(
    wall: Wall,
    plan: RunPlan,
    folder: RunFolder,
    *,
    argv: Sequence[str],
    skill_folders: Mapping[str, str],
    uid: int,
    rules: Sequence[PathRule],
    keep: Sequence[int],
    cgroups: Sequence[str],
) -> bytes:
    """Return the order.

    Args:
        wall: The engine's part.
        plan: The checked request.
        folder: The run's own folders.
        argv: The program and its arguments, with paths of this host.
        skill_folders: Folder of each mounted skill on this host, by full id.
        uid: The leased uid.
        rules: From `path_rules`.
        keep: Descriptors the program inherits.
        cgroups: `cgroup.procs` files of the run's leaf; without one memory is bounded for each process.
    """
    limits = plan.request.limits
    bounds = rlimits(limits) | {"nproc": (limits.pids, limits.pids)}
    if not cgroups:
        bounds["as"] = (limits.memory, limits.memory)
    handled_rights = handled(wall.abi)
    order = {
        "argv": list(argv),
        "env": environment(wall.tree, plan, folder),
        "cwd": host_path_of(plan.cwd, skill_folders, folder.work),
        "uid": uid,
        "limits": within_own_limits(bounds),
        "ruleset": handled_rights.attr().hex(),
        "rules": [(rule.path, rule.access) for rule in rules],
        "proc": [(name, READ if name in PROC_FOLDERS else READ_FILE) for name in (*PROC_FILES, *PROC_FOLDERS)],
        "seccomp": wall.seccomp.hex(),
        "keep": list(keep),
        "cgroups": list(cgroups),
        "guard": [
            (str(folder.work), limits.work_size + GUARD_SLACK),
            (str(folder.tmp), limits.tmp_size + GUARD_SLACK),
        ],
    }
    return json.dumps(order).encode("ascii")


def environment(tree: Path, plan: RunPlan, folder: RunFolder) -> dict[str, str]:
    """Return the program's variables.

    The shared libraries of the tree come first: its Python may be linked against one that the program's uid cannot
    reach on the host.
    """
    base = {
        "PATH": ":".join(f"{tree}/{folder_name}" for folder_name in ("usr/local/bin", "usr/bin", "bin")),
        "HOME": str(folder.work),
        "LANG": "C.UTF-8",
        "TMPDIR": str(folder.tmp),
        "LD_LIBRARY_PATH": ":".join(f"{tree}/{folder_name}" for folder_name in library_folders(tree)),
    }
    return base | {name.decode(): value.decode("utf-8", "surrogateescape") for name, value in plan.env}


def host_argv(plan: RunPlan, skill_folders: Mapping[str, str]) -> tuple[str, ...]:
    """Return the argument list with the script's place on this host; the caller's own arguments stay as they are."""
    script = plan.request.script
    if script is None:
        return plan.argv
    inside, host_path = f"/skills/{script.skill}/{script.path}", f"{skill_folders[script.skill]}/{script.path}"
    count = len(plan.argv) - len(script.args)
    return (*(word.replace(inside, host_path) for word in plan.argv[:count]), *script.args)


def host_path_of(inside: str, skill_folders: Mapping[str, str], work: Path) -> str:
    """Return the host's path of a path below /work or /skills."""
    top, _, relative = inside.lstrip("/").partition("/")
    if top == "skills":
        skill, _, relative = relative.partition("/")
        return str(Path(skill_folders[skill]) / relative)
    return str(work / relative)
