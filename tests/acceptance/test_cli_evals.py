"""Evaluations at the command line: rows that are added."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

Run = Callable[..., Any]


@pytest.fixture
def skill(tmp_path: Path) -> Path:
    """A skill's folder."""
    folder = tmp_path / "b/skills/acme/hello"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: hello\ndescription: Says hello.\n---\nHello.\n")
    return folder


def test_a_row_is_added(run: Run, skill: Path) -> None:
    """The published file has it, with what was said and nothing else; a row that must not trigger says so."""
    first = run("eval", "add", skill, "Greet Ada", "--expected", "Hello Ada", "--assertion", "a", "--assertion", "b")
    second = run("eval", "add", skill, "Weather?", "--negative", "--id", "weather")
    assert (first.returncode, second.returncode) == (0, 0)
    assert "added weather to" in second.stdout
    assert json.loads((skill / "evals/evals.json").read_text()) == {
        "skill_name": "hello",
        "evals": [
            {"id": 1, "prompt": "Greet Ada", "expected_output": "Hello Ada", "assertions": ["a", "b"]},
            {"id": "weather", "prompt": "Weather?", "should_trigger": False},
        ],
    }


@pytest.mark.parametrize(
    ("content", "code"), [("{", "eval_file_broken"), ('[{"id": "x", "prompt": "p"}]', "eval_id_taken")]
)
def test_what_cannot_be_added_changes_nothing(run: Run, skill: Path, content: str, code: str) -> None:
    """A file that is not understood, and an id that is taken, are errors with a code, and the file stays as it was."""
    (skill / "evals").mkdir()
    path = skill / "evals/evals.json"
    path.write_text(content)
    done = run("eval", "add", skill, "Greet Ada", "--id", "x", "--json")
    assert json.loads(done.stderr or done.stdout)["error"]["code"] == code
    assert (done.returncode == 0, path.read_text()) == (False, content)


def test_no_folder(run: Run, tmp_path: Path) -> None:
    """A folder that is not there is said to be so, and is not made."""
    done = run("eval", "add", tmp_path / "none", "Greet Ada")
    assert (done.returncode, "there is no folder" in done.stderr) == (2, True)
    assert not (tmp_path / "none").exists()


@pytest.fixture
def evaluated(run: Run, skill: Path, tmp_path: Path) -> Path:
    """A workspace with two iterations of `retrieval`, the second of which misses a row that the first found."""
    rows = [{"id": "a", "prompt": "say hello"}, {"id": "b", "prompt": "greet in style"}]
    (skill / "evals").mkdir()
    (skill / "evals/evals.json").write_text(json.dumps(rows))
    for about in ("Says hello. To greet in style.", "Says hello."):
        (skill / "SKILL.md").write_text(f"---\nname: hello\ndescription: {about}\n---\nHello.\n")
        assert run("eval", "retrieval", skill.parents[2], "-w", tmp_path / "ws").returncode == 0
    return tmp_path / "ws"


def test_what_changed_is_shown(run: Run, evaluated: Path) -> None:
    """`eval diff` names the row that broke, and of an iteration with itself nothing."""
    done = run("eval", "diff", evaluated / "iteration-1", evaluated / "iteration-2", COLUMNS="120")
    assert ["b", "with_skill", "broken", "passed", "acme.hello", "failed"] in [
        line.split() for line in done.stdout.splitlines()
    ]
    same = run("eval", "diff", evaluated / "iteration-1", evaluated / "iteration-1")
    assert (same.returncode, same.stdout) == (0, "nothing changed\n")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), 0),
        (("--min-recall", "0.5"), 0),
        (("--min-recall", "0.6"), 1),
        (("--min-pass", "0.6"), 1),
        (("--max-regression", "0.5"), 0),
        (("--max-regression", "0.4"), 1),
        (("--min-pass", "2"), 2),
    ],
)
def test_thresholds_set_the_exit_code(
    run: Run, evaluated: Path, skill: Path, words: tuple[str, ...], code: int
) -> None:
    """1 when an iteration falls short, of a report as of a run."""
    report = run("eval", "report", evaluated / "iteration-2", *words)
    assert (report.returncode, (evaluated / "iteration-2/report.html").exists()) == (code, True)
    if words[:1] == ("--min-recall",):
        assert run("eval", "retrieval", skill.parents[2], "-w", evaluated, *words).returncode == code


def test_the_form_of_ci_systems(run: Run, evaluated: Path) -> None:
    """`--format junit` prints XML with a failure for the row that failed, and nothing else."""
    done = run("eval", "report", evaluated / "iteration-2", "--format", "junit")
    suite = ET.fromstring(done.stdout)[0]
    assert [(case.attrib["name"], len(case)) for case in suite] == [("a", 0), ("b", 1)]


def test_no_iteration(run: Run, tmp_path: Path) -> None:
    """A folder that is none is said to be so."""
    done = run("eval", "report", tmp_path, "--json")
    assert (done.returncode, json.loads(done.stderr or done.stdout)["error"]["code"]) == (2, "evals_invalid")
