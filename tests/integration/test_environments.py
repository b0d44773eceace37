"""Scripts, commands and generated code of a turn import what is locked and built for their skill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdskills.app import Host, Settings
from kdskills.bundle import load_bundle
from kdskills.environments.lock import write_lock
from kdskills.environments.store import EnvironmentStore
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem
from kdskills.testing.models import ScriptedModel, call, say
from tests.unit.environments.conftest import LoopIndex, index, open_cache

__all__ = ["index", "open_cache"]
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


async def turn(bundle: Path, cache: Path, *replies: object, **settings: object) -> list[dict[str, Any]]:
    """Run a turn of *replies* with the environments in *cache*, and return the answer of each first call."""
    events: list[Any] = []
    system = SolverSystem(
        bundle=load_bundle(bundle),
        model=ScriptedModel([*replies, say("done")]),
        executor="bubblewrap",
        sinks=(events.append,),
        settings=SolverSettings(work_dir=bundle.parent / "turns"),
        wiring=Host(Settings(environment_cache_dir=cache, **settings), entry_points=False).wiring,
    )
    async with system:
        await ReactSolver(system).run("x")
    return [json.loads(event.text) for event in events if event.type == "tool.finished"]


@pytest.fixture
def lock(bundle: Path, open_cache: Path, index: LoopIndex) -> Callable[..., None]:
    """Lock the package of the one skill, and on demand build it."""
    text = b"VERSION = '1.0'\ndef main():\n    print('said', VERSION)\n"
    index.add("one", entry_points="[console_scripts]\nsay-one = one:main\n", files={"one.py": text})
    environment = index.locked("one", key="acme.forms/scripts/go.py")

    def write(*, build: bool) -> None:
        write_lock(bundle / "kdskills.lock", {environment.key: environment})
        if build:
            EnvironmentStore(open_cache).build(environment, index.indexes)

    return write


async def test_every_program_of_a_skill_has_its_packages_and_no_other(
    bundle: Path, open_cache: Path, lock: Callable[..., None]
) -> None:
    """The script, a command and generated code import them; a script of another skill and code without the skill do not."""
    lock(build=True)
    code = "import one, sys\nprint(one.VERSION, 'one' in sys.modules)\n"
    answers = await turn(
        bundle, open_cache,
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
    bundle: Path, open_cache: Path, lock: Callable[..., None]
) -> None:
    """The model reads that the script cannot run here and who can cure it, before and after the lock."""
    script = call("skills_load", names=["forms"]), call("skills_run_script", path="scripts/go.py")
    unlocked = (await turn(bundle, open_cache, *script))[1]["error"]
    lock(build=False)
    answers = await turn(bundle, open_cache, *script, call("exec_python", code=ABSENT))
    for error in (unlocked, answers[1]["error"], answers[2]["error"]):
        assert (error["code"], error["who"]) == ("environment_missing", "operator")
        assert "kdskills env build" in error["message"]
        assert str(open_cache) not in error["message"]


async def test_off_brings_none(bundle: Path, open_cache: Path, lock: Callable[..., None]) -> None:
    """With the setting `off` a script starts as it is, whatever is locked and built."""
    lock(build=True)
    script = call("skills_load", names=["forms"]), call("skills_run_script", path="scripts/go.py")
    answers = await turn(bundle, open_cache, *script, environments="off")
    assert "ModuleNotFoundError" in str(answers[1]["stderr"])


async def test_start_up_code_of_a_package_acts_for_its_script_alone(
    bundle: Path, open_cache: Path, index: LoopIndex
) -> None:
    """`.pth` files of a package do nothing, its `sitecustomize` runs before its own script; code and other scripts have neither."""
    loud = b"import builtins, os\nbuiltins.PLANTED = True\nos.environ['PLANTED'] = 'yes'\n"
    files = {
        "one.py": b"VERSION = '1.0'\n",
        "sitecustomize.py": loud,
        "usercustomize.py": loud,
        "two.pth": b"import one\n",
    }
    index.add("one", files=files)
    environment = index.locked("one", key="acme.forms/scripts/go.py")
    look = (
        "import builtins, os, sys\nprint(hasattr(builtins, 'PLANTED'), 'PLANTED' in os.environ, 'one' in sys.modules)\n"
    )
    block = "# /// script\n# dependencies = ['one']\n# ///\n"
    (bundle / "skills/acme/forms/scripts/go.py").write_text(block + look)
    (bundle / "skills/acme/plain/scripts/go.py").write_text(look)
    write_lock(bundle / "kdskills.lock", {environment.key: environment})
    EnvironmentStore(open_cache).build(environment, index.indexes)
    answers = await turn(
        bundle, open_cache,
        call("skills_load", names=["forms"]),
        call("skills_run_script", path="scripts/go.py"),
        call("exec_python", code=look),
        call("skills_load", names=["plain"]),
        call("skills_run_script", skill="plain", path="scripts/go.py"),
        call("exec_shell", command=f"python3 -c \"{look.replace(chr(10), ';')}\""),
    )  # fmt: skip
    told = [str(answer.get("stdout", answer)).strip() for answer in answers]
    assert [told[1], told[2], told[4], told[5]] == ["True True False", *["False False False"] * 3]


async def test_generated_code_for_skills_that_exclude_each_other_is_refused(
    bundle: Path, open_cache: Path, index: LoopIndex
) -> None:
    """Two loaded skills locked to different versions are `environment_conflict` for generated code, which names both; a script
    of either still runs.
    """
    locks = []
    for name, version in (("forms", "1.0"), ("plain", "2.0")):
        index.add("one", version, files={"one.py": f"VERSION = '{version}'\n".encode()})
        (bundle / f"skills/acme/{name}/scripts/go.py").write_text(
            f"# /// script\n# dependencies = ['one=={version}']\n# ///\nimport one\nprint(one.VERSION)\n"
        )
        (bundle / f"skills/acme/{name}/scripts/both.py").write_text("print('starts')\n")
        locks.append(index.locked(f"one=={version}", key=f"acme.{name}/scripts/go.py"))
        EnvironmentStore(open_cache).build(locks[-1], index.indexes)
    write_lock(bundle / "kdskills.lock", {lock.key: lock for lock in locks})
    answers = await turn(
        bundle, open_cache,
        call("skills_load", names=["forms", "plain"]),
        call("exec_python", code="import one\n"),
        call("skills_run_script", skill="forms", path="scripts/go.py"),
        call("skills_run_script", skill="plain", path="scripts/go.py"),
    )  # fmt: skip
    error = answers[1]["error"]
    assert (error["code"], error["who"]) == ("environment_conflict", "operator")
    assert all(side in error["message"] for side in ("acme.forms", "one 1.0", "acme.plain", "2.0"))
    assert [str(answer["stdout"])[:3] for answer in answers[2:]] == ["1.0", "2.0"]
