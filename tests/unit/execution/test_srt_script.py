"""What srt is asked to do: settings and script, byte-exact, run here by bash without any sandbox."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdskills.builtin.executors import srt
from kdskills.execution.local_tree import RunFolder
from kdskills.execution.request import ExecRequest, Limits

WORDS = st.binary(max_size=40).map(lambda raw: raw.replace(b"\0", b""))
PRINT = "import os, sys; sys.stdout.buffer.write(b'\\0'.join([os.fsencode(w) for w in sys.argv[1:]] + [os.environb.get(b'VALUE', b'')]))"


@pytest.fixture
def folder(tmp_path):
    """A run's folders, with the files a sandbox fills."""
    made = RunFolder.make(tmp_path, ExecRequest(argv=("true",)))
    files = srt.Files(made)
    files.exit.parent.mkdir()
    for path in files.answers:
        path.touch()
    return made


def run(folder, argv, env=None, *, cwd=None, proxy=False, outer=None):
    """Run the script as bash inside would, and return (process, exit file)."""
    files = srt.Files(folder)
    variables = {b"PATH": os.environb[b"PATH"], **(env or {})}
    place = bytes(cwd or folder.work)
    launcher = [b"/usr/bin/env", b"--chdir"]  # stands for the filter's launcher: a word, then the filter's path
    shutil.rmtree(files.filter, ignore_errors=True)
    files.filter.mkdir()
    data = srt.run_script(
        argv, variables, place, Limits(pids=5000, memory=1 << 40), files, launcher=launcher, proxy=proxy, code=False
    )
    files.script.write_bytes(data)
    done = subprocess.run(
        ["bash", str(files.script)], capture_output=True, env={"PATH": "/usr/bin:/bin", **(outer or {})}
    )
    return done, files.exit.read_text()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, max_size=4), value=WORDS)
def test_arguments_and_values_arrive_byte_for_byte(folder, words, value):
    """Whatever stands in arguments and variables, no shell understands it."""
    python = os.fsencode(sys.executable)
    done, code = run(folder, [python, b"-c", PRINT.encode(), *words], {b"VALUE": value})
    assert (done.stdout, code) == (b"\0".join([*words, value]), "0")


@pytest.mark.parametrize("number", [0, 1, 125, 126, 127, 255])
def test_the_exit_code_is_left_in_its_file(folder, number):
    """Codes launchers use for their own faults are the program's too."""
    _, code = run(folder, [b"sh", b"-c", b"exit %d" % number])
    assert code == str(number)


def test_death_by_signal_says_nothing_of_its_own(folder):
    """What bash would say of a killed child is no output of the program."""
    done, code = run(folder, [b"sh", b"-c", b"kill -9 $$"])
    assert (code, done.stdout, done.stderr) == ("137", b"", b"")


def test_programs_and_workdirs_that_are_not_there(folder):
    """Neither is a program's exit code."""
    assert run(folder, [b"no-such-program-anywhere"])[1] == srt.MISSING
    assert run(folder, [b"true"], cwd=Path("/no/such/folder"))[1] == srt.NO_WORKDIR


def test_only_the_proxys_variables_are_passed_on(folder):
    """With an allow-list the proxy is told of, by address; nothing else srt sets goes in."""
    outer = {"HTTP_PROXY": "http://srt.u:p@localhost:3128", "GIT_SSH_COMMAND": "x", "NO_PROXY": "localhost,10.0.0.0/8"}
    with_proxy = run(folder, [b"env"], proxy=True, outer=outer)[0].stdout.decode().splitlines()
    assert sorted(line for line in with_proxy if not line.startswith("PATH=")) == [
        "HTTP_PROXY=http://srt.u:p@127.0.0.1:3128",
        "NO_PROXY=localhost,10.0.0.0/8",
    ]
    without = run(folder, [b"env"], outer=outer)[0].stdout.decode().splitlines()
    assert [line for line in without if not line.startswith("PATH=")] == []


def test_settings_close_everything_but_what_is_named(folder):
    """The root is closed, the run's folders and three files can be written, and no host is named unless asked for."""
    files = srt.Files(folder)
    made = json.loads(srt.settings((), [Path("/tree")], folder.control, (folder.work, folder.tmp), files))
    assert made["network"] == {"allowedDomains": [], "deniedDomains": []}
    assert made["filesystem"]["denyRead"] == ["/"]
    written = [str(path) for path in (folder.work, folder.tmp, files.exit, files.pid, files.report)]
    assert made["filesystem"]["allowWrite"] == written
    shown = set(made["filesystem"]["allowRead"])
    assert {"/tree", str(folder.control)} <= shown
    assert shown - {"/tree", str(folder.control)} <= set(srt.SYSTEM)
    listed = json.loads(srt.settings(("x.org",), [], folder.control, (), files))
    assert listed["network"]["allowedDomains"] == ["x.org"]


@pytest.mark.parametrize("name", ["example.org", "*.example.org", "a-b.example.org:443", "x1.y2.zz"])
def test_hosts(name):
    """Host names, all names below one, and ports may be in an allow-list."""
    assert srt.DOMAIN.fullmatch(name)


@pytest.mark.parametrize(
    "name",
    ["*", "*.", "org", "a..b", "-a.org", "a-.org", "a.org/", "http://a.org", "a.org:x", "a b.c", "ü.org", "*.*.org"],
)
def test_no_hosts(name):
    """Everything else may not."""
    assert not srt.DOMAIN.fullmatch(name)
