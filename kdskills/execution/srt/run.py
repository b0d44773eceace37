"""One run in srt: the exit code from its file, not from srt."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kdskills.execution.code_run import MAX_REPORT, apply_report
from kdskills.execution.landlock.run import TreeJob, TreeRun
from kdskills.execution.pump import Ending
from kdskills.execution.request import ExecError, ExecResult
from kdskills.execution.srt.script import MISSING, NO_WORKDIR, Files


class SrtRun(TreeRun):
    """A started run: the `Handle` of the srt engine.

    Args:
        job: The run.
        files: What the sandbox writes; opened here, before it starts, and never by name again.
        code: Whether a report is expected.
    """

    def __init__(self, job: TreeJob, files: Files, *, code: bool) -> None:
        super().__init__(job)
        self._plan = job.plan
        self._code = code
        self._answers = {path.name: os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) for path in files.answers}

    def close(self) -> None:
        """Close the answers."""
        while self._answers:
            os.close(self._answers.popitem()[1])

    def signal(self, number: int) -> None:
        """Send a signal to the program itself, not to srt around it."""
        inner = self._answer("pid", 16)
        launcher = self.launcher_pid
        if inner.isdigit() and launcher is not None:
            for pid in _inside(launcher, int(inner)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)

    def result_of(self, ending: Ending, facts: Mapping[str, Any]) -> ExecResult:
        """Return the result: srt's own exit code says only whether it worked at all."""
        word = self._answer("exit", 16).decode("ascii", "replace")
        report = self._answer("report", MAX_REPORT + 1)
        self.close()
        program_facts = {**facts, "signal": None, "code": None}
        program_facts.pop("signal")
        if facts.get("event") == "ended":
            program_facts["code"] = int(word) if word.isdigit() else facts.get("code")
            if word.isdigit() and 128 < int(word) <= 192:
                program_facts = {**program_facts, "code": None, "signal": int(word) - 128}
        result = super().result_of(ending, program_facts)
        if ending.reason != "exited" or result.status in {"infra_error", "limit", "oom"}:
            return result
        if not word.isdigit():
            return replace(
                result, status="infra_error", exit_code=None, signal=None, error=self._missing_exit_code(word, facts)
            )
        return apply_report(result, report) if self._code else result

    def _missing_exit_code(self, word: str, facts: Mapping[str, Any]) -> ExecError:
        """Return why there is no exit code."""
        if word == MISSING:
            return ExecError("exec", "program_missing", f"{(self._plan.argv or ('python3',))[0]}: not found")
        if word == NO_WORKDIR:
            return ExecError("workdir", "workdir_missing", f"{self._plan.cwd}: cannot be entered")
        words = self.tail(2000)[1].decode("utf-8", "replace").strip()
        end = f"exit code {facts['code']}" if "code" in facts else f"signal {facts.get('signal')}"
        return ExecError("setup", "setup_failed", f"srt ended with {end} before the program did: {words}")

    def _answer(self, name: str, limit: int) -> bytes:
        fd = self._answers.get(name)
        return b"" if fd is None else os.pread(fd, limit, 0)


def _inside(launcher: int, inner: int) -> Iterator[int]:
    """Return processes below *launcher* whose pid in their innermost namespace is *inner*."""
    queue = [launcher]
    while queue:
        pid = queue.pop()
        with contextlib.suppress(OSError, ValueError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                queue += [int(word) for word in (task / "children").read_text(encoding="ascii").split()]
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
            spaces = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
            if len(spaces) > 1 and int(spaces[-1]) == inner:
                yield pid
