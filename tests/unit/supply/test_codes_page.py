"""The reference page of the lock lists the codes as the code has them."""

from __future__ import annotations

from pathlib import Path

from kdskills.supply.install import SUPPLY_CODES


def test_the_page_has_every_code(repo: Path) -> None:
    """The table of the page is the table of codes, sorted."""
    page = (repo / "docs/reference/lock-file.md").read_text(encoding="utf-8")
    rows = [f"| `{code}` | {meaning} |\n" for code, meaning in sorted(SUPPLY_CODES.items())]
    assert f"<!-- codes: begin -->\n| code | meaning |\n|---|---|\n{''.join(rows)}<!-- codes: end -->\n" in page
