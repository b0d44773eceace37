"""The reference page of the format lists the table of codes as the code has it."""

from __future__ import annotations

from pathlib import Path

from kdskills.skills.findings import all_codes, reference_table


def test_page_has_the_table(repo: Path) -> None:
    """Between its marks the page holds exactly the generated table."""
    page = (repo / "docs/reference/skill-format.md").read_text(encoding="utf-8")
    begin, end = "<!-- codes: begin -->\n", "<!-- codes: end -->"
    assert page[page.index(begin) + len(begin) : page.index(end)] == reference_table()


def test_codes_are_unique_and_said_in_sentences() -> None:
    """Each code stands once, with a meaning and a cure."""
    rows = all_codes()
    assert len({row.code for row in rows}) == len(rows)
    assert [row.code for row in rows if not (row.meaning.endswith(".") and row.cure.endswith("."))] == []
