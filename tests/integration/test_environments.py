"""Scripts, commands and generated code of a turn import what is locked and built for their skill."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kdskills.app import Host, Settings
from kdskills.bundle import load_bundle
from kdskills.environments.lock import write_lock
from kdskills.environments.store import EnvironmentStore
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem
from kdskills.testing.models import ScriptedModel, call, say
from tests.unit.environments.conftest import LoopIndex, index

__all__ = ["index"]
pytestmark = pytest.mark.needs("bubblewrap")

SCRIPT = "# /// script\n# dependencies = ['one']\n# ///\nimport one\nprint(one.VERSION, one.__file__)\n"
ABSENT = "try:\n    import one\n    print('here')\nexcept ImportError:\n    print('absent')\n"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Two skills: the script of one declares a package, those of the other need none."""
    root = tmp_path / "bundle"
    for name, script in (("forms", SCRIPT), ("plain", ABSENT)):
        folder = root / "skills" / "acme" / name
        (folder / "scripts").mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\nnamespace: acme\ndescription: d\n---\nText.\n")
        (folder / "scripts" / "go.py").write_text(script)
    (root / "skills_descriptor.yaml").write_text("custom_skills_root: skills\nagents_config: {}\n")
    return root


async def turn(bundle: Path, tmp_path: Path, *replies: object, **settings: object) -> list[dict[str, Any]]:
    """Run a turn of *replies* and return the answer of each first call."""
    events: list[Any] = []
    system = SolverSystem(
        bundle=load_bundle(bundle),
        model=ScriptedModel([*replies, say("done")]),
        executor="bubblewrap",
        sinks=(events.append,),
        settings=SolverSettings(work_dir=tmp_path / "turns"),
        wiring=Host(Settings(**settings), entry_points=False).wiring,
    )
    async with system:
        await ReactSolver(system).run("x")
    return [json.loads(event.text) for event in events if event.type == "tool.finished"]


@pytest.fixture
def lock(bundle: Path, index: LoopIndex) -> Iterator[Callable[..., None]]:
    """Lock the package of the one skill, and on demand build it where this machine's environments are until the test ends."""
    text = f"VERSION = '1.0'\nTOKEN = '{uuid4()}'\ndef main():\n    print('said', VERSION)\n"
    index.add("one", entry_points="[console_scripts]\nsay-one = one:main\n", files={"one.py": text.encode()})
    environment = index.locked("one", key="acme.forms/scripts/go.py")

    def write(*, build: bool) -> None:
        write_lock(bundle / "kdskills.lock", {environment.key: environment})
        if build:
            EnvironmentStore().build(environment, index.indexes)

    yield write
    EnvironmentStore().remove([environment])


async def test_every_program_of_a_skill_has_its_packages_and_no_other(
    bundle: Path, tmp_path: Path, lock: Callable[..., None]
) -> None:
    """The script, a command and generated code import them; a script of another skill and code without the skill do not."""
    lock(build=True)
    code = "import one, sys\nprint(one.VERSION, 'one' in sys.modules)\n"
    answers = await turn(
        bundle, tmp_path,
        call("skills_load", names=["forms"]),
        call("skills_run_script", path="scripts/go.py"),
        call("exec_shell", command="python3 $SKILL_DIR/scripts/go.py && say-one"),
        call("exec_python", code=code),
        call("skills_load", names=["plain"]),
        call("skills_run_script", path="scripts/go.py"),
        call("exec_shell", command="python3 $SKILL_DIR/scripts/go.py"),
        call("exec_python", code=ABSENT),
    )  # fmt: skip
    assert [str(answer["stdout"]).split()[0] for answer in (*answers[1:4], *answers[5:8])] == [
        "1.0", "1.0", "1.0", "absent", "absent", "absent",
    ]  # fmt: skip
    assert "/env/" in str(answers[1]["stdout"])
    assert str(answers[2]["stdout"]).endswith("said 1.0\n")


async def test_what_is_not_built_is_told_and_no_traceback(
    bundle: Path, tmp_path: Path, lock: Callable[..., None]
) -> None:
    """The model reads that the script cannot run here and who can cure it, before and after the lock."""
    script = call("skills_load", names=["forms"]), call("skills_run_script", path="scripts/go.py")
    unlocked = (await turn(bundle, tmp_path, *script))[1]["error"]
    lock(build=False)
    answers = await turn(bundle, tmp_path, *script, call("exec_python", code=ABSENT))
    for error in (unlocked, answers[1]["error"], answers[2]["error"]):
        assert (error["code"], error["who"]) == ("environment_missing", "operator")
        assert "kdskills env build" in error["message"]
        assert str(tmp_path) not in error["message"]


async def test_off_brings_none(bundle: Path, tmp_path: Path, lock: Callable[..., None]) -> None:
    """With the setting `off` a script starts as it is, whatever is locked and built."""
    lock(build=True)
    script = call("skills_load", names=["forms"]), call("skills_run_script", path="scripts/go.py")
    answers = await turn(bundle, tmp_path, *script, environments="off")
    assert "ModuleNotFoundError" in str(answers[1]["stderr"])
