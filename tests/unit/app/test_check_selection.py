"""Which findings `check` tells: what the caller and the bundle choose, and what nobody can choose away."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from kdskills.app import Host, Settings
from kdskills.app.operations.checking import code_rules
from kdskills.bundle.descriptor import resembling
from kdskills.errors import BadRequest, DescriptorError, Diagnostic
from kdskills.errors.reports import BUNDLE_CODES
from kdskills.hooks import hookimpl


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A Host without plugins of others."""
    return Host(Settings(index_dir=tmp_path / "index"), entry_points=False)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with one skill that is warned of twice, and one that is an error."""
    write(tmp_path / "b/skills/one", "---\nname: Two\ndescription: Counts.\n---\nCount.\n")
    write(tmp_path / "b/skills/bad", "Count.\n")
    return tmp_path / "b"


def write(folder: Path, text: str) -> None:
    """Write a skill."""
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text(text)


def says(bundle: Path, **terms: Any) -> None:
    """Write what the descriptor says of checks."""
    (bundle / "skills_descriptor.json").write_text(json.dumps({"check": terms}))


def codes(answer: Any) -> list[str]:
    """Return the codes of findings, sorted."""
    return sorted(finding.code for finding in answer.diagnostics)


ALL = ["name_dir_mismatch", "name_not_lowercase", "no_frontmatter"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, ALL),
        ({"select": ["name_not"]}, ["name_not_lowercase", "no_frontmatter"]),
        ({"ignore": ["name"]}, ["no_frontmatter"]),
        ({"ignore": ["no_front"]}, ALL),
        ({"ignore": ["all"]}, ["no_frontmatter"]),
        ({"ignore": ["no_frontmatter", "name_dir_mismatch"]}, ["name_not_lowercase"]),
    ],
)
def test_the_caller_chooses(host: Host, bundle: Path, words: dict[str, Any], expected: list[str]) -> None:
    """Codes and how they begin choose; an error stays unless its whole code is left out; counts follow."""
    answer = host.run("skills.check", path=bundle, **words)
    assert (codes(answer), answer.left_out) == (expected, len(ALL) - len(expected))
    assert (answer.errors, answer.ok) == (("no_frontmatter" in expected) * 1, "no_frontmatter" not in expected)


def test_an_error_of_a_stricter_verdict_can_be_chosen_away(host: Host, bundle: Path) -> None:
    """What only a stricter verdict calls an error makes no skill unusable: a beginning leaves it out."""
    answer = host.run("skills.check", path=bundle, verdict="spec", ignore=["name_not"])
    assert codes(answer) == ["name_dir_mismatch", "no_frontmatter"]


def test_the_bundle_chooses_unless_the_caller_selects(host: Host, bundle: Path) -> None:
    """`check` of the descriptor holds for the bundle, with what the caller ignores; a caller's selection stands instead."""
    says(bundle, ignore=["name_dir"])
    assert codes(host.run("skills.check", path=bundle)) == ALL[1:]
    assert codes(host.run("skills.check", path=bundle, ignore=["name_not"])) == ALL[2:]
    assert codes(host.run("skills.check", path=bundle, select=["all"])) == ALL
    assert codes(host.run("skills.check", path=bundle / "skills")) == ALL
    says(bundle, select="name_dir")
    assert codes(host.run("skills.check", path=bundle)) == ["name_dir_mismatch", "no_frontmatter"]
    left = host.run("skills.fix", path=bundle, dry_run=True, ignore=["no_frontmatter"]).left
    assert codes(left) == ["name_dir_mismatch"]


def test_codes_that_nothing_has_are_errors(host: Host, bundle: Path) -> None:
    """Of the caller such a code refuses the call, before anything is mended; of the bundle it is a finding that stays."""
    for operation in ("skills.check", "skills.fix"):
        with pytest.raises(BadRequest) as caught:
            host.run(operation, path=bundle, ignore=["name_dir_mismatsh"])
        assert (caught.value.code, "'name_dir_mismatch'" in caught.value.message) == ("check_code_unknown", True)
    says(bundle, ignore=["nothing_has_it", "check", "no_frontmatter"])
    answer = host.run("skills.check", path=bundle)
    assert (codes(answer)[0], answer.ok) == ("check_code_unknown", False)
    assert [each.path for each in answer.diagnostics if each.code == "check_code_unknown"] == ["skills_descriptor.json"]


def test_the_nearest_code_is_named(host: Host, bundle: Path) -> None:
    """Of codes that are all alike, the one that was meant is named, for each slip of one letter that is no beginning."""
    names = [rule.id for rule in code_rules()]
    slips = [(code[:at] + code[at + 1 :], code) for code in names for at in (len(code) // 2, len(code) - 2)]
    slips += [(code.upper(), code) for code in names] + [
        (code.replace("_", "-"), code) for code in names if "_" in code
    ]
    slips = [(slip, code) for slip, code in slips if not any(each.startswith(slip) for each in names)]
    assert [slip for slip, code in slips if resembling(slip, names) != code] == []
    says(bundle, select=[slip for slip, _ in slips])
    told = [each for each in host.run("skills.check", path=bundle).diagnostics if each.code == "check_code_unknown"]
    assert {each.fix for each in told} == {f"Write {code!r}." for _, code in slips}


@pytest.mark.parametrize(
    "code", ["x" * 100, "zzz", "\n::error::", "##[error]", "\x1b[31m\u202e", "*", "name*"], ids=ascii
)
def test_a_hostile_code_is_one_plain_sentence(host: Host, bundle: Path, code: str) -> None:
    """A code like no other is refused with where all codes stand, and told so that it prints as one line."""
    with pytest.raises(BadRequest) as caught:
        host.run("skills.check", path=bundle, select=[code])
    assert (caught.value.code, caught.value.details["given"]) == ("check_code_unknown", code)
    assert caught.value.message.isprintable()
    says(bundle, ignore=[code * 1000])
    (told,) = [each for each in host.run("skills.check", path=bundle).diagnostics if each.code == "check_code_unknown"]
    assert (told.severity, told.message.isprintable(), len(told.message) < 300) == ("error", True, True)


@pytest.mark.parametrize(
    "terms", [{"ignored": []}, {"ignore": [1]}, {"ignore": [""]}, {"select": {"a": 1}}, ["bom"], "bom"]
)
def test_what_the_descriptor_may_say(host: Host, bundle: Path, terms: Any) -> None:
    """Anything else than texts under `select` and `ignore` is an error of the descriptor."""
    (bundle / "skills_descriptor.json").write_text(json.dumps({"check": terms}))
    with pytest.raises(DescriptorError) as caught:
        host.run("skills.check", path=bundle)
    assert caught.value.details["key"].startswith("check")


def test_codes_of_plugins_are_taken(tmp_path: Path, bundle: Path) -> None:
    """Where a plugin checks skills, a code may be its own, and is left out like others."""

    class Plugin:
        @hookimpl
        def kdskills_check_skill(self, skill: Any) -> list[Diagnostic]:
            return [Diagnostic("house_style", "warning", "Not ours.")]

    host = Host(Settings(index_dir=tmp_path / "index"), plugins=[Plugin()], entry_points=False)
    assert {*codes(host.run("skills.check", path=bundle, select=["house"]))} == {"house_style", "no_frontmatter"}
    assert "house_style" not in codes(host.run("skills.check", path=bundle, ignore=["house_"]))


def test_every_code_stands_in_the_table_and_on_its_page(repo: Path) -> None:
    """Each code that what `check` asks can give stands in a table, once, in a sentence, and on the page."""
    rooms = [repo / "kdskills" / name for name in ("bundle", "skills", "turn", "environments")]
    files = [file for room in rooms for file in room.rglob("*.py")]
    calls = [
        node.args[0].value
        for file in [*files, repo / "kdskills/app/operations/checking.py"]
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "Diagnostic"
        and isinstance(node.args[0], ast.Constant)
    ]
    rules = [rule.id for rule in code_rules()]
    assert sorted({*calls} - {*rules, "archive_ignored"}) == []  # that one is told of uploads only
    assert len(rules) == len(set(rules))
    page = (repo / "docs/reference/check.md").read_text(encoding="utf-8")
    begin, end = "<!-- codes: begin -->\n", "<!-- codes: end -->"
    rows = [f"| `{code}` | {meaning} |\n" for code, meaning in BUNDLE_CODES.items()]
    assert page[page.index(begin) + len(begin) : page.index(end)] == "| code | meaning |\n|---|---|\n" + "".join(rows)
    assert list(BUNDLE_CODES) == sorted(BUNDLE_CODES)
