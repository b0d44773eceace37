"""What `metadata` holds, and what verdicts judge of it."""

from __future__ import annotations

import pytest

from kdskills.skills import parse_skill_bytes

#: The severity of a plain scalar that is no text; `skills-ref` reads every scalar as text.
SEVERITIES = {"lenient": "warning", "spec": "error", "skills-ref": None}


@pytest.mark.parametrize("verdict", SEVERITIES)
@pytest.mark.parametrize("value", ["2.50", "0010", "true", "null", "~", "1e3"])
def test_types_are_judged_and_characters_kept(verdict, value) -> None:
    """A plain scalar that YAML reads as no text is `metadata_type`; its characters are kept as they are written."""
    data = f"---\nname: brief\ndescription: Summaries.\nmetadata:\n  code: {value}\n---\nWrite.\n".encode()
    found = parse_skill_bytes(data, folder="brief", verdict=verdict)
    told = [(finding.code, finding.severity) for finding in found.diagnostics]
    assert told == ([] if SEVERITIES[verdict] is None else [("metadata_type", SEVERITIES[verdict])])
    if found.skill is not None:
        assert found.skill.metadata == {"code": value}


@pytest.mark.parametrize("verdict", SEVERITIES)
@pytest.mark.parametrize("value", ['"2.50"', "'true'", "yes", "2024-01-02", "1.2.3"])
def test_text_is_text_under_every_verdict(verdict, value) -> None:
    """Quoted values, and plain ones that YAML 1.2 reads as text, are no finding."""
    data = f"---\nname: brief\ndescription: Summaries.\nmetadata:\n  code: {value}\n---\nWrite.\n".encode()
    found = parse_skill_bytes(data, folder="brief", verdict=verdict)
    assert (found.diagnostics, found.skill.metadata) == ((), {"code": value.strip("'\"")})
