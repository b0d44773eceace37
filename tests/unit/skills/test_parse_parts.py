"""The contract discovery builds on: bytes and companions in, a skill or the reasons out."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdskills.errors import Diagnostic
from kdskills.skills import SkillTool
from kdskills.skills.findings import CODES, FileFindings
from kdskills.skills.folder import LazyContent
from kdskills.skills.parse import parse_parts
from kdskills.skills.safe_open import bytes_digest


def test_facts_of_the_place_are_taken_over(plain: bytes) -> None:
    """Layer, path, tools and content come from the caller, and built-in follows the layer."""
    content = LazyContent.of_text("elsewhere", 1, "sha256:00")
    tools = (SkillTool("web.search", required=True),)
    found = parse_parts(
        plain, folder="brief", layer="plugin", file="/srv/brief/SKILL.md", content=lambda _: content, tools=tools
    ).skill
    assert found is not None
    assert (found.layer, found.built_in, found.tools, found.body) == ("plugin", True, tools, "elsewhere")
    assert (found.path, found.folder) == (Path("/srv/brief/SKILL.md"), Path("/srv/brief"))
    assert "/srv" not in found.location


@pytest.mark.parametrize(
    ("layer", "built_in"), [("builtin", True), ("plugin", True), ("user", False), ("project", False), ("bundle", False)]
)
def test_built_in_layers(plain: bytes, layer, built_in: bool) -> None:
    """Skills of the house and of plugins are built in, the others are not."""
    found = parse_parts(plain, folder="brief", layer=layer).skill
    assert found is not None
    assert found.built_in is built_in


def test_digest_size_and_tokens(plain: bytes) -> None:
    """The digest is that of the raw file unless it is known; tokens estimate the body in bytes."""
    found = parse_parts(plain, folder="brief").skill
    assert found is not None
    assert (found.digest, found.size) == (bytes_digest(plain), len(plain))
    assert found.tokens == -(-len(found.body.encode()) // 4)
    known = parse_parts(plain, folder="brief", digest="sha256:known").skill
    assert known is not None
    assert known.digest == "sha256:known"


def test_findings_name_the_place_given() -> None:
    """Findings carry the path relative to the root."""
    found = parse_parts(b"junk", folder="brief", path="acme/brief/SKILL.md", layout_namespace="acme")
    assert [(f.path, f.code) for f in found.diagnostics] == [("acme/brief/SKILL.md", "no_frontmatter")]
    assert (found.skill, found.full_id) == (None, "acme.brief")


def test_an_error_of_a_companion_refuses(plain: bytes) -> None:
    """An error handed in refuses the skill, a warning does not; both are kept."""
    error = Diagnostic("tools_invalid", "error", "`tools.yaml` cannot be used.", "brief/tools.yaml")
    warning = Diagnostic("compact_invalid", "warning", "`compact.md` cannot be used.", "brief/compact.md")
    refused = parse_parts(plain, folder="brief", findings=(error, warning))
    kept = parse_parts(plain, folder="brief", findings=(warning,))
    assert (refused.ok, refused.diagnostics, refused.full_id) == (False, (error, warning), "public.brief")
    assert (kept.ok, kept.diagnostics) == (True, (warning,))


def test_a_fixed_namespace_names_refused_skills_too() -> None:
    """A root that fixes its namespace does so for skills that cannot be read."""
    assert parse_parts(b"junk", folder="brief", layout_namespace="a", fixed_namespace="mine").full_id == "mine.brief"


def test_lower_case_file_name_is_said(plain: bytes) -> None:
    """A file called skill.md is reported first."""
    found = parse_parts(plain, folder="brief", file_name="skill.md")
    assert [(f.code, f.path) for f in found.diagnostics] == [("file_name_case", "skill.md")]


def test_skill_values_are_frozen(plain: bytes) -> None:
    """Nobody changes a skill once it is read."""
    found = parse_parts(plain, folder="brief").skill
    assert found is not None
    with pytest.raises(AttributeError):
        found.name = "other"  # type: ignore[misc]


def test_findings_follow_the_table() -> None:
    """A finding has the table's severity and cure; what a verdict does not report is dropped."""
    lenient, tool = FileFindings("lenient", "SKILL.md"), FileFindings("skills-ref", "SKILL.md")
    for notes in (lenient, tool):
        notes.add("field_type", "Odd.", position=(3, 1), ref="tags")
    assert [(f.severity, f.line, f.fix) for f in lenient.items] == [("warning", 3, CODES["field_type"].cure)]
    assert (tool.items, lenient.refused) == ([], False)
    lenient.add("field_type", "Odd.", severity="error")
    assert lenient.refused is True


def test_unknown_codes_are_a_mistake_of_ours() -> None:
    """A code outside the table cannot be reported."""
    with pytest.raises(KeyError):
        FileFindings("lenient", "x").add("no_such_code", "Odd.")
