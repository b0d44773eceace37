"""Sandboxes that are up and whose program has not started: made for one run, or ahead of time.

A worker of the pool is a sandbox like any other, with its own cgroup and a fresh `/work`, in which a Python process has
started and waits for one order on a pipe. What is fixed when a sandbox is made (skills and sizes) is its kind; a run
takes a worker of exactly its kind or none. A worker is ended after its run, whatever came of it.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from kdskills.errors import ExecFailed, ExecRefused
from kdskills.execution.bwrap.box import (
    DEFAULT_ENV,
    SETUP_S,
    BoxFailed,
    BwrapBox,
    Fds,
    Launcher,
    Pipes,
    command_line,
    launch,
    rlimit_words,
    rlimits,
    run_arguments,
)
from kdskills.execution.cgroup import CgroupLeaf, CgroupParent
from kdskills.execution.check import RunPlan
from kdskills.execution.owner import RunRecords, leaf_name
from kdskills.execution.processes import within_own_limits
from kdskills.execution.request import ExecRequest, Limits

OWN_PROCESSES = 2
"""Processes bwrap itself needs, beside the program's."""


@dataclass(frozen=True, slots=True)
class SandboxSetup:
    """What every run of one engine shares."""

    launcher: Launcher
    rootfs: Path
    seccomp: bytes
    spawner: ThreadPoolExecutor
    cgroups: CgroupParent | None
    nproc: bool
    records: RunRecords


@dataclass(frozen=True, slots=True)
class SandboxJob:
    """One checked and staged run.

    `argv` builds the program's arguments from the payload's and the report's descriptor; both are -1 without payload.
    """

    plan: RunPlan
    argv: Callable[[int, int], Sequence[str]]
    payload: bytes | None
    skills: tuple[tuple[str, Path], ...]
    inputs: tuple[tuple[str, bytes], ...]
    enforced: frozenset[str]

    @property
    def limits(self) -> Limits:
        """Bounds of the run."""
        return self.plan.request.limits


@dataclass(frozen=True, slots=True)
class ReadySandbox:
    """A sandbox that is up.

    Attributes:
        box: The sandbox.
        pipes: Our ends of its pipes.
        leaf: Its cgroup.
        feeds: Bytes to write once its program starts, by the pipe's name.
        waiting: Whether its program waits behind bwrap's gate; one of the pool waits for its order instead.
    """

    box: BwrapBox
    pipes: Pipes
    leaf: CgroupLeaf | None
    feeds: tuple[tuple[str, bytes], ...]
    waiting: bool


def make_sandbox(setup: SandboxSetup, job: SandboxJob, stack: ExitStack) -> ReadySandbox:
    """Make a sandbox for *job*; *stack* ends it and closes its descriptors.

    Raises:
        BoxFailed: It did not come up.
    """
    pipes = Pipes.make(code=job.payload is not None)
    stack.callback(pipes.close)
    leaf = make_leaf(setup, job.limits, stack)
    bounds = rlimit_words(within_own_limits(rlimits(job.limits, memory=setup.cgroups is None)))
    argv = job.argv(pipes.theirs.get("payload", -1), pipes.theirs.get("report", -1))
    with ExitStack() as launch_stack:  # the launcher's copies of what it only reads; ours are closed once it has them
        seccomp = memory_file(launch_stack, setup.seccomp)
        inputs = [(path, memory_file(launch_stack, data)) for path, data in job.inputs]
        fds = Fds(pipes.theirs["args"], pipes.theirs["status"], pipes.theirs["block"], seccomp)
        command = command_line(setup.launcher, setup.rootfs, job.limits, job.plan.cwd, argv, fds, bounds)
        box = launch(setup.spawner, command, pipes, [seccomp, *(fd for _, fd in inputs)])
        stack.callback(box.close)
    if leaf is None:
        keep_record(setup, job.plan.request, box, stack)
    arguments = run_arguments(job.plan.cwd, job.skills, inputs, job.plan.env, frozenset(job.plan.request.executable))
    box.bring_up(arguments, setup.rootfs, leaf, job.limits.pids + 1 if setup.nproc else None)
    feeds = [("stdin", job.plan.request.stdin)]
    if job.payload is not None:
        feeds.append(("payload", job.payload))
    return ReadySandbox(box, pipes, leaf, tuple(feeds), waiting=True)


def make_leaf(setup: SandboxSetup, limits: Limits, stack: ExitStack) -> CgroupLeaf | None:
    """Make a cgroup leaf with these bounds, where there are any. Raises BoxFailed."""
    if setup.cgroups is None:
        return None
    try:
        leaf = setup.cgroups.leaf(leaf_name(), limits.memory, limits.pids + OWN_PROCESSES)
    except OSError as error:
        raise BoxFailed(f"no cgroup could be made: {error}") from error
    stack.callback(leaf.remove)
    return leaf


def keep_record(setup: SandboxSetup, request: ExecRequest, box: BwrapBox, stack: ExitStack) -> None:
    """Record the launcher for `reap`, until *stack* ends."""
    record = setup.records.write(request, box.pid)
    stack.callback(record.unlink, missing_ok=True)


def memory_file(stack: ExitStack, data: bytes) -> int:
    """Return a descriptor of a file in memory holding *data*, at its beginning; *stack* closes it."""
    fd = os.memfd_create("kdskills", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


KEEP_S = 300.0
"""A worker older than this is not used any more: what it mounts may have been tidied away."""
_DEFAULTS = Limits()


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What is fixed once a sandbox is up: the skills (staged copies named by digest) and its sizes."""

    skills: tuple[tuple[str, Path], ...]
    work_size: int
    tmp_size: int

    @classmethod
    def for_job(cls, job: SandboxJob) -> WorkerKind:
        """Return the kind of sandbox *job* needs."""
        return cls(job.skills, job.limits.work_size, job.limits.tmp_size)


@dataclass(slots=True)
class PoolWorker:
    """A sandbox of the pool; `fds` are the numbers of payload and report inside."""

    kind: WorkerKind
    box: BwrapBox
    pipes: Pipes
    leaf: CgroupLeaf | None
    fds: tuple[int, int]
    stack: ExitStack
    ready_since: float

    def usable(self) -> bool:
        """Whether its sandbox is still up and not too old."""
        launcher_events = select.select([self.box.launcher_fd], [], [], 0)[0]
        return not launcher_events and time.monotonic() - self.ready_since < KEEP_S

    def give(self, job: SandboxJob, stack: ExitStack, *, memory_by_rlimit: bool) -> ReadySandbox:
        """Hand the worker over to one run; *stack* ends it.

        Raises:
            BoxFailed: The run's bounds cannot be set.
        """
        stack.enter_context(self.stack.pop_all())
        limits = job.limits
        try:
            if self.leaf is not None and (limits.memory, limits.pids) != (_DEFAULTS.memory, _DEFAULTS.pids):
                self.leaf.bound(limits.memory, limits.pids + OWN_PROCESSES)
        except OSError as error:
            raise BoxFailed(f"the bounds of a prepared sandbox cannot be set: {error}") from error
        order = build_order(job, self.fds, memory_by_rlimit=memory_by_rlimit, nproc=self.leaf is None)
        feeds = (("stdin", job.plan.request.stdin), ("payload", order))
        return ReadySandbox(self.box, self.pipes, self.leaf, feeds, waiting=False)


def build_order(job: SandboxJob, fds: tuple[int, int], *, memory_by_rlimit: bool, nproc: bool) -> bytes:
    """Return what `kdskills_runtime.pool_worker` reads: its length, the order, inputs, and the payload of code.

    Generated code without variables of its own runs in the waiting process itself; everything else replaces it.
    """
    plan, bounds = job.plan, rlimits(job.limits, memory=memory_by_rlimit)
    if nproc:
        bounds["nproc"] = (job.limits.pids + 1,) * 2
    bounds = within_own_limits(bounds)
    argv = None if job.payload is not None and not plan.env else list(job.argv(*fds))
    env = {**dict(DEFAULT_ENV), **dict(plan.env)}
    order = {
        "argv": argv,
        "env": {_text(key): _text(value) for key, value in env.items()},
        "cwd": plan.cwd,
        "limits": bounds,
        "inputs": [(path, len(data)) for path, data in job.inputs],
        "executable": list(plan.request.executable),
        "code": job.payload is not None,
    }
    head = json.dumps(order).encode("ascii")
    return b"".join([len(head).to_bytes(8, "big"), head, *(data for _, data in job.inputs), job.payload or b""])


def make_worker(setup: SandboxSetup, kind: WorkerKind, python: str, program: str) -> PoolWorker:
    """Make a sandbox of *kind* and wait until its process waits for an order.

    Raises:
        BoxFailed: It did not come up.
    """
    limits = Limits(work_size=kind.work_size, tmp_size=kind.tmp_size)
    with ExitStack() as stack:
        pipes = Pipes.make(code=True)
        stack.callback(pipes.close)
        leaf = make_leaf(setup, limits, stack)
        fds = (pipes.theirs["payload"], pipes.theirs["report"])
        argv = [python, "-I", program, *map(str, fds), *(["skills"] if kind.skills else [])]
        with ExitStack() as launch_stack:
            seccomp = memory_file(launch_stack, setup.seccomp)
            fds_of_launcher = Fds(pipes.theirs["args"], pipes.theirs["status"], pipes.theirs["block"], seccomp)
            bounds = rlimit_words({"core": (0, 0)})  # the worker itself takes on the run's, inside and for good
            command = command_line(setup.launcher, setup.rootfs, limits, "/work", argv, fds_of_launcher, bounds)
            box = launch(setup.spawner, command, pipes, [seccomp])
            stack.callback(box.close)
        if leaf is None:
            keep_record(setup, ExecRequest(), box, stack)
        box.bring_up(run_arguments("/work", kind.skills, [], ()), setup.rootfs, leaf, None)
        box.release()
        report = pipes.ours["report"]
        if not select.select([report], [], [], SETUP_S)[0] or os.read(report, 1) != b"\n":
            raise BoxFailed("a prepared sandbox did not become ready")
        return PoolWorker(kind, box, pipes, leaf, fds, stack.pop_all(), time.monotonic())


@dataclass(slots=True)
class Pool:
    """At most `size` workers of the kinds that were requested last.

    `make` makes one worker. Workers are made by one thread of the pool's own, after the run that took one has ended.
    """

    size: int
    make: Callable[[WorkerKind], PoolWorker]
    trouble: str | None = None
    _idle: list[PoolWorker] = field(default_factory=list)
    _requests: SimpleQueue[WorkerKind | None] = field(default_factory=SimpleQueue)
    # Entered twice when the engine is collected as garbage in the middle of a step: its finalizer closes the pool.
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _thread: threading.Thread | None = None
    _closed: bool = False

    def take(self, kind: WorkerKind) -> PoolWorker | None:
        """Return a worker of *kind*, which is then the caller's; None when there is none."""
        while True:
            with self._lock:
                worker = next((idle_worker for idle_worker in self._idle if idle_worker.kind == kind), None)
                if worker is None:
                    return None
                self._idle.remove(worker)
            if worker.usable():
                return worker
            worker.stack.close()

    def idle(self, kind: WorkerKind | None = None) -> int:
        """Return how many workers wait, of one kind or of all."""
        with self._lock:
            return sum(kind in {None, worker.kind} for worker in self._idle)

    def want(self, kind: WorkerKind) -> None:
        """Request workers of *kind*; idle workers of other kinds are ended to make room."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="kdskills-pool", daemon=True)
                self._thread.start()
        self._requests.put(kind)

    def close(self) -> None:
        """End every worker; the pool stays empty."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            thread = self._thread
        self._requests.put(None)
        for worker in idle:
            worker.stack.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(SETUP_S)

    def _serve(self) -> None:
        while (kind := self._latest()) is not None:
            try:
                self._fill(kind)
            except (ExecFailed, ExecRefused, OSError, RuntimeError) as error:
                self.trouble = str(error)  # runs go on without a pool; the next one asks again

    def _latest(self) -> WorkerKind | None:
        """Return the kind requested last; earlier requests are out of date."""
        kind = self._requests.get()
        while kind is not None:
            try:
                kind = self._requests.get_nowait()
            except Empty:
                break
        return kind

    def _fill(self, kind: WorkerKind) -> None:
        while True:
            with self._lock:
                if self._closed or sum(idle_worker.kind == kind for idle_worker in self._idle) >= self.size:
                    return
                surplus_worker = next((idle_worker for idle_worker in self._idle if idle_worker.kind != kind), None)
                if surplus_worker is not None and len(self._idle) >= self.size:
                    self._idle.remove(surplus_worker)
                else:
                    surplus_worker = None
            if surplus_worker is not None:
                surplus_worker.stack.close()
            worker = self.make(kind)
            with self._lock:
                keep = not self._closed
                if keep:
                    self._idle.append(worker)
            if not keep:
                worker.stack.close()
                return


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
