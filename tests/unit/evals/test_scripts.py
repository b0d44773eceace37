"""Scripts of skills are held to what `evals/scripts.yaml` says, behind the wall and without a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kdskills.app import Host, Settings
from kdskills.app.operations import Context
from kdskills.doors.cli.main import build_cli
from kdskills.evals.scripts import TextExpectation, read_rows
from kdskills.skills import parse_skill

SKILL = "---\nname: pdf\ndescription: Does things for a test.\n---\nDo it.\n"
ECHO = """\
import pathlib, sys
text = sys.stdin.read()
print(sys.argv[1:], text, sorted(path.name for path in pathlib.Path().iterdir()))
pathlib.Path("made").mkdir()
pathlib.Path("made/out.txt").write_text("out\\n")
pathlib.Path("made/raw").write_bytes(b"\\xff\\0")
print("warned", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
ROWS = """\
- id: as expected
  script: scripts/echo.py
  args: ["3", b]
  stdin: hello
  files: {in.csv: "1,2"}
  expect:
    exit: 3
    stdout: "['3', 'b'] hello ['in.csv']"
    files: {made/out.txt: out, made/raw: {}, gone.txt: {absent: true}}
- script: scripts/echo.py
  args: ["0"]
  files: [evals/files/table.csv]
  expect: {stdout: {contains: table.csv, regex: "^\\\\["}, files: [made/out.txt]}
- id: wrong
  script: scripts/echo.py
  args: ["1"]
  expect: {stdout: nothing, files: {made/out.txt: {absent: true}, made/raw: text, lost.txt: {contains: x}}}
- id: endless
  script: scripts/endless.py
  timeout_s: 2
  expect: {exit: 124}
- id: missing
  script: scripts/never.py
- id: leads out
  script: scripts/../SKILL.md
- id: links out
  script: scripts/links.py
  expect: {files: {link: {}}}
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose skill has scripts, and rows that hold and that do not."""
    root = tmp_path / "lab"
    skill = root / "skills/pdf"
    (skill / "scripts").mkdir(parents=True)
    (skill / "evals/files").mkdir(parents=True)
    (root / "skills_descriptor.yaml").write_text("custom_skills_root: skills\n")
    (skill / "SKILL.md").write_text(SKILL)
    (skill / "scripts/echo.py").write_text(ECHO)
    (skill / "scripts/endless.py").write_text("while True: print('x' * 1000)\n")
    (skill / "scripts/links.py").write_text("import os\nos.symlink('/etc/passwd', 'link')\n")
    (skill / "evals/files/table.csv").write_text("a\n1\n")
    (skill / "evals/scripts.yaml").write_text(ROWS)
    return root


def rows_of(bundle: Path):
    """Return the rows of the skill, and what cannot be read."""
    skill = parse_skill(bundle / "skills/pdf").skill
    assert skill is not None
    return read_rows(skill)


async def answered(bundle: Path, executor: str = "bubblewrap", **arguments):
    """Return the answer of `evals.scripts`."""
    host = Host(Settings(executor=executor), entry_points=False)
    return await host.invoke("evals.scripts", {"bundle": str(bundle), **arguments}, Context())


@pytest.mark.needs("bubblewrap")
async def test_scripts_are_held_to_their_rows(bundle):
    """Arguments, standard input and files go in; exit code, text and files are compared; hostile scripts end in a no."""
    answer = await answered(bundle)
    told = {
        row.eval.removeprefix("public.pdf/"): (row.status, [each.text for each in row.verdicts if not each.passed])
        for row in answer.rows
    }
    assert told == {
        "as expected": ("passed", []),
        "scripts/echo.py#2": ("passed", []),
        "wrong": ("failed", ["exit 0", "stdout", "file made/out.txt", "file made/raw", "file lost.txt"]),
        "endless": ("failed", ["exit 124"]),
        "missing": ("failed", ["the script runs"]),
        "leads out": ("failed", ["the script runs"]),
        "links out": ("failed", ["file link"]),
    }
    assert (answer.negative, answer.rows[0].facts["stderr"], answer.rows[0].skill) == (True, "warned\n", "public.pdf")


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize("name", ["hello", "press"])
async def test_shipped_scripts_do_what_their_rows_say(name, repo):
    """Every row of the shipped bundles passes, and every skill with scripts has rows."""
    answer = await answered(repo / "bundles" / name)
    assert [(row.eval, row.status, row.verdicts) for row in answer.rows if row.status != "passed"] == []
    folders = {path.parents[1].name for path in (repo / "bundles" / name).glob("skills/**/scripts/*.py")}
    assert ({row.skill.partition(".")[2] for row in answer.rows}, answer.ok) == (folders, True)


@pytest.mark.needs("bubblewrap")
def test_the_command_prints_what_did_not_pass(bundle):
    """`kdskills eval scripts` names each row, what was seen instead, and exits 1; without rows there is nothing that passed."""
    cli = build_cli(Host(Settings(executor="bubblewrap"), entry_points=False))
    run = CliRunner().invoke(cli, ["eval", "scripts", str(bundle), "pdf"])
    assert (run.exit_code, "2 of 7 rows passed" in run.output) == (1, True), run.output
    assert "failed public.pdf/missing\n    the script runs: " in run.output
    (bundle / "skills/pdf/evals/scripts.yaml").unlink()
    empty = CliRunner().invoke(cli, ["eval", "scripts", str(bundle)])
    assert (empty.exit_code, "0 of 0 rows passed" in empty.output) == (1, True)


@pytest.mark.needs("bubblewrap")
async def test_what_the_machine_lacks_is_an_error(bundle):
    """A script whose packages nobody locked is the operator's to mend: the row is an error, neither passed nor failed."""
    skill = bundle / "skills/pdf"
    (skill / "scripts/declares.py").write_text('# /// script\n# dependencies = ["not-there"]\n# ///\n')
    (skill / "evals/scripts.yaml").write_text("- script: scripts/declares.py\n")
    answer = await answered(bundle)
    (row,) = answer.rows
    assert (row.status, row.error[0], row.verdicts, answer.ok) == ("error", "environment_missing", (), False)


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("- script: scripts/echo.py\n  arg: [a]\n", "row 1: arg: no such key; did you mean 'args'?", 1),
        ("- script: a\n- script: b\n  expect: {exti: 0}\n", "row 2: expect.exti: no such key; did you mean 'exit'?", 2),
        ("- script: a\n  args: [3]\n", "row 1: args.0: Input should be a valid string", 1),
        ("- args: []\n", "row 1: script: Field required", 1),
        ("- script: a\n  files: {../x: y}\n", "row 1: files", 1),
        ("- script: a\n  files: [/etc/passwd]\n", "row 1: files", 1),
        ("- script: a\n  expect: {stdout: {regex: '('}}\n", "row 1: expect.stdout.regex", 1),
        ("- id: x\n  script: a\n- id: x\n  script: b\n", "row 2: the id 'public.pdf/x' stands twice", 3),
        ("- just words\n- null\n", "row 1: Input should be a valid dictionary", 1),
        ("script: a\n", "it is no list of rows", None),
        ("- script: a\n  script: b\n", "the key 'script' stands twice", 2),
        ("- &a [*a]\n", "", 1),
        ("- [" * 5_000, "", None),
        ("- script: \xff", "it is no UTF-8 text", None),
        ("x" * 2_000_000, "bytes", None),
    ],
)
def test_rows_that_cannot_be_read_are_told(text, words, line, bundle):
    """Each with its number, its line and the nearest name; the rows beside it stay."""
    (bundle / "skills/pdf/evals/scripts.yaml").write_bytes(text.encode("latin-1"))
    rows, findings = rows_of(bundle)
    first = findings[0]
    assert (first.code, first.severity, first.path, first.ref) == ("script_eval_invalid", "error", "evals/scripts.yaml", "public.pdf")  # fmt: skip
    assert words in first.message
    assert line is None or first.line == line
    assert [row.script for row in rows] == (
        ["a"] if "- script: a\n- script" in text or "id: x" in text or "twice" in words else []
    )


def test_links_in_place_of_the_file_are_told(bundle, tmp_path):
    """A link is not followed, wherever it leads."""
    file = bundle / "skills/pdf/evals/scripts.yaml"
    file.rename(tmp_path / "elsewhere.yaml")
    file.symlink_to(tmp_path / "elsewhere.yaml")
    rows, findings = rows_of(bundle)
    assert (rows, [finding.code for finding in findings]) == ((), ["script_eval_invalid"])


@given(st.binary(max_size=40), st.text(max_size=10))
def test_expectations_of_text_hold_for_texts_alone(data, part):
    """Whatever a script writes, a text that is expected must stand there as UTF-8, and presence asks for nothing."""
    contained, _ = TextExpectation(contains=[part]).see(data)
    assert contained is (
        part.encode("utf-8", "surrogatepass") in data and data.decode("utf-8", "replace").encode() == data
    )
    assert TextExpectation().see(data)[0]
