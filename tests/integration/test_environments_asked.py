"""At a terminal a person is asked whether to bring packages that skills lack; elsewhere nobody is."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kdskills.environments.lock import read_lock
from tests.unit.environments.conftest import LoopIndex, index

__all__ = ["index"]

PROGRAM = str(Path(sys.executable).parent / "kdskills")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with a skill whose script declares a package, and one whose script declares what every image has."""
    root = tmp_path / "lab"
    for name, package in (("forms", "one"), ("plain", "pydantic")):
        folder = root / "skills" / name
        (folder / "scripts").mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: Does things for a test.\n---\nDo it.\n")
        (folder / "scripts/go.py").write_text(f'# /// script\n# dependencies = ["{package}"]\n# ///\n')
    (root / "skills_descriptor.yaml").write_text("custom_skills_root: skills\nagents_config: {}\n")
    return root


def started(bundle: Path, index: LoopIndex, *words: str, answer: str | None, policy: str = "") -> tuple[str, int]:
    """Run a command, at a terminal where *answer* is typed or without one, and return what it said and its exit code."""
    variables = {
        **os.environ,
        "TERM": "dumb",
        "KDSKILLS_ENVIRONMENT_CACHE_DIR": str(bundle.parent / "cache"),
        "KDSKILLS_ENVIRONMENT_INDEX": f'{{"loop": "{index.indexes[0].url}"}}',
        **({"KDSKILLS_ENVIRONMENTS": policy} if policy else {}),
    }
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stderr": theirs} if answer else {"stdin": subprocess.DEVNULL, "stderr": theirs}
    command = [PROGRAM, *words]
    with subprocess.Popen(command, cwd=bundle, env=variables, stdout=theirs, **streams) as program:
        os.close(theirs)
        if answer:
            os.write(ours, f"{answer}\n".encode())
        said, until = b"", time.monotonic() + 100
        while time.monotonic() < until:
            try:
                said += os.read(ours, 65536)
            except OSError:  # nobody holds the other end any more
                break
    os.close(ours)
    return said.decode(), program.returncode


def test_a_yes_locks_and_builds_before_the_turn(bundle: Path, index: LoopIndex) -> None:
    """The question names packages, bytes and index; a no changes nothing; after a yes nobody is asked again."""
    index.add("one")
    turn = ("run", ".", "Do it.", "--model", "nobody:there")
    said, _ = started(bundle, index, *turn, answer="n")
    assert "one 1.0" in said
    assert "from loop" in said
    assert "pydantic" not in said  # every sandbox has it
    assert said.count("Lock and build them now?") == 1
    assert read_lock(bundle / "kdskills.lock") == {}
    assert not list((bundle.parent / "cache").glob("**/wheels/*"))
    said, _ = started(bundle, index, *turn, answer="y")
    assert "public.forms/scripts/go.py built" in said
    assert list(read_lock(bundle / "kdskills.lock")) == ["public.forms/scripts/go.py"]
    said, _ = started(bundle, index, *turn, answer="y")
    assert "Lock and build" not in said


@pytest.mark.parametrize(("answer", "policy"), [(None, ""), ("y", "locked"), ("y", "off"), ("y", "auto")])
def test_nobody_else_is_asked(bundle: Path, index: LoopIndex, answer: str | None, policy: str) -> None:
    """Without a terminal, and with every other policy, there is no question, and what is not locked is not built."""
    index.add("one")
    said, code = started(bundle, index, "env", "build", ".", answer=answer, policy=policy)
    assert ("Lock and build" in said, code, "environment_lock_missing" in said) == (False, 1, True)
    assert not (bundle / "kdskills.lock").exists()


def test_a_build_asks_for_what_is_not_locked_alone(bundle: Path, index: LoopIndex) -> None:
    """`env build` asks whether to lock what is not, of the skills that are named; what is locked it builds unasked."""
    index.add("one")
    said, code = started(bundle, index, "env", "build", ".", "forms", answer="y")
    assert ("Lock and build" in said, code) == (True, 0)
    started(bundle, index, "env", "clean", ".", answer="y")
    said, code = started(bundle, index, "env", "build", ".", "forms", answer="y")
    assert ("Lock and build" in said, code) == (False, 0)


def test_an_index_that_is_away_keeps_nobody_from_the_turn(bundle: Path, index: LoopIndex) -> None:
    """Where nothing can be found nobody is asked, the reason is told, and the turn goes on."""
    index.url = "http://127.0.0.1:9"
    said, _ = started(bundle, index, "run", ".", "Do it.", "--model", "nobody:there", answer="y")
    assert "environment_index_unreachable" in said
    assert "Lock and build" not in said
    assert "nobody" in said.rpartition("environment_index_unreachable")[2]
