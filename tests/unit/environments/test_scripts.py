"""Which packages a program gets, and what it is told where they are not here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kdskills.environments.codes import EnvironmentFailed
from kdskills.environments.lock import write_lock
from kdskills.environments.model import LockedEnvironment
from kdskills.environments.scripts import ScriptPackages
from kdskills.environments.store import EnvironmentStore
from kdskills.skills import Skill, parse_skill
from tests.unit.environments.conftest import LoopIndex

NEEDS_ONE = "# /// script\n# dependencies = ['one']\n# ///\n"


class Lab:
    """Skills, a lock file and a store in one folder."""

    def __init__(self, folder: Path, image: Mapping[str, str]) -> None:
        self.folder, self.lock = folder, folder / "kdskills.lock"
        self.store = EnvironmentStore(folder / "cache")
        self.packages = ScriptPackages(self.lock, lambda: self.store, lambda: image)

    def skill(self, name: str, **files: str) -> Skill:
        """Write a skill, files with `__` for `/` and `_py` at the end for `.py`, and return it."""
        home = self.folder / "skills" / "lab" / name
        for path, text in {
            "SKILL_md": f"---\nname: {name}\nnamespace: lab\ndescription: Fills forms.\n---\nFill.\n",
            **files,
        }.items():
            stem, _, suffix = path.replace("__", "/").rpartition("_")
            (home / f"{stem}.{suffix}").parent.mkdir(parents=True, exist_ok=True)
            (home / f"{stem}.{suffix}").write_text(text)
        skill = parse_skill(home).skill
        assert skill is not None
        return skill

    def write(self, *environments: LockedEnvironment) -> None:
        """Write the lock file."""
        write_lock(self.lock, {environment.key: environment for environment in environments})

    def refused(self, ask: Callable[[ScriptPackages], object]) -> EnvironmentFailed:
        """Return the error of a question."""
        with pytest.raises(EnvironmentFailed) as caught:
            ask(self.packages)
        assert caught.value.who == "operator"
        return caught.value


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """A lab whose sandboxes have PyYAML 6.0.2."""
    return Lab(tmp_path, {"PyYAML": "6.0.2"})


def of_script(lab: Lab, skill: Skill, script: str = "scripts/go.py") -> object:
    """Ask for a script of a skill."""
    assert skill.folder is not None
    return lab.packages.of_script(skill, script, skill.folder)


def test_a_script_gets_what_is_locked_and_built(index: LoopIndex, lab: Lab) -> None:
    """What is declared is refused until it is locked and built; then the script imports it, and others do not get it."""
    index.add("one")
    skill = lab.skill("forms", scripts__go_py=NEEDS_ONE, scripts__plain_py="print(1)\n")
    error = lab.refused(lambda _: of_script(lab, skill))
    assert (error.code, "it needs one (scripts/go.py)" in error.message) == ("environment_missing", True)
    locked = index.locked("one", key="lab.forms/scripts/go.py")
    lab.write(locked)
    error = lab.refused(lambda _: of_script(lab, skill))
    assert (error.code, "kdskills env build" in error.message) == ("environment_missing", True)
    mount = lab.store.build(locked, index.indexes)
    assert of_script(lab, skill) == mount
    program = [sys.executable, "-S", "-c", "import one; print(one.VERSION)"]
    done = subprocess.run(program, env={"PYTHONPATH": f"{mount.root}/python"}, capture_output=True, text=True)
    assert done.stdout == "1.0\n"
    assert of_script(lab, skill, "scripts/plain.py") is None


@pytest.mark.parametrize(
    ("requirement", "known"),
    [
        ("PyYAML>=6", True),
        ("pyyaml", True),
        ("pyyaml>=7", False),
        ("pyyaml[fast]", False),
        ("nowhere; sys_platform == 'win32'", True),
        ("nowhere", False),
    ],
)
def test_what_every_sandbox_has_is_not_asked_for(lab: Lab, requirement: str, known: bool) -> None:
    """A script that declares nothing but what the image has starts as it is."""
    skill = lab.skill("forms", scripts__go_py=f'# /// script\n# dependencies = ["{requirement}"]\n# ///\n')
    if known:
        assert of_script(lab, skill) is None
    else:
        assert lab.refused(lambda _: of_script(lab, skill)).code == "environment_missing"


def test_packages_of_node_without_their_lock_stop_scripts_of_node_alone(lab: Lab) -> None:
    """A script of Node is told which command writes the lock; one of a shell, which may need none of them, starts."""
    skill = lab.skill("forms", package_json='{"dependencies": {"one": "1"}}', scripts__go_js="", scripts__go_sh="")
    with pytest.raises(EnvironmentFailed, match="npm install --package-lock-only") as caught:
        of_script(lab, skill, "scripts/go.js")
    assert (caught.value.code, caught.value.who) == ("environment_invalid", "author")
    assert of_script(lab, skill, "scripts/go.sh") is None


def test_what_cannot_be_understood_stops_no_script(lab: Lab) -> None:
    """A script whose declaration breaks a rule starts as it is: it may need none of it."""
    assert of_script(lab, lab.skill("forms", scripts__go_py="", requirements_txt="-e .\n")) is None


def test_a_lock_of_other_requirements_is_stale(index: LoopIndex, lab: Lab) -> None:
    """What was locked for other words is not used."""
    index.add("one")
    lab.write(index.locked("one>=1", key="lab.forms"))
    skill = lab.skill("forms", scripts__go_py=NEEDS_ONE)
    error = lab.refused(lambda _: of_script(lab, skill))
    assert (error.code, "asked for now: one" in error.message) == ("environment_lock_stale", True)


def test_a_lock_of_what_was_suggested_is_used(index: LoopIndex, lab: Lab) -> None:
    """A skill that declares nothing gets what is locked for it."""
    index.add("one")
    locked = index.locked("one", key="lab.forms")
    lab.write(locked)
    mount = lab.store.build(locked, index.indexes)
    assert of_script(lab, lab.skill("forms", scripts__go_py="import one\n")) == mount


def test_a_lock_is_read_again_when_it_changes(index: LoopIndex, lab: Lab) -> None:
    """A lock that is written, changed or gone counts with the next question; one that is none is told."""
    index.add("one")
    skill = lab.skill("forms", scripts__go_py="import one\n")
    assert of_script(lab, skill) is None
    lab.write(index.locked("one", key="lab.forms"))
    assert lab.refused(lambda _: of_script(lab, skill)).code == "environment_missing"
    lab.lock.unlink()
    assert of_script(lab, skill) is None
    lab.lock.write_text("[environment]\nbroken = 1\n")
    with pytest.raises(EnvironmentFailed) as caught:
        of_script(lab, skill)
    assert caught.value.code == "environment_lock_invalid"


def test_a_program_of_several_skills_gets_all_of_their_packages(index: LoopIndex, lab: Lab) -> None:
    """What is locked for skills and their scripts comes together; from what is built, without the index."""
    index.add("one")
    index.add("two")
    skills = [lab.skill("forms"), lab.skill("tables"), lab.skill("plain")]
    assert lab.packages.of_skills(skills) is None
    parts = index.locked("one", key="lab.forms"), index.locked("two", key="lab.tables/scripts/go.py")
    lab.write(*parts)
    for part in parts:
        assert lab.refused(lambda packages: packages.of_skills(skills)).code == "environment_missing"
        lab.store.build(part, index.indexes)
    asked = index.asked.copy()
    mount = lab.packages.of_skills(skills)
    assert mount is not None
    assert {path.name for path in (mount.root / "python").glob("*.py")} == {"one.py", "two.py"}
    assert (index.asked, lab.packages.of_skills(skills)) == (asked, mount)
    assert lab.packages.of_skills([skills[2]]) is None


def test_two_versions_of_one_package_are_a_conflict(index: LoopIndex, lab: Lab) -> None:
    """Skills that are locked to different versions cannot share a program, and both are named."""
    index.add("one")
    index.add("one", "2.0")
    skills = [lab.skill("forms"), lab.skill("tables")]
    lab.write(index.locked("one<2", key="lab.forms"), index.locked("one", key="lab.tables"))
    error = lab.refused(lambda packages: packages.of_skills(skills))
    assert (error.code, error.details["keys"]) == ("environment_conflict", ["lab.forms", "lab.tables"])
    assert "lab.forms has one 1.0, lab.tables has 2.0" in error.message


def test_without_a_bundle_nothing_is_locked(lab: Lab) -> None:
    """Skills of no bundle have no lock: what they declare is missing."""
    packages = ScriptPackages(None, lambda: lab.store, dict)
    skill = lab.skill("forms", scripts__go_py=NEEDS_ONE)
    assert skill.folder is not None
    with pytest.raises(EnvironmentFailed):
        packages.of_script(skill, "scripts/go.py", skill.folder)
    assert packages.of_skills([skill]) is None
