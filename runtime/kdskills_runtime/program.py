"""Run the program as `python FILE` would, and report how it ended."""

from __future__ import annotations

import os
import sys
import types

from kdskills_runtime.reporting import Reporter, shorten

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from typing import Any


def run_program(path: str, names: dict[str, Any], reporter: Reporter) -> int:
    """Run the file *path* as `__main__` with *names* set, and return the exit code a plain interpreter would give."""
    main = types.ModuleType("__main__")
    main.__dict__.update(names, __file__=path, __builtins__=__builtins__, __kdskills_reporter__=reporter)
    main.__dict__.setdefault("__annotations__", {})
    sys.modules["__main__"] = main
    sys.argv = [path]
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(line_buffering=True)  # what was printed before a kill is not lost
    reporter.started()
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib costs 3 ms to import
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit as stop:
        return _exited(stop, reporter)
    except BaseException as error:  # noqa: BLE001 - whatever the program raises is what the report is about
        return _raised(error, path, reporter)
    reporter.ended("ok", exit_code=0)
    return 0


def _exited(stop: SystemExit, reporter: Reporter) -> int:
    """Report `SystemExit` with the meaning the interpreter gives its argument."""
    if stop.code is None:
        number = 0
    elif isinstance(stop.code, int):
        number = stop.code & 0xFF
    else:
        number = 1
        sys.stderr.write(f"{stop.code}\n")
    reporter.ended("exit", exit_code=number)
    return number


def _raised(error: BaseException, path: str, reporter: Reporter) -> int:
    """Report an uncaught exception, without the frames of this package, and print it as the interpreter would."""
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    name = type(error).__name__
    # A SyntaxError's own text quotes the line; the last line alone says what is wrong with it.
    only = [f"{name}: {error.msg}"] if isinstance(error, SyntaxError) else traceback.format_exception_only(error)
    reporter.ended(
        "exception",
        exit_code=1,
        exception=name,
        message=shorten("".join(only).strip(), 4096),
        traceback=shorten("".join(traceback.format_exception(error))),
    )
    if isinstance(error, KeyboardInterrupt):
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.excepthook(type(error), error, trace)
    return 1
