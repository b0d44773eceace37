"""Stage 0: read the work order, apply limits, place the program, run it and report. Standard library only."""

from __future__ import annotations

import json
import os
import resource
import sys
import types

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from typing import Any

SETUP_FAILED = 125
MAX_PAYLOAD = 64 * 1024 * 1024
MAX_VALUE = 1024 * 1024
MAX_TEXT = 32 * 1024

_NAMES = ("cpu", "as", "nproc", "nofile", "fsize", "core")
LIMITS: dict[str, int] = {name: getattr(resource, f"RLIMIT_{name.upper()}") for name in _NAMES}


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Return *text* with its middle left out when it is longer than *limit* characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


class Reporter:
    """Owns the report descriptor in the process that was started, which no program started later inherits. Forked
    children write nothing.
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd
        self._pid = os.getpid()
        self._value: tuple[Any] | None = None

    def value(self, value: Any) -> None:
        """Keep *value* for the last line, as it is now. Raises TypeError or ValueError when it is not JSON."""
        text = json.dumps(value, allow_nan=False)
        if len(text) > MAX_VALUE:
            raise ValueError(f"a reported value may take {MAX_VALUE} bytes as JSON; this one takes {len(text)}")
        self._value = (json.loads(text),)

    def failed(self, stage: str, code: str, message: str) -> None:
        """Report that the program could not be started."""
        self.line({"event": "failed", "stage": stage, "code": code, "message": shorten(message)})

    def ended(self, outcome: str, **facts: Any) -> None:
        """Report how the program ended."""
        line = {"event": "ended", "outcome": outcome, **facts}
        if self._value is not None:
            line["value"] = self._value[0]
        self.line(line)

    def line(self, line: dict[str, Any]) -> None:
        """Report what *line* says."""
        if os.getpid() != self._pid:
            return
        data = memoryview(json.dumps(line).encode("ascii") + b"\n")
        while data:
            data = data[os.write(self._fd, data) :]


class Unusable(Exception):
    """The work order cannot be carried out; `stage` and `code` say where and why."""

    def __init__(self, stage: str, code: str, message: str) -> None:
        super().__init__(message)
        self.stage, self.code = stage, code


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
    if "SKILLS_DESCRIPTOR" in names and not restore(names["SKILLS_DESCRIPTOR"], order.get("verify", "tree"), reporter):
        return SETUP_FAILED
    os.environ.update(order.get("variables", {}))
    return run_program(path, names, order.get("paths", []), reporter)


def restore(descriptor: dict[str, Any], verify: Any, reporter: Reporter) -> bool:
    """Stage 1: activate the skills *descriptor* describes and leave them active; False when refused and reported. A
    root or skill that is missing or differs is `skills_mismatch`; any other fault of the descriptor keeps its own code.
    """
    try:
        from kdskills.errors import KdskillsError, RootChanged, RootMissing
        from kdskills.turn import set_skills_descriptor
    except ImportError as error:
        reporter.failed("skills", "skills_unavailable", f"kdskills cannot be imported here: {error}")
        return False
    try:
        set_skills_descriptor(descriptor, verify=verify)
    except KdskillsError as error:
        differs = isinstance(error, RootMissing | RootChanged)
        code = "skills_mismatch" if differs else error.code
        reporter.line({"event": "refused", "code": code, "message": shorten(error.message)})
        return False
    return True


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


def run_program(path: str, names: dict[str, Any], packages: list[str], reporter: Reporter) -> int:
    """Run the file *path* as `__main__` with *names* set, and return the exit code a plain interpreter would give. It finds
    *packages* before all others; nothing is imported from there for us.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(names, __file__=path, __builtins__=__builtins__, __kdskills_reporter__=reporter)
    main.__dict__.setdefault("__annotations__", {})
    sys.modules["__main__"] = main
    sys.argv = [path]
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(line_buffering=True)  # what was printed before a kill is not lost
    reporter.line({"event": "started"})  # the program runs next
    own_path = sys.path.copy()
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib costs 3 ms to import
            code = compile(file.read(), path, "exec", dont_inherit=True)
        sys.path[:0] = packages
        exec(code, main.__dict__)
    except SystemExit as stop:  # with the meaning the interpreter gives its argument
        number = 0 if stop.code is None else stop.code & 0xFF if isinstance(stop.code, int) else 1
        if not (stop.code is None or isinstance(stop.code, int)):
            sys.stderr.write(f"{stop.code}\n")
        reporter.ended("exit", exit_code=number)
        return number
    except BaseException as error:  # noqa: BLE001 - whatever the program raises is what the report is about
        return _raised(error, path, own_path, reporter)
    reporter.ended("ok", exit_code=0)
    return 0


def _raised(error: BaseException, path: str, own_path: list[str], reporter: Reporter) -> int:
    """Report an uncaught exception, without the frames of this package, and print it as the interpreter would."""
    # What formats it is imported from folders of ours, never from packages.
    programs_path, sys.path = sys.path, own_path
    import signal
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    name = type(error).__name__
    # A SyntaxError's own text quotes the line; the last line alone says what is wrong with it.
    only = [f"{name}: {error.msg}"] if isinstance(error, SyntaxError) else traceback.format_exception_only(error)
    texts = {
        "message": shorten("".join(only).strip(), 4096),
        "traceback": shorten("".join(traceback.format_exception(error))),
    }
    sys.path = programs_path
    reporter.ended("exception", exit_code=1, exception=name, **texts)
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.excepthook(type(error), error, trace)
    return 1
