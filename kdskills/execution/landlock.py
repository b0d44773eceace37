"""Landlock: what it can hold back on this kernel, leased uids, and runs `kdskills_runtime.landlock_init` starts and ends.

What an older version (ABI) lacks is made up for, so that the wall is the same on all: by `kdskills.execution.seccomp`, and
by a uid nobody else has, for Landlock does not hold back modes and times of files of one's own uid, nor signals to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import pwd
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from kdskills.errors import ExecRefused
from kdskills.execution.check import RunPlan
from kdskills.execution.dirs import private_dir, state_dir, write_note
from kdskills.execution.local_tree import (
    RunFolder,
    environment_folder,
    host_argv,
    host_path_of,
    host_variables,
    leftovers,
)
from kdskills.execution.owner import Cgroup, RunRecords, find_parent, leaf_name, reap
from kdskills.execution.payload import (
    BASE_ENV,
    build_payload,
    entry_argv,
    host_entry,
    package_variables,
)
from kdskills.execution.processes import rlimits, start_program, within_own_limits
from kdskills.execution.protocol import ReapReport
from kdskills.execution.request import ExecError, ExecResult, Limits, Status
from kdskills.execution.rootfs import Rootfs
from kdskills.execution.run import ExecutionEngine, ProgramEnd, ProgramRun, not_started, preparing
from kdskills.execution.streams import Ending, HeadBuffer, Pump

CREATE_RULESET: Final = 444
_VERSION_FLAG: Final = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE, MAKE_CHAR, MAKE_DIR = (1 << bit for bit in range(8))
MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM, REFER, TRUNCATE, IOCTL_DEV = (1 << bit for bit in range(8, 16))

_FILE_RIGHTS: Final = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""The rights that mean something for what is no folder; the kernel refuses others there."""

LOOK: Final = EXECUTE | READ_FILE | READ_DIR
READ: Final = READ_FILE | READ_DIR
_MAKE: Final = MAKE_DIR | MAKE_REG | MAKE_FIFO | MAKE_SYM
WRITE: Final = LOOK | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | _MAKE | REFER | TRUNCATE
DEVICE: Final = READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV

DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
FACTS: Final = (
    *("/proc/cpuinfo", "/proc/loadavg", "/proc/meminfo", "/proc/stat", "/proc/uptime", "/proc/version"),
    *("/sys/devices/system/cpu", "/etc/ld.so.cache", "/etc/localtime"),
)
"""What a program may read of the machine, beside the files of its own process in /proc."""

PROC_FILES: Final = (
    *("auxv", "cgroup", "cmdline", "comm", "environ", "io", "limits", "maps", "mounts", "smaps", "stat", "statm"),
    *("status", "gid_map", "uid_map"),
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


def path_rules(tree: Path, mounts: Sequence[Path], folder: RunFolder, abi: int) -> list[tuple[str, int]]:
    """Return (path, access) rules of one run, for the rights version *abi* knows, for folders and files that are there.
    The prepared *tree* and *mounts*, staged skills and an environment, are read and executed, the folder of generated code is
    read. Files of the host that programs of *tree* need by absolute path, loader, libraries and shells, get one rule each; their folders stay closed.
    """
    originals = (path for folder in library_folders(tree) for path in sorted((tree / folder).iterdir()))
    libraries = (Path("/", path.relative_to(tree)) for path in originals if not path.is_dir())
    rules: dict[int, Sequence[Path | str]] = {
        LOOK: (tree, *mounts),
        READ: (folder.control, *FACTS),
        WRITE: (folder.work, folder.tmp),
        EXECUTE | READ_FILE: [path for path in (*libraries, *map(Path, SHEBANGS)) if path.is_file()],
        DEVICE: DEVICES,
    }
    mask = handled(abi).fs
    return [
        (str(path), right)
        for access, paths in rules.items()
        for path in paths
        if (right := access & (mask if Path(path).is_dir() else mask & _FILE_RIGHTS)) and Path(path).exists()
    ]


def library_folders(tree: Path) -> list[str]:
    """Return the folders of *tree* that hold shared libraries, relative to it."""
    tops = [tree / top for top in ("usr/lib", "usr/lib64", "lib", "lib64")]
    libraries = (path for top in tops if top.is_dir() and not top.is_symlink() for path in top.rglob("*.so*"))
    return sorted({str(path.parent.relative_to(tree)) for path in libraries})


TERM_ALL, KILL_ALL = b"\x00", b"\xff"
"""Commands on the control pipe; any other byte is a signal for the program."""

GUARD_SLACK: Final = 16 * 1024 * 1024
"""Bytes a folder may take on disk beyond its bound: subfolders take room on disk, but none in a tmpfs."""


class Wall(NamedTuple):
    """What every Landlock run shares: the prepared tree, Landlock's version, and the system call filter."""

    rootfs: Rootfs
    abi: int
    seccomp: bytes


def build_order(
    wall: Wall,
    plan: RunPlan,
    folder: RunFolder,
    skills: Mapping[str, Path],
    keep: Sequence[int],
    uid: int,
    cgroups: Sequence[str],
) -> bytes:
    """Return the order of a program under Landlock.

    *skills* are folders of this host, *keep* the descriptors of generated code's payload and report. *cgroups* are
    `cgroup.procs` files of the run's leaf; without one memory is bounded for each process.
    """
    limits, tree = plan.request.limits, wall.rootfs.path
    argv = host_argv(plan, skills)
    if keep:
        argv = entry_argv(*wall.rootfs.on_host(), payload_fd=keep[0], report_fd=keep[1])
    bounds = rlimits(limits, memory=not cgroups) | {"nproc": (limits.pids, limits.pids)}
    return order_bytes(
        folder,
        limits,
        argv=argv,
        env=environment(tree, plan, folder, skills),
        cwd=host_path_of(plan.cwd, skills, folder.work),
        uid=uid,
        limits=within_own_limits(bounds),
        ruleset=handled(wall.abi).attr().hex(),
        rules=path_rules(tree, mounted_folders(plan, skills), folder, wall.abi),
        proc=[(name, READ if name in PROC_FOLDERS else READ_FILE) for name in (*PROC_FILES, *PROC_FOLDERS)],
        seccomp=wall.seccomp.hex(),
        keep=keep,
        cgroups=cgroups,
    )


def order_bytes(folder: RunFolder, bounds: Limits, **facts: object) -> bytes:
    """Return the launcher's order, with the guard of the run's folders; without *facts* of a wall it makes none."""
    guard = [(folder.work, bounds.work_size), (folder.tmp, bounds.tmp_size)]
    order: dict[str, object] = dict.fromkeys(("ruleset", "seccomp")) | dict.fromkeys(("rules", "proc", "keep"), ())
    order["guard"] = [(str(path), size + GUARD_SLACK) for path, size in guard]
    return json.dumps(order | facts).encode("ascii")


def mounted_folders(plan: RunPlan, skills: Mapping[str, Path]) -> list[Path]:
    """Return the folders of this host a run may look into: its staged *skills*, and its environment."""
    environment_mount = plan.request.environment
    return [*skills.values(), *(() if environment_mount is None else (environment_mount.root,))]


def search_path(tree: Path) -> str:
    """Return where programs of *tree* are searched on this host."""
    return ":".join(f"{tree}{folder_name}" for folder_name in BASE_ENV["PATH"].split(":"))


def environment(tree: Path, plan: RunPlan, folder: RunFolder, skills: Mapping[str, Path]) -> dict[str, str]:
    """Return the program's variables. The shared libraries of the tree come first: its Python may be linked against one
    that the program's uid cannot reach on the host.
    """
    own = {
        "PATH": search_path(tree),
        "HOME": str(folder.work),
        "TMPDIR": str(folder.tmp),
        "LD_LIBRARY_PATH": ":".join(f"{tree}/{folder_name}" for folder_name in library_folders(tree)),
    }
    return host_variables(plan, skills, folder.work, **own)


OFFSET: Final = 1000
COUNT: Final = 64
LEAST: Final = 1000


class UidLease(NamedTuple):
    """A uid that is ours alone until `close`."""

    uid: int
    fd: int

    def close(self) -> None:
        """Give the uid back; the caller has seen that no process has it any more."""
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Uids:
    """The uids of one machine: `OFFSET` above the operator's `sandbox_uid`, `COUNT` of them. `sandbox_uid` itself is
    what other engines' programs have on the host, so it is not among them.
    """

    base: int
    top: Path

    @property
    def all(self) -> range:
        """Every uid of the range."""
        return range(self.base + OFFSET, self.base + OFFSET + COUNT)

    def lease(self) -> UidLease:
        """Return a uid that no account, no process and no other run has. Raises ExecRefused: `running_as_root` when the
        range could hold a real account's uid; else every uid is taken.
        """
        if self.base <= 0 or self.all.start < LEAST or self.all.stop > 0xFFFF:
            words = f"sandbox_uid = {self.base} leaves no uids for programs; use a number between 1 and {0xFFFF - OFFSET - COUNT}"
            raise ExecRefused(words, code="running_as_root", engine="landlock")
        busy = running_uids()
        for uid in self.all:
            if uid not in busy and not _has_account(uid) and (lease := self.take(uid)) is not None:
                if uid not in running_uids():  # somebody may have started under it before we held the lock
                    return lease
                lease.close()
        raise ExecRefused(f"all of the {COUNT} uids for programs are in use; run fewer at a time", engine="landlock")

    def end_run(self, folder: RunFolder, ended: list[str]) -> str | None:
        """End a dead owner's run for `leftovers`; a uid that another run holds by now is left alone."""
        note = folder.path / "uid"
        uid = int(note.read_text(encoding="ascii")) if note.is_file() else None
        lease = self.take(uid) if uid is not None and uid in self.all else None
        if lease is None:
            return None
        try:
            ended += [f"process {pid}" for pid in processes_of(lease.uid)]
            survivors = end_uid(lease.uid)
        finally:
            lease.close()
        return f"{survivors} processes of uid {uid} could not be ended" if survivors else None

    def take(self, uid: int) -> UidLease | None:
        """Return *uid* when no other run holds it."""
        import fcntl

        fd = os.open(private_dir(self.top) / str(uid), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return UidLease(uid, fd)


def running_uids() -> set[int]:
    """Return the real, effective and saved uids of every process."""
    return {uid for _, uids in _processes() for uid in uids}


def processes_of(uid: int) -> list[int]:
    """Return the processes that have *uid* in any way, zombies aside."""
    return [pid for pid, uids in _processes() if uid in uids]


def _processes() -> Iterator[tuple[int, set[int]]]:
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if name.isdigit():
            with contextlib.suppress(OSError):
                status = Path("/proc", name, "status").read_text(encoding="utf-8", errors="replace")
                fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
                if fields.get("State", "").split()[:1] != ["Z"]:
                    yield int(name), {int(word) for word in fields.get("Uid", "").split()[:3]}


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


class TreeRun(ProgramRun):
    """A run whose tree the launcher starts, watches and ends."""

    engine: TreeEngine
    plan: RunPlan
    folder: RunFolder
    lease: UidLease | None = None  # None when the run has our uid
    inputs: dict[str, bytes]  # what launcher and program read, by the pipe's name; `payload` is generated code's
    cgroups: Cgroup | None = None
    reserve: ClassVar[tuple[int, int]] = (0, 0)  # memory and processes the leaf holds for a launcher inside it

    _control = -1
    _leaf: Cgroup | None = None
    _launcher: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def order(self, cgroups: Sequence[str]) -> bytes:
        """Return the launcher's order; the pipes are made. *cgroups* are `cgroup.procs` files of the run's leaf."""

    def settle(self, inputs: Sequence[tuple[str, bytes]]) -> None:
        """Lease a uid where we may give one, and fill the run's folders."""
        if os.geteuid() == 0:
            self.lease = self.engine.uids().lease()
            self.stack.callback(self.lease.close)
        self.folder = RunFolder.make(self.engine.runs(), self.request)
        self.stack.callback(self.folder.remove)
        self.folder.write_inputs(inputs, self.plan.cwd, frozenset(self.request.executable))

    def hand_over(self, *further: Path) -> None:
        """Give the program's uid what it may write; the program has not started yet."""
        if self.lease is None:
            return
        write_note(self.folder.path / "uid", str(self.lease.uid))
        self.folder.path.chmod(0o711)
        self.folder.control.chmod(0o755)
        folders = [path for top in (self.folder.work, self.folder.tmp) for path in (top, *top.rglob("*"))]
        for path in (*folders, *further):
            os.chown(path, self.lease.uid, self.lease.uid, follow_symlinks=False)

    def code_payload(self, skills: Mapping[str, Path], tree: Path) -> bytes:
        """Write generated code where its program, run by *tree*'s Python, cannot change it; return its payload. Raises
        ExecRefused.
        """
        assert self.request.code is not None
        program = self.folder.control / "main.py"
        payload = build_payload(
            self.request,
            program_path=str(program),
            with_source=False,
            skill_folders={name: str(path) for name, path in skills.items()},
            work_dir=str(self.folder.work),
            packages=package_variables(self.request, environment_folder(self.request), search_path(tree)),
        )
        program.write_bytes(self.request.code.encode("utf-8", "surrogatepass"))
        program.chmod(0o644)
        return payload

    @property
    def launcher_pid(self) -> int | None:
        """The watcher's pid, whose descendants are the run; None before it started and after its end."""
        return self._launcher.pid if self._launcher is not None and not self.done else None

    def signal(self, number: int) -> None:
        """Send a signal to the program; nothing happens when it has ended."""
        if 0 < number < KILL_ALL[0]:
            self._tell(bytes([number]))

    def spawn(self) -> Pump:
        """Start the launcher."""
        code = "payload" in self.inputs
        self._status = HeadBuffer(64 * 1024)
        with preparing(self.engine.name):
            procs_files: list[str] = []
            if self.cgroups is not None:
                limits, (memory, pids) = self.request.limits, self.reserve
                leaf = self.cgroups.leaf(leaf_name(), limits.memory + memory, limits.pids + pids)
                self.stack.callback(leaf.remove)
                self.bounds, self._leaf = leaf.bounds(), leaf
                procs_files = [str(path / "cgroup.procs") for path in leaf.folders]
            reading = ("stdout", "stderr", "status", *(["report"] if code else []))
            pipes = self.open_pipes(reading, ("order", "control", *self.inputs))
            order = self.order(procs_files)
            theirs = [pipes.theirs[name] for name in ("order", "status", "control")]
            kept = [pipes.theirs[name] for name in ("payload", "report") if code]
            command = [*_INIT, *map(str, theirs)]
            self._launcher = start_program(command, pipes, cwd="/", env=_INIT_ENV, fds=[*theirs, *kept])
            self._control = pipes.take("control")
            self.stack.callback(self._hang_up)
            os.set_blocking(self._control, False)
            pidfd = os.pidfd_open(self._launcher.pid)
            self.stack.callback(os.close, pidfd)
        inputs = {"order": order, **self.inputs}
        feed = self._status.feed
        return self.pump(pidfd, inputs, lambda: self._tell(TERM_ALL), lambda: self._tell(KILL_ALL), status=feed)

    def conclude(self, ending: Ending) -> ExecResult:
        """Read the launcher's last line, and end what it could not tell about."""
        assert self._launcher is not None
        self._launcher.wait()
        lines = self._status.value().splitlines()
        facts: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        if facts.get("event") == "failed":
            facts["left"] = 0
        elif "left" not in facts:
            facts["left"] = 0 if self.lease is None else end_uid(self.lease.uid)
        return self.result_of(ending, facts)

    def result_of(self, ending: Ending, facts: Mapping[str, Any]) -> ExecResult:
        """Return the result of a run whose end the launcher reported."""
        exited = ending.reason == "exited"
        verdict: tuple[Status, ExecError | None] | None = None
        trouble = self._trouble(facts) if exited else None
        end = ProgramEnd(ending.reason, facts.get("code"), facts.get("signal"), ending.duration_s, trouble)
        if facts["left"]:
            trouble = ExecError("end", "survived", f"{facts['left']} processes could not be ended")
            end = ProgramEnd("exited", None, None, ending.duration_s, trouble)
        elif exited and trouble is None and end.code != 0 and self._leaf is not None and self._leaf.oom_kills():
            verdict = ("oom", None)
        if exited and facts.get("over"):
            name = "work" if facts["over"] == str(self.folder.work) else "tmp"
            verdict = ("limit", ExecError("program", name, f"{name} outgrew its bound and the run was ended"))
        if trouble is not None:
            return self.result(end, verdict=verdict)
        outputs = self.folder.collect(self.plan)
        report = self.report.value() if "payload" in self.inputs else None
        return self.result(end, outputs, report=report, verdict=verdict)

    def _tell(self, word: bytes) -> None:
        """Send the launcher a command; a launcher that is gone has already ended the tree."""
        with self.lock, contextlib.suppress(BrokenPipeError, BlockingIOError):
            if self._control >= 0:
                os.write(self._control, word)

    def _hang_up(self) -> None:
        with self.lock:
            os.close(self._control)
            self._control = -1

    def _trouble(self, facts: Mapping[str, Any]) -> ExecError | None:
        """Return why no program ran or why its end was not seen, or None."""
        match facts.get("event"):
            case "ended":
                return None
            case "failed":
                number = int(facts["errno"])
                why = os.strerror(number) if number else facts.get("found", "")
                return not_started(self.plan, str(facts["stage"]), why)
            case "started":
                return ExecError("end", "init_lost", "the launcher ended before the program")
        words = self.last_words(2000) or "the launcher ended before the program began"
        return ExecError("setup", "setup_failed", words)


class TreeEngine(ExecutionEngine):
    """An engine whose runs are `TreeRun`s."""

    def runs(self) -> Path:
        """Return the folder of the runs' folders; programs with a uid of their own pass it."""
        passable = os.geteuid() == 0
        return private_dir(private_dir(self.state(), passable=passable) / f"{self.name}-runs", passable=passable)

    def uids(self) -> Uids:
        """Return the uids for programs, at one place for the whole machine wherever an engine keeps its state."""
        return Uids(self.options.sandbox_uid, private_dir(state_dir(), passable=True) / "uids")

    def end_leftovers(self) -> ReapReport:
        """End processes, cgroups and folders of dead owners; an ordinary user's runs end with their watcher."""
        runs = leftovers(self.runs(), self.uids().end_run)
        groups = reap(RunRecords(self.state()), find_parent())
        return ReapReport(runs.ended + groups.ended, runs.failed + groups.failed)


_INIT: Final = (sys.executable, "-I", str(host_entry().with_name("landlock_init.py")))
_INIT_ENV: Final = {"PATH": "/usr/bin:/bin"}


def end_uid(uid: int) -> int:
    """End every process of a leased uid, and return how many could not be ended."""
    command = [*_INIT, "--end", str(uid)]
    return subprocess.run(command, env=_INIT_ENV, cwd="/", stdin=subprocess.DEVNULL, check=False).returncode
