"""Programs under Landlock, for the inside of ordinary containers where no namespace can be made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from kdskills.errors import ExecRefused
from kdskills.execution.check import LIMIT_NAMES
from kdskills.execution.landlock import TreeEngine, TreeRun, Wall, build_order, landlock_version
from kdskills.execution.owner import Cgroup, find_parent
from kdskills.execution.protocol import ExecutionOptions, ExecutorFactory, ProbeCheck, ReapReport
from kdskills.execution.request import ExecResult, IsolationLevel
from kdskills.execution.rootfs import build_rootfs
from kdskills.execution.run import ExecutionRun, judge
from kdskills.execution.seccomp import host_filter, landlock_rules
from kdskills.execution.stage import read_inputs
from kdskills.hooks import Register, hookimpl

ENGINE: Final = "landlock"
_CAPABILITIES: Final = {"CHOWN": 0, "DAC_OVERRIDE": 1, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8}
"""What the launcher needs of root: all of them are in what container engines give by default."""


class LandlockRun(TreeRun):
    """A run whose launcher carries Landlock and the filter to the program."""

    engine: LandlockExecutor

    def prepare(self) -> None:
        """Stage skills and inputs, and put generated code where its program cannot change it."""
        engine, request = self.engine, self.request
        self.plan = engine.checked(request)
        self._wall = engine.prepared()
        self.cgroups = engine.cgroups
        lacking = {"work", "tmp"} if self.cgroups is not None else {"work", "tmp", "memory"}
        enforced = engine.require(LIMIT_NAMES - lacking)
        self._skills = engine.stage(request, passable=True)
        engine.environment(request, passable=True)
        self.settle(read_inputs(request.inputs, request.limits))
        self.hand_over()
        self.inputs = {"stdin": request.stdin}
        if request.code is not None:
            self.inputs["payload"] = self.code_payload(self._skills, self._wall.rootfs.path)
        self.enforced = enforced

    def order(self, cgroups: Sequence[str]) -> bytes:
        """Return the launcher's order."""
        assert self.lease is not None
        fds = self.pipes.theirs
        keep = [fds["payload"], fds["report"]] if "payload" in fds else []
        return build_order(self._wall, self.plan, self.folder, self._skills, keep, self.lease.uid, cgroups)


class LandlockExecutor(TreeEngine):
    """Runs every program under Landlock, a system call filter and a uid of its own.

    Only root can give a program a uid that owns nothing, so an ordinary user is refused: Landlock would let the
    program change modes and times of every file of that user. `work`, `tmp` and, where no cgroup is writable, `memory`
    cannot be held exactly and must be listed as best effort.
    """

    name = ENGINE
    level = IsolationLevel.LANDLOCK
    run_type = LandlockRun
    environments = True
    least: ClassVar[Mapping[str, int]] = {"memory": 16 * 1024 * 1024}

    def __init__(self, options: ExecutionOptions) -> None:
        super().__init__(options)
        self.cgroups: Cgroup | None = None
        self._prepared: Wall | None = None

    def end_leftovers(self) -> ReapReport:
        """End what dead owners left; nothing of ours can be there for an ordinary user, whose runs are refused."""
        return super().end_leftovers() if os.geteuid() == 0 else ReapReport()

    def prepared(self) -> Wall:
        """Return what every run shares. Raises ExecRefused when this machine or user cannot have it."""
        with self.lock:
            if self._prepared is None or not self._prepared.rootfs.path.is_dir():
                version = _usable_version()
                seccomp = host_filter(landlock_rules(version), self.name)
                rootfs = build_rootfs(self.options.cache_dir, **self.options.image)
                for folder in (rootfs.path, self.runs()):
                    closed = next((path for path in (folder, *folder.parents) if not path.stat().st_mode & 0o001), None)
                    if closed is not None:
                        words = f"{closed} is closed to programs' uids: choose another folder for cache and state"
                        raise ExecRefused(words, engine=ENGINE)
                self.cgroups = find_parent()
                self._prepared = Wall(rootfs, version, seccomp)
            os.utime(self._prepared.rootfs.path)  # in use: not to be pruned by a newer version's build
            return self._prepared

    def interpreter(self) -> tuple[str, str]:
        """Return interpreter and entry in the prepared tree."""
        return self.prepared().rootfs.on_host()

    def judged(self, run: ExecutionRun, result: ExecResult) -> tuple[ProbeCheck, ...]:
        """Return the canary's checks beside Landlock's version and the limits."""
        assert isinstance(run, LandlockRun)
        memory_bound = f"cgroup holds {run.bounds}" if run.bounds else "RLIMIT_AS per process"
        return (
            ProbeCheck("landlock", ok=True, found=f"ABI {self.prepared().abi}"),
            *judge(result.stdout.data, sockets=False),
            ProbeCheck("limits", ok=True, found=f"{memory_bound}, RLIMIT_NPROC of a uid of its own"),
        )


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
        words = f"give the container the capabilities {names}: programs get a uid of their own"
        raise ExecRefused(words, engine=ENGINE)
    if shutil.which("du") is None:
        raise ExecRefused("du not found; install the package coreutils", engine=ENGINE)
    return version


def effective_capabilities() -> int:
    """Return our effective capabilities as a mask."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register `landlock`."""
    register(ENGINE, LandlockExecutor)
