"""The first program of a sandbox made ahead of time: reports that it is ready, waits for one order, carries it out.

::

    python3 -I PATH/pool_worker.py PAYLOAD_FD REPORT_FD [NETWORK_FD] [skills]
                                                                       with `skills`, stage 1 is imported while waiting
    report  <- one newline                                            ready
    payload -> 8 bytes: length; the order, JSON; input files; the payload of generated code, to the end

Order: {"argv": [...] or null, "env": {name: value}, "cwd", "limits": {rlimit: [soft, hard]}, "inputs": [[path, size]],
"executable": [path], "code": bool}. Without argv the payload is carried out by this very process (`py_code_exec_entry` says how); with argv this
process becomes that program. With a NETWORK_FD a helper of `egress` is started first, at the port `network` of the order. A failure to do so is reported as one `failed` line, which a program
cannot write: the descriptor is closed when it starts.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from typing import Any

    from kdskills_runtime.stage0 import Reporter

FAILED = 125
SCRIPT_SHELL = b"/bin/sh"


def main(argv: list[str]) -> int:
    """Get ready, serve one order, and return the exit code."""
    package_parent = __file__.rpartition("/")[0].rpartition("/")[0]
    if package_parent not in sys.path:
        sys.path.append(package_parent)
    import json

    from kdskills_runtime import stage0
    from kdskills_runtime.outbox import exactly, place_inputs

    if "skills" in argv:
        import kdskills.turn.restore  # noqa: F401 - imported while nobody waits, with all that it needs
    payload, report, *channel = (int(word) for word in argv if word.isdigit())
    for fd in (payload, *channel):
        os.set_inheritable(fd, False)
    reporter = stage0.Reporter(report)
    os.write(report, b"\n")
    try:
        order = json.loads(exactly(payload, int.from_bytes(exactly(payload, 8), "big")))
    except EOFError:
        return FAILED  # the host is gone, so no order will come
    stage = "inputs"
    try:
        place_inputs(lambda size: exactly(payload, size), order["inputs"], order.get("executable", []))
        if order["cwd"].split("/")[1] == "work":
            os.makedirs(order["cwd"], exist_ok=True)  # noqa: PTH103 - pathlib costs 3 ms to import
        os.chdir(order["cwd"])
        stage = "limits"
        for name, bound in order["limits"].items():
            resource.setrlimit(stage0.LIMITS[name], tuple(bound))
        stage = "network"
        if channel:
            from kdskills_runtime import egress

            egress.start_helper(channel[0], order["network"])
    except (OSError, ValueError) as error:
        reporter.failed("setup", "setup_failed", f"{stage}: {error}")
        return FAILED
    if order["argv"] is None:
        return stage0.run(["--payload-fd", str(payload), "--report-fd", str(report)])
    if order["code"]:
        os.set_inheritable(payload, True)
        os.set_inheritable(report, True)
    else:
        os.close(payload)
    return become(order, reporter)


def become(order: dict[str, Any], reporter: Reporter) -> int:
    """Become the program of *order*; return only when that cannot be done."""
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)  # this interpreter ignores them, and a program would inherit that
    argv = [word.encode("utf-8", "surrogateescape") for word in order["argv"]]
    env = {name.encode("utf-8", "surrogateescape"): value.encode("utf-8", "surrogateescape") for name, value in order["env"].items()}  # fmt: skip
    number = errno.ENOENT
    folders = [folder + b"/" for folder in env.get(b"PATH", b"").split(b":") if folder]
    for folder in ([b""] if b"/" in argv[0] else folders) if argv[0] else []:
        path = folder + argv[0]
        try:
            os.execve(path, argv, env)  # noqa: S606 - argv by execve is the contract
        except OSError as error:
            if error.errno == errno.ENOEXEC:  # as execvp does: a file without a first line is the shell's
                os.execve(SCRIPT_SHELL, [SCRIPT_SHELL, path, *argv[1:]], env)  # noqa: S606 - as above
            number = error.errno or number if error.errno != errno.ENOENT else number
    reporter.failed("exec", "program_missing", f"{order['argv'][0]}: {os.strerror(number)}")
    return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
