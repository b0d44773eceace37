"""Bare processes of this host, without any wall: for machines whose operator wants just that.

Two people must ask for it: the operator (`allow_unisolated`) and the caller (`profile="unsafe-local"`). A program sees
everything its user may see. What it gets is a session of its own, a scrubbed environment, rlimits and the end of its
whole process group; memory totals, process counts, folder sizes and the network are not limited, and the result says
so in `limits_enforced`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from kdskills.errors import ExecRefused, RootChanged, RootMissing
from kdskills.execution.check import RunPlan, check_request, require_limits
from kdskills.execution.collect import Collection, collect, new_collection
from kdskills.execution.container import rlimits
from kdskills.execution.dirs import cache_dir, private_dir, state_dir
from kdskills.execution.local_tree import RUN_MARK, RunFolder, end_marked, leftovers
from kdskills.execution.payload import MAX_REPORT, apply_report, build_payload, entry_argv, host_entry
from kdskills.execution.probing import require_consent
from kdskills.execution.processes import require_endings, signal_reset, within_own_limits
from kdskills.execution.protocol import ProbeCheck, ProbeReport, ReapReport
from kdskills.execution.request import ExecError, ExecRequest, ExecResult, IsolationLevel
from kdskills.execution.run import FinishedRun, ProgramEnd, in_thread, skills_mismatch, status_of, to_the_end
from kdskills.execution.stage import read_inputs, stage_skill
from kdskills.execution.streams import Ending, HeadBuffer, Pump, TailBuffer, output_buffers
from kdskills.hooks import Register, hookimpl

if TYPE_CHECKING:
    from kdskills.execution.protocol import ExecutionOptions, ExecutorFactory

ENFORCED: Final = frozenset({"wall", "cpu", "nofile", "fsize", "stdout", "stderr"})
UNENFORCED: Final = frozenset({"memory", "pids", "work", "tmp", "network"})
"""What the operator's consent to this engine counts as best effort."""
LIMITS: Final = {
    "core": resource.RLIMIT_CORE,
    "cpu": resource.RLIMIT_CPU,
    "fsize": resource.RLIMIT_FSIZE,
    "nofile": resource.RLIMIT_NOFILE,
}
PATH: Final = "/usr/local/bin:/usr/bin:/bin"


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register the engine as `subprocess`."""
    register("subprocess", SubprocessExecutor)


class SubprocessExecutor:
    """Runs programs as plain children of this process.

    Args:
        options: The operator's settings; without `allow_unisolated` every run is refused.
    """

    name = "subprocess"
    level = IsolationLevel.NONE

    def __init__(self, options: ExecutionOptions) -> None:
        self._options = options

    async def probe(self) -> ProbeReport:
        """Say whether the operator consents; there is no wall whose workings could be tried."""
        allowed = self._options.allow_unisolated
        return ProbeReport(
            engine=self.name,
            level=self.level,
            ok=allowed,
            checks=(ProbeCheck("consent", allowed, f"allow_unisolated = {allowed}".lower()),),
            limits=ENFORCED,
            cure=None if allowed else "the operator's settings must say allow_unisolated = true",
        )

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run to the end."""
        return await to_the_end(self, request)

    async def start(self, request: ExecRequest) -> LocalRun | FinishedRun:
        """Check, stage and start *request*."""
        require_consent(self, request, allow_unisolated=self._options.allow_unisolated)
        try:
            return await in_thread(partial(self._start, request), undo=lambda run: run.cancel())
        except (RootChanged, RootMissing) as error:
            return skills_mismatch(error, self.name, self.level)

    async def reap(self) -> ReapReport:
        """End processes and remove folders of dead owners."""
        return await asyncio.to_thread(leftovers, self._runs())

    def _runs(self) -> Path:
        return private_dir(private_dir(self._options.state_dir or state_dir()) / "local-runs")

    def _start(self, request: ExecRequest) -> LocalRun:
        require_endings(self.name)
        plan = check_request(request)
        if request.network != "none":
            raise ExecRefused(
                "subprocess cannot restrict a program to some hosts", code="limit_not_enforceable", engine=self.name
            )
        require_limits(ENFORCED, self._options.best_effort | UNENFORCED, self.name)
        cache = self._options.cache_dir or cache_dir()
        skill_folders = {mount.id: str(stage_skill(mount, cache)) for mount in request.skills}
        inputs = read_inputs(request.inputs, request.limits)
        folder = RunFolder.make(self._runs(), request)
        try:
            folder.write_inputs(inputs, plan.cwd, frozenset(request.executable))
            run = LocalRun(plan, folder, skill_folders, self.name, self.level)
            run.spawn()
        except BaseException:  # raised again: no folder stays behind
            folder.remove()
            raise
        return run


@dataclass(slots=True)
class LocalRun:
    """A started process tree. Made by `SubprocessExecutor.start`."""

    plan: RunPlan
    folder: RunFolder
    skill_folders: dict[str, str]
    engine: str
    level: IsolationLevel
    _stdout: TailBuffer = field(init=False)
    _stderr: TailBuffer = field(init=False)
    _report: HeadBuffer = field(default_factory=lambda: HeadBuffer(MAX_REPORT))
    _future: Future[ExecResult] = field(default_factory=Future)
    _process: subprocess.Popen[bytes] | None = None
    _pump: Pump | None = None

    def __post_init__(self) -> None:
        self._stdout, self._stderr = output_buffers(self.plan.request)

    async def wait(self) -> ExecResult:
        """Wait for the end; waiting may be cancelled without ending the run."""
        return await asyncio.shield(asyncio.wrap_future(self._future))

    async def cancel(self) -> None:
        """End the whole tree: TERM, grace, KILL."""
        if self._pump is not None:
            self._pump.cancel()
        await asyncio.wait([asyncio.wrap_future(self._future)])

    def signal(self, number: int) -> None:
        """Send a signal to the program."""
        if self._process is not None and not self._future.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def tail(self, limit: int = 8192) -> tuple[bytes, bytes]:
        """Return the last *limit* bytes of stdout and stderr so far."""
        return self._stdout.tail(limit), self._stderr.tail(limit)

    def spawn(self) -> None:
        """Start the program and the thread that watches it; a program that cannot start is the run's result."""
        channel = _Channel.open(self.plan.request, self.skill_folders, self.folder)
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                channel.argv or self._argv(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._host_path(self.plan.cwd),
                env=self._env(),
                pass_fds=channel.theirs,
                start_new_session=True,
                umask=0o022,
                preexec_fn=signal_reset(),  # noqa: PLW1509 - two system calls and no lock, and only where there is something to reset
            )
        except OSError as error:
            channel.close()
            self._future.set_result(self._not_started(error))
            return
        channel.started()
        self._process = process
        try:
            self._pump = self._bounded(process, channel)
        except BaseException:  # raised again: a program that nothing watches must not go on
            self._end(signal.SIGKILL)
            process.communicate()
            channel.close()
            raise
        threading.Thread(target=self._watch, args=(self._pump, started), name="kdskills-local", daemon=True).start()

    def _bounded(self, process: subprocess.Popen[bytes], channel: _Channel) -> Pump:
        """Set the limits of the program that was just started, and return the pump for its pipes and its time."""
        for name, bounds in within_own_limits(rlimits(self.plan.request.limits)).items():
            with contextlib.suppress(ProcessLookupError):  # the program has ended already
                resource.prlimit(process.pid, LIMITS[name], bounds)
        return Pump(
            pidfd=os.pidfd_open(process.pid),
            outputs=[
                (_take(process.stdout), self._stdout.feed),
                (_take(process.stderr), self._stderr.feed),
                *((fd, self._report.feed) for fd in channel.reports),
            ],
            inputs=[(_take(process.stdin), self.plan.request.stdin), *channel.payloads],
            wall_s=self.plan.request.limits.wall_s,
            terminate=lambda: self._end(signal.SIGTERM),
            kill=lambda: self._end(signal.SIGKILL),
        )

    def _watch(self, pump: Pump, started: float) -> None:
        """Drive the pump to the end, collect, and hand over the result. Runs in a thread of its own."""
        assert self._process is not None
        try:
            ending = pump.drive(started)
            code = self._process.wait()
            end_marked(self.folder.mark, self._process.pid)
            with self.folder.opened() as work:
                collection = collect(work, self.plan.globs, self.plan.request.limits)
            result = self._result(ending, code, collection)
        except BaseException as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it was
            self._future.set_exception(error)
            return
        finally:
            os.close(pump.pidfd)
            self.folder.remove()
        self._future.set_result(result)

    def _end(self, number: int) -> None:
        """Send a signal to the program's group and, for those who left it, to every process bearing its mark."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            end_marked(self.folder.mark, self._process.pid)

    def _argv(self) -> tuple[str, ...]:
        """Return the argument list with the script's place on this host."""
        script = self.plan.request.script
        if script is None:
            return self.plan.argv
        sandbox_path, host_path = (
            f"/skills/{script.skill}/{script.path}",
            f"{self.skill_folders[script.skill]}/{script.path}",
        )
        return (
            tuple(word.replace(sandbox_path, host_path) for word in self.plan.argv[: -len(script.args) or None])
            + script.args
        )

    def _host_path(self, sandbox_path: str) -> str:
        """Return the host's path of a path below /work or /skills."""
        top, _, relative = sandbox_path.lstrip("/").partition("/")
        if top == "skills":
            skill, _, relative = relative.partition("/")
            return str(Path(self.skill_folders[skill]) / relative)
        return str(self.folder.work / relative)

    def _env(self) -> dict[bytes, bytes]:
        base = {"PATH": PATH, "HOME": str(self.folder.work), "LANG": "C.UTF-8", "TMPDIR": str(self.folder.tmp)}
        base[RUN_MARK] = self.folder.mark
        return {name.encode(): value.encode() for name, value in base.items()} | dict(self.plan.env)

    def _not_started(self, error: OSError) -> ExecResult:
        """Return the result of a program that is not there or may not be executed."""
        stage = "workdir" if error.filename == self._host_path(self.plan.cwd) else "exec"
        code = "workdir_missing" if stage == "workdir" else "program_missing"
        missing_path = self.plan.cwd if stage == "workdir" else self.plan.argv[0]
        trouble = ExecError(stage, code, f"{missing_path}: {error.strerror}")
        self.folder.remove()
        collection = new_collection((), self.plan.request.limits)
        return self._built(ProgramEnd("exited", None, None, 0.0, trouble), collection)

    def _result(self, ending: Ending, code: int, collection: Collection) -> ExecResult:
        ended = ProgramEnd(
            reason=ending.reason,
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            duration_s=ending.duration_s,
            trouble=None,
        )
        result = self._built(ended, collection)
        return apply_report(result, self._report.value()) if self.plan.request.code is not None else result

    def _built(self, ended: ProgramEnd, collection: Collection) -> ExecResult:
        status, exit_code, number, error = status_of(ended)
        return ExecResult(
            status=status,
            exit_code=exit_code,
            signal=number,
            stdout=self._stdout.stream(),
            stderr=self._stderr.stream(),
            duration_s=ended.duration_s,
            engine=self.engine,
            level=self.level,
            limits_enforced=ENFORCED,
            artifacts=tuple(collection.artifacts),
            artifact_errors=tuple(collection.errors),
            error=error,
        )


@dataclass(slots=True)
class _Channel:
    """The pipes of generated code: payload in, report out; empty for other programs."""

    argv: tuple[str, ...] = ()
    theirs: tuple[int, ...] = ()
    payloads: tuple[tuple[int, bytes], ...] = ()
    reports: tuple[int, ...] = ()

    @classmethod
    def open(cls, request: ExecRequest, skill_folders: dict[str, str], folder: RunFolder) -> _Channel:
        """Build the payload first, as that may refuse; then open the pipes."""
        if request.code is None:
            return cls()
        program = str(folder.control / "main.py")
        payload = build_payload(request, program_path=program, skill_folders=skill_folders, work_dir=str(folder.work))
        payload_in, payload_out = os.pipe()
        report_in, report_out = os.pipe()
        argv = entry_argv(sys.executable, str(host_entry()), payload_fd=payload_in, report_fd=report_out)
        return cls(argv, (payload_in, report_out), ((payload_out, payload),), (report_in,))

    def started(self) -> None:
        """Close our copies of the ends that the program inherited."""
        for fd in self.theirs:
            os.close(fd)
        self.theirs = ()

    def close(self) -> None:
        """Close everything: nothing was started."""
        for fd in (*self.theirs, *(fd for fd, _ in self.payloads), *self.reports):
            os.close(fd)


def _take(stream: IO[bytes] | None) -> int:
    """Take a pipe's descriptor over from its file object."""
    assert stream is not None
    fd = os.dup(stream.fileno())
    stream.close()
    return fd
