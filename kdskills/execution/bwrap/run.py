"""One run in a bubblewrap sandbox, driven by a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

from kdskills.execution.bwrap.box import BoxFailed, BwrapBox
from kdskills.execution.bwrap.pool import Pool, ReadySandbox, SandboxJob, SandboxSetup, WorkerKind, make_sandbox
from kdskills.execution.collect import Collection, collect, new_collection
from kdskills.execution.payload import MAX_REPORT, apply_report, read_report
from kdskills.execution.request import ExecError, ExecRequest, ExecResult, IsolationLevel, Status
from kdskills.execution.run import ProgramEnd, status_of
from kdskills.execution.streams import Ending, HeadBuffer, Pump, output_buffers

ENGINE = "bubblewrap"
LEVEL = IsolationLevel.NAMESPACE


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything a run needs that was decided without a sandbox; `pool` is None when it must have one of its own."""

    setup: SandboxSetup
    job: SandboxJob
    pool: Pool | None = None


class BubblewrapRun:
    """A started run: the `Handle` of the bubblewrap engine."""

    def __init__(
        self,
        request: ExecRequest,
        prepare: Callable[[], Prepared],
        *,
        engine: str = ENGINE,
        level: IsolationLevel = LEVEL,
    ) -> None:
        self._prepare = prepare
        self._engine = engine
        self._level = level
        self._stdout, self._stderr = output_buffers(request)
        self._report = HeadBuffer(MAX_REPORT)
        self._lock = threading.Lock()
        self._cancelled = False
        self._pump: Pump | None = None
        self._box: BwrapBox | None = None
        self._started: Future[None] = Future()
        self._result: Future[ExecResult] = Future()
        self._enforced: frozenset[str] = frozenset()
        self._host_uid = -1
        self._bounds: dict[str, int] = {}

    @property
    def host_uid(self) -> int:
        """Uid of the sandbox's processes as the host sees them; -1 before it is up."""
        return self._host_uid

    @property
    def bounds(self) -> dict[str, int]:
        """Memory and pids limits as the kernel held them for this run; empty without a cgroup."""
        return self._bounds

    def go(self) -> None:
        """Start the run's thread."""
        threading.Thread(target=self._main, name="kdskills-bubblewrap", daemon=True).start()

    async def begun(self) -> None:
        """Wait until the program runs, or the run is already over. Raises what preparing raises."""
        try:
            await asyncio.shield(asyncio.wrap_future(self._started))
        except asyncio.CancelledError:
            await self.cancel()
            raise

    async def wait(self) -> ExecResult:
        """Wait for the end and return the result; cancelling the wait does not end the run. Raises as `begun`."""
        return await asyncio.shield(asyncio.wrap_future(self._result))

    async def cancel(self) -> None:
        """End the whole tree and return when it is gone; `wait` then gives `cancelled`."""
        with self._lock:
            self._cancelled = True
            pump = self._pump
        if pump is not None:
            pump.cancel()
        result = asyncio.wrap_future(self._result)
        await asyncio.wait({result})
        result.exception()  # marks it as retrieved; `wait` raises it

    def signal(self, number: int) -> None:
        """Send a signal to the program; nothing happens when it has ended."""
        with self._lock:
            if self._box is not None:
                self._box.signal(number)

    def network_namespace(self) -> int | None:
        """Return the host pid of a process in the sandbox's network; None before it is up and after its end."""
        with self._lock:
            return None if self._box is None else self._box.init

    def tail(self, limit: int = 8192) -> tuple[bytes, bytes]:
        """Return the last *limit* bytes of stdout and stderr so far."""
        return self._stdout.tail(limit), self._stderr.tail(limit)

    def _main(self) -> None:
        began = time.monotonic()
        try:
            result = self._run(self._prepare())
        except BoxFailed as error:
            status: Status = "cancelled" if self._cancelled else "infra_error"
            result = self._failed(status, ExecError("setup", error.code, error.message), time.monotonic() - began)
        except BaseException as error:  # noqa: BLE001 - raised again by `wait` and `begun`
            self._result.set_exception(error)
            if not self._started.done():
                self._started.set_exception(error)
            return
        self._result.set_result(result)
        self._tell_started()

    def _tell_started(self) -> None:
        if not self._started.done():
            self._started.set_result(None)

    def _run(self, prepared: Prepared) -> ExecResult:
        job, pool = prepared.job, prepared.pool
        self._enforced = job.enforced
        with ExitStack() as stack:
            if pool is not None:
                stack.callback(
                    pool.want, WorkerKind.for_job(job)
                )  # called last, so that making sandboxes never delays this run
            sandbox = self._sandbox_for(prepared, stack)
            box, leaf = sandbox.box, sandbox.leaf
            self._host_uid = box.host_uid
            self._bounds = {} if leaf is None else leaf.bounds()
            pump = self._pump_for(sandbox, job.limits.wall_s)
            with self._lock:
                self._pump, self._box = pump, box
                if self._cancelled:
                    pump.cancel()
            started = time.monotonic()
            if sandbox.waiting:
                box.release()
            self._tell_started()
            try:
                ending = pump.drive(started)
            finally:
                with self._lock:
                    self._box = None
            exit_code = box.finish()
            oom = leaf.oom_kills() if leaf is not None else 0
            trouble = self._trouble(job, sandbox, exit_code, ending)
            if trouble is not None:
                exit_code = None
            outputs = self._collect(job, box, exit_code, ending)
            return self._report_on(job, self._result_of(ending, exit_code, oom, outputs, trouble), exit_code)

    def _sandbox_for(self, prepared: Prepared, stack: ExitStack) -> ReadySandbox:
        """Return a sandbox of the pool, or one of its own."""
        setup, job = prepared.setup, prepared.job
        if self._cancelled:
            raise BoxFailed("cancelled before a sandbox was made")
        worker = prepared.pool.take(WorkerKind.for_job(job)) if prepared.pool is not None else None
        if worker is not None:
            return worker.give(job, stack, memory_by_rlimit=setup.cgroups is None)
        return make_sandbox(setup, job, stack)

    def _pump_for(self, sandbox: ReadySandbox, wall_s: float) -> Pump:
        box, pipes = sandbox.box, sandbox.pipes
        outputs: list[tuple[int, Callable[[bytes], None]]]
        outputs = [(pipes.take("stdout"), self._stdout.feed), (pipes.take("stderr"), self._stderr.feed)]
        if "report" in pipes.ours:
            outputs.append((pipes.take("report"), self._report.feed))
        inputs = [(pipes.take(name), data) for name, data in sandbox.feeds]
        return Pump(box.launcher_fd, outputs, inputs, wall_s, box.terminate, box.kill)

    @staticmethod
    def _collect(job: SandboxJob, box: BwrapBox, exit_code: int | None, ending: Ending) -> Collection:
        if exit_code is None and ending.reason == "exited":
            return new_collection((), job.limits)
        return collect(box.work, job.plan.globs, job.limits)

    def _trouble(
        self, job: SandboxJob, sandbox: ReadySandbox, exit_code: int | None, ending: Ending
    ) -> ExecError | None:
        """Return why no program ran, or None when one did."""
        if ending.reason != "exited":
            return None
        if exit_code is None:
            return self._start_error()
        if not sandbox.waiting and job.payload is None:
            return read_report(self._report.value()).error  # how a pool worker tells that argv could not start
        return None

    def _result_of(
        self, ending: Ending, exit_code: int | None, oom: int, outputs: Collection, trouble: ExecError | None
    ) -> ExecResult:
        number = _signal_of(exit_code)
        status, exit_code, number, error = status_of(
            ProgramEnd(ending.reason, exit_code, number, ending.duration_s, trouble)
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
            engine=self._engine,
            level=self._level,
            limits_enforced=self._enforced,
            artifacts=tuple(outputs.artifacts),
            artifact_errors=tuple(outputs.errors),
            error=error,
        )

    def _report_on(self, job: SandboxJob, result: ExecResult, exit_code: int | None) -> ExecResult:
        if job.payload is None or (exit_code is None and result.status == "infra_error"):
            return result
        return apply_report(result, self._report.value())

    def _start_error(self) -> ExecError:
        """Return why no program ran; bwrap's stderr tells a missing program from a broken sandbox."""
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
            engine=self._engine,
            level=self._level,
            limits_enforced=self._enforced,
            error=error,
        )


def _signal_of(exit_code: int | None) -> int | None:
    """Return the signal an exit code stands for: bwrap, like a shell, reports death by signal n as 128 + n."""
    if exit_code is None or not 128 < exit_code <= 128 + 64:
        return None
    return exit_code - 128
