"""Programs under Landlock, for the inside of ordinary containers where no namespace can be made."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kdskills.errors import ExecFailed, ExecRefused, RootChanged, RootMissing
from kdskills.execution.cgroup import CgroupParent, find_parent
from kdskills.execution.check import LIMIT_NAMES, RunPlan, check_request, require_limits
from kdskills.execution.dirs import cache_dir, private_dir, state_dir
from kdskills.execution.landlock.order import Wall, build_order, host_argv, landlock_version, path_rules
from kdskills.execution.landlock.run import TreeJob, TreeRun, Uids, leftovers, note_uid
from kdskills.execution.local_tree import RunFolder
from kdskills.execution.owner import RunRecords, reap
from kdskills.execution.payload import build_payload, entry_argv
from kdskills.execution.probing import canary_argv, failed, judge
from kdskills.execution.processes import require_endings
from kdskills.execution.protocol import ProbeCheck, ProbeReport, ReapReport
from kdskills.execution.request import ExecRequest, ExecResult, IsolationLevel
from kdskills.execution.rootfs import Rootfs, build_rootfs
from kdskills.execution.run import FinishedRun, in_thread, skills_mismatch, to_the_end
from kdskills.execution.seccomp import ARCHES, landlock_rules, program_bytes
from kdskills.execution.stage import read_inputs, stage_skill
from kdskills.hooks import hookimpl

if TYPE_CHECKING:
    from kdskills.execution.protocol import ExecutionOptions, ExecutorFactory
    from kdskills.hooks import Register

ENGINE: Final = "landlock"
LEVEL: Final = IsolationLevel.LANDLOCK
_CAPABILITIES: Final = {"CHOWN": 0, "DAC_OVERRIDE": 1, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8}
"""What the launcher needs of root: all of them are in what container engines give by default."""
LEAST_MEMORY: Final = 16 * 1024 * 1024


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register `landlock`."""
    register(ENGINE, LandlockExecutor)


class LandlockExecutor:
    """Runs every program under Landlock, a system call filter and a uid of its own.

    Only root can give a program a uid that owns nothing, so an ordinary user is refused: Landlock would let the
    program change modes and times of every file of that user.

    Args:
        options: The operator's settings. `work`, `tmp` and, where no cgroup is writable, `memory` cannot be held exactly
            and must be listed as best effort.
    """

    name = ENGINE
    level = LEVEL

    def __init__(self, options: ExecutionOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._wall: Wall | None = None
        self._rootfs: Rootfs | None = None
        self._cgroups: CgroupParent | None = None
        self._probed: tuple[tuple[object, ...], ProbeReport] | None = None

    async def probe(self) -> ProbeReport:
        """Run the canary; cached by the kernel and our uid."""
        key = (platform.release(), os.geteuid())
        if self._probed is None or self._probed[0] != key:
            self._probed = (key, await self._probe())
        return self._probed[1]

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run to the end. Raises as the protocol says."""
        return await to_the_end(self, request)

    async def start(self, request: ExecRequest) -> TreeRun | FinishedRun:
        """Start and return at once. Raises as `run`."""
        try:
            return await in_thread(partial(self._start, request), undo=lambda run: run.cancel())
        except (RootChanged, RootMissing) as error:
            return skills_mismatch(error, self.name, self.level)
        except (ExecFailed, OSError) as error:
            raise ExecRefused(f"what a run needs cannot be prepared: {error}", engine=self.name) from error

    async def reap(self) -> ReapReport:
        """End processes, cgroups and folders of dead owners."""
        return await asyncio.to_thread(self._reap)

    def _reap(self) -> ReapReport:
        if os.geteuid() != 0:
            return ReapReport()  # nothing of ours can be here: an ordinary user's runs are refused
        runs = leftovers(self._runs(), self._uids())
        groups = reap(RunRecords(self._options.state_dir or state_dir()), find_parent())
        return ReapReport(runs.ended + groups.ended, runs.failed + groups.failed)

    def _runs(self) -> Path:
        top = private_dir(self._options.state_dir or state_dir(), passable=True)
        return private_dir(top / "landlock-runs", passable=True)

    def _uids(self) -> Uids:
        # One place for the whole machine, wherever an instance keeps its state: uids are the machine's.
        return Uids(self._options.sandbox_uid, private_dir(state_dir(), passable=True) / "uids")

    def _start(self, request: ExecRequest) -> TreeRun:
        require_endings(self.name)
        plan = check_request(request)
        if request.network != "none":
            raise ExecRefused(
                "landlock runs programs without network only", code="limit_not_enforceable", engine=ENGINE
            )
        if request.limits.memory < LEAST_MEMORY:
            raise ExecRefused(
                f"landlock itself needs a memory limit of at least {LEAST_MEMORY}",
                code="limit_not_enforceable",
                limits=["memory"],
                engine=ENGINE,
            )
        wall, rootfs = self._prepared()
        enforced = LIMIT_NAMES - {"work", "tmp"} - (set() if self._cgroups is not None else {"memory"})
        require_limits(enforced, self._options.best_effort, self.name)
        cache = self._options.cache_dir or cache_dir()
        skill_folders = {mount.id: str(stage_skill(mount, cache, passable=True)) for mount in request.skills}
        inputs = read_inputs(request.inputs, request.limits)
        lease = self._uids().lease()
        try:
            folder = RunFolder.make(self._runs(), request)
        except BaseException:  # raised again: whatever it was, the leased uid goes back
            lease.close()
            raise
        try:
            _furnish(folder, inputs, plan, lease.uid)
            payload = None if request.code is None else _payload(request, folder, skill_folders)
            skills = [Path(folder_path) for folder_path in skill_folders.values()]
            allowed = path_rules(wall.tree, skills, folder.control, (folder.work, folder.tmp), wall.abi)

            def order(payload_fd: int, report_fd: int, cgroups: Sequence[str]) -> bytes:
                python, entry = f"{wall.tree}{rootfs.python}", f"{wall.tree}{rootfs.entry}"
                code = entry_argv(python, entry, payload_fd=payload_fd, report_fd=report_fd)
                return build_order(
                    wall, plan, folder, skill_folders=skill_folders, uid=lease.uid, rules=allowed, cgroups=cgroups,
                    argv=host_argv(plan, skill_folders) if payload is None else code,
                    keep=[] if payload is None else [payload_fd, report_fd],
                )  # fmt: skip

            run = TreeRun(
                TreeJob(
                    engine=self.name, level=self.level, plan=plan, folder=folder, lease=lease, order=order, payload=payload,
                    stdin=request.stdin, cgroups=self._cgroups, reserve=(0, 0), enforced=frozenset(enforced),
                )
            )  # fmt: skip
            run.spawn()
        except BaseException:  # raised again: no folder and no leased uid stays behind
            folder.remove()
            lease.close()
            raise
        return run

    def _prepared(self) -> tuple[Wall, Rootfs]:
        """Return what every run shares. Raises ExecRefused when this machine or user cannot have it."""
        with self._lock:
            if self._wall is None or self._rootfs is None or not self._rootfs.path.is_dir():
                version = _usable_version()
                arch = ARCHES.get(platform.machine())
                if arch is None:
                    raise ExecRefused(f"no system call filter for {platform.machine()}", engine=self.name)
                self._rootfs = build_rootfs(self._options.cache_dir, packages=self._options.image_packages)
                for folder in (self._rootfs.path, self._runs()):
                    _demand_reachable(folder)
                self._cgroups = find_parent()
                self._wall = Wall(self._rootfs.path, version, program_bytes(arch, landlock_rules(version)))
            os.utime(self._rootfs.path)  # in use: not to be pruned by a newer version's build
            return self._wall, self._rootfs

    async def _probe(self) -> ProbeReport:
        try:
            wall, rootfs = await asyncio.to_thread(self._prepared)
            argv = canary_argv(f"{wall.tree}{rootfs.python}", f"{wall.tree}{rootfs.entry}")
            run = await self.start(ExecRequest(argv=argv))
        except (ExecRefused, ExecFailed) as error:
            return ProbeReport(self.name, self.level, ok=False, cure=error.message)
        except OSError as error:
            return ProbeReport(self.name, self.level, ok=False, cure=f"make what a run needs accessible: {error}")
        assert isinstance(run, TreeRun)
        bounds = run.bounds
        result = await run.wait()
        memory_bound = f"cgroup holds {bounds}" if bounds else "RLIMIT_AS per process"
        checks = (
            ProbeCheck("landlock", ok=True, found=f"ABI {wall.abi}"),
            *judge(result.stdout.data, sockets=False),
            ProbeCheck("limits", ok=True, found=f"{memory_bound}, RLIMIT_NPROC of a uid of its own"),
        )
        ok = result.status == "ok" and all(check.ok for check in checks)
        words = result.error.message if result.error else failed(checks)
        cure = None if ok else f"look into the sandbox's set-up: {words}"
        return ProbeReport(self.name, self.level, ok, checks, result.limits_enforced, cure)


def _usable_version() -> int:
    """Return Landlock's version here. Raises ExecRefused with the cure when something is missing."""
    version, problem = landlock_version()
    if version < 1:
        raise ExecRefused(problem, engine=ENGINE)
    if os.geteuid() != 0:
        raise ExecRefused(
            "an ordinary user cannot give programs a uid that owns nothing, and Landlock does not stop a program from"
            " changing modes and times of its own user's files: run kdskills as root of its container (programs never"
            " run as root), or use bubblewrap or docker",
            engine=ENGINE,
        )
    missing = sorted(name for name, bit in _CAPABILITIES.items() if not effective_capabilities() >> bit & 1)
    if missing:
        names = ", ".join(f"CAP_{name}" for name in missing)
        raise ExecRefused(
            f"give the container the capabilities {names}: programs get a uid of their own", engine=ENGINE
        )
    if shutil.which("du") is None:
        raise ExecRefused("du not found; install the package coreutils", engine=ENGINE)
    return version


def effective_capabilities() -> int:
    """Return our effective capabilities as a mask."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)


def _demand_reachable(folder: Path) -> None:
    """Raise ExecRefused when programs, which have a uid of their own, cannot enter *folder*."""
    closed = next((path for path in (folder, *folder.parents) if not path.stat().st_mode & 0o001), None)
    if closed is not None:
        raise ExecRefused(
            f"{closed} is closed to programs' uids: choose another folder for cache and state", engine=ENGINE
        )


def _furnish(folder: RunFolder, inputs: list[tuple[str, bytes]], plan: RunPlan, uid: int) -> None:
    """Fill the run's folders and give the program's uid those it may write; the program has not started yet."""
    note_uid(folder, uid)
    folder.write_inputs(inputs, plan.cwd, frozenset(plan.request.executable))
    folder.path.chmod(0o711)
    folder.control.chmod(0o755)
    for top in (folder.work, folder.tmp):
        for path, _, files in os.walk(top):
            for name in (path, *(os.path.join(path, file) for file in files)):  # noqa: PTH118 - walk gives text
                os.chown(name, uid, uid, follow_symlinks=False)


def _payload(request: ExecRequest, folder: RunFolder, skill_folders: dict[str, str]) -> bytes:
    """Write the generated code where its program cannot change it, and return its payload."""
    assert request.code is not None
    program = folder.control / "main.py"
    payload = build_payload(
        request, program_path=str(program), with_source=False, skill_folders=skill_folders, work_dir=str(folder.work)
    )
    program.write_bytes(request.code.encode("utf-8", "surrogatepass"))
    program.chmod(0o644)
    return payload
