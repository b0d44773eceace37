"""The reference page of the format lists the table of codes as the code has it."""

from __future__ import annotations

from pathlib import Path

from kdskills.skills.findings import CODES


def test_page_has_the_table(repo: Path) -> None:
    """Between its marks the page holds exactly the generated table."""
    page = (repo / "docs/reference/skill-format.md").read_text(encoding="utf-8")
    begin, end = "<!-- codes: begin -->\n", "<!-- codes: end -->"
    rows = [f"| `{row.code}` | {' | '.join(row.marks)} | {row.meaning} | {row.cure} |" for row in CODES.values()]
    head = ["| code | lenient | spec | skills-ref | meaning | cure |", "|---|---|---|---|---|---|"]
    assert page[page.index(begin) + len(begin) : page.index(end)] == "\n".join([*head, *rows]) + "\n"


def test_codes_are_unique_and_said_in_sentences() -> None:
    """Each code stands once, with a meaning and a cure."""
    assert [code for code, row in CODES.items() if code != row.code] == []
    assert [row.code for row in CODES.values() if not (row.meaning.endswith(".") and row.cure.endswith("."))] == []
