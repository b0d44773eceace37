"""bubblewrap: one sandbox from its argument list to its last process, and sandboxes made ahead of time.

`docs/explanation/isolation.md` says why: the two gates before a program, the descriptor that keeps `/work`, the pool.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from kdskills.errors import ExecFailed, ExecRefused
from kdskills.execution import processes
from kdskills.execution.check import RunPlan
from kdskills.execution.egress import PROXY_PORT
from kdskills.execution.owner import Cgroup, RunRecords, leaf_name
from kdskills.execution.payload import BASE_ENV, ENVIRONMENTS_DIR, SKILLS_DIR, entry_argv, framed, program_variables
from kdskills.execution.processes import Pipes, rlimits, start_program, within_own_limits
from kdskills.execution.request import ExecRequest, Limits
from kdskills.execution.rootfs import Rootfs
from kdskills.execution.run import SetupFailed

SETUP_S = 30.0
"""Seconds a sandbox may take to come up: many times what a busy machine needs."""
KILLED_S = 10.0
"""Seconds after SIGKILL within which every process of a sandbox must be gone."""
_POLL_S = 0.0003
_SIZE = 64 * 1024


class BwrapBox:
    """A sandbox, whose first process's pid and uid are as the host sees them; `pooled` when it was made for no run yet.
    Its program waits behind bwrap's gate for `release`.
    """

    def __init__(self, launcher: subprocess.Popen[bytes], pipes: Pipes, leaf: Cgroup | None) -> None:
        self._launcher, self.pid = launcher, launcher.pid
        self.pipes, self.leaf = pipes, leaf
        self.pooled = False
        self._stack = ExitStack()
        self.launcher_fd = self._hold(os.pidfd_open(launcher.pid))
        self.init = self.init_fd = self.namespace = self.host_uid = self.work = -1
        self._status = b""

    def bring_up(self, arguments: bytes, rootfs: Path, nproc: int | None) -> None:
        """Let the launcher build the sandbox and wait until it stands, with its program not yet started. Raises
        SetupFailed: the launcher gave up, or took longer than `SETUP_S`.
        """
        end = time.monotonic() + SETUP_S
        try:
            # The launcher waits for its arguments, so everything it starts is born inside the cgroup.
            if self.leaf is not None:
                self.leaf.join(self.pid)
            with os.fdopen(self.pipes.take("args"), "wb") as stream:
                stream.write(arguments)
            while b"\n" not in self._status and self._read_status(end):
                pass
            self.init = int(json.loads(self._status.partition(b"\n")[0])["child-pid"])
            self.init_fd = self._hold(os.pidfd_open(self.init))
            self._await_root(rootfs, end)
            self.namespace = Path(f"/proc/{self.init}/ns/pid").stat().st_ino
            self.host_uid = Path(f"/proc/{self.init}").stat().st_uid
            self.work = self._hold(os.open(f"/proc/{self.init}/root/work", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            if nproc is not None:
                resource.prlimit(self.init, resource.RLIMIT_NPROC, (nproc, nproc))
        except (OSError, ValueError, KeyError) as error:
            self.kill()
            self._launcher.wait()
            fd, words = self.pipes.ours.get("stderr"), ""
            # No program has run yet: these are the launcher's own words.
            if fd is not None and select.select([fd], [], [], 0.2)[0]:
                words = os.read(fd, 4096).decode("utf-8", "replace").strip()
            words = words or (str(error) if self._status else "bwrap reported nothing")
            raise SetupFailed(f"the sandbox did not start: {words}") from error

    def release(self) -> None:
        """Let the program start."""
        with suppress(BrokenPipeError), os.fdopen(self.pipes.take("block"), "wb", buffering=0) as gate:
            gate.write(b"1")  # a sandbox that died meanwhile is what the pump sees next

    def signal(self, number: int) -> bool:
        """Send a signal to the program itself; False before it starts and after it ended."""
        pid = next(iter(processes.children(self.init)), None)
        return pid is not None and processes.send(pid, number, self.namespace)

    def terminate(self) -> None:
        """Send TERM to every process in the sandbox but its first, which ignores it."""
        for pid in processes.descendants(self.init) if self.init > 0 else ():
            processes.send(pid, signal.SIGTERM, self.namespace)

    def kill(self) -> None:
        """End the whole tree; the launcher goes with it."""
        if self.init_fd >= 0:
            processes.kill(self.init_fd)
        processes.kill(self.launcher_fd)

    def finish(self) -> int | None:
        """Wait until every process is gone and return the program's exit code, None when it never started or left none.
        Raises SetupFailed: a process survived KILL.
        """
        self.kill()
        self._launcher.wait()
        if self.init_fd >= 0:
            exits = select.poll()
            exits.register(self.init_fd, select.POLLIN)
            if not exits.poll(KILLED_S * 1000):
                raise SetupFailed("a process of the sandbox survived SIGKILL", pid=self.init)
        end = time.monotonic() + 0.2
        while self._read_status(end):
            pass
        for line in self._status.splitlines():
            facts = json.loads(line)
            if "exit-code" in facts:
                return int(facts["exit-code"])
        return None

    def close(self) -> None:
        """Close every descriptor; a sandbox that is still running is ended."""
        self.kill()
        self._launcher.wait()
        self._stack.close()
        self.pipes.close()

    def _hold(self, fd: int) -> int:
        self._stack.callback(os.close, fd)
        return fd

    def _read_status(self, end: float) -> bool:
        """Read more of bwrap's status lines; False at their end or when none comes in time."""
        fd = self.pipes.ours["status"]
        if len(self._status) > _SIZE or not select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
            return False
        data = os.read(fd, 4096)
        self._status += data
        return bool(data)

    def _await_root(self, rootfs: Path, end: float) -> None:
        """Wait until the sandbox's root is the prepared tree, which is the last thing bwrap does before it blocks."""
        rootfs_status = rootfs.stat()
        process = os.open(f"/proc/{self.init}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            while True:
                root_status = os.stat("root", dir_fd=process)
                if (root_status.st_dev, root_status.st_ino) == (rootfs_status.st_dev, rootfs_status.st_ino):
                    return
                if time.monotonic() >= end or select.select([self.launcher_fd], [], [], 0)[0]:
                    raise ValueError("bwrap did not switch to the prepared tree")
                time.sleep(_POLL_S)
        finally:
            os.close(process)


UID = 10001
_MARKER = "/run/complete"
_RUN_SIZE = 1024 * 1024
OWN_PROCESSES = 2
"""Processes bwrap itself needs, beside the program's."""


@dataclass(frozen=True, slots=True)
class SandboxSetup:
    """What every run of one engine shares.

    `drop_to` is the host uid and gid that `setpriv` takes on before anything else; None keeps ours. `spawner` has one
    long-lived thread, which `--die-with-parent` is tied to. `nproc` says whether RLIMIT_NPROC bounds exactly one sandbox.
    """

    programs: Mapping[str, str]
    drop_to: int | None
    rootfs: Rootfs
    seccomp: bytes
    spawner: ThreadPoolExecutor
    cgroups: Cgroup | None
    nproc: bool
    records: RunRecords


@dataclass(frozen=True, slots=True)
class SandboxJob:
    """One checked and staged run; `payload` is generated code's, `mounts` are pairs of path inside and folder of this host."""

    plan: RunPlan
    payload: bytes | None
    mounts: tuple[tuple[str, Path], ...]
    inputs: tuple[tuple[str, bytes], ...]

    @property
    def limits(self) -> Limits:
        """Bounds of the run."""
        return self.plan.request.limits

    def argv(self, rootfs: Rootfs, fds: tuple[int, int]) -> tuple[str, ...]:
        """Return the program's arguments; *fds* are payload and report inside."""
        if self.payload is None:
            return self.plan.argv
        return entry_argv(rootfs.python, rootfs.entry, payload_fd=fds[0], report_fd=fds[1])

    @property
    def network(self) -> bool:
        """Whether the program may reach some hosts; then a helper runs beside it."""
        return self.plan.request.network != "none"


def command_line(
    setup: SandboxSetup,
    limits: Limits,
    cwd: str,
    argv: Sequence[str],
    fds: Mapping[str, int],
    bounds: Mapping[str, tuple[int, int]],
) -> list[str]:
    """Return the launcher's command line; *bounds* are rlimits that prlimit sets before anything else. *fds* are the
    descriptors it inherits: `args`, `status`, `block` and `seccomp`.
    """
    uid, identity = str(setup.drop_to), []
    if setup.drop_to is not None:
        identity = [setup.programs["setpriv"], "--reuid", uid, "--regid", uid, "--clear-groups", "--inh-caps", "-all"]
    return [
        *(setup.programs["prlimit"], *(f"--{name}={soft}:{hard}" for name, (soft, hard) in bounds.items())),
        *identity,
        setup.programs["bwrap"],
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--disable-userns", "--cap-drop", "ALL", "--new-session", "--die-with-parent", "--clearenv"),
        *("--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"),
        *("--seccomp", str(fds["seccomp"]), "--json-status-fd", str(fds["status"]), "--block-fd", str(fds["block"])),
        *("--ro-bind", str(setup.rootfs.path), "/", "--proc", "/proc", "--dev", "/dev"),
        *_tmpfs("/tmp", limits.tmp_size, "1777"),  # noqa: S108 - inside the sandbox
        *_tmpfs("/dev/shm", limits.tmp_size, "1777"),  # noqa: S108 - inside the sandbox
        *_tmpfs("/work", limits.work_size, "0755"),
        *_tmpfs("/run", _RUN_SIZE, "0755"),
        *_tmpfs(SKILLS_DIR, _RUN_SIZE, "0755"),
        *_tmpfs(ENVIRONMENTS_DIR, _RUN_SIZE, "0755"),
        *("--args", str(fds["args"])),
        *("--chmod", "0755", _MARKER, "--remount-ro", "/run"),
        *("--remount-ro", SKILLS_DIR, "--remount-ro", ENVIRONMENTS_DIR),
        *("--ro-bind", "/proc/sys", "/proc/sys", "--remount-ro", "/dev", "--remount-ro", "/"),
        *("--chdir", cwd, "--", *argv),
    ]


def run_arguments(
    cwd: str,
    mounts: Sequence[tuple[str, Path]],
    inputs: Sequence[tuple[str, int]],
    env: Mapping[str, str],
    executable: Collection[str] = (),
) -> bytes:
    """Return the arguments that travel by descriptor, each ended by NUL. *mounts* are pairs of path inside and folder of this
    host, *inputs* of path below /work and descriptor to copy from; *env* are all variables of the program.
    """
    words: list[str] = []
    for inside, mounted_folder in mounts:
        words += ["--ro-bind", str(mounted_folder), inside]
    folders = {str(parent) for path, _ in inputs for parent in Path("/work", path).parents}
    folders |= {cwd, *map(str, Path(cwd).parents)}
    for folder_path in sorted(folder for folder in folders if folder.startswith("/work/")):  # parents first
        words += ["--perms", "0755", "--dir", folder_path]
    for path, fd in inputs:
        words += ["--perms", "0755" if path in executable else "0644", "--file", str(fd), f"/work/{path}"]
    for key, value in env.items():
        words += ["--setenv", key, value]
    words += ["--dir", _MARKER]
    return b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)


def _tmpfs(mount_point: str, size: int, mode: str) -> tuple[str, ...]:
    return ("--perms", mode, "--size", str(size), "--tmpfs", mount_point)


def make_sandbox(setup: SandboxSetup, job: SandboxJob, stack: ExitStack) -> BwrapBox:
    """Make a sandbox for *job*, which waits for `release`; *stack* ends it. Raises SetupFailed."""
    pipes = sandbox_pipes(stack, code=job.payload is not None, terminal=job.plan.request.terminal)
    bounds = within_own_limits(rlimits(job.limits, memory=setup.cgroups is None))
    argv = job.argv(setup.rootfs, (pipes.theirs.get("payload", -1), pipes.theirs.get("report", -1)))
    return _bring_up(setup, job, pipes, stack, argv, bounds, job.limits.pids + 1 if setup.nproc else None)


def _bring_up(
    setup: SandboxSetup,
    job: SandboxJob,
    pipes: Pipes,
    stack: ExitStack,
    argv: Sequence[str],
    bounds: Mapping[str, tuple[int, int]],
    nproc: int | None,
) -> BwrapBox:
    """Bring up a sandbox whose program is *argv*, and wait until it stands. Raises SetupFailed."""
    leaf, plan, request = None, job.plan, job.plan.request
    if setup.cgroups is not None:
        try:
            leaf = setup.cgroups.leaf(leaf_name(), job.limits.memory, job.limits.pids + OWN_PROCESSES)
        except OSError as error:
            raise SetupFailed(f"no cgroup could be made: {error}") from error
        stack.callback(leaf.remove)
    with ExitStack() as launch_stack:  # the launcher's copies of what it only reads; ours are closed once it has them
        seccomp = memory_file(launch_stack, setup.seccomp)
        inputs = [(path, memory_file(launch_stack, data)) for path, data in job.inputs]
        fds = {**pipes.theirs, "seccomp": seccomp}
        command = command_line(setup, job.limits, plan.cwd, argv, fds, bounds)
        inherited = [fd for name, fd in fds.items() if name not in {"stdin", "stdout", "stderr"}]
        inherited += [fd for _, fd in inputs]
        env = {"PATH": BASE_ENV["PATH"]}
        launch = partial(start_program, command, pipes, cwd="/", env=env, fds=inherited, reset=True)
        try:
            process = setup.spawner.submit(launch).result()
        except OSError as error:
            raise SetupFailed(f"the launcher {command[0]} cannot be started: {error.strerror}") from error
        box = BwrapBox(process, pipes, leaf)
        stack.callback(box.close)
    if leaf is None:  # then a record names the launcher for `reap`
        stack.callback(setup.records.write(request, box.pid).unlink, missing_ok=True)
    variables = program_variables(request)
    arguments = run_arguments(plan.cwd, job.mounts, inputs, variables, frozenset(request.executable))
    box.bring_up(arguments, setup.rootfs.path, nproc)
    return box


def sandbox_pipes(stack: ExitStack, *, code: bool, terminal: int | None = None) -> Pipes:
    """Make the pipes of a sandbox, which *stack* closes; *code* adds payload and report, a *terminal* is its three streams."""
    further = (["report"], ["payload"]) if code else ([], [])
    streams = (["stdout", "stderr"], ["stdin"]) if terminal is None else ([], [])
    pipes = Pipes.make(("status", *streams[0], *further[0]), ("args", "block", *streams[1], *further[1]))
    stack.callback(pipes.close)
    if terminal is not None:
        pipes.theirs |= {name: os.dup(terminal) for name in ("stdin", "stdout", "stderr")}
    return pipes


def memory_file(stack: ExitStack, data: bytes) -> int:
    """Return a descriptor of a file in memory holding *data*, at its beginning; *stack* closes it."""
    stream = stack.enter_context(os.fdopen(os.memfd_create("kdskills", os.MFD_CLOEXEC), "w+b"))
    stream.write(data)
    stream.seek(0)
    return stream.fileno()


KEEP_S = 300.0
"""A worker older than this is not used any more: what it mounts may have been tidied away."""
_DEFAULTS = Limits()


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What is fixed once a sandbox is up: its mounts, skills (staged copies named by digest) and environment, its sizes, and
    whether it has a socket to our proxy.
    """

    mounts: tuple[tuple[str, Path], ...]
    work_size: int
    tmp_size: int
    inodes: tuple[int, ...] = ()  # of the mounts: a sandbox goes on seeing a folder that was removed and made anew
    network: bool = False

    @classmethod
    def for_job(cls, job: SandboxJob) -> WorkerKind:
        """Return the kind of sandbox *job* needs."""
        inodes = tuple(folder.stat().st_ino for _, folder in job.mounts)
        return cls(job.mounts, job.limits.work_size, job.limits.tmp_size, inodes, job.network)


@dataclass(slots=True)
class PoolWorker:
    """A sandbox of the pool; `fds` are the numbers of payload and report inside."""

    kind: WorkerKind
    box: BwrapBox
    fds: tuple[int, int]
    stack: ExitStack
    ready_since: float

    def usable(self) -> bool:
        """Whether its sandbox is still up and not too old."""
        launcher_events = select.select([self.box.launcher_fd], [], [], 0)[0]
        return not launcher_events and time.monotonic() - self.ready_since < KEEP_S

    def give(self, setup: SandboxSetup, job: SandboxJob, stack: ExitStack) -> bytes:
        """Hand the worker over to one run, which *stack* ends; return the order for it. Raises SetupFailed."""
        stack.enter_context(self.stack.pop_all())
        limits, leaf = job.limits, self.box.leaf
        try:
            bounds, defaults = (limits.memory, limits.pids + job.network), (_DEFAULTS.memory, _DEFAULTS.pids)
            if leaf is not None and bounds != defaults:
                leaf.bound(bounds[0], bounds[1] + OWN_PROCESSES)
        except OSError as error:
            raise SetupFailed(f"the bounds of a prepared sandbox cannot be set: {error}") from error
        return build_order(setup, job, self.fds)


def build_order(setup: SandboxSetup, job: SandboxJob, fds: tuple[int, int]) -> bytes:
    """Return what `kdskills_runtime.pool_worker` reads: its length, the order, inputs, and the payload of code.
    Generated code without variables of its own runs in the waiting process itself; everything else replaces it.
    """
    plan, bounds = job.plan, rlimits(job.limits, memory=setup.cgroups is None)
    if setup.cgroups is None:
        bounds["nproc"] = (job.limits.pids + 1 + job.network,) * 2
    order = {
        "argv": None if job.payload is not None and not plan.env else job.argv(setup.rootfs, fds),
        "env": program_variables(plan.request),
        "cwd": plan.cwd,
        "limits": within_own_limits(bounds),
        "inputs": [(path, len(data)) for path, data in job.inputs],
        "executable": plan.request.executable,
        "code": job.payload is not None,
        "network": PROXY_PORT,  # where the helper listens, for a worker that has a socket for it
    }
    return framed(order, *(data for _, data in job.inputs), job.payload or b"")


def make_worker(setup: SandboxSetup, kind: WorkerKind, terminal: int | None = None) -> PoolWorker:
    """Make a sandbox of *kind* and wait until its process waits for an order; *terminal* as in `sandbox_pipes`. Raises SetupFailed."""
    limits = Limits(work_size=kind.work_size, tmp_size=kind.tmp_size)
    job = SandboxJob(RunPlan(ExecRequest(limits=limits), (), "/work", (), ()), None, kind.mounts, ())
    with ExitStack() as stack:
        pipes = sandbox_pipes(stack, code=True, terminal=terminal)
        if kind.network:
            channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pipes.ours["network"], pipes.theirs["network"] = (end.detach() for end in channel)
        fds = (pipes.theirs["payload"], pipes.theirs["report"])
        program = setup.rootfs.beside_entry("pool_worker.py")
        skills = ["skills"] if any(inside.startswith(f"{SKILLS_DIR}/") for inside, _ in kind.mounts) else []
        channel_fds = [pipes.theirs["network"]] if kind.network else []
        argv = [setup.rootfs.python, "-I", program, *map(str, (*fds, *channel_fds)), *skills]
        # The worker itself takes on the run's bounds, inside and for good.
        box = _bring_up(setup, job, pipes, stack, argv, {"core": (0, 0)}, None)
        box.release()
        box.pooled = True
        report = pipes.ours["report"]
        if not select.select([report], [], [], SETUP_S)[0] or os.read(report, 1) != b"\n":
            raise SetupFailed("a prepared sandbox did not become ready")
        return PoolWorker(kind, box, fds, stack.pop_all(), time.monotonic())


@dataclass(slots=True)
class Pool:
    """At most `size` workers of the kinds that were requested last. `make` makes one worker. Workers are made by one
    thread of the pool's own, after the run that took one has ended.
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
        while (kind := self._requests.get()) is not None:
            with suppress(Empty):  # earlier requests are out of date
                while kind is not None:
                    kind = self._requests.get_nowait()
            if kind is None:
                return
            try:
                self._fill(kind)
            except (ExecFailed, ExecRefused, OSError, RuntimeError) as error:
                self.trouble = str(error)  # runs go on without a pool; the next one asks again

    def _fill(self, kind: WorkerKind) -> None:
        while True:
            with self._lock:
                if self._closed or sum(idle_worker.kind == kind for idle_worker in self._idle) >= self.size:
                    return
                others = (idle_worker for idle_worker in self._idle if idle_worker.kind != kind)
                surplus = next(others, None) if len(self._idle) >= self.size else None
                if surplus is not None:
                    self._idle.remove(surplus)
            if surplus is not None:
                surplus.stack.close()
            worker = self.make(kind)
            with self._lock:
                keep = not self._closed
                if keep:
                    self._idle.append(worker)
            if not keep:
                worker.stack.close()
                return
