"""Requirements become exact wheels of the operator's indexes, or an error whose code says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.tags import Tag

from kdskills.environments import resolve as room
from kdskills.environments.codes import ENVIRONMENT_CODES, EnvironmentFailed
from kdskills.environments.model import EnvironmentSpec
from kdskills.environments.resolve import PackageIndex, best_wheel, configured_indexes, requirement_line, resolve

BOTH = pytest.mark.parametrize("tool", ["uv", "pip"])


@pytest.fixture
def choose(monkeypatch):
    """Make one of the two programs the one that resolves."""

    def chosen(tool: str) -> None:
        if tool == "pip":
            monkeypatch.setattr(room, "find_uv", lambda: None)

    return chosen


def failing(spec, indexes, code, **options):
    """Return the error of a resolution, after checking its code."""
    with pytest.raises(EnvironmentFailed) as caught:
        resolve(spec, indexes, **options)
    assert (caught.value.code, caught.value.code in ENVIRONMENT_CODES) == (code, True), caught.value
    return caught.value


@BOTH
def test_requirements_become_exact_wheels(index, choose, tool):
    """Versions that go together are chosen, with all they need, sorted, each with its file, digest and index."""
    choose(tool)
    index.add("one", "1.0")
    index.add("one", "2.0", requires=("two>=1",))
    index.add("two", "1.5")
    packages = resolve(EnvironmentSpec(("one>=2",)), index.indexes)
    assert [(package.name, package.version, package.index) for package in packages] == [
        ("one", "2.0", "loop"),
        ("two", "1.5", "loop"),
    ]
    assert packages[0].file == "one-2.0-py3-none-any.whl"
    assert len(packages[0].sha256) == 64


@BOTH
def test_constraints_bind_what_is_needed_anyway(index, choose, tool):
    """A constraint chooses the version of a package that is needed, and brings none that is not."""
    choose(tool)
    index.add("one", "1.0")
    index.add("one", "2.0")
    index.add("two")
    packages = resolve(EnvironmentSpec(("one",)), index.indexes, constraints=("one==1.0", "two==1.0"))
    assert [(package.name, package.version) for package in packages] == [("one", "1.0")]


@BOTH
def test_a_conflict_names_both_sides(index, choose, tool):
    """Requirements that exclude each other are `environment_conflict`, and the message has both."""
    choose(tool)
    index.add("one", "1.0")
    index.add("one", "2.0")
    index.add("two", "1.0", requires=("one<2",))
    error = failing(EnvironmentSpec(("one>=2", "two")), index.indexes, "environment_conflict")
    assert "one" in error.message
    assert "two" in error.message


@BOTH
def test_what_is_not_there_is_told(index, choose, tool):
    """An unknown package, a version nobody has, and wheels for other platforms alone are `environment_unavailable`."""
    choose(tool)
    index.add("one", "1.0")
    index.add("far", tag="cp311-cp311-win_amd64")
    for requirement in ("nobody", "one>=7", "far"):
        failing(EnvironmentSpec((requirement,)), index.indexes, "environment_unavailable")


def test_source_distributions_have_a_code_of_their_own(index):
    """A package without wheels is `environment_source_only`, and its set-up does not run."""
    index.files["raw-1.0.tar.gz"] = b"never looked at"
    failing(EnvironmentSpec(("raw",)), index.indexes, "environment_source_only")
    assert index.asked["files/raw-1.0.tar.gz"] == 0


@BOTH
def test_yanked_versions_are_passed_over(index, choose, tool):
    """A yanked version is not chosen; who names it exactly gets it, and is told."""
    choose(tool)
    index.add("one", "1.0")
    index.yanked.add(index.add("one", "2.0"))
    assert resolve(EnvironmentSpec(("one",)), index.indexes)[0].version == "1.0"
    warnings = []
    assert resolve(EnvironmentSpec(("one==2.0",)), index.indexes, tell=warnings.append)[0].version == "2.0"
    assert "yanked" in warnings[0]


@BOTH
def test_an_index_that_is_away_is_told_without_its_password(choose, tool, monkeypatch):
    """Nobody listening is `environment_index_unreachable`; the login of the address is in no message."""
    choose(tool)
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    away = (PackageIndex("away", "http://user:hunter2@127.0.0.1:9/simple"),)
    error = failing(EnvironmentSpec(("one",)), away, "environment_index_unreachable")
    assert "hunter2" not in error.message + repr(error.details) + repr(away)


def test_an_index_that_fails_or_is_slow_is_told(index, monkeypatch):
    """An answer of 500, and one that takes too long, are `environment_index_unreachable`."""
    index.add("one")
    monkeypatch.setattr(room, "RESOLVE_S", 0.5)
    index.delay_s = 2
    failing(EnvironmentSpec(("one",)), index.indexes, "environment_index_unreachable")
    monkeypatch.setattr(room, "RESOLVE_S", 60)
    index.delay_s, index.status = 0, 500
    failing(EnvironmentSpec(("one",)), index.indexes, "environment_index_unreachable")


@pytest.mark.parametrize(
    "text",
    [
        "-r /etc/passwd",
        "--index-url=http://127.0.0.1:9/",
        "one\n--index-url http://127.0.0.1:9/",
        "-e .",
        "./folder",
        "/tmp/x.whl",
        "one @ http://127.0.0.1:9/one-1.0-py3-none-any.whl",
        "one @ file:///etc/passwd",
        "git+https://example.net/x",
        "",
        "one; import os",
        "$(id)",
        "one\0",
    ],
)
def test_hostile_texts_are_no_options(index, text):
    """Options, paths, addresses and lines within a requirement are refused before any program sees them."""
    failing(EnvironmentSpec((text,)), index.indexes, "environment_invalid")
    assert not index.asked


@given(st.text(max_size=60))
def test_a_requirement_is_one_line_that_is_no_option(text):
    """Whatever text comes, the line that is passed on is a requirement by itself, or there is none."""
    try:
        line = requirement_line(text)
    except EnvironmentFailed:
        return
    assert len(line.splitlines()) == 1
    assert line[0].isalnum()
    assert "://" not in line.partition(";")[0]


def test_hashes_of_a_requirement_bind(index):
    """A file whose digest a requirement does not allow is refused: `environment_hash_mismatch`."""
    index.add("one", "1.0")
    (package,) = resolve(EnvironmentSpec(("one==1.0",)), index.indexes)
    good = EnvironmentSpec(("one==1.0",), hashes={"one==1.0": (f"sha256:{package.sha256}",)})
    assert resolve(good, index.indexes) == (package,)
    bad = EnvironmentSpec(("one==1.0",), hashes={"one==1.0": ("sha256:" + "0" * 64,)})
    failing(bad, index.indexes, "environment_hash_mismatch")


def test_another_python_is_told(index):
    """Versions of Python this is none of are `environment_platform`; a text that is no set of versions is invalid."""
    failing(EnvironmentSpec(("one",), requires_python=">=4"), index.indexes, "environment_platform")
    failing(EnvironmentSpec(("one",), requires_python="some"), index.indexes, "environment_invalid")
    assert not index.asked


@BOTH
def test_files_of_the_folder_decide_nothing(index, choose, tool, tmp_path, monkeypatch):
    """Configurations in the folder kdskills is started in, such as a skill's, do not say where packages come from."""
    choose(tool)
    index.add("one")
    evil = 'index-url = "http://127.0.0.1:9/simple"\n'
    (tmp_path / "uv.toml").write_text(evil)
    (tmp_path / "pyproject.toml").write_text(f"[tool.uv]\n{evil}")
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = http://127.0.0.1:9/simple\n")
    monkeypatch.chdir(tmp_path)
    assert resolve(EnvironmentSpec(("one",)), index.indexes)[0].version == "1.0"


def test_addresses_do_not_stand_in_command_lines(index, monkeypatch):
    """Logins reach the index, and no command line, which everybody on the machine can read."""
    index.add("one")
    lines = []
    run = subprocess.run

    def watched(command, **options):
        lines.append(" ".join(map(str, command)))
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", watched)
    login = (PackageIndex("loop", index.indexes[0].url.replace("://", "://user:hunter2@")),)
    (package,) = resolve(EnvironmentSpec(("one",)), login)
    assert any(header.startswith("Basic ") for header in index.logins)
    assert lines
    assert "hunter2" not in " ".join(lines) + repr(package)


def test_indexes_come_from_the_account_and_variables(tmp_path, monkeypatch):
    """Variables go before files, uv's before pip's; the main index is the first, and without any it is PyPI."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://pip.example.net/simple\nextra-index-url = https://a.b/s\n"
    )
    assert [index.url for index in configured_indexes()][:2] == ["https://pip.example.net/simple", "https://a.b/s"]
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv/uv.toml").write_text('[[index]]\nname = "own"\nurl = "https://uv.example.net/s"\ndefault = true\n')
    assert configured_indexes()[0].url == "https://uv.example.net/s"
    monkeypatch.setenv("UV_INDEX", "near=https://u:p@near.example.net/s")
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable.example.net/s")
    found = configured_indexes()
    assert [(index.name, index.url) for index in found] == [
        ("variable.example.net", "https://variable.example.net/s"),
        ("near", "https://u:p@near.example.net/s"),
    ]


@given(
    st.permutations(["a-1-cp311-cp311-linux_x86_64.whl", "a-1-py3-none-any.whl", "a-1-2-py3-none-any.whl", "junk.whl"])
)
def test_the_best_wheel_does_not_depend_on_the_order(files):
    """The most specific tag wins, then the higher build number, however an index sorts its files."""
    exact, general = Tag("cp311", "cp311", "linux_x86_64"), Tag("py3", "none", "any")
    assert best_wheel(files, [exact, general]) == "a-1-cp311-cp311-linux_x86_64.whl"
    assert best_wheel(files, [general]) == "a-1-2-py3-none-any.whl"
    assert best_wheel(files, []) is None


def test_reading_settings_of_machines_needs_no_uv(monkeypatch, tmp_path):
    """Where neither uv nor pip is installed, the error names the extra that brings them."""
    monkeypatch.setattr(room, "find_uv", lambda: None)
    program = (
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'pip' else real(name, *a)\n"
        "from kdskills.environments import resolve as r\n"
        "r.find_uv = lambda: None\n"
        "try: r.list_wheels(['one'], (r.PackageIndex('x', 'http://127.0.0.1:9/'),))\n"
        "except Exception as error: print(error.code, error.details['extra'])\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(tmp_path))
    assert run.stdout == "missing_extra environments\n", run.stderr
