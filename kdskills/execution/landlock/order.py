"""The order for `kdskills_runtime.landlock_init`, as a pure function of a checked request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kdskills.execution.check import RunPlan
from kdskills.execution.children import within_own_limits
from kdskills.execution.container import rlimits
from kdskills.execution.landlock.abi import (
    PROC_FILES,
    PROC_FOLDERS,
    READ,
    READ_FILE,
    PathRule,
    handled,
    library_folders,
)
from kdskills.execution.local_tree import RunFolder

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
        rules: From `abi.rules`.
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
