"""Run one Python program inside the sandbox and report how it ended.

::

    python3 -I PATH/py_code_exec_entry.py --payload-fd N --report-fd M     N = 0 reads standard input to its end

The payload is one JSON object:

    version     1
    program     {"path": absolute file name, "source": text or absent when the file is already there}
    workdir     directory to start in, or absent
    globals     names set in the program before it starts; SKILLS_DESCRIPTOR asks for stage 1
    limits      {"cpu" | "as" | "nproc" | "nofile" | "fsize" | "core": number}: rlimits set before anything else
    verify      "tree" (default), "catalog" or "none": how skills are checked against the descriptor
    paths       folders of packages the program finds before all others; nothing is imported from there before it starts
    variables   {name: value} set for the program and what it starts

The report is JSON lines on M, a descriptor the program's own output never reaches:

    {"event": "failed", "stage", "code", "message"}      the entry could not start the program; exit code 125
    {"event": "refused", "code", "message"}              skills do not match the descriptor; exit code 125
    {"event": "started"}                                 the next thing that runs is the program
    {"event": "ended", "outcome": "ok" | "exit" | "exception", "exit_code"?, "exception"?, "message"?, "traceback"?,
     "value"?}

Only the first line about the start counts, so a program cannot deny that it ran. The program can write
everything after it: the reader treats it as untrusted data.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    """Run the work order named by *argv* and return the exit code."""
    package_parent = __file__.rpartition("/")[0].rpartition("/")[0]
    if package_parent and package_parent not in sys.path:  # as a plain folder: before another copy in site-packages
        sys.path.insert(0, package_parent)
    from kdskills_runtime.stage0 import run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
