"""Whether a program started: judged by how it ended and by what it said, since only running it tells what it lacks.

A program *started* when it got past everything it imports: it ended with 0, or with 2 and its usage, or with anything else that
does not say that a package, a module or a program is missing. One that was still running when its time was up started, too;
one that ran out of memory, or that its interpreter cannot read, did not.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_MODULE: Final = re.compile(
    r"No module named '?([\w.]+)'?|Cannot find (?:module|package) '([^'\n]{1,200})'|cannot import name '(\w+)' from '[\w.]+'"
)
_PROGRAM: Final = re.compile(
    r"(?:^|[\s:])([\w.+-]{1,100}): (?:command )?not found\s*$"
    r"|env: [‘'\"]?([\w.+-]{1,100})[’'\"]?: No such file or directory"
    r"|No such file or directory: '([\w.+-]{1,100})'\s*$",
    re.MULTILINE,
)
_INSTALL: Final = re.compile(
    r"\b(?:pip3?|npm|apt(?:-get)?|brew) (?:install|i) +(?:-[\w-]+ +)*([@\w][\w./@\[\]-]{0,100})"
)
_IMPORT_ERROR: Final = re.compile(
    r"^(?:ImportError|ModuleNotFoundError|OSError: (?:no library called|cannot load library))\b", re.MULTILINE
)
_UNREADABLE: Final = re.compile(r"^(SyntaxError|IndentationError|TabError)\b.*", re.MULTILINE)
_NOT_FOUND: Final = 127
_USAGE: Final = 2
_LOST: Final = {"oom": "it ran out of memory", "limit": "it hit a limit", "cancelled": "it was ended"}


class StartVerdict(NamedTuple):
    """Whether a program started; `missing` names modules, packages or programs it lacks, `reason` is for people."""

    started: bool
    missing: tuple[str, ...] = ()
    reason: str = ""


def judge_start(status: str, exit_code: int | None, stdout: str, stderr: str) -> StartVerdict:
    """Return the verdict on a program that ended with *exit_code*; *status* is that of its `ExecResult`."""
    if status in _LOST:
        return StartVerdict(started=False, reason=_LOST[status])
    words = f"{stdout}\n{stderr}"
    if exit_code == 0 or status == "timeout" or (exit_code == _USAGE and "usage" in words.lower()):
        return StartVerdict(started=True)
    unreadable = _UNREADABLE.search(stderr)
    if unreadable is not None:
        return StartVerdict(started=False, reason=unreadable[0][:200])
    modules = _names(_MODULE, words)
    if modules or _IMPORT_ERROR.search(stderr):
        last_line = stderr.rstrip().rpartition("\n")[2]
        return StartVerdict(started=False, missing=modules, reason=last_line[:200])
    programs = _names(_PROGRAM, stderr) if exit_code == _NOT_FOUND or "subprocess.py" in stderr else ()
    missing = programs or _names(_INSTALL, words)
    return StartVerdict(started=not missing, missing=missing, reason=f"{', '.join(missing)} missing" if missing else "")


def _names(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    """Return what a pattern's groups match, each once."""
    return tuple(dict.fromkeys(group for match in pattern.finditer(text) for group in match.groups() if group))
