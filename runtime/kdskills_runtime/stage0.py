"""Stage 0: read the work order, apply limits, place the program, run it. Standard library only."""

from __future__ import annotations

import json
import os
import resource
import sys

from kdskills_runtime.reporting import Reporter

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from typing import Any

SETUP_FAILED = 125
MAX_PAYLOAD = 64 * 1024 * 1024

LIMITS = {
    "cpu": resource.RLIMIT_CPU,
    "as": resource.RLIMIT_AS,
    "nproc": resource.RLIMIT_NPROC,
    "nofile": resource.RLIMIT_NOFILE,
    "fsize": resource.RLIMIT_FSIZE,
    "core": resource.RLIMIT_CORE,
}


class Unusable(Exception):
    """The work order cannot be carried out; `stage` and `code` say where and why."""

    def __init__(self, stage: str, code: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage
        self.code = code


def run(argv: list[str]) -> int:
    """Carry out the work order named by *argv*: `--payload-fd N --report-fd M`."""
    options = dict(zip(argv[::2], argv[1::2], strict=False))
    try:
        payload_fd, report_fd = int(options["--payload-fd"]), int(options["--report-fd"])
    except (KeyError, ValueError):
        sys.stderr.write("usage: py_code_exec_entry.py --payload-fd N --report-fd M\n")
        return SETUP_FAILED
    reporter = Reporter(report_fd)
    try:
        order = read_order(payload_fd)
        apply_limits(order.get("limits", {}))
        path = place_program(order)
        enter(order.get("workdir"))
    except Unusable as error:
        reporter.failed(error.stage, error.code, str(error))
        return SETUP_FAILED
    names = order.get("globals", {})
    if "SKILLS_DESCRIPTOR" in names:
        from kdskills_runtime.skills import restore

        if not restore(names["SKILLS_DESCRIPTOR"], order.get("verify", "tree"), reporter):
            return SETUP_FAILED
    from kdskills_runtime.program import run_program

    return run_program(path, names, reporter)


def read_order(fd: int) -> dict[str, Any]:
    """Read the payload from *fd* to its end and close it; standard input becomes empty."""
    chunks: list[bytes] = []
    size = 0
    while chunk := os.read(fd, 1 << 20):
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_PAYLOAD:
            raise Unusable("payload", "payload_too_large", f"the payload is longer than {MAX_PAYLOAD} bytes")
    if fd == 0:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    else:
        os.close(fd)
    try:
        order = json.loads(b"".join(chunks))
    except ValueError as error:
        raise Unusable("payload", "payload_invalid", f"the payload is not JSON: {error}") from error
    if not isinstance(order, dict) or order.get("version") != 1 or not isinstance(order.get("program"), dict):
        raise Unusable("payload", "payload_invalid", "the payload is not a work order of version 1")
    return order


def apply_limits(limits: dict[str, int]) -> None:
    """Lower the rlimits named in *limits*; one already lower stays."""
    for name, requested in limits.items():
        kind = LIMITS.get(name)
        if kind is None:
            raise Unusable("limits", "limit_unknown", f"no limit is named {name!r}")
        hard = resource.getrlimit(kind)[1]
        endless = hard == resource.RLIM_INFINITY
        bound = requested if endless else min(requested, hard)
        # A CPU limit warns first (SIGXCPU) and kills one second later.
        last = bound + 1 if name == "cpu" and (endless or bound < hard) else bound
        try:
            resource.setrlimit(kind, (bound, last))
        except (OSError, ValueError) as error:
            raise Unusable("limits", "limit_not_enforceable", f"{name}={requested}: {error}") from error


def place_program(order: dict[str, Any]) -> str:
    """Write the program verbatim to a new file of its own, unless it is there already; return its path."""
    program = order["program"]
    path, source = program.get("path"), program.get("source")
    if not isinstance(path, str) or not path.startswith("/"):
        raise Unusable("program", "program_invalid", "the program's path is not absolute")
    if source is None:
        return path
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120 - pathlib costs 3 ms to import
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(source.encode("utf-8", "surrogatepass"))
    except OSError as error:
        raise Unusable("program", "program_not_placed", f"{path}: {error.strerror}") from error
    return path


def enter(workdir: str | None) -> None:
    """Change to the program's workdir, and put it last on the import path."""
    if workdir is not None:
        try:
            os.chdir(workdir)
        except OSError as error:
            raise Unusable("program", "workdir_missing", f"{workdir}: {error.strerror}") from error
    sys.dont_write_bytecode = True  # imported inputs leave no __pycache__ among the outputs
    sys.path.append(os.getcwd())  # noqa: PTH109 - pathlib costs 3 ms to import
