"""`skills.run_script` behind a real wall: files in and out, environment, tails, endings."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kdskills.builtin.executors.bubblewrap import BubblewrapExecutor
from kdskills.execution.protocol import ExecutionOptions
from kdskills.session import FolderWorkspace, RuntimeLimits, SkillCatalog, SkillRuntime, TurnScope

pytestmark = pytest.mark.needs("bubblewrap")

SCRIPTS = {
    "look.py": "import json, os, sys\nprint(json.dumps({'env': dict(os.environ), 'cwd': os.getcwd(), 'args': sys.argv[1:]}))\n",
    "make.py": "import pathlib\npathlib.Path('out').mkdir()\npathlib.Path('out/sum.txt').write_text(str(len(open('rows.csv').readlines())))\n"
    "open('rows.csv', 'a').write('more')\nopen('data/x.csv', 'w').write('spoilt')\n",
    "flood.py": "import sys\nfor n in range(60000): print('line', n)\nsys.exit(3)\n",
    "hang.sh": "trap '' TERM\nsleep 600 & sleep 600\n",
    "die.sh": "kill -SEGV $$\n",
    "spoil.sh": 'echo x > "$KDSKILLS_SKILL_DIR/scripts/look.py"\n',
    "link.py": "import os\nos.symlink('/etc/passwd', 'passwd')\nos.mkfifo('pipe')\n",
    "x.js": "console.log(1)\n",
    "odd.zz": "odd\n",
}


@pytest.fixture
async def session(tmp_path: Path):
    """A session with one skill of scripts loaded, within a turn that has files."""
    folder = tmp_path / "skills/acme/tool"
    (folder / "scripts").mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: tool\ndescription: Scripts.\n---\nRun them.\n")
    for name, text in SCRIPTS.items():
        (folder / "scripts" / name).write_text(text)
    data = tmp_path / "data"
    data.mkdir()
    (data / "x.csv").write_text("1\n")
    work = FolderWorkspace(tmp_path / "turn", mounts={"data": data}, protected={"rows.csv"})
    (work.root / "rows.csv").write_text("a\nb\n")
    runtime = SkillRuntime(
        catalog=SkillCatalog.from_directory(tmp_path / "skills"),
        run_scripts=True,
        executor=BubblewrapExecutor(ExecutionOptions()),
        limits=RuntimeLimits(max_output_bytes=2048),
        interpreters={".zz": ["no-such-interpreter", "{path}"]},
    )
    made = await runtime.create_session(initial=["tool"])
    yield made.within(TurnScope(workspace=work))
    await runtime.aclose()


async def test_environment_and_arguments(session, monkeypatch):
    """The environment is exactly the promised one, arguments arrive byte-exact, cwd follows workdir."""
    monkeypatch.setenv("HOST_SECRET", "hunter2")
    found = await session.run_script(
        "scripts/look.py", args=["a b", "$HOME", "ü"], env={"MODE": "x y"}, workdir="scripts"
    )
    said = json.loads(found.stdout)
    assert (said["args"], said["cwd"]) == (["a b", "$HOME", "ü"], "/skills/acme.tool/scripts")
    env = said["env"]
    assert {name: env[name] for name in ("MODE", "LANG", "KDSKILLS_SKILL_DIR", "KDSKILLS_TURN_DIR")} == {
        "MODE": "x y",
        "LANG": "C.UTF-8",
        "KDSKILLS_SKILL_DIR": "/skills/acme.tool",
        "KDSKILLS_TURN_DIR": "/work",
    }
    allowed = {"PATH", "HOME", "TMPDIR", "LANG", "PYTHONUTF8", "PYTHONDONTWRITEBYTECODE", "MODE", "PWD", "SKILL_DIR"}
    assert {name for name in env if not name.startswith("KDSKILLS_")} <= allowed
    assert {"PATH", "HOME", "TMPDIR"} <= set(env)
    assert "hunter2" not in found.stdout


async def test_turn_files_go_in_and_come_back(session):
    """A produced file is kept; inputs and mounts stay as they were, and the change is told."""
    found = await session.run_script("scripts/make.py")
    work = session.scope.workspace
    assert (found.status, [item.path for item in found.artifacts]) == ("ok", ["out/sum.txt"]), found.stderr
    assert sorted(path for path, _ in found.dropped) == ["data/x.csv", "rows.csv"]
    assert (work.root / "out/sum.txt").read_text() == "2"
    assert ((work.root / "rows.csv").read_text(), work.read("data/x.csv")) == ("a\nb\n", b"1\n")


async def test_a_flood_keeps_its_tail_and_exit_code(session):
    """Of too much output the last bytes are kept; a non-zero exit is a result."""
    found = await session.run_script("scripts/flood.py")
    assert (found.status, found.exit_code, found.stdout_truncated) == ("nonzero", 3, True)
    assert found.stdout.endswith("line 59999\n")
    assert len(found.stdout.encode()) <= 2048


async def test_a_hanging_script_ends(session):
    """A script that ignores TERM, with a grandchild, is back within its limit and two seconds, as 124."""
    began = time.monotonic()
    found = await session.run_script("scripts/hang.sh", timeout_s=1)
    assert (found.status, found.exit_code, found.timed_out) == ("timeout", 124, True)
    assert time.monotonic() - began < 60  # the script would stay for ten minutes


async def test_death_by_signal(session):
    """A script killed by signal 11 exits with 139, never 0."""
    found = await session.run_script("scripts/die.sh")
    assert (found.status, found.exit_code, found.signal) == ("nonzero", 139, 11)


async def test_the_skill_is_read_only(session):
    """A script cannot change its own skill."""
    before = (await session.describe("tool")).tree_digest
    found = await session.run_script("scripts/spoil.sh")
    assert found.exit_code != 0
    assert (await session.describe("tool")).tree_digest == before


async def test_planted_links_are_not_collected(session):
    """Links and pipes left behind do not reach the turn folder, and nothing hangs."""
    found = await session.run_script("scripts/link.py", workdir="turn:.")
    assert (found.status, found.artifacts) == ("ok", ())
    assert sorted(path.name for path in session.scope.workspace.root.iterdir()) == ["rows.csv"]


async def test_a_missing_interpreter(session):
    """An interpreter that is not in the sandbox is the operator's to mend, told as no defect of the script."""
    reply = await session.call("skills_run_script", {"path": "scripts/odd.zz"})
    assert (reply.ok, reply.error["code"], reply.error["who"]) == (False, "interpreter_missing", "operator")
