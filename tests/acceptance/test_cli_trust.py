"""Whose code commands run: a folder from elsewhere is looked at, not obeyed."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kdskills.app import Host, Settings
from kdskills.app.identity import LOCAL
from kdskills.app.operations import Context
from kdskills.errors import BundleError

HELLO = Path(__file__).parents[2] / "bundles" / "hello"
PROGRAM = str(Path(sys.executable).parent / "kdskills")
SKILL = "---\nname: hello\ndescription: Says hello. Use when somebody is greeted.\n---\nSay hello.\n"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A bundle outside the working folder whose descriptor leaves a mark where it runs."""
    bundle = tmp_path / "elsewhere/evil"
    (bundle / "skills/hello").mkdir(parents=True)
    (bundle / "skills/hello/SKILL.md").write_text(SKILL)
    (bundle / "skills_descriptor.py").write_text(
        "open(__file__ + '.ran', 'a').write('x')\nCUSTOM_SKILLS_ROOT = 'skills'\n"
    )
    (tmp_path / "here").mkdir()
    return bundle


def runs(bundle: Path) -> int:
    """Return how often the descriptor ran."""
    mark = bundle / "skills_descriptor.py.ran"
    return len(mark.read_text()) if mark.exists() else 0


def kdskills(bundle: Path, *args: object) -> subprocess.CompletedProcess[str]:
    """Run the command in the folder beside that of *bundle*."""
    return subprocess.run(
        [PROGRAM, *map(str, args)],
        cwd=bundle.parents[1] / "here",
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        stdin=subprocess.DEVNULL,
    )


COMMANDS = {
    "check": ("check", "{bundle}"),
    "check --fix": ("check", "{bundle}", "--fix"),
    "list": ("list", "{bundle}"),
    "show": ("show", "{bundle}", "hello"),
    "render": ("render", "{bundle}"),
    "why": ("why", "hello", "-b", "{bundle}"),
    "run": ("run", "{bundle}", "Greet.", "-e", "subprocess"),
    "demo": ("demo", "{bundle}"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_code_from_elsewhere_waits_for_trust(elsewhere: Path, words: tuple[str, ...]) -> None:
    """No command runs a descriptor of a folder from elsewhere: it ends with 2 and names `--trust`, which runs it."""
    command = [word.format(bundle=elsewhere) for word in words]
    done = kdskills(elsewhere, *command)
    assert (done.returncode, runs(elsewhere)) == (2, 0), done.stdout
    assert done.stderr.startswith("bundle_untrusted: skills_descriptor.py, line 1:")
    assert "--trust" in done.stderr
    assert done.stderr.count("\n") == 1
    assert json.loads(kdskills(elsewhere, *command, "--json").stdout)["error"]["code"] == "bundle_untrusted"
    assert runs(elsewhere) == 0
    kdskills(elsewhere, *command, "--trust")
    assert runs(elsewhere) >= 1


def test_check_runs_no_code_of_the_working_folder(elsewhere: Path) -> None:
    """`check` runs no descriptor at all, wherever it lies: what is checked may be anybody's change."""
    done = subprocess.run([PROGRAM, "check", "."], cwd=elsewhere, capture_output=True, text=True, check=False)
    assert (done.returncode, runs(elsewhere)) == (2, 0)


def test_own_folders_and_literals_need_no_trust(elsewhere: Path, tmp_path: Path) -> None:
    """In the working folder a descriptor runs; elsewhere one of literals is read, for every command that looks."""
    here = subprocess.run([PROGRAM, "list", "."], cwd=elsewhere, capture_output=True, text=True, check=False)
    assert (here.returncode, runs(elsewhere)) == (0, 1)
    (elsewhere / "skills_descriptor.py").write_text("AGENTS_CONFIG = {'*': {'disabled': ['hello']}}\n")
    assert kdskills(elsewhere, "check", elsewhere).returncode == 0
    rows = json.loads(kdskills(elsewhere, "list", elsewhere, "--json").stdout)["skills"]
    assert [(row["full_id"], row["code"]) for row in rows] == [("public.hello", "denied")]


def test_a_link_in_the_working_folder_is_elsewhere(elsewhere: Path, tmp_path: Path) -> None:
    """A link in the working folder does not make the folder it leads to the caller's own."""
    (tmp_path / "here/mine").symlink_to(elsewhere)
    assert (kdskills(elsewhere, "list", "mine").returncode, runs(elsewhere)) == (2, 0)


def test_tools_of_a_folder_from_elsewhere_wait_for_trust(elsewhere: Path) -> None:
    """A `tools.py` from elsewhere runs no more than a descriptor does: looking is possible, a turn needs `--trust`."""
    (elsewhere / "skills_descriptor.py").unlink()
    shutil.copyfile(HELLO / "demo.yaml", elsewhere / "demo.yaml")
    (elsewhere / "tools.py").write_text("open(__file__ + '.ran', 'a')\nTOOLS = []\n")
    assert kdskills(elsewhere, "list", elsewhere).returncode == 0
    done = kdskills(elsewhere, "run", elsewhere, "Greet.", "--out", "out")
    assert (done.returncode, done.stderr.split(",")[0]) == (2, "bundle_untrusted: tools.py")
    assert not (elsewhere / "tools.py.ran").exists()
    kdskills(elsewhere, "run", elsewhere, "Greet.", "--trust")
    assert (elsewhere / "tools.py.ran").exists()


@pytest.mark.parametrize(("word", "code", "ran"), [("n", 1, 0), ("y", 0, 1)])
def test_a_person_is_asked_once(elsewhere: Path, word: str, code: int, ran: int) -> None:
    """At a terminal the person is asked once; no ends with 1 and runs nothing, yes runs it this time."""
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        [PROGRAM, "list", str(elsewhere)],
        cwd=elsewhere.parents[1] / "here",
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.write(ours, f"{word}\n".encode())
    printed, _ = program.communicate(timeout=110)
    os.close(theirs)
    said = os.read(ours, 65536).decode()
    os.close(ours)
    assert (program.returncode, runs(elsewhere), said.count("Run it this time?")) == (code, ran, 1)
    assert ("hello" in printed) == bool(ran)


async def test_a_model_at_a_local_door_cannot_run_the_working_folder(elsewhere: Path, monkeypatch) -> None:
    """To a caller at the MCP door the working folder is not its own: a model that wrote a descriptor cannot have it run."""
    monkeypatch.chdir(elsewhere)
    host = Host(Settings(), entry_points=False)
    for door in ("mcp", "http"):
        with pytest.raises(BundleError) as caught:
            await host.invoke("skills.list", {"bundle": str(elsewhere)}, Context(replace(LOCAL, door=door)))
        assert (caught.value.code, runs(elsewhere)) == ("bundle_untrusted", 0)
