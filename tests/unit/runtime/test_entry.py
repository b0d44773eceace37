"""The in-sandbox entry, run as a real process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ENTRY = Path(__file__).parents[3] / "runtime" / "kdskills_runtime" / "py_code_exec_entry.py"


class Run:
    """A finished run of the entry: exit code, streams, report lines."""

    def __init__(self, done: subprocess.CompletedProcess[bytes], report: bytes) -> None:
        self.code = done.returncode
        self.out = done.stdout.decode()
        self.err = done.stderr.decode()
        self.lines = [json.loads(line) for line in report.splitlines()]

    @property
    def events(self) -> list[str]:
        """The names of the report's lines."""
        return [line["event"] for line in self.lines]


@pytest.fixture
def program(tmp_path):
    """Return the absolute path the program is written to."""
    return tmp_path / "control" / "main.py"


@pytest.fixture
def launch(tmp_path, program):
    """Return a function that runs source through the entry; keyword arguments change the work order."""

    def run(source: str | None, *, raw: bytes | None = None, by_stdin: bool = False, **order: object) -> Run:
        body: dict[str, object] = {"version": 1, "program": {"path": str(program), "source": source}}
        payload = json.dumps({**body, **order}).encode() if raw is None else raw
        (tmp_path / "payload").write_bytes(payload)
        (tmp_path / "work").mkdir(exist_ok=True)
        with (tmp_path / "payload").open("rb") as given, (tmp_path / "report").open("wb") as report:
            payload_fd = 0 if by_stdin else given.fileno()
            argv = [
                sys.executable,
                "-I",
                str(ENTRY),
                "--payload-fd",
                str(payload_fd),
                "--report-fd",
                str(report.fileno()),
            ]
            done = subprocess.run(
                argv,
                stdin=given if by_stdin else subprocess.DEVNULL,
                capture_output=True,
                cwd=tmp_path / "work",
                pass_fds=(given.fileno(), report.fileno()),
                timeout=60,
                check=False,
            )
        return Run(done, (tmp_path / "report").read_bytes())

    return run


def test_program_runs_and_reports(launch):
    """Output goes to stdout, the report to its own descriptor."""
    run = launch("print('hello')")
    assert (run.code, run.out, run.err) == (0, "hello\n", "")
    assert run.lines == [{"event": "started"}, {"event": "ended", "outcome": "ok", "exit_code": 0}]


def test_payload_by_standard_input(launch):
    """Where no descriptor can be inherited the payload comes by stdin, and the program finds stdin empty."""
    assert launch("import sys; print(repr(sys.stdin.read()))", by_stdin=True).out == "''\n"


def test_the_file_is_verbatim_and_the_programs_own(launch, program):
    """The source is written byte for byte; `__file__`, `__name__` and argv are as for a plain script."""
    source = "import sys\r\nprint(__name__, __file__ == sys.argv[0], len(sys.argv), 'ü')"
    run = launch(source)
    assert program.read_bytes() == source.encode()
    assert run.out == "__main__ True 1 ü\n"


def test_future_imports_docstring_and_main_classes(launch):
    """Nothing is pasted around the program: first-line rules, pickling by `__main__` and inspection work."""
    source = (
        '"""doc"""\nfrom __future__ import annotations\nimport inspect, pickle\n'
        "class C:\n    pass\nassert type(pickle.loads(pickle.dumps(C()))) is C\n"
        "print(__doc__, inspect.getsource(C).strip())\n"
    )
    assert launch(source).out == "doc class C:\n    pass\n"


def test_exception_is_named_with_lines_of_the_users_file(launch, program):
    """`ValueError: boom` is reported with the user's own line numbers and no frame of the entry."""
    run = launch("def f():\n    raise ValueError('boom')\n\nf()\n")
    ended = run.lines[1]
    assert run.code == 1
    assert (ended["outcome"], ended["exception"], ended["message"]) == ("exception", "ValueError", "ValueError: boom")
    assert f'File "{program}", line 4, in <module>' in ended["traceback"]
    assert f'File "{program}", line 2, in f' in ended["traceback"]
    assert "kdskills_runtime" not in ended["traceback"]
    assert run.err == ended["traceback"]


def test_syntax_error_is_the_programs(launch):
    """A file that does not compile is a program's error with its line."""
    run = launch("x = 1\ny = = 2\n")
    assert (run.code, run.lines[1]["exception"], run.lines[1]["message"]) == (
        1,
        "SyntaxError",
        "SyntaxError: invalid syntax",
    )
    assert "line 2" in run.lines[1]["traceback"]


@pytest.mark.parametrize(
    ("source", "code", "stderr"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit('because')", 1, "because\n"),
        ("raise SystemExit([1])", 1, "[1]\n"),
        ("import os; os._exit(9)", 9, ""),
    ],
)
def test_exit_codes_are_those_of_a_plain_interpreter(launch, source, code, stderr):
    """SystemExit means what it means in a script."""
    run = launch(source)
    assert (run.code, run.err) == (code, stderr)


def test_exit_is_no_exception(launch):
    """`sys.exit(3)` is the outcome `exit` with its code."""
    assert launch("import sys; sys.exit(3)").lines[1] == {"event": "ended", "outcome": "exit", "exit_code": 3}


def test_a_signal_is_a_signal(launch):
    """A program that kills itself dies by that signal; the report stops at `started`."""
    run = launch("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert (run.code, run.events) == (-signal.SIGTERM, ["started"])


def test_keyboard_interrupt_dies_by_sigint(launch):
    """As for a plain script, an uncaught interrupt ends by the signal."""
    run = launch("raise KeyboardInterrupt")
    assert (run.code, run.lines[1]["exception"]) == (-signal.SIGINT, "KeyboardInterrupt")


def test_globals_are_set(launch):
    """Contract globals are there before the first line."""
    assert launch("print(A, B)", globals={"A": 1, "B": {"c": [None]}}).out == "1 {'c': [None]}\n"


def test_report_hands_back_a_value(launch):
    """The last reported value counts, as it was when it was reported."""
    source = "from kdskills_runtime import report\nv = [1]\nreport('first')\nreport(v)\nv.append(2)\n"
    assert launch(source).lines[1]["value"] == [1]


def test_report_of_none_is_a_value(launch):
    """None is a value; no call is no value."""
    assert launch("import kdskills_runtime as k; k.report(None)").lines[1]["value"] is None


def test_value_survives_an_exception(launch):
    """What was reported before an exception still arrives."""
    run = launch("import kdskills_runtime as k; k.report(5); 1 / 0")
    assert (run.lines[1]["value"], run.lines[1]["exception"]) == (5, "ZeroDivisionError")


@pytest.mark.parametrize(
    ("expression", "exception"),
    [("object()", "TypeError"), ("float('nan')", "ValueError"), ("'x' * 2**21", "ValueError")],
)
def test_unusable_values_fail_where_they_are_reported(launch, expression, exception):
    """A value that is not JSON, or too large, is the program's own exception."""
    assert launch(f"import kdskills_runtime as k\nk.report({expression})\n").lines[1]["exception"] == exception


def test_report_outside_a_run_is_refused():
    """`report` needs a program started by the entry."""
    import kdskills_runtime

    with pytest.raises(RuntimeError):
        kdskills_runtime.report(1)


def test_forked_children_write_no_report(launch):
    """A child that runs on to the end of the file adds no line."""
    run = launch("import os, kdskills_runtime as k\npid = os.fork()\nk.report(pid == 0)\nif pid: os.waitpid(pid, 0)\n")
    assert run.events == ["started", "ended"]
    assert run.lines[1]["value"] is False


def test_started_programs_do_not_inherit_the_report(launch):
    """Neither payload nor report descriptor reaches a program's children."""
    source = (
        "import os, subprocess\n"
        "out = subprocess.run(['ls', '-l', '/proc/self/fd'], capture_output=True, text=True, close_fds=False).stdout\n"
        "print('report' in out, 'payload' in out)\n"
    )
    assert launch(source).out == "False False\n"


def test_inputs_can_be_imported_but_shadow_nothing(launch, tmp_path):
    """Modules beside the data are importable after the standard library."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "helper.py").write_text("WORD = 'helped'\n")
    (work / "colorsys.py").write_text("raise SystemExit('shadowed')\n")
    assert (
        launch("import helper, colorsys; print(helper.WORD, colorsys.rgb_to_hsv(0, 0, 0))").out
        == "helped (0.0, 0.0, 0)\n"
    )


@pytest.fixture
def packages(tmp_path):
    """Return a folder of packages with a good module, and modules by the names of those the entry needs."""
    folder = tmp_path / "packages"
    for name in (
        *(
            "json",
            "traceback",
            "ast",
            "linecache",
            "tokenize",
            "signal",
            "resource",
            "types",
            "sitecustomize",
            "usercustomize",
        ),
        *("kdskills_runtime/__init__", "kdskills_runtime/stage0", "kdskills/__init__", "encodings/__init__"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text("import os\nos.write(2, b'PLANTED ' + __name__.encode())\n")
    (folder / "packed.py").write_text("NAME = 'packed'\n")
    return folder


@pytest.mark.parametrize("source", ["pass", "import sys\nsys.exit(3)", "x = 1 / 0", "def", "raise KeyboardInterrupt"])
def test_packages_are_never_imported_for_us(launch, packages, source):
    """Whatever a program does, nothing the entry imports comes from there, however it is called."""
    run = launch(source, paths=[str(packages)])
    assert "PLANTED" not in run.err
    assert run.events == ["started", "ended"]


def test_packages_come_before_all_others(launch, packages):
    """The program finds them first, keeps what the entry had imported, and its exception hook finds them, too."""
    run = launch(
        "import sys, json, packed\nprint(json.__file__ == sys.modules['json'].__file__, 'packages' in json.__file__)\n"
        "print(sys.path[0].endswith('packages'), packed.NAME)\n"
        "def hook(*_):\n    import linecache\nsys.excepthook = hook\nraise ValueError",
        paths=[str(packages)],
    )
    assert run.out == "True False\nTrue packed\n"


def test_variables_are_for_the_program_and_its_children(launch, packages):
    """They are set when it starts; a child that is no isolated Python imports from the packages."""
    source = (
        "import os, subprocess, sys\nprint(os.environ['A'], flush=True)\n"
        "subprocess.run([sys.executable, '-S', '-c', 'import packed; print(packed.NAME)'])"
    )
    (packages / "encodings/__init__.py").unlink()
    (packages / "encodings").rmdir()
    run = launch(source, variables={"A": "b", "PYTHONPATH": str(packages)})
    assert run.out == "b\npacked\n"


def test_imported_inputs_leave_no_bytecode(launch, tmp_path):
    """A program's own imports add nothing to the outputs."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "helper.py").write_text("")
    launch("import helper")
    assert [path.name for path in work.iterdir()] == ["helper.py"]


def test_threads_and_atexit_finish(launch):
    """Non-daemon threads and exit handlers run to their end, as in a plain interpreter."""
    source = (
        "import atexit, threading, time\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('main')\n"
    )
    assert launch(source).out == "main\nthread\nlast\n"


def test_printed_lines_survive_a_kill(launch):
    """Lines are flushed as they are printed."""
    assert launch("import os, signal; print('seen'); os.kill(os.getpid(), signal.SIGKILL)").out == "seen\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E", "E: <exception str() failed>"),
        ("class E(BaseException): pass\nraise E('x')", "E: x"),
        ("raise ValueError('a\\nb')", "ValueError: a\nb"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("raise ValueError('\\udc80')", "ValueError: \udc80"),
    ],
)
def test_odd_exceptions_are_reported(launch, source, message):
    """Exceptions that cannot be printed, are not Exceptions, or come in thousands of frames are reported."""
    run = launch(source)
    assert run.code == 1
    assert message in run.lines[1]["message"]


def test_huge_messages_are_shortened(launch):
    """A report stays small whatever the exception says."""
    ended = launch("raise ValueError('x' * 10**7)").lines[1]
    assert len(ended["message"]) < 5_000
    assert len(ended["traceback"]) < 40_000
    assert "characters left out" in ended["message"]


def test_excepthook_of_the_program_is_used(launch):
    """A program's own `sys.excepthook` prints what it wants; the report still names the exception."""
    run = launch("import sys\nsys.excepthook = lambda *a: print('mine')\n1/0\n")
    assert (run.out, run.err, run.lines[1]["exception"]) == ("mine\n", "", "ZeroDivisionError")


def test_limits_are_set_and_never_raised(launch):
    """Rlimits of the work order hold for the program; asking for more than allowed changes nothing."""
    source = "import resource as r; print(r.getrlimit(r.RLIMIT_NOFILE), r.getrlimit(r.RLIMIT_CORE))"
    assert launch(source, limits={"nofile": 99, "core": 0}).out == "(99, 99) (0, 0)\n"


def test_cpu_limit_warns_then_kills(launch):
    """A program over its CPU time dies by SIGXCPU."""
    assert launch("while True: pass", limits={"cpu": 1}).code == -signal.SIGXCPU


def test_file_size_limit_is_the_programs_error(launch):
    """Writing over the file size limit fails inside the program."""
    run = launch("open('big', 'wb').write(b'x' * 100_000)", limits={"fsize": 50_000})
    assert run.lines[1]["exception"] == "OSError"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "payload_invalid"),
        (b"{", "payload_invalid"),
        (b"[]", "payload_invalid"),
        (b'{"version": 2, "program": {"path": "/x"}}', "payload_invalid"),
        (b'{"version": 1}', "payload_invalid"),
        (b'{"version": 1, "program": {"path": "relative.py"}}', "program_invalid"),
        (b'{"version": 1, "program": {"path": "/x"}, "limits": {"magic": 1}}', "limit_unknown"),
        (b'{"version": 1, "program": {"path": "/dev/null"}, "workdir": "/no/such"}', "workdir_missing"),
    ],
)
def test_bad_orders_fail_before_the_program(launch, raw, code):
    """A work order that cannot be understood is a failure of the entry, exit code 125, never a program's result."""
    run = launch(None, raw=raw)
    assert (run.code, run.events, run.lines[0]["code"]) == (125, ["failed"], code)


def test_the_program_file_is_never_overwritten_or_followed(launch, program, tmp_path):
    """An existing file or link in the program's place is a failure."""
    program.parent.mkdir()
    program.symlink_to(tmp_path / "elsewhere")
    run = launch("pass")
    assert (run.lines[0]["code"], (tmp_path / "elsewhere").exists()) == ("program_not_placed", False)


def test_a_staged_program_runs(launch, program):
    """Without source the file in its place is run."""
    program.parent.mkdir()
    program.write_text("print('staged')\n")
    assert launch(None, program={"path": str(program)}).out == "staged\n"


def test_missing_options_are_a_usage_error():
    """Started by hand the entry says how it is called."""
    done = subprocess.run([sys.executable, "-I", str(ENTRY)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.split(":")[0]) == (125, "usage")


def test_stage_zero_is_standard_library_only(launch):
    """Without skills nothing but the standard library and the entry itself is imported, and little of that."""
    run = launch(
        "import sys; print(sorted(m for m in sys.modules if m.partition('.')[0] in ('kdskills', 'pydantic', 'yaml', 'jinja2', 'asyncio', 'pathlib')))"
    )
    assert run.out == "[]\n"


def test_entry_imports_without_an_installed_package(launch, tmp_path):
    """The entry finds its package beside itself, so a copied folder works on any interpreter."""
    read, write = os.pipe()
    order = {"version": 1, "program": {"path": str(tmp_path / "p.py"), "source": "print('bare')"}}
    argv = [sys.executable, "-I", "-S", str(ENTRY), "--payload-fd", "0", "--report-fd", str(write)]
    done = subprocess.run(argv, input=json.dumps(order), capture_output=True, text=True, pass_fds=(write,), check=False)
    os.close(write)
    os.close(read)
    assert done.stdout == "bare\n"
