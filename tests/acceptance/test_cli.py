"""The command line as its users meet it: output for people, JSON for machines, exit codes by who must act."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kdskills.app.operations import OPERATIONS
from kdskills.models import ModelRequest
from kdskills.solver import ReactSolver, SolverSystem
from kdskills.testing.models import ScriptedModel, say

ROOT = Path(__file__).parents[2]
PRESS, HELLO = ROOT / "bundles" / "press", ROOT / "bundles" / "hello"
DECISION = "solver.react.decision"


def kdskills(*args: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the installed command as a process of its own."""
    command = [str(Path(sys.executable).parent / "kdskills"), *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=110)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A copy of the press bundle that may be damaged."""
    return Path(shutil.copytree(PRESS, tmp_path / "press"))


def test_help_names_every_command() -> None:
    """`kdskills --help` lists the friendly commands."""
    printed = kdskills("--help").stdout
    assert [
        name
        for name in ("demo", "run", "check", "list", "show", "render", "why", "doctor", "image")
        if name not in printed
    ] == []


def test_no_arguments_is_a_usage_error() -> None:
    """Calling it bare prints the help and exits with 2."""
    done = kdskills()
    assert (done.returncode, "Usage" in done.stdout + done.stderr) == (2, True)


@pytest.mark.parametrize("path", [PRESS, HELLO, PRESS / "skills/data/chart", PRESS / "skills/press"])
def test_check_passes_shipped_skills(answer: Callable[..., Any], path: Path) -> None:
    """Our own bundles, a skill of them and a folder of skills have no errors and no warnings."""
    found = answer("check", path)
    assert (found["ok"], found["errors"], found["warnings"], found["skills"] > 0) == (True, 0, 0, True), found[
        "diagnostics"
    ]


def test_check_reports_file_line_and_code(run: Callable[..., Any], answer: Callable[..., Any], bundle: Path) -> None:
    """A broken skill beside good ones is one error with its place; the good ones are still counted; exit 1."""
    (bundle / "skills/data/chart/SKILL.md").write_text("---\nname: chart\ndescription: [unclosed\n---\nbody\n")
    done = run("check", bundle)
    assert done.returncode == 1
    assert "data/chart/SKILL.md:" in done.stdout
    assert "error[invalid_yaml]" in done.stdout
    found = answer("check", bundle)
    assert (found["errors"], found["skills"]) == (1, 9)


def test_check_strict_counts_warnings(run: Callable[..., Any], tmp_path: Path) -> None:
    """`--strict` turns a warning into exit 1, without it the exit is 0."""
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/SKILL.md").write_text("---\nname: other\ndescription: Named unlike its folder.\n---\nDo it.\n")
    assert (
        run("check", tmp_path / "odd").returncode,
        run("check", tmp_path / "odd", "--strict").returncode,
    ) == (0, 1)


def test_check_fix_mends_and_is_idempotent(run: Callable[..., Any], answer: Callable[..., Any], tmp_path: Path) -> None:
    """`--fix` quotes what repair quoted and shows the diff, `--dry-run` changes nothing, a second run finds nothing."""
    skill = tmp_path / "mine"
    skill.mkdir()
    text = "---\nname: mine\ndescription: Use it: always\n---\nBody stays.\n"
    (skill / "SKILL.md").write_text(text)
    dry = run("check", skill, "--fix", "--dry-run")
    assert ("+description:" in dry.stdout, (skill / "SKILL.md").read_text()) == (True, text)
    assert run("check", skill, "--fix").returncode == 0
    mended = (skill / "SKILL.md").read_text()
    assert mended.endswith("---\nBody stays.\n")
    assert answer("check", skill)["warnings"] == 0
    assert "nothing to mend" in run("check", skill, "--fix").stdout
    assert (skill / "SKILL.md").read_text() == mended


def test_missing_path_is_one_line_and_exit_2(run: Callable[..., Any], answer: Callable[..., Any]) -> None:
    """A path that is not there is an error of the caller, in one line, and in JSON with its code."""
    done = run("check", "/nowhere/at/all")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert answer("check", "/nowhere/at/all")["error"]["code"] == "path_missing"


def test_list_shows_states_with_reasons(run: Callable[..., Any], answer: Callable[..., Any]) -> None:
    """Listing says for every skill whether it is listed, hidden or refused, and why."""
    found = {row["full_id"]: row for row in answer("list", PRESS, "--consumer", DECISION)["skills"]}
    assert {full_id: row["state"] for full_id, row in found.items()} == {
        "data.chart": "listed",
        "data.flights": "listed",
        "data.profile": "listed",
        "internal.evidence": "refused",
        "press.brief": "listed",
        "press.draft-interview": "refused",
        "press.embargo": "refused",
        "press.report": "listed",
        "press.style": "hidden",
    }
    assert (found["press.embargo"]["code"], found["internal.evidence"]["code"]) == ("denied", "internal")
    assert [found[i]["short_id"] for i in ("data.chart", "data.flights", "press.style")] == ["SK1", "SK2", None]
    assert "press.embargo" in run("list", PRESS, "--consumer", DECISION).stdout


def test_list_with_a_tool_gate(answer: Callable[..., Any]) -> None:
    """`--tools ''` means no tools: skills with a required tool are refused."""
    rows = {row["full_id"]: row for row in answer("list", PRESS, "-c", DECISION, "--tools", "")["skills"]}
    assert (rows["data.profile"]["code"], rows["data.flights"]["state"]) == ("tools_missing", "listed")


def test_show_prints_instructions(run: Callable[..., Any], answer: Callable[..., Any]) -> None:
    """Showing a skill gives its text, closure and sources, by any way to name it."""
    for ref in ("press.brief", "sk:press.brief", "SK4"):
        found = answer("show", PRESS, ref, "-c", DECISION)
        assert (found["full_id"], found["closure"]) == ("press.brief", ["internal.evidence", "press.brief"])
    assert "A brief that can be checked" in run("show", PRESS, "press.brief", "-c", DECISION).stdout


def test_show_refuses_a_denied_skill(run: Callable[..., Any]) -> None:
    """A denied skill asked for by exact id is refused with its code and exit 2, and none of its text is printed."""
    done = run("show", PRESS, "press.embargo", "-c", DECISION)
    assert (done.returncode, done.stdout, "denied" in done.stderr, "Two editors" in done.stderr) == (2, "", True, False)


def test_render_catalog_fits_its_budget(answer: Callable[..., Any]) -> None:
    """A catalog under a budget says what it left out and never exceeds it."""
    whole, small = (
        answer("render", PRESS, "-c", DECISION, "--form", "gallery", *more) for more in ((), ("--budget", "60"))
    )
    assert whole["text"].startswith("[SKILL CATALOG]\n")
    assert (whole["level"], small["tokens"] <= 60, small["level"] > 0) == (0, True, True)
    assert "press.style" not in whole["text"]


def test_render_prints_the_prompt_a_solver_sends(run: Callable[..., Any], answer: Callable[..., Any]) -> None:
    """The preview is byte for byte what a turn sends first, with its tools, and every number of tokens is marked as an estimate."""
    kept = asyncio.run(first_request("press.brief"))
    done = run("render", PRESS, "-s", "press.brief")
    assert done.stdout == kept.instructions + "\n"
    assert done.stderr.startswith("~")
    found = answer("render", PRESS, "-s", "press.brief")
    assert (found["form"], found["text"]) == ("prompt", kept.instructions)
    assert [tool["name"] for tool in found["offered"]] == [tool.name for tool in kept.tools]
    assert found["tokens"] == found["instruction_tokens"] + found["tool_tokens"]
    assert found["tool_tokens"] > found["instruction_tokens"] / 2


async def first_request(skill: str) -> ModelRequest:
    """Run a turn on the press bundle, and return what it sent first."""
    model = ScriptedModel([say("Done.")])
    async with SolverSystem(bundle=PRESS, model=model) as system:
        await ReactSolver(system).run("Go", skills=[skill])
    return model.requests[0]


def test_render_says_what_does_not_go_together(run: Callable[..., Any]) -> None:
    """What belongs to one form only is refused beside another, in one line."""
    for words in (
        ("press.brief", "--form", "prompt"),
        ("press.brief", "-s", "press.brief"),
        ("--form", "xml", "-s", "x"),
    ):
        done = run("render", PRESS, *words)
        assert (done.returncode, done.stderr.split(":")[0], done.stderr.count("\n")) == (2, "form_mixed", 1)


def test_render_block_is_what_a_prompt_holds(run: Callable[..., Any]) -> None:
    """The printed block holds the closure's texts, hidden guidance without its name, and nothing of a refused skill."""
    done = run("render", PRESS, "press.report", "press.embargo", "-c", DECISION)
    assert done.stdout.startswith("[ACTIVE SKILLS]\n## Skill Guidance\nDisclosure rule: this guidance is private.")
    assert ("## Skill: report (press.report)" in done.stdout, "Two editors" in done.stdout, done.returncode) == (
        True,
        False,
        1,
    )
    assert "press.style" not in done.stdout


def test_why_explains_rule_by_rule(run: Callable[..., Any], answer: Callable[..., Any]) -> None:
    """A refusal names the rule and where it stands, walks all seven steps, and exits 1; a grant exits 0."""
    done = run("why", "press.embargo", "-b", PRESS, "-c", DECISION)
    assert (done.returncode, "refused: denied" in done.stdout) == (1, True)
    found = answer("why", "press.embargo", "-b", PRESS, "-c", DECISION)
    step = next(s for s in found["steps"] if s["result"] == "refuse")
    assert ([s["step"] for s in found["steps"]], step["code"], step["rule"]) == (
        [1, 2, 3, 4, 5, 6, 7],
        "denied",
        "press.embargo",
    )
    assert DECISION in step["source"]
    assert run("why", "press.brief", "-b", PRESS, "-c", DECISION).returncode == 0
    assert answer("why", "public.x", "-b", PRESS, "-c", DECISION)["code"] == "unknown_skill"


def test_markup_in_skill_texts_is_text(run: Callable[..., Any], bundle: Path) -> None:
    """Console markup and control characters in a description do not style, hide or clear anything."""
    hostile = "[red]boo[/] [link=file:///etc]x[/link] \\x1b[2J"
    (bundle / "skills/data/chart/SKILL.md").write_text(f'---\nname: chart\ndescription: "{hostile}"\n---\nbody\n')
    done = run("list", bundle, "-c", DECISION)
    assert done.returncode == 0
    assert ("[red]boo[/]" in done.stdout, "\x1b[2J" in done.stdout) == (True, False)


def test_bundle_errors_name_file_and_line(bundle: Path) -> None:
    """A descriptor that raises is the author's error: exit 3, file and line in one sentence."""
    (bundle / "skills_descriptor.py").write_text("CUSTOM_SKILLS_ROOT = 'skills'\nraise SystemExit(0)\n")
    done = kdskills("list", bundle, "--trust")
    assert (done.returncode, done.stdout) == (3, "")
    assert "skills_descriptor.py" in done.stderr
    assert "2" in done.stderr


def test_a_missing_root_is_said(answer: Callable[..., Any], bundle: Path) -> None:
    """A bundle whose skills folder is gone lists nothing and says why."""
    shutil.rmtree(bundle / "skills")
    found = answer("list", bundle)
    assert (found["skills"], "root_missing" in {d["code"] for d in found["diagnostics"]}) == ([], True)


@pytest.mark.needs("bubblewrap")
def test_doctor_is_truthful(run: Callable[..., Any], answer: Callable[..., Any]) -> None:
    """Doctor names the engine in force, every engine's probe, and how scripts are started."""
    found = answer("doctor")
    engines = {engine["name"]: engine for engine in found["engines"]}
    assert (found["ok"], found["chosen"], engines["bubblewrap"]["ok"]) == (True, "bubblewrap", True)
    assert {check["name"] for check in engines["bubblewrap"]["checks"]} != set()
    assert found["interpreters"][".py"] == ["python3", "{path}"]
    assert run("doctor").returncode == 0


def test_operations_and_commands_agree() -> None:
    """Every operation has models with documented inputs, and a summary."""
    for operation in OPERATIONS.values():
        assert operation.summary.endswith(".")
        fields = operation.input.model_json_schema().get("properties", {})
        assert [name for name, schema in fields.items() if not schema.get("description")] == []


def test_a_tampered_variable_is_refused(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that tries to open the wall stops every command with exit 4 and names the file to use instead."""
    monkeypatch.setenv("KDSKILLS_ALLOW_UNISOLATED", "true")
    done = run("list", HELLO)
    assert (done.returncode, "cannot be set by a variable" in done.stderr) == (4, True)
