"""Authors run scripts of their bundle behind the wall, with what a call of a model would have, and are told which start."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdskills.app import Host, Settings
from kdskills.app.environments import lock_of
from kdskills.app.operations import Context
from kdskills.app.operations.scripts import CallFiles
from kdskills.errors import BadRequest, ToolCallRefused
from kdskills.execution import Artifact
from tests.unit.environments.conftest import LoopIndex
from tests.unit.environments.conftest import index as index  # noqa: PLC0414 - a fixture

pytestmark = pytest.mark.needs("bubblewrap")

TOP = "---\nname: {name}\ndescription: Does things for a test.\n---\nDo it.\n"
ECHO = """\
import os, pathlib, sys
print(sys.argv[1:], pathlib.Path("data/in.csv").read_text())
print("warned", file=sys.stderr)
pathlib.Path("made").mkdir()
pathlib.Path("made/out.txt").write_text("out")
sys.exit(7)
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose skill has a script that works, one that lacks a package, and one that lacks a program."""
    root = tmp_path / "lab"
    scripts = root / "skills/pdf/scripts"
    scripts.mkdir(parents=True)
    (root / "skills_descriptor.yaml").write_text("custom_skills_root: skills\n")
    (root / "skills/pdf/SKILL.md").write_text(TOP.format(name="pdf"))
    (scripts / "echo.py").write_text(ECHO)
    (scripts / "lacks.py").write_text("import not_there_at_all\n")
    (scripts / "calls.sh").write_text("frobnicate x\n")
    (scripts / "declares.py").write_text('# /// script\n# dependencies = ["not-there"]\n# ///\n')
    (scripts / "notes.txt").write_text("no program\n")
    return root


async def answered(name, bundle, **arguments):
    """Return the answer of an operation on scripts."""
    host = Host(Settings(executor="bubblewrap"), entry_points=False)
    return await host.invoke(f"scripts.{name}", {"bundle": str(bundle), **arguments}, Context())


async def test_a_script_runs_with_files_and_ends_as_it_ended(bundle, tmp_path, monkeypatch):
    """Arguments and files go in, streams, exit code and new files come out, and nothing of it touches the inputs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/in.csv").write_text("1,2")
    result = await answered(
        "run",
        bundle,
        skill="pdf",
        path="scripts/echo.py",
        args=["--help", "-x"],
        files=["data/in.csv"],
        out="made-here",
    )
    assert (result.exit_code, result.stdout, result.stderr) == (7, "['--help', '-x'] 1,2\n", "warned\n")
    assert [file.path for file in result.files] == ["made/out.txt"]
    assert (tmp_path / "made-here/made/out.txt").read_text() == "out"
    told = await answered("run", bundle, skill="pdf", path="scripts/echo.py", files=["data/in.csv"])
    assert (told.files[0].saved, sorted(path.name for path in tmp_path.iterdir())) == ("", ["data", "lab", "made-here"])


async def test_the_same_checks_hold_as_for_models(bundle):
    """Paths that lead out, unknown skills and packages nobody locked are refused with the codes a model gets."""
    for arguments, code in (
        ({"skill": "pdf", "path": "../SKILL.md"}, "path_denied"),
        ({"skill": "pdf", "path": "SKILL.md"}, "path_denied"),
        ({"skill": "pdf", "path": "scripts/notes.txt"}, "extension_not_allowed"),
        ({"skill": "other", "path": "scripts/echo.py"}, "skill_not_found"),
        ({"skill": "pdf", "path": "scripts/declares.py"}, "environment_missing"),
    ):
        with pytest.raises(ToolCallRefused) as refused:
            await answered("run", bundle, **arguments)
        assert refused.value.code == code


async def test_a_probe_tells_which_scripts_start_and_what_they_lack(bundle):
    """Every program of the skill is started with `--help`; the answer is a no when too few start."""
    result = await answered("probe", bundle, at_least=50)
    rows = {row.path: (row.started, row.missing, row.code) for row in result.rows}
    assert rows == {
        "scripts/calls.sh": (False, ("frobnicate",), ""),
        "scripts/declares.py": (False, (), "environment_missing"),
        "scripts/echo.py": (True, (), ""),
        "scripts/lacks.py": (False, ("not_there_at_all",), ""),
    }
    assert (result.scripts, result.started, result.percent, result.negative) == (4, 1, 25.0, True)
    assert not (await answered("probe", bundle)).negative


def test_files_have_one_name_each_and_never_leave_the_folder(tmp_path, monkeypatch):
    """Files from elsewhere lose their folders, two of one name are refused, and no link leads an output out of its folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("1")
    (tmp_path / "elsewhere").mkdir()
    assert [item.path for item in CallFiles([tmp_path / "a.csv"], None).inputs()] == ["a.csv"]
    for files, code in (([Path("a.csv"), tmp_path / "a.csv"], "path_exists"), ([Path("no.csv")], "path_missing")):
        with pytest.raises(BadRequest) as refused:
            CallFiles(files, None)
        assert refused.value.code == code
    (tmp_path / "out").mkdir()
    (tmp_path / "out/link").symlink_to(tmp_path / "elsewhere")
    files = CallFiles((), tmp_path / "out")
    collected = files.collect([Artifact("link/x", 1, "0" * 64, 0o644, b"x"), Artifact("y", 1, "1" * 64, 0o755, b"y")])
    assert ([file.path for file in collected.files], collected.dropped) == (
        ["y"],
        (("link/x", "a link leads out of the folder"),),
    )
    assert (list((tmp_path / "elsewhere").iterdir()), (tmp_path / "out/y").stat().st_mode & 0o777) == ([], 0o644)


def test_a_script_replaces_no_file_but_those_it_was_given(tmp_path, monkeypatch):
    """Into the folder of the author's own work come new files and changed inputs; nothing else is replaced, nor told to Git."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("in.csv", "own.py", ".bashrc", "elsewhere/far.csv", "far.csv"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    paths = ("in.csv", "new.txt", "own.py", ".bashrc", "far.csv", "nowhere", ".git/hooks/x", "a/.GIT/config")
    files = CallFiles([Path("in.csv"), tmp_path / "elsewhere/far.csv"], Path())
    collected = files.collect([Artifact(path, 5, "0" * 64, 0o644, b"other") for path in paths])
    assert ([file.path for file in collected.files], sorted(files.saved)) == (["in.csv", "new.txt"],) * 2
    assert [path for path, _ in collected.dropped] == [*paths[2:]]
    assert ((tmp_path / "in.csv").read_text(), (tmp_path / "far.csv").read_text()) == ("other", "mine")
    assert (list((tmp_path / ".git").iterdir()), (tmp_path / "a").exists()) == ([], False)
    assert CallFiles((), None).collect([Artifact("own.py", 5, "0" * 64, 0o644, b"other")]).dropped == ()


async def test_scripts_are_told_to_start_once_their_packages_are_built(bundle, tmp_path, index: LoopIndex, monkeypatch):
    """`show` and `doctor` follow what is locked and built, and what was locked as suggested is built without being told again."""
    monkeypatch.setattr("kdskills.environments.store.cache_dir", lambda: tmp_path / "cache")
    index.add("requests")
    scripts = bundle / "skills/pdf/scripts"
    (scripts / "declares.py").unlink()
    (scripts / "lacks.py").write_text("import requests\n")
    settings = Settings(
        executor="bubblewrap",
        bundle=bundle,
        environment_index={"loop": index.indexes[0].url},
        state_dir=tmp_path / "state",
    )
    host = Host(settings, entry_points=False)

    async def told():
        shown = await host.invoke("skills.show", {"bundle": str(bundle), "ref": "pdf"}, Context())
        checks = (await host.invoke("doctor", {}, Context())).checks
        rows = {row.path: (row.starts, row.packages) for row in shown.scripts}
        return rows["scripts/lacks.py"], next(check.found for check in checks if check.name == "packages")

    assert await told() == ((False, ""), "what is locked is built")
    locked = await host.invoke("environments.lock", {"bundle": str(bundle), "suggested": True}, Context())
    assert (locked.ok, lock_of(bundle).is_file()) == (True, True)
    (starts, packages), found = await told()
    assert (starts, packages) == (False, "environment_missing")
    assert found.endswith("public.pdf/scripts/lacks.py: not built")
    built = await host.invoke("environments.build", {"bundle": str(bundle)}, Context())
    assert [(row.key, row.state) for row in built.rows] == [("public.pdf/scripts/lacks.py", "built")]
    assert await told() == ((True, "built"), "what is locked is built")
    (scripts / "lacks.py").unlink()
    shown = await host.invoke("environments.show", {"bundle": str(bundle)}, Context())
    assert [(row.state, row.reason) for row in shown.rows] == [("unneeded", "nobody asks for it")]
