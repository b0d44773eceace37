"""Who started a run, the cgroup that bounds it, and the end of what dead owners left, not of what living ones use.

A cgroup leaf holds every process of its run, and is named after the process that made it, so it can be judged without a
record. Where there are no cgroups, which is found by trying, a record beside the state names the launcher instead.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kdskills.execution.dirs import private_dir, write_note
from kdskills.execution.protocol import ReapReport
from kdskills.execution.request import ExecRequest, Owner

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
        entries = (entry for folder in folders for entry in os.scandir(folder))
        names = {entry.name for entry in entries if entry.is_dir(follow_symlinks=False)}
        return [Cgroup(self.memory / name, self.pids / name, self.version) for name in sorted(names)]


def find_parent(mount: Path = MOUNT, own_cgroups: str | None = None) -> Cgroup | None:
    """Return the cgroup in which leaves can be made, tested by making one; None when there is none. *own_cgroups* is
    the text of `/proc/self/cgroup`, which is read when None.
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


RUN_LABEL: Final = "kdskills.run"
_PREFIX: Final = "kdskills."


def boot_id() -> str:
    """Return the kernel's id of this boot; empty where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """Return when *pid* started, in ticks since boot, or None when there is no such process, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def owner_labels(owner: Owner, request_id: str) -> dict[str, str]:
    """Return the labels of a run of *owner*: whose it is, which process watches it, in which boot."""
    pid = os.getpid()
    return {
        RUN_LABEL: request_id,
        **{f"{_PREFIX}{name}": value for name, value in asdict(owner).items()},
        f"{_PREFIX}boot": boot_id(),
        f"{_PREFIX}pid": str(pid),
        f"{_PREFIX}started": process_start(pid) or "",
        f"{_PREFIX}pidns": _pid_namespace(),
    }


def is_leftover(labels: Mapping[str, str]) -> bool:
    """Whether nobody watches a run with these labels any more. A run of another boot is a leftover. One watched from
    another pid namespace of this boot cannot be judged from here and is left alone.
    """
    if RUN_LABEL not in labels:
        return False
    if labels.get(f"{_PREFIX}boot") != boot_id():
        return True
    if labels.get(f"{_PREFIX}pidns") != _pid_namespace():
        return False
    pid = labels.get(f"{_PREFIX}pid", "")
    return not pid.isdigit() or process_start(int(pid)) != labels.get(f"{_PREFIX}started")


def _pid_namespace() -> str:
    """Return the namespace as the kernel names it, `pid:[NUMBER]`; empty where there is no /proc."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


_LEAF = re.compile(r"(?P<ns>\d+)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{16}")

_PROBE = re.compile(r"probe-\d+-(?P<made>\d+)")
PROBE_S = 10
"""Seconds after which a leaf made by a probe counts as forgotten; the probe itself takes milliseconds."""


def leaf_name() -> str:
    """Return a new name for a leaf of this process."""
    return f"{_pid_namespace()[5:-1]}-{os.getpid()}-{process_start(os.getpid()) or 0}-{secrets.token_hex(8)}"


def leaf_is_leftover(name: str) -> bool:
    """Whether the process a leaf is named after is gone; leaves of other pid namespaces are not ours to judge."""
    probe = _PROBE.fullmatch(name)
    if probe is not None:
        return time.monotonic_ns() - int(probe["made"]) > PROBE_S * 10**9
    owner = _LEAF.fullmatch(name)
    if owner is None or owner["ns"] != _pid_namespace()[5:-1]:
        return False
    return process_start(int(owner["pid"])) != owner["start"]


_NETWORK: Final = "kdskills-network-"


def network_folder(stack: ExitStack) -> Path:
    """Return a new folder for what a program needs for its network, readable to it; *stack* removes it.

    The folder around it is closed to others, and named after this process, so that `reap_network_folders` can judge it.
    """
    outer = Path(tempfile.gettempdir(), f"{_NETWORK}{leaf_name()}")
    outer.mkdir(mode=0o700)
    stack.callback(shutil.rmtree, outer, ignore_errors=True)
    inner = outer / "open"
    inner.mkdir()
    inner.chmod(0o755)
    return inner


def reap_network_folders() -> list[str]:
    """Remove such folders of dead owners of our uid, and return one line for each."""
    folders = [path for path in Path(tempfile.gettempdir()).glob(f"{_NETWORK}*") if _is_own_leftover(path)]
    for path in folders:
        shutil.rmtree(path, ignore_errors=True)
    return [f"folder {path}" for path in folders if not path.exists()]


def _is_own_leftover(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:  # removed meanwhile
        return False
    own = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()
    return own and leaf_is_leftover(path.name.removeprefix(_NETWORK))


ASIDE_S = 3600
"""Seconds after which a half-written record counts as left by a process that died."""


class RunRecords:
    """Records of runs that have no cgroup, one file each."""

    def __init__(self, state: Path) -> None:
        self._top = state / "runs"

    def write(self, request: ExecRequest, launcher: int) -> Path:
        """Record a run whose launcher is *launcher*; the caller removes the file at its end."""
        labels = owner_labels(request.owner, request.request_id or secrets.token_hex(8))
        facts = {"labels": labels, "launcher": launcher, "started": process_start(launcher)}
        path = private_dir(private_dir(self._top.parent) / self._top.name) / f"{secrets.token_hex(8)}.json"
        write_note(path, json.dumps(facts))
        return path

    def leftovers(self) -> Iterator[tuple[Path, str, int, str]]:
        """Return (file, run, launcher, its start) of every record whose owner is dead; an unreadable record has launcher 0."""
        for path in sorted(self._top.glob("*.json")) if self._top.is_dir() else ():
            try:
                facts = json.loads(path.read_bytes())
                labels = dict(facts["labels"])
                launcher, started = int(facts["launcher"]), str(facts["started"])
            except FileNotFoundError:
                continue  # its run has just ended
            except (OSError, ValueError, KeyError, TypeError):
                yield path, path.stem, 0, ""
                continue
            if is_leftover(labels):
                yield path, labels[RUN_LABEL], launcher, started
        forgotten = time.time() - ASIDE_S
        for path in sorted(self._top.glob("*.new")) if self._top.is_dir() else ():
            with suppress(FileNotFoundError):  # written whole by now
                if path.stat().st_mtime < forgotten:
                    yield path, path.stem, 0, ""


def reap(records: RunRecords, parent: Cgroup | None) -> ReapReport:
    """End what dead owners left behind, and report one line for each."""
    ended: list[str] = []
    failed: list[str] = []
    for leaf in parent.leaves() if parent is not None else ():
        if leaf_is_leftover(leaf.memory.name):
            count = len(leaf.members())
            removed = leaf.remove()
            (ended if removed else failed).append(f"cgroup {leaf.memory.name} with {count} processes")
    for path, run, launcher, started in records.leftovers():
        alive = launcher > 0 and process_start(launcher) == started
        try:
            with suppress(ProcessLookupError):
                if alive:
                    os.kill(launcher, signal.SIGKILL)  # bwrap's sandbox dies with it
        except PermissionError:
            failed.append(f"run {run}: launcher {launcher} cannot be ended")
            continue
        path.unlink(missing_ok=True)
        ended.append(f"run {run}" + (f": launcher {launcher}" if alive else ": its record"))
    ended += reap_network_folders()
    return ReapReport(tuple(ended), tuple(failed))
