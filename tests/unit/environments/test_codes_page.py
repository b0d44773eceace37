"""The reference page of environments lists the codes as the code has them."""

from __future__ import annotations

from pathlib import Path

from kdskills.environments.codes import ENVIRONMENT_CODES


def test_the_page_has_every_code(repo: Path) -> None:
    """The table at the end of the page is the table of codes."""
    page = (repo / "docs/reference/environments.md").read_text(encoding="utf-8")
    rows = [f"| `{code}` | {meaning} |\n" for code, meaning in ENVIRONMENT_CODES.items()]
    assert page.endswith("| code | meaning |\n|---|---|\n" + "".join(rows))
