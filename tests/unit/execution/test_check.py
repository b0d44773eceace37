"""Request checks: everything is decided before anything runs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import ExecRefused
from kdskills.execution.check import (
    HOOK_NAMES,
    LIMIT_NAMES,
    check_request,
    env_problem,
    output_problem,
    path_problem,
    require_limits,
    shown_path,
)
from kdskills.execution.request import EnvironmentMount, ExecRequest, InputFile, Limits, Owner, ScriptCall, SkillMount

MOUNT = SkillMount("press.profile", Path("/nowhere"), "sha256:" + "0" * 64)


def refusal(**changes) -> list[str]:
    """Return the problems a request is refused for."""
    with pytest.raises(ExecRefused) as caught:
        check_request(ExecRequest(**({"argv": ("true",)} | changes)))
    assert caught.value.code == "bad_request"
    assert caught.value.who == "caller"
    return caught.value.details["errors"]


def test_a_plain_request_passes():
    """A request with everything in shape gives its plan."""
    plan = check_request(
        ExecRequest(
            argv=("echo", "x"), env={"A": "ü"}, inputs=(InputFile("in/a", b"1"),), outputs=("out/*.csv",), workdir="in"
        )
    )
    assert (plan.argv, plan.cwd, plan.env) == (("echo", "x"), "/work/in", ((b"A", "ü".encode()),))


@pytest.mark.parametrize(
    "given", [{}, {"argv": ("a",), "code": "x"}, {"code": "x", "script": ScriptCall("a", "scripts/x")}]
)
def test_exactly_one_program(given):
    """None or two of argv, script and code are refused."""
    with pytest.raises(ExecRefused, match="exactly one"):
        check_request(ExecRequest(**given))


def test_a_script_becomes_its_interpreter_and_path():
    """A script's argument list is its interpreter with the path in place, then its own arguments."""
    request = ExecRequest(script=ScriptCall("press.profile", "scripts/run.py", ("--x", "{path}")), skills=(MOUNT,))
    assert check_request(request).argv == ("python3", "/skills/press.profile/scripts/run.py", "--x", "{path}")
    ruby = ExecRequest(script=request.script, skills=(MOUNT,), interpreter=("ruby", "-w", "{path}"))
    assert check_request(ruby).argv[:3] == ("ruby", "-w", "/skills/press.profile/scripts/run.py")


@pytest.mark.parametrize(
    "path", ["../scripts/x", "scripts/../x", "x.py", "/scripts/x", "scripts//x", "scripts/./x", "a\\b"]
)
def test_a_script_lies_below_scripts(path):
    """A script's path cannot leave scripts/."""
    assert any(
        "script path" in error for error in refusal(argv=None, script=ScriptCall(MOUNT.id, path), skills=(MOUNT,))
    )


def test_a_script_needs_its_skill_mounted():
    """The skill of a script must be among the mounts."""
    assert "not among the mounted" in refusal(argv=None, script=ScriptCall("other", "scripts/x"), skills=(MOUNT,))[0]


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "LD_AUDIT",
        "PYTHONSTARTUP",
        "PYTHONPATH",
        "BASH_ENV",
        "ENV",
        "NODE_OPTIONS",
        "DOCKER_HOST",
        "GIT_SSH_COMMAND",
        "PERL5OPT",
        "RUBYOPT",
        "JAVA_TOOL_OPTIONS",
        "GCONV_PATH",
        "BASH_FUNC_x",
        "GLIBC_TUNABLES",
    ],
)
def test_hooks_are_refused_by_name(name):
    """Variables that load code into programs are refused, whatever their value."""
    assert "refused by name" in refusal(env={name: ""})[0]


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "Ä", "A\n", "BASH_FUNC_x%%"])
def test_names_of_variables(name):
    """Only plain names are variables."""
    assert "is no variable name" in refusal(env={name: "x"})[0]


@given(st.text())
def test_a_name_is_plain_or_refused(name):
    """No name passes that is not `[A-Za-z_][A-Za-z0-9_]*`, nor a listed hook."""
    if env_problem(name) is None:
        assert name.isascii()
        assert name.isidentifier()
        assert name not in HOOK_NAMES


def test_values_arrive_byte_exact():
    """Values keep every byte, also those that are no UTF-8."""
    value = b"\x01\xff\n'\"$(x)".decode("utf-8", "surrogateescape")
    assert check_request(ExecRequest(argv=("a",), env={"V": value})).env == ((b"V", b"\x01\xff\n'\"$(x)"),)
    assert "NUL" in refusal(env={"V": "a\0b"})[0]


@given(st.text(alphabet="ab/.\\\0\n *", max_size=12))
def test_clean_paths_stay_below(path):
    """A path without a problem never leaves the folder it is joined to."""
    if path_problem(path) is None:
        parts = Path("/top", path).parts
        assert parts[:2] == ("/", "top")
        assert ".." not in parts
        assert len(parts) == 2 + len(path.split("/"))


@pytest.mark.parametrize(
    ("path", "shown", "fits"),
    [
        ("a/ü שלום.txt", "a/ü שלום.txt", True),
        ("a\x1b[2J", "a\\x1b[2J", False),
        ("a\nb", "a\\nb", False),
        ("a\x9bb", "a\\x9bb", False),
        ("a\u2028b", "a\\u2028b", False),
        ("a\u202etxt.exe", "a\\u202etxt.exe", False),
        ("a\udcff", "a\\xff", False),
        ("a\ud800", "a\\ud800", False),
        ("zero\u200dwidth", "zero\\u200dwidth", True),
    ],
)
def test_names_of_outputs(path, shown, fits):
    """An output's name is plain text, or it is refused; what is shown is on one line and holds nothing to obey."""
    assert (output_problem(path) is None) is fits
    assert shown_path(path) == shown
    assert shown.isprintable()


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\0b", "a\nb", "x" * 2000, "y" * 256]
)
def test_input_paths(path):
    """Inputs land below the workdir or nowhere."""
    assert refusal(inputs=(InputFile(path, b""),))


def test_inputs_do_not_clash():
    """A path is given once, and is not both file and folder."""
    assert "given twice" in refusal(inputs=(InputFile("a", b""), InputFile("a", b"")))[0]
    assert "both a file and a folder" in refusal(inputs=(InputFile("a", b""), InputFile("a/b", b"")))[0]


def test_inputs_fit_and_are_absolute():
    """Inputs fit the workdir; host files are named absolutely."""
    assert "more than the workdir's" in refusal(inputs=(InputFile("a", b"12345"),), limits=Limits(work_size=4))[0]
    assert "absolute" in refusal(inputs=(InputFile("a", Path("relative")),))[0]


@pytest.mark.parametrize("pattern", ["/etc/*", "../*", "a/../b", "", "a//b", "./x"])
def test_output_globs(pattern):
    """Declared outputs are validated before anything runs."""
    assert "output" in refusal(outputs=(pattern,))[0]


@pytest.mark.parametrize(("workdir", "good"), [("/skills/press.profile", True), ("/skills/press.profile/data", True), ("/skills/x", False),
    ("/etc", False), ("../x", False), ("/skills/../etc", False), ("a/b", True)])  # fmt: skip
def test_workdirs(workdir, good):
    """The program starts below /work or in a mounted skill."""
    request = ExecRequest(argv=("true",), workdir=workdir, skills=(MOUNT,))
    if good:
        assert check_request(request).cwd.endswith(workdir)
    else:
        with pytest.raises(ExecRefused):
            check_request(request)


@pytest.mark.parametrize("skill", ["a/b", "..", ".", "", "a b", "a\n", "x" * 300])
def test_skill_ids_are_folder_names(skill):
    """A skill's id is one safe folder name."""
    assert "no safe folder name" in refusal(skills=(SkillMount(skill, Path("/x"), "t"),))[0]


@pytest.mark.parametrize(
    "limits",
    [
        {"wall_s": 0},
        {"wall_s": 601},
        {"wall_s": float("nan")},
        {"cpu_s": -1},
        {"memory": 0},
        {"pids": True},
        {"stdout": -1},
        {"memory": 1.5},
    ],
)
def test_limits_are_numbers_in_range(limits):
    """Senseless limits are refused."""
    assert any("limit" in error for error in refusal(limits=Limits(**limits)))


def test_sizes_of_arguments_and_stdin():
    """One argument, all arguments and stdin are bounded."""
    assert "argument 1" in refusal(argv=("a", "x" * (128 * 1024)))[0]
    assert "in all" in refusal(argv=("a", *["x" * 1000] * 2000))[0]
    assert "stdin" in refusal(stdin=b"12", limits=Limits(stdin=1))[0]
    assert "holds NUL" in refusal(argv=("a\0",))[0]
    assert refusal(argv=()) == ["argv is empty"]


def test_labels_and_network():
    """Labels are short plain text; an empty allow-list is said as 'none'."""
    assert "label" in refusal(owner=Owner(tenant="a\nb"))[0]
    assert "allow-list" in refusal(network=())[0]


def test_every_problem_is_listed():
    """One refusal names all problems at once."""
    assert len(refusal(env={"LD_PRELOAD": "x"}, outputs=("/x",), workdir="..")) == 3


def test_limits_are_refused_or_best_effort():
    """A limit an engine cannot hold is refused unless the operator lists it."""
    can = LIMIT_NAMES - {"memory"}
    require_limits(can, frozenset({"memory"}), "x")
    with pytest.raises(ExecRefused) as caught:
        require_limits(can, frozenset(), "x")
    assert (caught.value.code, caught.value.details["limits"]) == ("limit_not_enforceable", ["memory"])


@pytest.mark.parametrize(
    "digest", ["", "0" * 15, "0" * 65, "A" * 16, "g" * 16, "../" * 8, "0" * 16 + "\n", "0" * 15 + "\u0660"]
)
def test_an_environment_is_named_by_its_digest(digest):
    """The name of a mount is 16 to 64 hexadecimal digits and nothing that could be a path."""
    assert "is not 16 to 64 hexadecimal digits" in refusal(environment=EnvironmentMount(digest, Path("/e")))[0]


@pytest.mark.parametrize("root", ["relative", "/a/../b", "/a:b", "/a\n", "/a\x1b[2J", "/a\udcff"])
def test_an_environments_root_can_stand_in_variables(root):
    """A root is absolute and holds nothing that PATH or a terminal would read as something else."""
    (problem,) = refusal(environment=EnvironmentMount("0" * 16, Path(root)))
    assert "is no absolute path" in problem
    assert problem.isprintable()


def test_a_sound_environment_passes():
    """Shapes alone are decided here; the folder is looked at by the engine."""
    for digest in ("0123456789abcdef", "f" * 64):
        assert check_request(ExecRequest(argv=("a",), environment=EnvironmentMount(digest, Path("/nowhere/e-1_2.x"))))


def test_a_trace_costs_no_room():
    """A caller may give as many variables as before: what its program is told of its trace is beside them; no other text is."""
    full = {f"V{number}": "x" for number in range(256)}
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert len(check_request(ExecRequest(argv=("true",), env=full | {"TRACEPARENT": trace})).env) == 257
    assert refusal(env=full | {"TRACEPARENT": "x"}) == ["the environment has more than 256 variables or 262144 bytes"]
