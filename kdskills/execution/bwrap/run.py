"""One run in a bubblewrap sandbox, driven by a thread of its own (spec execution §1, §5)."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kdskills.execution.bwrap.args import Fds, Launcher, command_line, run_arguments
from kdskills.execution.bwrap.box import Box, BoxFailed, Pipes, launch
from kdskills.execution.cgroup import CgroupParent, Leaf
from kdskills.execution.check import Plan
from kdskills.execution.code_run import MAX_REPORT, apply_report
from kdskills.execution.collect import Collection, collect, new_collection
from kdskills.execution.ended import Ended, status_of
from kdskills.execution.lifecycle import RunRecords, leaf_name
from kdskills.execution.pump import Ending, HeadBuffer, Pump, TailBuffer
from kdskills.execution.request import ExecError, ExecResult, IsolationLevel, Status

ENGINE = "bubblewrap"
LEVEL = IsolationLevel.NAMESPACE


@dataclass(frozen=True, slots=True)
class Ground:
    """What every run of one engine shares."""

    launcher: Launcher
    rootfs: Path
    seccomp: bytes
    spawner: ThreadPoolExecutor
    cgroups: CgroupParent | None
    nproc: bool
    records: RunRecords


@dataclass(frozen=True, slots=True)
class Job:
    """One checked and staged run.

    `argv` builds the program's arguments from the payload's and the report's descriptor; both are -1 without payload.
    """

    plan: Plan
    argv: Callable[[int, int], Sequence[str]]
    payload: bytes | None
    skills: tuple[tuple[str, Path], ...]
    inputs: tuple[tuple[str, bytes], ...]
    enforced: frozenset[str]


class BubblewrapRun:
    """A started run: the `Handle` of the bubblewrap engine."""

    def __init__(self, ground: Ground, job: Job) -> None:
        self._ground = ground
        self._job = job
        limits = job.plan.request.limits
        self._stdout, self._stderr = TailBuffer(limits.stdout), TailBuffer(limits.stderr)
        self._report = HeadBuffer(MAX_REPORT)
        self._lock = threading.Lock()
        self._cancelled = False
        self._pump: Pump | None = None
        self._box: Box | None = None
        self._started: Future[None] = Future()
        self._result: Future[ExecResult] = Future()
        self._host_uid = -1
        self._bounds: dict[str, int] = {}

    @property
    def host_uid(self) -> int:
        """Uid of the sandbox's processes as the host sees them; -1 before it stood."""
        return self._host_uid

    @property
    def bounds(self) -> dict[str, int]:
        """Memory and pids limits as the kernel held them for this run; empty without a cgroup."""
        return self._bounds

    async def begin(self) -> None:
        """Start the thread and wait until the program runs, or the run is already over."""
        threading.Thread(target=self._main, name="kdskills-bubblewrap", daemon=True).start()
        try:
            await asyncio.shield(asyncio.wrap_future(self._started))
        except asyncio.CancelledError:
            await self.cancel()
            raise

    async def wait(self) -> ExecResult:
        """Wait for the end and return the result; cancelling the wait does not end the run."""
        return await asyncio.shield(asyncio.wrap_future(self._result))

    async def cancel(self) -> None:
        """End the whole tree and return when it is gone; `wait` then gives `cancelled`."""
        with self._lock:
            self._cancelled = True
            pump = self._pump
        if pump is not None:
            pump.cancel()
        await asyncio.shield(asyncio.wrap_future(self._result))

    def signal(self, number: int) -> None:
        """Send a signal to the program; one that is already gone hears nothing."""
        with self._lock:
            if self._box is not None:
                self._box.signal(number)

    def tail(self, limit: int = 8192) -> tuple[bytes, bytes]:
        """Return the last *limit* bytes of stdout and stderr so far."""
        return self._stdout.tail(limit), self._stderr.tail(limit)

    def _main(self) -> None:
        began = time.monotonic()
        try:
            result = self._run()
        except BoxFailed as error:
            status: Status = "cancelled" if self._cancelled else "infra_error"
            result = self._failed(status, ExecError("setup", error.code, error.message), time.monotonic() - began)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits, not swallowed
            self._result.set_exception(error)
            self._tell_started()
            return
        self._result.set_result(result)
        self._tell_started()

    def _tell_started(self) -> None:
        if not self._started.done():
            self._started.set_result(None)

    def _run(self) -> ExecResult:
        with ExitStack() as stack:
            pipes = Pipes.make(code=self._job.payload is not None)
            stack.callback(pipes.close)
            leaf = self._leaf(stack)
            box = self._open(stack, pipes, leaf)
            pump = self._pump_for(box, pipes)
            with self._lock:
                self._pump, self._box = pump, box
                if self._cancelled:
                    pump.cancel()
            started = time.monotonic()
            box.release()
            self._tell_started()
            try:
                ending = pump.drive(started)
            finally:
                with self._lock:
                    self._box = None
            exit_code = box.finish()
            oom = leaf.oom_kills() if leaf is not None else 0
            found = self._collect(box, exit_code, ending)
            return self._report_on(self._result_of(ending, exit_code, oom, found), exit_code)

    def _leaf(self, stack: ExitStack) -> Leaf | None:
        if self._ground.cgroups is None:
            return None
        limits = self._job.plan.request.limits
        try:
            # bwrap itself needs two processes beside the program's.
            leaf = self._ground.cgroups.leaf(leaf_name(), limits.memory, limits.pids + 2)
            self._bounds = leaf.bounds()
        except OSError as error:
            raise BoxFailed(f"no cgroup could be made: {error}") from error
        stack.callback(leaf.remove)
        return leaf

    def _open(self, stack: ExitStack, pipes: Pipes, leaf: Leaf | None) -> Box:
        ground, job = self._ground, self._job
        held = ExitStack()  # the launcher's copies of what it only reads; ours are closed once it has them
        with held:
            seccomp = _memory_file(held, ground.seccomp)
            inputs = [(path, _memory_file(held, data)) for path, data in job.inputs]
            fds = Fds(pipes.theirs["args"], pipes.theirs["status"], pipes.theirs["block"], seccomp)
            argv = job.argv(pipes.theirs.get("payload", -1), pipes.theirs.get("report", -1))
            command = command_line(
                ground.launcher, ground.rootfs, job.plan, argv, fds, memory_by_rlimit=ground.cgroups is None
            )
            box = launch(ground.spawner, command, pipes, [seccomp, *(fd for _, fd in inputs)])
            stack.callback(box.close)
        if leaf is None:
            record = ground.records.write(job.plan.request, box.pid)
            stack.callback(record.unlink, missing_ok=True)
        arguments = run_arguments(job.plan, job.skills, inputs, job.plan.env)
        nproc = job.plan.request.limits.pids + 1 if ground.nproc else None
        box.bring_up(arguments, ground.rootfs, leaf, nproc)
        self._host_uid = box.host_uid
        return box

    def _pump_for(self, box: Box, pipes: Pipes) -> Pump:
        request = self._job.plan.request
        outputs: list[tuple[int, Callable[[bytes], None]]]
        outputs = [(pipes.take("stdout"), self._stdout.feed), (pipes.take("stderr"), self._stderr.feed)]
        inputs = [(pipes.take("stdin"), request.stdin)]
        if self._job.payload is not None:
            outputs.append((pipes.take("report"), self._report.feed))
            inputs.append((pipes.take("payload"), self._job.payload))
        return Pump(box.launcher_fd, outputs, inputs, request.limits.wall_s, box.terminate, box.kill)

    def _collect(self, box: Box, exit_code: int | None, ending: Ending) -> Collection:
        limits = self._job.plan.request.limits
        if exit_code is None and ending.reason == "exited":
            return new_collection((), limits)
        return collect(box.work, self._job.plan.globs, limits)

    def _result_of(self, ending: Ending, exit_code: int | None, oom: int, found: Collection) -> ExecResult:
        number = _signal_of(exit_code)
        trouble = self._start_error() if exit_code is None and ending.reason == "exited" else None
        status, exit_code, number, error = status_of(
            Ended(ending.reason, exit_code, number, ending.duration_s, trouble)
        )
        if oom and ending.reason == "exited" and exit_code != 0:
            status, error = "oom", None  # without an exit code when the kernel chose the sandbox's own first process
        return ExecResult(
            status=status,
            exit_code=exit_code,
            signal=number,
            stdout=self._stdout.stream(),
            stderr=self._stderr.stream(),
            duration_s=ending.duration_s,
            engine=ENGINE,
            level=LEVEL,
            limits_enforced=self._job.enforced,
            artifacts=tuple(found.artifacts),
            artifact_errors=tuple(found.errors),
            error=error,
        )

    def _report_on(self, result: ExecResult, exit_code: int | None) -> ExecResult:
        if self._job.payload is None or (exit_code is None and result.status == "infra_error"):
            return result
        return apply_report(result, self._report.value())

    def _start_error(self) -> ExecError:
        """Say why no program ran; bwrap's last words tell a missing program from a broken sandbox."""
        words = self._stderr.tail(4096).decode("utf-8", "replace").strip()
        if words.startswith("bwrap: execvp "):
            return ExecError("exec", "program_missing", words.removeprefix("bwrap: execvp "))
        return ExecError("setup", "setup_failed", words or "the sandbox ended before its program began")

    def _failed(self, status: Status, error: ExecError, duration: float) -> ExecResult:
        return ExecResult(
            status=status,
            exit_code=None,
            signal=None,
            stdout=self._stdout.stream(),
            stderr=self._stderr.stream(),
            duration_s=duration,
            engine=ENGINE,
            level=LEVEL,
            limits_enforced=self._job.enforced,
            error=error,
        )


def _signal_of(exit_code: int | None) -> int | None:
    """Return the signal an exit code stands for: bwrap, like a shell, reports death by signal n as 128 + n."""
    if exit_code is None or not 128 < exit_code <= 128 + 64:
        return None
    return exit_code - 128


def _memory_file(stack: ExitStack, data: bytes) -> int:
    fd = os.memfd_create("kdskills", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
