"""Bare processes of this host, without any wall: for machines whose operator wants just that.

A program sees everything its user may see. What it gets is a session of its own, a scrubbed environment, rlimits and the
end of its whole process group.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from kdskills.errors import ExecRefused
from kdskills.execution.dirs import private_dir
from kdskills.execution.local_tree import (
    RUN_MARK,
    RunFolder,
    end_marked,
    environment_folder,
    host_argv,
    host_path_of,
    host_variables,
    leftovers,
)
from kdskills.execution.payload import build_payload, entry_argv, host_entry, package_variables
from kdskills.execution.processes import require_calls, rlimits, start_program, within_own_limits
from kdskills.execution.protocol import ExecutionOptions, ExecutorFactory, ProbeCheck, ProbeReport, ReapReport
from kdskills.execution.request import ExecResult, IsolationLevel
from kdskills.execution.run import ExecutionEngine, ProgramEnd, ProgramRun, SetupFailed, not_started
from kdskills.execution.stage import read_inputs
from kdskills.execution.streams import Ending, Pump
from kdskills.hooks import Register, hookimpl

ENFORCED: Final = frozenset({"wall", "cpu", "nofile", "fsize", "stdout", "stderr"})
UNENFORCED: Final = frozenset({"memory", "pids", "work", "tmp", "network"})
"""What the operator's consent to this engine counts as best effort."""


class LocalRun(ProgramRun):
    """A program, and everything it starts, as children of this process."""

    engine: SubprocessExecutor
    _process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Fill a folder of the run's own, and build the payload, as that may refuse."""
        self._plan = self.engine.checked(self.request)
        self.engine.require(ENFORCED)
        self._skills = self.engine.stage(self.request)
        self.engine.environment(self.request)
        inputs = read_inputs(self.request.inputs, self.request.limits)
        self._folder = RunFolder.make(self.engine.runs(), self.request)
        self.stack.callback(self._folder.remove)
        self._folder.write_inputs(inputs, self._plan.cwd, frozenset(self.request.executable))
        self._inputs = {"stdin": self.request.stdin}
        if self.request.code is not None:
            self._inputs["payload"] = build_payload(
                self.request,
                program_path=str(self._folder.control / "main.py"),
                skill_folders={name: str(path) for name, path in self._skills.items()},
                work_dir=str(self._folder.work),
                packages=package_variables(self.request, environment_folder(self.request)),
            )
        self.enforced = ENFORCED

    def spawn(self) -> Pump:
        """Start the program; one that is not there, or may not be executed, is the run's result."""
        code = self.request.code is not None
        pipes = self.open_pipes(("stdout", "stderr", *(["report"] if code else [])), tuple(self._inputs))
        argv, cwd = host_argv(self._plan, self._skills), host_path_of(self._plan.cwd, self._skills, self._folder.work)
        if code:
            fds = {"payload_fd": pipes.theirs["payload"], "report_fd": pipes.theirs["report"]}
            argv = entry_argv(sys.executable, str(host_entry()), **fds)
        own = {"HOME": str(self._folder.work), "TMPDIR": str(self._folder.tmp), RUN_MARK: self._folder.mark}
        variables = host_variables(self._plan, self._skills, self._folder.work, **own)
        env = {name.encode(): value.encode("utf-8", "surrogateescape") for name, value in variables.items()}
        try:
            kept = [pipes.theirs[name] for name in ("payload", "report") if code]
            self._process = process = start_program(argv, pipes, cwd=cwd, env=env, fds=kept, reset=True)
        except OSError as error:
            stage = "workdir" if error.filename == cwd else "exec"
            trouble = not_started(self._plan, stage, error.strerror or str(error))
            raise SetupFailed(trouble.message, code=trouble.code, stage=stage) from error
        self.stack.callback(self._end_unwatched)
        for name, bounds in within_own_limits(rlimits(self.request.limits)).items():
            with contextlib.suppress(ProcessLookupError):  # the program has ended already
                resource.prlimit(process.pid, getattr(resource, f"RLIMIT_{name.upper()}"), bounds)
        pidfd = os.pidfd_open(process.pid)
        self.stack.callback(os.close, pidfd)
        return self.pump(pidfd, self._inputs, lambda: self._end(signal.SIGTERM), lambda: self._end(signal.SIGKILL))

    def conclude(self, ending: Ending) -> ExecResult:
        """End what left the program's group, and collect."""
        assert self._process is not None
        code = self._process.wait()
        end_marked(self._folder.mark, self._process.pid)
        outputs = self._folder.collect(self._plan)
        exit_code, number = (code, None) if code >= 0 else (None, -code)
        end = ProgramEnd(ending.reason, exit_code, number, ending.duration_s)
        return self.result(end, outputs, report=self.report.value())

    def signal(self, number: int) -> None:
        """Send a signal to the program."""
        if self._process is not None and not self.done:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def _end(self, number: int) -> None:
        """Send a signal to the program's group and, for those who left it, to every process bearing its mark."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            end_marked(self._folder.mark, self._process.pid)

    def _end_unwatched(self) -> None:
        """End a program that nothing watches any more, as what should follow its start failed."""
        assert self._process is not None
        if self._process.returncode is None:
            self._end(signal.SIGKILL)
            self._process.wait()


class SubprocessExecutor(ExecutionEngine):
    """Runs programs as plain children of this process; without `allow_unisolated` every run is refused."""

    name = "subprocess"
    level = IsolationLevel.NONE
    run_type = LocalRun
    environments = True

    def __init__(self, options: ExecutionOptions) -> None:
        super().__init__(options)
        self.best_effort |= UNENFORCED

    async def probe(self) -> ProbeReport:
        """Say whether the operator consents; there is no wall whose workings could be tried."""
        try:
            require_calls(self.name)
        except ExecRefused as error:
            return ProbeReport(self.name, self.level, ok=False, cure=error.message)
        allowed = self.options.allow_unisolated
        checks = (ProbeCheck("consent", allowed, f"allow_unisolated = {allowed}".lower()),)
        cure = None if allowed else "the operator's settings must say allow_unisolated = true"
        return ProbeReport(self.name, self.level, allowed, checks, ENFORCED, cure)

    def end_leftovers(self) -> ReapReport:
        """End processes and remove folders of dead owners."""
        return leftovers(self.runs())

    def runs(self) -> Path:
        """Return the folder of the runs' folders."""
        return private_dir(private_dir(self.state()) / "local-runs")


@hookimpl
def kdskills_register_executors(register: Register[ExecutorFactory]) -> None:
    """Register the engine as `subprocess`."""
    register("subprocess", SubprocessExecutor)
