"""One run in srt: its settings, the script inside, and the exit code from a file, not from srt.

srt takes no descriptor along and mixes its own faults with the program's exit code (killed by TERM, it exits with 0).
So the script inside leaves the program's exit code in a file that was made before, is bound as that one file, and
which we read by the descriptor we had all the time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kdskills.execution.landlock.run import TreeJob, TreeRun
from kdskills.execution.local_tree import RunFolder
from kdskills.execution.payload import MAX_REPORT, apply_report
from kdskills.execution.processes import descendants
from kdskills.execution.request import ExecError, ExecResult, Limits
from kdskills.execution.streams import Ending

DOMAIN: Final = re.compile(
    r"(?:\*\.)?[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)+(?::[0-9]{1,5})?"
)
"""A host name, or all names below one, with an optional port: what an allow-list may hold."""

SYSTEM: Final = ("/bin", "/lib", "/lib32", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64")
"""Programs and libraries of the host that srt's own helpers inside need. They stay readable to the program."""

CERTIFICATES: Final = ("/etc/ssl/certs", "/usr/share/ca-certificates")
PROXIES: Final = (
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
)
"""Variables by which programs find srt's proxy; everything else it sets is dropped."""

MISSING, NO_WORKDIR = "missing", "workdir"
"""Words in the exit file of a program that was not started."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files the sandbox may fill, one by one, and the script it runs."""

    script: Path
    filter: Path
    exit: Path
    pid: Path
    report: Path

    @classmethod
    def in_folder(cls, folder: RunFolder) -> Files:
        """Return the files of a run; those the sandbox writes lie outside the folders it sees read-only."""
        answers = folder.path / "answers"
        return cls(
            folder.control / "run.sh",
            folder.control / "calls.bpf",
            answers / "exit",
            answers / "pid",
            answers / "report",
        )

    @property
    def answers(self) -> tuple[Path, ...]:
        """The files the sandbox writes."""
        return self.exit, self.pid, self.report


def settings(
    domains: Sequence[str], readable: Iterable[Path], control: Path, writable: Iterable[Path], files: Files
) -> bytes:
    """Return srt's settings: everything closed but what is named.

    Args:
        domains: The allow-list; empty for no network.
        readable: Folders the program may read: the prepared tree, staged skills, srt's own helper.
        control: Folder of generated code and the script.
        writable: The run's own folders.
        files: Files the sandbox fills.
    """
    writing = [*map(str, writable), *map(str, files.answers)]
    reading = [*map(str, readable), str(control), *(folder for folder in SYSTEM if Path(folder).exists())]
    if domains:
        reading += [folder for folder in CERTIFICATES if Path(folder).exists()]
    return json.dumps(
        {
            "network": {"allowedDomains": list(domains), "deniedDomains": []},
            "filesystem": {"denyRead": ["/"], "allowRead": reading, "allowWrite": writing, "denyWrite": []},
        }
    ).encode()


def run_script(argv: Sequence[bytes], env: Mapping[bytes, bytes], cwd: bytes, limits: Limits, files: Files, *, launcher: Sequence[bytes], proxy: bool, code: bool) -> bytes:  # fmt: skip
    """Return the script bash runs inside, byte-exact.

    Args:
        argv: The program and its arguments.
        env: Exactly the program's variables, beside the proxy's when *proxy*.
        cwd: Folder it starts in.
        limits: Bounds set before it starts.
        files: Where its exit code and, for *code*, its report go, and the system call filter.
        launcher: Argument list of `kdskills_runtime.filtered`, which sets the filter.
        proxy: Whether the variables that name srt's proxy are passed on.
        code: Whether descriptor 3 is the report.
    """
    cpu = math.ceil(limits.wall_s if limits.cpu_s is None else limits.cpu_s)
    bounds = f"ulimit -c 0 && ulimit -Sn {limits.nofile} && ulimit -Hn {limits.nofile} && ulimit -f {-(-limits.fsize // 1024)}"
    bounds += f" && ulimit -St {cpu} && ulimit -Ht {cpu + 1} && ulimit -v {limits.memory // 1024} && ulimit -u {limits.pids + 3}"
    variables = b" ".join(_quoted(name + b"=" + value) for name, value in env.items())
    # The name localhost is not known inside, where the file that says so is closed.
    proxy_variables = b" ".join(b'${%s+"%s=${%s//localhost:/127.0.0.1:}"}' % ((name.encode(),) * 3) for name in PROXIES)
    program = b" ".join(_quoted(word) for word in (*launcher, bytes(files.filter), *argv))
    exit_file = _quoted(bytes(files.exit))
    return b"\n".join(
        [
            b"exec 4>&2 2>/dev/null",  # what bash says of a killed child is no output of the program
            b"cd -- %s || { printf %s >%s; exit 127; }" % (_quoted(cwd), NO_WORKDIR.encode(), exit_file),
            b"PATH=%s type -P -- %s >/dev/null || { printf %s >%s; exit 127; }"
            % (_quoted(env[b"PATH"]), _quoted(argv[0]), MISSING.encode(), exit_file),
            b"( " + bounds.encode() + b" || exit 126",
            b"  printf %%s $BASHPID >%s" % _quoted(bytes(files.pid)),
            b"  exec env -i %s %s %s 2>&4 4>&-" % (variables, proxy_variables if proxy else b"", program) + (b" 3>%s" % _quoted(bytes(files.report)) if code else b""),
            b")",
            b"printf %%s $? >%s" % exit_file,
            b"",
        ]
    )  # fmt: skip


def _quoted(word: bytes) -> bytes:
    """Return *word* as bash reads it back byte for byte."""
    return b"'" + word.replace(b"'", b"'\\''") + b"'"


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
    for pid in (launcher, *descendants(launcher)):
        with contextlib.suppress(OSError, ValueError):
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
            spaces = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
            if len(spaces) > 1 and int(spaces[-1]) == inner:
                yield pid
