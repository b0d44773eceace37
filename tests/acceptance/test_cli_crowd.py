"""`kdskills demo --many`: the demo's turn, from the command line, with a thousand generated skills around the press."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kdskills.solver.events import read_transcript

ROOT = Path(__file__).parents[2]
CHOSEN = {"data.flights", "data.profile", "data.chart", "press.brief", "press.report"}


def kdskills(*args: object) -> subprocess.CompletedProcess[str]:
    """Run the installed command."""
    command = [str(Path(sys.executable).parent / "kdskills"), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)


@pytest.mark.needs("bubblewrap")
def test_the_demo_finds_its_skills_among_a_thousand(tmp_path: Path) -> None:
    """The recorded turn ends as it does without the crowd: every skill used, every file made, sources cited."""
    done = kdskills("demo", "--many", tmp_path / "many", "-o", tmp_path / "out", "-e", "bubblewrap", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert (answer["unmet"], answer["many"]) == ([], str(tmp_path / "many"))
    assert {used["id"] for used in answer["result"]["skills_used"]} >= CHOSEN
    generated = [path for path in (tmp_path / "many/skills").glob("*/*/SKILL.md") if path.parent.parent.name != "press"]
    assert len(generated) > 1000
    transcript = read_transcript(Path(answer["transcript"]))
    assert transcript.result is not None
    first = next(event for event in transcript.events if event.type == "prompt.built")
    assert {"flights", "profile"} <= set(first.available)
    assert 10 < len(first.available) < 40 < 1000 < first.total
    shown = kdskills("turn", "show", answer["transcript"])
    counts = f"listed {len(first.available)} of {first.total:,}, ranked for the request"
    assert counts in " ".join(shown.stdout.split())
    shutil.rmtree(Path(answer["result"]["files"][0]["location"]).parent)


def test_the_number_of_skills_is_the_callers(tmp_path: Path) -> None:
    """`--crowd` says how many; any bundle with a recording will do, and the folder made is told."""
    done = kdskills("demo", "bundles/hello", "--many", tmp_path / "many", "--crowd", "7", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"bundle {tmp_path}/many" in done.stdout
    assert len(list((tmp_path / "many/skills").glob("*/*/SKILL.md"))) == 7
    again = kdskills("run", tmp_path / "many", "-o", tmp_path / "again")
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.parametrize(("number", "code"), [("0", 2), ("10001", 2), ("many", 2)])
def test_a_number_out_of_bounds_is_refused(tmp_path: Path, number: str, code: int) -> None:
    """None, too many, no number: the call is wrong, and nothing is made."""
    done = kdskills("demo", "--many", tmp_path / "many", "--crowd", number, "-o", tmp_path / "out")
    assert done.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    """A second demo into the same folder is told so in one line, and what is there stays."""
    (tmp_path / "many").mkdir()
    (tmp_path / "many/mine").write_text("mine")
    done = kdskills("demo", "--many", tmp_path / "many", "-o", tmp_path / "out")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("path_exists: ")
    assert [path.name for path in tmp_path.rglob("*")] == ["many", "mine"]


def test_a_turn_without_a_request_makes_nothing(tmp_path: Path) -> None:
    """Where there is nothing to run, no folder is made; with a request `run` makes it, too."""
    bare = Path(shutil.copytree(ROOT / "bundles/hello", tmp_path / "bare"))
    demo = (bare / "demo.yaml").rename(tmp_path / "other.yaml")
    done = kdskills("demo", bare, "--many", tmp_path / "many", "--trust")
    assert (done.returncode, done.stderr.partition(":")[0]) == (2, "request_missing")
    assert not (tmp_path / "many").exists()
    words = ("Greet Ada in French", "--model", f"replay:{demo}", "--many", tmp_path / "many", "--crowd", 3, "--trust")
    done = kdskills("run", bare, *words, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "many/skills").glob("*/*/SKILL.md"))) == 3
