"""The work order of generated code, as the host writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import ExecRefused
from kdskills.execution import EnvironmentMount, ExecRequest, SkillMount
from kdskills.execution.payload import (
    BASE_ENV,
    MAX_PAYLOAD,
    build_payload,
    entry_argv,
    host_entry,
    package_variables,
    program_variables,
    remap_descriptor,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
EXPORT = {
    "version": 1,
    "skills": [
        {"id": "acme.brief", "uri": "bundle://skills/acme/brief", "tree": "t1"},
        {"id": "public.x", "uri": "bundle://skills/x", "tree": "t2"},
    ],
    "mounts": {"bundle://": "/srv/press"},
    "activation": {"consumer": "writer"},
}


@given(source=st.text(), value=JSON)
def test_source_and_globals_arrive_verbatim(source, value):
    """The program's text and its globals are exactly what the caller gave."""
    order = json.loads(build_payload(ExecRequest(code=source, globals={"GIVEN": value})))
    assert order["program"]["source"] == source
    assert order["globals"] == {"GIVEN": value}


def test_the_payload_says_where_everything_is():
    """Version, file, workdir, limits and the depth of verification are in the work order."""
    order = json.loads(build_payload(ExecRequest(code="pass", workdir="sub/dir")))
    assert order == {
        "version": 1,
        "program": {"path": "/tmp/program/main.py", "source": "pass"},
        "workdir": "/work/sub/dir",
        "globals": {},
        "limits": {},
        "verify": "tree",
    }


def test_a_workdir_below_skills_stays_absolute():
    """A program may start inside a mounted skill."""
    order = json.loads(build_payload(ExecRequest(code="pass", workdir="/skills/public.x")))
    assert order["workdir"] == "/skills/public.x"


def test_a_staged_program_travels_without_its_source():
    """An engine that wrote the file itself sends its path only."""
    order = json.loads(build_payload(ExecRequest(code="pass"), program_path="/run/p.py", with_source=False))
    assert order["program"] == {"path": "/run/p.py"}


def test_no_host_path_travels_with_the_descriptor():
    """Mounts name the far side's places of the mounted skills and nothing else."""
    mounts = (SkillMount("acme.brief", Path("/srv/press/skills/acme/brief"), "t1"),)
    request = ExecRequest(code="pass", globals={"SKILLS_DESCRIPTOR": EXPORT}, skills=mounts)
    data = build_payload(request)
    assert json.loads(data)["globals"]["SKILLS_DESCRIPTOR"] == {
        **EXPORT,
        "mounts": {"bundle://skills/acme/brief": "/skills/acme.brief"},
    }
    assert b"/srv/press" not in data
    assert EXPORT["mounts"] == {"bundle://": "/srv/press"}


def test_remapping_uses_the_engines_own_places():
    """An engine without a namespace of its own says where its staged skills are; the others have none."""
    assert remap_descriptor(EXPORT, {"public.x": "/cache/t2"})["mounts"] == {"bundle://skills/x": "/cache/t2"}


def test_the_entry_of_this_installation_is_found_without_importing_it():
    """The host knows the entry as a file."""
    assert host_entry().name == "py_code_exec_entry.py"
    assert host_entry().is_file()


@pytest.mark.parametrize("name", ["", "1a", "a-b", "class", "__name__", "__builtins__", "a b", "x.y", "None"])
def test_names_that_cannot_be_globals_are_refused(name):
    """A global is an identifier which is neither a keyword nor the interpreter's own."""
    with pytest.raises(ExecRefused) as caught:
        build_payload(ExecRequest(code="pass", globals={name: 1}))
    assert caught.value.code == "bad_request"


@pytest.mark.parametrize("name", ["SKILLS_DESCRIPTOR", "x", "_private", "größe"])
def test_ordinary_names_are_usable(name):
    """Identifiers of any script may be globals."""
    assert json.loads(build_payload(ExecRequest(code="pass", globals={name: {}})))["globals"].keys() == {name}


def test_values_that_are_not_json_are_refused():
    """Objects, NaN, circles and bottomless nests never reach an engine."""
    circle: list[object] = []
    circle.append(circle)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (object(), float("nan"), float("inf"), circle, deep, {1, 2}, b"bytes"):
        with pytest.raises(ExecRefused) as caught:
            build_payload(ExecRequest(code="pass", globals={"x": value}))
        assert caught.value.code == "bad_request"
    while deep:
        deep = deep.pop()  # a nest this deep is taken apart by hand


def test_a_descriptor_that_is_no_mapping_is_refused():
    """`SKILLS_DESCRIPTOR` is an export or nothing."""
    with pytest.raises(ExecRefused, match="not a mapping"):
        build_payload(ExecRequest(code="pass", globals={"SKILLS_DESCRIPTOR": ["x"]}))


def test_too_much_is_refused():
    """The payload has a bound of its own, above that of one argument."""
    with pytest.raises(ExecRefused, match="are allowed"):
        build_payload(ExecRequest(code="x" * (MAX_PAYLOAD + 1)))


def test_only_code_has_a_payload():
    """A program by argv has no work order."""
    with pytest.raises(ExecRefused, match="only generated code"):
        build_payload(ExecRequest(argv=("true",)))


def test_payload_is_not_in_argv():
    """The argument list names descriptors; the work order travels through them."""
    expected = ("python3", "-I", "/e.py", "--payload-fd", "3", "--report-fd", "4")
    assert entry_argv("python3", "/e.py", payload_fd=3, report_fd=4) == expected


@pytest.fixture
def environment(tmp_path):
    """Return the mount of an environment with every part."""
    for part in ("bin", "python", "node_modules"):
        (tmp_path / "e" / part).mkdir(parents=True)
    return EnvironmentMount("ab" * 8, tmp_path / "e")


def test_variables_name_the_parts_that_are_there(environment):
    """Each part that exists has its variable, at the far side's folder; PATH goes on to where it led."""
    request = ExecRequest(argv=("x",), environment=environment)
    top = f"/env/{environment.digest}"
    path = f"{top}/bin:/usr/local/bin:/usr/bin:/bin"
    assert package_variables(request) == {
        "PATH": path,
        "PYTHONPATH": f"{top}/python",
        "NODE_PATH": f"{top}/node_modules",
    }
    assert package_variables(request, "/h", "/t")["PATH"] == "/h/bin:/t"
    for part in ("bin", "node_modules"):
        (environment.root / part).rmdir()
    (environment.root / "bin").write_text("no folder")
    assert package_variables(request) == {"PYTHONPATH": f"{top}/python"}
    assert package_variables(ExecRequest(argv=("x",))) == {}


def test_a_programs_variables_come_in_order(environment):
    """Ours, the engine's, the packages', and last what the request says; generated code gets the packages' by its payload."""
    request = ExecRequest(argv=("x",), environment=environment, env={"A": "b"})
    variables = program_variables(request, "/e", PATH="/tree", HOME="/h")
    assert variables == {
        **BASE_ENV, "HOME": "/h", "PATH": "/e/bin:/tree", "PYTHONPATH": "/e/python", "NODE_PATH": "/e/node_modules", "A": "b",
    }  # fmt: skip
    assert (
        program_variables(ExecRequest(argv=("x",), environment=environment, env={"PATH": "/mine"}))["PATH"] == "/mine"
    )
    assert program_variables(ExecRequest(code="1", environment=environment)) == BASE_ENV


def test_the_payload_names_packages(environment):
    """Paths and variables are for the entry to put in force; a PATH of the request's own stays."""
    order = json.loads(build_payload(ExecRequest(code="1", environment=environment, env={"PATH": "/mine"})))
    top = f"/env/{environment.digest}"
    assert order["paths"] == [f"{top}/python"]
    assert order["variables"] == {"PYTHONPATH": f"{top}/python", "NODE_PATH": f"{top}/node_modules"}
    assert str(environment.root) not in json.dumps(order)
    on_host = json.loads(build_payload(ExecRequest(code="1", environment=environment), packages={"PATH": "/h/bin:/t"}))
    assert (on_host["paths"], on_host["variables"]) == ([], {"PATH": "/h/bin:/t"})
