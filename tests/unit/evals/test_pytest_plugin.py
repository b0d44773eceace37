"""Evaluations as tests of pytest: an item for each row of a bundle that is named, and nothing at all where none is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLUGIN = "kdskills.testing.pytest_evals"


def run_pytest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder of its own, with the plugin alone."""
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", *words]
    variables = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with one test of its own, and a bundle with an evaluation that passes, one that fails and one that is none."""
    skill = tmp_path / "shop/skills/acme/sums/SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("---\nname: sums\ndescription: Adds numbers up.\n---\nDo it.\n")
    rows = [{"id": "right", "prompt": "Add the numbers up.", "expected_skill": "sums"}]
    rows += [{"id": "wrong", "prompt": "Numbers!", "expected_skill": None}, {"id": "none"}]
    (tmp_path / "shop/evals").mkdir()
    (tmp_path / "shop/evals/rows.json").write_text(json.dumps(rows))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_own.py").write_text("def test_own():\n    pass\n")
    return tmp_path


def test_each_row_is_an_item(folder: Path) -> None:
    """A row that fails says why in a line; a row that cannot be understood is a warning; the project's tests run as ever."""
    done = run_pytest(folder, "--kdskills-evals", "shop", "-v", "-W", "default", "test_own.py")
    assert "shop::right PASSED" in done.stdout, done.stdout + done.stderr
    assert "shop::wrong FAILED" in done.stdout
    assert "acme.sums came first, not none" in done.stdout
    assert "Traceback" not in done.stdout
    assert "eval_" in done.stdout
    assert "1 failed, 2 passed, 1 warning" in done.stdout
    assert done.returncode == 1
    chosen = run_pytest(folder, "--kdskills-evals", "shop", "-k", "right", "-W", "default")
    assert (chosen.returncode, "1 passed, 2 deselected" in chosen.stdout) == (0, True), chosen.stdout


def test_the_ini_file_names_bundles_as_well(folder: Path) -> None:
    """What stands in `pytest.ini` holds without an option."""
    (folder / "pytest.ini").write_text("[pytest]\nkdskills_evals = shop\n")
    done = run_pytest(folder, "--collect-only", "-q", "-W", "default")
    assert [line for line in done.stdout.splitlines() if "::" in line][-1].endswith("shop::wrong"), done.stdout


def test_a_folder_that_is_no_bundle_is_a_wrong_call(folder: Path) -> None:
    """Pytest ends with its code for wrong calls, and names ours."""
    done = run_pytest(folder, "--kdskills-evals", "nowhere")
    assert (done.returncode, "bundle_missing" in done.stderr) == (4, True), done.stdout + done.stderr


def test_without_a_bundle_nothing_is_done(folder: Path) -> None:
    """Nothing is collected, and little imported; the entry point names the module."""
    heavy = "{'pydantic', 'yaml', 'kdskills.evals', 'kdskills.bundle'}"
    (folder / "test_own.py").write_text(f"import sys\ndef test_own():\n    assert not {heavy} & set(sys.modules)\n")
    done = run_pytest(folder, "-q")
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert points == {"kdskills_evals": PLUGIN}
