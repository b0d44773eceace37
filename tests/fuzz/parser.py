"""Fuzzes the reading, checking and mending of skill files."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from pathlib import Path

sys.path.append(os.fspath(Path(__file__).parent))
from draw import Draw, scratch

from kdskills.skills import parse_skill, parse_skill_bytes, render_body, validate_skill
from kdskills.skills.findings import CODES
from kdskills.skills.fix import apply_fix, plan_fix
from kdskills.skills.frontmatter import read_body
from kdskills.skills.model import ParsedSkill, Verdict
from kdskills.skills.refs import parse_ref

FOLDERS = ("pdf", "", "My Folder", "caf\u00e9", "-a--b-", "SK1", "skills")
VERDICTS: tuple[Verdict, ...] = ("lenient", "spec", "skills-ref")
WORDS = (
    "---\n", "...\n", "name: pdf\n", "description: ", "description: |\n  ", "description: >-\n  ", "license: ",
    "compatibility: ", "metadata:\n  a: 1\n", "allowed-tools: ", "- Read\n", "Bash(git:*)", "id: ", "namespace: ",
    "version: 1.0", "tags: [a, b]", "when_to_use:\n- ", "imports: ", "include-for: ", "include_fr: ", "disclosure: ",
    "disable-model-invocation: ", "user-invocable: no\n", "arguments: ", "argument-hint: [file] [x]\n", "insert: ",
    "$ARGUMENTS", "{{ x }}", "0x", "0o7", "1e999", ".inf", "!!str ", "&a ", "*a", "<<: ", "? ", "%YAML 1.2\n",
    "\ufeff", "\r\n", "\r", "\x85", "\u2028", "\ue000", "\u200b", "\xa0", "'", '"', "\\x00", "\\ud800", " #", ": ",
)  # fmt: skip


@cache
def _place() -> Path:
    """Return a folder of this process for skills that are read from files."""
    return scratch()


def check(data: bytes) -> None:
    """No content raises; what `spec` accepts is accepted by `lenient`; all that is read is JSON and text."""
    draw = Draw(data)
    folder = draw.choice(FOLDERS)
    file_name = draw.choice(("SKILL.md", "skill.md"))
    written = draw.pumped(60_000)
    parsed = {name: parse_skill_bytes(written, folder=folder, file_name=file_name, verdict=name) for name in VERDICTS}
    for verdict, outcome in parsed.items():
        _sound(outcome, written, verdict)
    for strict in ("spec", "skills-ref"):
        if parsed[strict].ok and folder:
            assert parsed["lenient"].ok, (strict, parsed["lenient"].diagnostics)
    if folder:
        _files(written, folder, file_name, parsed)


def _sound(outcome: ParsedSkill, written: bytes, verdict: Verdict) -> None:
    errors = [found for found in outcome.diagnostics if found.severity == "error"]
    assert (outcome.skill is None) == bool(errors)
    lines = written.count(b"\n") + written.count(b"\r") + 2
    for found in outcome.diagnostics:
        assert CODES[found.code]
        assert found.line is None or 1 <= found.line <= lines, found
        assert found.column is None or found.column >= 1, found
        found.message.encode()
    target = parse_ref(outcome.full_id or "")
    assert outcome.full_id is not None
    skill = outcome.skill
    if skill is None:
        return
    assert target.kind == "full", target
    assert target.value == skill.full_id == outcome.full_id
    assert json.loads(json.dumps(skill.frontmatter, allow_nan=False).encode()) == skill.frontmatter
    assert json.loads(json.dumps(dict(skill.metadata), allow_nan=False)) == skill.metadata
    assert skill.body == read_body(written, verdict)
    for text in (skill.name, skill.description, skill.body, *skill.tags, *skill.when_to_use, *skill.imports):
        text.encode()
    render_body(skill.body, skill.arguments, {})
    assert render_body(skill.body, (), {}).text == skill.body


def _files(written: bytes, folder: str, file_name: str, parsed: dict[Verdict, ParsedSkill]) -> None:
    place = _place() / folder
    place.mkdir(exist_ok=True)
    (place / file_name).write_bytes(written)
    try:
        for verdict in VERDICTS:
            found = validate_skill(place, verdict=verdict)
            skill = parse_skill(place, verdict=verdict).skill
            assert skill is None or skill.body == read_body(written, verdict)
            assert {(f.code, f.line) for f in found} >= {(f.code, f.line) for f in parsed[verdict].diagnostics}
        plan = plan_fix(place)
        if plan is not None and plan.changed:
            assert plan.diff
            before = parse_skill(place)
            apply_fix(plan)
            after = parse_skill(place)
            assert len(after.diagnostics) < len(before.diagnostics)
            assert (after.ok, after.full_id) == (before.ok, before.full_id)
            again = plan_fix(place)
            assert again is not None
            assert not again.changed, again.done
    finally:
        for path in place.iterdir():
            path.unlink()
