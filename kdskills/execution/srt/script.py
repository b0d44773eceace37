"""The settings srt gets and the script it runs inside, as pure functions.

srt takes no descriptor along and mixes its own faults with the program's exit code (killed by TERM, it exits with 0).
So the script inside leaves the program's exit code in a file that was made before, is bound as that one file, and
which we read by the descriptor we had all the time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kdskills.execution.local_tree import RunFolder
from kdskills.execution.request import Limits

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
