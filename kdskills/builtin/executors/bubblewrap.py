"""The default engine on Linux hosts: a bubblewrap sandbox per run."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kdskills.errors import ExecFailed, ExecRefused, RootChanged, RootMissing
from kdskills.execution.bwrap.box import Launcher
from kdskills.execution.bwrap.pool import Pool, SandboxJob, SandboxSetup, make_worker
from kdskills.execution.bwrap.run import ENGINE, LEVEL, BubblewrapRun, Prepared
from kdskills.execution.cgroup import find_parent
from kdskills.execution.check import LIMIT_NAMES, check_request, require_limits
from kdskills.execution.dirs import cache_dir, state_dir
from kdskills.execution.owner import RunRecords, reap
from kdskills.execution.payload import build_payload, entry_argv
from kdskills.execution.probing import canary_argv, failed, judge
from kdskills.execution.processes import require_endings
from kdskills.execution.protocol import ProbeCheck, ProbeReport, ReapReport
from kdskills.execution.request import ExecRequest, ExecResult, Limits
from kdskills.execution.rootfs import Rootfs, build_rootfs
from kdskills.execution.run import FinishedRun, skills_mismatch
from kdskills.execution.seccomp import Arch, program_bytes
from kdskills.execution.stage import read_inputs, stage_skill
from kdskills.hooks import hookimpl

if TYPE_CHECKING:
    from kdskills.execution.protocol import ExecutionOptions, ExecutorFactory
    from kdskills.hooks import Register

_ARCHES: dict[str, Arch] = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
_SPARE_FDS = 32
LEAST = {"memory": 16 * 1024 * 1024, "nofile": 16}
"""What the launcher needs for itself within the program's limits."""
_COUNTED_PER_NAMESPACE = (5, 14)
"""Since this kernel RLIMIT_NPROC counts the processes of one user namespace, so it bounds exactly one sandbox."""


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register `bubblewrap`."""
    register(ENGINE, BubblewrapExecutor)


class BubblewrapExecutor:
    """Runs every program in namespaces of its own, as a uid that is nobody.

    Args:
        options: The operator's settings. For an ordinary user `memory` counts as best effort: where no cgroup is
            writable the bound falls back to RLIMIT_AS per process, and `memory` is absent from `limits_enforced`.
    """

    name = ENGINE
    level = LEVEL

    def __init__(self, options: ExecutionOptions) -> None:
        self._options = options
        self._best_effort = options.best_effort | (frozenset() if os.geteuid() == 0 else {"memory"})
        self._lock = threading.Lock()
        self._setup: SandboxSetup | None = None
        self._rootfs: Rootfs | None = None
        self._pool: tuple[SandboxSetup, Pool] | None = None
        self._probed: tuple[tuple[object, ...], ProbeReport] | None = None

    async def probe(self) -> ProbeReport:
        """Run the canary; cached by the binary's time, the kernel and our uid."""
        key = self._probe_key()
        if self._probed is None or self._probed[0] != key:
            self._probed = (key, await self._probe())
        return self._probed[1]

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run to the end. Raises as the protocol says."""
        run = self._new(request, self._pool_of)
        run.go()
        try:
            return await run.wait()
        except (RootChanged, RootMissing) as error:
            return await skills_mismatch(error, self.name, self.level).wait()
        except asyncio.CancelledError:
            await run.cancel()
            raise

    async def start(self, request: ExecRequest) -> BubblewrapRun | FinishedRun:
        """Start and return at once. Raises as `run`."""
        run = self._new(request, self._pool_of)
        run.go()
        try:
            await run.begun()
        except (RootChanged, RootMissing) as error:
            return skills_mismatch(error, self.name, self.level)
        return run

    def _new(self, request: ExecRequest, pool: Callable[[SandboxSetup, Rootfs], Pool | None]) -> BubblewrapRun:
        """Return a run whose own thread decides and stages everything; handing that over would only cost time."""

        def prepare() -> Prepared:
            try:
                setup, rootfs, job = self._prepare(request)
                return Prepared(setup, job, pool(setup, rootfs))
            except (ExecFailed, OSError) as error:
                raise ExecRefused(f"what a sandbox needs cannot be prepared: {error}", engine=self.name) from error

        return BubblewrapRun(request, prepare, engine=self.name, level=self.level)

    def prepare(self) -> None:
        """Do ahead of time what all runs share; no thread is started, so this process may fork afterwards."""
        self._prepared()

    def close(self) -> None:
        """End the sandboxes that were made ahead of time; the end of the interpreter does the same."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool[1].close()

    def ready(self) -> int:
        """Return how many sandboxes wait in the pool."""
        pool = self._pool
        return 0 if pool is None else pool[1].idle()

    def lacking(self) -> int:
        """Return how many sandboxes the pool still has to make after the last run."""
        pool = self._pool
        return 0 if pool is None else pool[1].size - pool[1].idle()

    async def reap(self) -> ReapReport:
        """End what dead owners left: cgroups and launchers."""
        records = RunRecords(self._options.state_dir or state_dir())
        return await asyncio.to_thread(lambda: reap(records, find_parent()))

    def _pool_of(self, setup: SandboxSetup, rootfs: Rootfs) -> Pool | None:
        """Return the pool of sandboxes on this setup; one on older setup is closed."""
        if self._options.pool <= 0:
            return None
        old = None
        with self._lock:
            if self._pool is None or self._pool[0] is not setup:
                program = rootfs.entry.rpartition("/")[0] + "/pool_worker.py"
                new_pool = Pool(self._options.pool, partial(make_worker, setup, python=rootfs.python, program=program))
                old, self._pool = self._pool, (setup, new_pool)
                weakref.finalize(self, new_pool.close)
            pool = self._pool[1]
        if old is not None:
            old[1].close()
        return pool

    def _prepare(self, request: ExecRequest) -> tuple[SandboxSetup, Rootfs, SandboxJob]:
        """Decide and stage everything that needs no sandbox. Raises ExecRefused, RootChanged, RootMissing."""
        require_endings(self.name)
        plan = check_request(request)
        if request.network != "none":
            raise ExecRefused(
                "bubblewrap runs programs without network only", code="limit_not_enforceable", engine=self.name
            )
        for name, least in LEAST.items():
            if getattr(request.limits, name) < least:
                raise ExecRefused(
                    f"bubblewrap itself needs a limit of at least {least} for {name}",
                    code="limit_not_enforceable",
                    limits=[name],
                    engine=self.name,
                )
        setup, rootfs = self._prepared()
        enforced = self._enforceable(setup)
        require_limits(enforced, self._best_effort, self.name)
        cache = self._options.cache_dir or cache_dir()
        drops_uid = setup.launcher.drop_to is not None
        skills = tuple((mount.id, stage_skill(mount, cache, passable=drops_uid)) for mount in request.skills)
        payload = None if request.code is None else build_payload(request)

        def argv(payload_fd: int, report_fd: int) -> tuple[str, ...]:
            if payload is None:
                return plan.argv
            return entry_argv(rootfs.python, rootfs.entry, payload_fd=payload_fd, report_fd=report_fd)

        inputs = tuple(read_inputs(request.inputs, request.limits))
        _fit(inputs, request.limits)
        return setup, rootfs, SandboxJob(plan, argv, payload, skills, inputs, enforced)

    def _prepared(self) -> tuple[SandboxSetup, Rootfs]:
        with self._lock:
            if self._setup is None or self._rootfs is None or not self._rootfs.path.is_dir():
                arch = _ARCHES.get(platform.machine())
                if arch is None:
                    raise ExecRefused(f"no system call filter for {platform.machine()}", engine=self.name)
                launcher = self._launcher()
                self._rootfs = build_rootfs(self._options.cache_dir, packages=self._options.image_packages)
                cgroups = find_parent()
                self._setup = SandboxSetup(
                    launcher=launcher,
                    rootfs=self._rootfs.path,
                    seccomp=program_bytes(arch),
                    spawner=ThreadPoolExecutor(1, thread_name_prefix="kdskills-spawner"),
                    cgroups=cgroups,
                    nproc=cgroups is None and os.geteuid() != 0 and _kernel() >= _COUNTED_PER_NAMESPACE,
                    records=RunRecords(self._options.state_dir or state_dir()),
                )
            os.utime(self._rootfs.path)  # in use: not to be pruned by a newer version's build
            return self._setup, self._rootfs

    def _launcher(self) -> Launcher:
        programs = {name: shutil.which(name) for name in ("bwrap", "prlimit", "setpriv")}
        missing = sorted(name for name, path in programs.items() if path is None)
        if missing:
            raise ExecRefused(
                f"{' and '.join(missing)} not found; install the packages bubblewrap and util-linux",
                engine=self.name,
                missing=missing,
            )
        drop_to = None
        if os.geteuid() == 0:
            drop_to = self._options.sandbox_uid
            if drop_to <= 0:
                raise ExecRefused(
                    "a sandbox is never launched as root: set sandbox_uid to a dedicated uid",
                    code="running_as_root",
                    engine=self.name,
                )
        return Launcher(str(programs["bwrap"]), str(programs["prlimit"]), str(programs["setpriv"]), drop_to)

    def _enforceable(self, setup: SandboxSetup) -> frozenset[str]:
        missing = set() if setup.cgroups is not None else {"memory"}
        if setup.cgroups is None and not setup.nproc:
            missing.add("pids")
        return LIMIT_NAMES - missing

    def _probe_key(self) -> tuple[object, ...]:
        bwrap = shutil.which("bwrap")
        return (Path(bwrap).stat().st_mtime_ns if bwrap else None, platform.release(), os.geteuid())

    async def _probe(self) -> ProbeReport:
        try:
            setup, rootfs = await asyncio.to_thread(self._prepared)
            canary = ExecRequest(argv=canary_argv(rootfs.python, rootfs.entry))
            run = self._new(canary, lambda *_: None)
            run.go()
            await run.begun()
        except (ExecRefused, ExecFailed) as error:
            return ProbeReport(self.name, self.level, ok=False, cure=error.message)
        except OSError as error:
            return ProbeReport(self.name, self.level, ok=False, cure=f"make what a sandbox needs accessible: {error}")
        result = await run.wait()
        checks = (*judge(result.stdout.data), *_host_checks(run, setup))
        ok = result.status == "ok" and all(check.ok for check in checks)
        words = result.error.message if result.error else failed(checks)
        return ProbeReport(
            engine=self.name,
            level=self.level,
            ok=ok,
            checks=checks,
            limits=result.limits_enforced,
            cure=None if ok else _cure(words),
        )


def _fit(inputs: Sequence[tuple[str, bytes]], limits: Limits) -> None:
    """Raise ExecRefused for inputs that the launcher, which has the program's limits, could not write."""
    problem = None
    if inputs and len(inputs) + _SPARE_FDS > limits.nofile:
        problem = f"{len(inputs)} inputs do not fit a limit of {limits.nofile} open files"
    largest = max((len(data) for _, data in inputs), default=0)
    if largest > limits.fsize:
        problem = f"an input has {largest} bytes, more than the file size limit of {limits.fsize}"
    if problem:
        raise ExecRefused(problem, code="bad_request", who="caller")


def _host_checks(run: BubblewrapRun, setup: SandboxSetup) -> tuple[ProbeCheck, ...]:
    """Return the checks of the canary that only the host can make: its uid and its limits."""
    checks = [ProbeCheck("host_uid", run.host_uid > 0, f"uid {run.host_uid} on the host")]
    if setup.cgroups is not None:
        ok = {"memory", "pids"} <= set(run.bounds)
        checks.append(ProbeCheck("limits", ok, f"cgroup holds {run.bounds}"))
    else:
        limits = "RLIMIT_AS per process" + (" and RLIMIT_NPROC" if setup.nproc else "")
        checks.append(ProbeCheck("limits", ok=True, found=limits))
    return tuple(checks)


def _cure(words: str) -> str:
    """Return one sentence for the operator about a sandbox that did not work."""
    if "uid map" in words or "new namespace" in words or "user namespace" in words:
        return (
            f"allow unprivileged user namespaces for bwrap (kernel.unprivileged_userns_clone=1, or an AppArmor profile"
            f" with userns where kernel.apparmor_restrict_unprivileged_userns=1), or use docker: {words}"
        )
    if "Unknown option" in words:
        return f"install bubblewrap 0.8 or newer: {words}"
    return f"look into the sandbox's set-up: {words}"


def _kernel() -> tuple[int, ...]:
    parts = platform.release().split("-")[0].split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)
