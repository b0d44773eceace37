"""What `run`, `demo` and `check` tell about files: those a turn left, those it could not make, those that are lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kdskills.app import Host, Settings
from kdskills.app.operations import turns

ROOT = Path(__file__).parents[2]
PRESS = ROOT / "bundles" / "press"
SKILL = "---\nname: {name}\ndescription: Does it. Use when asked.\n---\nDo it.\n"


def kdskills(*args: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the installed command."""
    command = [str(Path(sys.executable).parent / "kdskills"), *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=110)


@pytest.fixture
def press(tmp_path: Path) -> Path:
    """A copy of the press bundle whose scripts find no fpdf2."""
    bundle = Path(shutil.copytree(PRESS, tmp_path / "press"))
    absent = "raise ModuleNotFoundError(\"No module named 'fpdf'\", name='fpdf')\n"
    (bundle / "skills/press/report/scripts/fpdf.py").write_text(absent)
    return bundle


async def test_the_demo_answers_without_the_pdf(press: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the part for PDFs the demo still answers and presses the HTML; one warning names the extra."""
    monkeypatch.setattr(turns, "installed", lambda distribution: distribution != "fpdf2")
    found = await Host(Settings(), entry_points=False).call("solver.run", bundle=press)
    made = {file.path for file in found.result.files}
    assert (found.result.status, found.unmet, "report.html" in made, "report.pdf" in made) == ("final", (), True, False)
    assert [(one.code, one.severity, one.message) for one in found.diagnostics] == [
        ("missing_extra", "warning", "report.pdf needs an optional part: pip install 'kdskills[documents]'")
    ]
    assert sorted(Path(file).name for file in found.files) == sorted(Path(name).name for name in made)
    shutil.rmtree(Path(found.files[0]).parent)


async def test_a_missing_pdf_is_a_failure_where_it_could_be_made(press: Path) -> None:
    """With the part installed a PDF that was not made is told as before."""
    found = await Host(Settings(), entry_points=False).call("solver.run", bundle=press)
    assert found.unmet == ("file report.pdf was not made",)


def test_a_pdf_alone_without_fpdf2_is_one_line(press: Path, tmp_path: Path) -> None:
    """Where nothing but a PDF is wanted, the script says in one line what is missing, and ends with 2."""
    (tmp_path / "report.md").write_text("# Title\n\nText.\n")
    script = press / "skills/press/report/scripts/press.py"
    command = [sys.executable, str(script), "report.md", "--pdf", "report.pdf"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "report.pdf was not written: a PDF needs fpdf2, pip install 'kdskills[documents]'\n",
    )


def test_run_names_the_files_it_leaves() -> None:
    """Without `--out` every file of the turn is named where it lies, and their folder."""
    done = kdskills("run", PRESS)
    assert done.returncode == 0, done.stderr
    named = [Path(row.strip().partition(" ")[2]) for row in done.stderr.splitlines() if row.startswith("  file ")]
    assert f"  folder {named[0].parent}\n" in done.stderr
    assert {"report.html", "report.md", "airports.svg"} <= {path.name for path in named}
    assert all(path.is_file() for path in named)
    shutil.rmtree(named[0].parent)


def bundle_of(tmp_path: Path, *skills: str) -> Path:
    """Make a bundle with skills at these folders, each named as its last part."""
    for place in skills:
        folder = tmp_path / "mine/skills" / place
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(SKILL.format(name=folder.name))
    (tmp_path / "mine/skills").mkdir(parents=True, exist_ok=True)
    return tmp_path / "mine"


def test_a_missing_root_fails_the_check(tmp_path: Path) -> None:
    """A descriptor whose root is not there has no skills at all: `check` ends with 1."""
    bundle = bundle_of(tmp_path)
    (bundle / "skills_descriptor.yaml").write_text("custom_skills_root: skils\n")
    done = kdskills("check", bundle)
    assert (done.returncode, "error[root_missing]" in done.stdout) == (1, True)


def test_duplicate_ids_fail_the_check(tmp_path: Path) -> None:
    """Two skills of one id are one skill fewer than were written: `check` ends with 1 and names both."""
    bundle = bundle_of(tmp_path, "acme/brief", "acme/other")
    (bundle / "skills/acme/other/SKILL.md").write_text(SKILL.format(name="other\nid: brief"))
    found = json.loads(kdskills("check", bundle, "--json").stdout)
    twice = [one for one in found["diagnostics"] if one["code"] == "duplicate_id"]
    assert ([one["severity"] for one in twice], found["ok"]) == (["error"], False)


@pytest.mark.parametrize("name", ["My Skill", "Brief", "a--b", "-a", "x" * 65, "node_modules"])
def test_rename_makes_no_invalid_folder(tmp_path: Path, name: str) -> None:
    """`--fix --rename` never gives a folder a name that the format refuses; it says that the name itself is wrong."""
    folder = tmp_path / "brief-one"
    folder.mkdir()
    (folder / "SKILL.md").write_text(SKILL.format(name=name))
    done = kdskills("check", folder, "--fix", "--rename")
    assert [path.name for path in tmp_path.iterdir()] == ["brief-one"]
    assert "is no valid one; mend the name of the skill first" in done.stdout
