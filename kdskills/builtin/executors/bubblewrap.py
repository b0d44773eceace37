"""The default engine on Linux hosts: a bubblewrap sandbox per run; `docs/explanation/isolation.md` has the reasons."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ClassVar

from kdskills.errors import ExecRefused
from kdskills.execution.bwrap import BwrapBox, Pool, SandboxJob, SandboxSetup, WorkerKind, make_sandbox, make_worker
from kdskills.execution.check import LIMIT_NAMES
from kdskills.execution.egress import PROXY_ENV
from kdskills.execution.owner import RunRecords, find_parent, reap
from kdskills.execution.payload import build_payload, read_report
from kdskills.execution.protocol import ExecutionOptions, ExecutorFactory, ProbeCheck, ReapReport
from kdskills.execution.request import ExecError, ExecResult, IsolationLevel, Status
from kdskills.execution.rootfs import build_rootfs
from kdskills.execution.run import ExecutionEngine, ExecutionRun, ProgramEnd, ProgramRun, judge
from kdskills.execution.seccomp import RULES, host_filter
from kdskills.execution.stage import collect, read_inputs
from kdskills.execution.streams import Ending, Pump
from kdskills.hooks import Register, hookimpl

ENGINE = "bubblewrap"
_SPARE_FDS = 32
_COUNTED_PER_NAMESPACE = (5, 14)
"""Since this kernel RLIMIT_NPROC counts the processes of one user namespace, so it bounds exactly one sandbox."""


class BubblewrapRun(ProgramRun):
    """A run in a sandbox of the pool, or in one of its own; `host_uid` is that of its processes as the host sees them."""

    engine: BubblewrapExecutor
    host_uid = -1
    _box: BwrapBox | None = None

    def prepare(self) -> None:
        """Decide and stage everything that needs no sandbox."""
        engine, request = self.engine, self.request
        plan = engine.checked(request)
        self._setup = engine.prepared()
        enforced = engine.require(engine.enforceable(self._setup))
        certificates = self.prepare_secrets()
        mounts = (*engine.mounts(request, passable=self._setup.drop_to is not None).items(), *certificates.items())
        payload = None if request.code is None else build_payload(request)
        inputs = tuple(read_inputs(request.inputs, request.limits))
        # The launcher, which has the program's limits, writes the inputs.
        problem, largest = None, max((len(data) for _, data in inputs), default=0)
        if inputs and len(inputs) + _SPARE_FDS > request.limits.nofile:
            problem = f"{len(inputs)} inputs do not fit a limit of {request.limits.nofile} open files"
        if largest > request.limits.fsize:
            problem = f"an input has {largest} bytes, more than the file size limit of {request.limits.fsize}"
        if problem:
            raise ExecRefused(problem, code="bad_request", who="caller")
        self._job = SandboxJob(plan, payload, mounts, inputs)
        # The canary needs what a run without a pool needs; certificates of one run are no use to the next.
        apart = self.probing or request.terminal is not None or bool(certificates)
        self._pool = None if apart else engine.pool_on(self._setup)
        self.enforced = enforced

    def spawn(self) -> Pump:
        """Take a sandbox of the pool, or make one, and let its program start."""
        job, worker, kind = self._job, None, WorkerKind.for_job(self._job)
        if self._pool is not None:
            # Called last, so that making sandboxes never delays this run.
            self.stack.callback(self._pool.want, kind)
            worker = self._pool.take(kind)
        if job.network and worker is None:
            # It starts the helper before it becomes the program.
            worker = make_worker(self._setup, kind, self.request.terminal)
        payload = job.payload if worker is None else worker.give(self._setup, job, self.stack)
        self._sandbox = box = make_sandbox(self._setup, job, self.stack) if worker is None else worker.box
        self.pipes, self.host_uid = box.pipes, box.host_uid
        if job.network:
            self.forward(socket.socket(fileno=self.pipes.take("network")))
        self.bounds = {} if box.leaf is None else box.leaf.bounds()
        feeds = ({} if self.request.terminal is not None else {"stdin": self.request.stdin}) | (
            {} if payload is None else {"payload": payload}
        )
        pump = self.pump(box.launcher_fd, feeds, box.terminate, box.kill)
        with self.lock:
            self._box = box
        if not box.pooled and not self.cancelled.is_set():
            box.release()
        return pump

    def conclude(self, ending: Ending) -> ExecResult:
        """Wait until every process is gone, and collect from what only we hold by then."""
        with self.lock:
            self._box = None
        job, box = self._job, self._sandbox
        exit_code, exited = box.finish(), ending.reason == "exited"
        oom = exited and exit_code != 0 and box.leaf is not None and box.leaf.oom_kills() > 0
        trouble = self._trouble(exit_code) if exited and not oom else None
        if trouble is not None:
            exit_code = None
        outputs = None if exited and exit_code is None else collect(box.work, job.plan.globs, job.limits)
        # Like a shell, bwrap reports death by signal n as 128 + n.
        number = None if exit_code is None or not 128 < exit_code <= 128 + 64 else exit_code - 128
        end = ProgramEnd(ending.reason, exit_code, number, ending.duration_s, trouble)
        # Without an exit code when the kernel chose the sandbox's own first process.
        verdict: tuple[Status, ExecError | None] | None = ("oom", None) if oom else None
        return self.result(end, outputs, report=self.report.value(), verdict=verdict)

    def signal(self, number: int) -> None:
        """Send a signal to the program; nothing happens when it has ended."""
        with self.lock:
            if self._box is not None:
                self._box.signal(number)

    def network_namespace(self) -> int | None:
        """Return the host pid of a process in the sandbox's network; None before it is up and after its end."""
        with self.lock:
            return None if self._box is None else self._box.init

    def _trouble(self, exit_code: int | None) -> ExecError | None:
        """Return why no program ran, or None when one did; bwrap's stderr tells a missing one from a broken sandbox."""
        if exit_code is not None:
            by_worker = self._sandbox.pooled and self._job.payload is None
            return read_report(self.report.value()).error if by_worker else None  # argv that could not start
        words = self.last_words(4096)
        if words.startswith("bwrap: execvp "):
            return ExecError("exec", "program_missing", words.removeprefix("bwrap: execvp "))
        return ExecError("setup", "setup_failed", words or "the sandbox ended before its program began")


class BubblewrapExecutor(ExecutionEngine):
    """Runs every program in namespaces of its own, as a uid that is nobody.

    For an ordinary user `memory` counts as best effort: where no cgroup is writable the bound falls back to RLIMIT_AS per
    process, and `memory` is absent from `limits_enforced`.
    """

    name = ENGINE
    level = IsolationLevel.NAMESPACE
    run_type = BubblewrapRun
    environments = True
    terminals: ClassVar[bool] = True
    least: ClassVar[Mapping[str, int]] = {"memory": 16 * 1024 * 1024, "nofile": 16}
    networks: ClassVar[bool] = True
    network_env: ClassVar[Mapping[str, str]] = PROXY_ENV

    def __init__(self, options: ExecutionOptions) -> None:
        super().__init__(options)
        if os.geteuid() != 0:
            self.best_effort |= {"memory"}
        self._setup: SandboxSetup | None = None
        self._pool: tuple[SandboxSetup, Pool] | None = None

    def prepare(self) -> None:
        """Do ahead of time what all runs share; no thread is started, so this process may fork afterwards."""
        self.prepared()

    def close(self) -> None:
        """End the sandboxes that were made ahead of time; the end of the interpreter does the same."""
        with self.lock:
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

    def end_leftovers(self) -> ReapReport:
        """End cgroups and launchers of dead owners."""
        return reap(RunRecords(self.state()), find_parent())

    def pool_on(self, setup: SandboxSetup) -> Pool | None:
        """Return the pool of sandboxes on this setup; one on older setup is closed."""
        if self.options.pool <= 0:
            return None
        old = None
        with self.lock:
            if self._pool is None or self._pool[0] is not setup:
                new_pool = Pool(self.options.pool, partial(make_worker, setup))
                old, self._pool = self._pool, (setup, new_pool)
                weakref.finalize(self, new_pool.close)
            pool = self._pool[1]
        if old is not None:
            old[1].close()
        return pool

    def prepared(self) -> SandboxSetup:
        """Return what every run shares. Raises ExecRefused."""
        with self.lock:
            if self._setup is None or not self._setup.rootfs.path.is_dir():
                self._setup = self._new_setup()
            os.utime(self._setup.rootfs.path)  # in use: not to be pruned by a newer version's build
            return self._setup

    def _new_setup(self) -> SandboxSetup:
        seccomp = host_filter(RULES, self.name)
        programs = {name: path for name in ("bwrap", "prlimit", "setpriv") if (path := shutil.which(name))}
        missing = sorted({"bwrap", "prlimit", "setpriv"} - programs.keys())
        if missing:
            words = f"{' and '.join(missing)} not found; install the packages bubblewrap and util-linux"
            raise ExecRefused(words, engine=self.name, missing=missing)
        drop_to = self.options.sandbox_uid if os.geteuid() == 0 else None
        if drop_to is not None and drop_to <= 0:
            words = "a sandbox is never launched as root: set sandbox_uid to a dedicated uid"
            raise ExecRefused(words, code="running_as_root", engine=self.name)
        cgroups = find_parent()
        kernel = tuple(int(part) if part.isdigit() else 0 for part in platform.release().split("-")[0].split("."))
        return SandboxSetup(
            programs=programs,
            drop_to=drop_to,
            rootfs=build_rootfs(self.options.cache_dir, **self.options.image),
            seccomp=seccomp,
            spawner=ThreadPoolExecutor(1, thread_name_prefix="kdskills-spawner"),
            cgroups=cgroups,
            nproc=cgroups is None and os.geteuid() != 0 and kernel[:2] >= _COUNTED_PER_NAMESPACE,
            records=RunRecords(self.state()),
        )

    def enforceable(self, setup: SandboxSetup) -> frozenset[str]:
        """Return the limits sandboxes of *setup* hold."""
        if setup.cgroups is not None:
            return LIMIT_NAMES
        return LIMIT_NAMES - ({"memory"} if setup.nproc else {"memory", "pids"})

    def probe_key(self) -> tuple[object, ...]:
        """Return the binary's time beside the kernel and our uid."""
        bwrap = shutil.which("bwrap")
        return Path(bwrap).stat().st_mtime_ns if bwrap else None, *super().probe_key()

    def interpreter(self) -> tuple[str, str]:
        """Return interpreter and entry inside."""
        rootfs = self.prepared().rootfs
        return rootfs.python, rootfs.entry

    def judged(self, run: ExecutionRun, result: ExecResult) -> tuple[ProbeCheck, ...]:
        """Return the canary's checks and those only the host can make: its uid and its limits."""
        assert isinstance(run, BubblewrapRun)
        setup = self.prepared()
        if setup.cgroups is not None:
            ok = {"memory", "pids"} <= set(run.bounds)
            limits = ProbeCheck("limits", ok, f"cgroup holds {run.bounds}")
        else:
            words = "RLIMIT_AS per process" + (" and RLIMIT_NPROC" if setup.nproc else "")
            limits = ProbeCheck("limits", ok=True, found=words)
        uid = ProbeCheck("host_uid", run.host_uid > 0, f"uid {run.host_uid} on the host")
        return *judge(result.stdout.data), uid, limits

    def cure_of(self, words: str) -> str:
        """Return one sentence for the operator about a sandbox that did not work."""
        if "uid map" in words or "new namespace" in words or "user namespace" in words:
            return (
                f"allow unprivileged user namespaces for bwrap (kernel.unprivileged_userns_clone=1, or an AppArmor profile"
                f" with userns where kernel.apparmor_restrict_unprivileged_userns=1), or use docker: {words}"
            )
        if "Unknown option" in words:
            return f"install bubblewrap 0.8 or newer: {words}"
        return super().cure_of(words)


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register `bubblewrap`."""
    register(ENGINE, BubblewrapExecutor)
