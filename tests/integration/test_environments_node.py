"""Scripts of Node find the packages that are locked beside them, whichever way they import; those of Python theirs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kdskills.app import Host, Settings
from kdskills.app.operations.table import Context
from kdskills.bundle import load_bundle
from kdskills.solver import ReactSolver, SolverSettings, SolverSystem
from kdskills.testing.models import ScriptedModel, call, say
from tests.unit.environments.conftest import LoopIndex, index, open_cache

__all__ = ["index", "open_cache"]
pytestmark = [
    pytest.mark.needs("bubblewrap"),
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
]

COMMON = "console.log('common', require('one').said, require('@acme/two')())\n"
MODULE = "import one from 'one'\nimport two from '@acme/two'\nimport fs from 'node:fs'\nconsole.log('module', one.said, two())\n"
ABSENT = "import('one').catch((error) => console.log(error.code))\n"


@pytest.fixture
def bundle(tmp_path: Path, index: LoopIndex) -> Path:
    """A bundle with a skill of scripts in both languages, and another one without packages."""
    root = tmp_path / "bundle"
    for name, scripts in (
        ("deck", {"a.js": COMMON, "b.mjs": MODULE, "c.py": "import pie\nprint(pie.VERSION)\n"}),
        ("plain", {"d.mjs": ABSENT}),
    ):
        folder = root / "skills/acme" / name
        (folder / "scripts").mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\nnamespace: acme\ndescription: d\n---\nText.\n")
        for path, text in scripts.items():
            (folder / "scripts" / path).write_text(text)
    (root / "skills_descriptor.yaml").write_text("custom_skills_root: skills\nagents_config: {}\n")
    index.add("pie")
    program = "#!/usr/bin/env node\nconsole.log('program', process.argv[2])\n"
    rows = {
        "node_modules/one": index.add_node(
            "one", {"index.js": "exports.said = 'one'", "cli.js": program}, bin={"say-one": "cli.js"}
        ),
        "node_modules/@acme/two": index.add_node("@acme/two", {"index.js": "module.exports = () => require('three')"}),
        "node_modules/@acme/two/node_modules/three": index.add_node("three", {"index.js": "module.exports = 3"}),
    }
    wanted = {"one": "^1", "@acme/two": "1.0.0"}
    lock = {"lockfileVersion": 3, "packages": {"": {"dependencies": wanted}, **rows}}
    folder = root / "skills/acme/deck"
    (folder / "package.json").write_text(json.dumps({"dependencies": wanted}))
    (folder / "package-lock.json").write_text(json.dumps(lock))
    (folder / "requirements.txt").write_text("pie\n")
    return root


@pytest.fixture
def host(tmp_path: Path, open_cache: Path, index: LoopIndex) -> Host:
    """A host whose packages come from loopback alone."""
    settings = Settings(
        executor="bubblewrap",
        environments="locked",
        image_profiles=("node",),
        environment_index={"loop": index.indexes[0].url},
        environment_registry=f"{index.url}/npm/",
        environment_cache_dir=open_cache,
        state_dir=tmp_path / "state",
    )
    return Host(settings, entry_points=False)


async def answered(host: Host, name: str, bundle: Path) -> Any:
    """Return the one environment of an operation's answer."""
    (row,) = (await host.invoke(f"environments.{name}", {"bundle": str(bundle)}, Context())).rows
    return row


async def turn(host: Host, bundle: Path, *replies: object) -> list[dict[str, Any]]:
    """Run a turn of *replies* and return the answer of each call."""
    events: list[Any] = []
    system = SolverSystem(
        bundle=load_bundle(bundle),
        model=ScriptedModel([*replies, say("done")]),
        executor="bubblewrap",
        sinks=(events.append,),
        settings=SolverSettings(work_dir=bundle.parent / "turns"),
        wiring=host.wiring,
    )
    async with system:
        await ReactSolver(system).run("x")
    return [json.loads(event.text) for event in events if event.type == "tool.finished"]


async def test_scripts_of_node_import_what_is_locked(host: Host, bundle: Path, index: LoopIndex) -> None:
    """CommonJS and ES modules, programs in the shell and the skill's Python script have their packages, from one environment;
    a script of another skill has none of them, and before the build the script is refused.
    """
    script = call("skills_load", names=["deck"]), call("skills_run_script", path="scripts/a.js")
    assert (await turn(host, bundle, *script))[1]["error"]["code"] == "environment_missing"
    planned = await answered(host, "plan", bundle)
    assert planned.packages == ("pie 1.0", "@acme/two 1.0.0", "three 1.0.0", "one 1.0.0")
    assert (await answered(host, "lock", bundle)).state == "locked"
    assert (await answered(host, "build", bundle)).state == "built"
    answers = await turn(
        host, bundle,
        *script,
        call("skills_run_script", path="scripts/b.mjs"),
        call("skills_run_script", path="scripts/c.py"),
        call("exec_shell", command="say-one hello; node $SKILL_DIR/scripts/a.js"),
        call("skills_load", names=["plain"]),
        call("skills_run_script", skill="plain", path="scripts/d.mjs"),
    )  # fmt: skip
    assert [answer.get("stdout", answer) for answer in (*answers[1:5], answers[6])] == [
        "common one 3\n", "module one 3\n", "1.0\n", "program hello\ncommon one 3\n", "ERR_MODULE_NOT_FOUND\n",
    ]  # fmt: skip


async def test_another_lock_is_stale_and_a_cleaned_environment_is_built_again(
    host: Host, bundle: Path, index: LoopIndex
) -> None:
    """A changed package-lock.json is told before a run; a clean frees the packages, and a build brings them again."""
    await answered(host, "lock", bundle)
    await answered(host, "build", bundle)
    await answered(host, "clean", bundle)
    index.asked.clear()
    assert (await answered(host, "show", bundle)).state == "locked"
    assert (await answered(host, "build", bundle)).state == "built"
    assert index.asked["npm/one-1.0.0.tgz"] == 1
    path = bundle / "skills/acme/deck/package-lock.json"
    path.write_text(path.read_text() + "\n")
    script = call("skills_load", names=["deck"]), call("skills_run_script", path="scripts/a.js")
    assert (await turn(host, bundle, *script))[1]["error"]["code"] == "environment_lock_stale"
    assert (await turn(host, bundle, script[0], call("skills_run_script", path="scripts/c.py")))[1]["stdout"] == "1.0\n"
