"""Every line of the page on threats is shown by a test that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = "docs/explanation/threats.md"


def test_the_tests_of_the_threats_are_there(repo: Path) -> None:
    """Each line of a table names a file of tests, and where it names a test, that test is in the file."""
    rows = [
        line
        for line in (repo / PAGE).read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and not line.startswith("| it cannot")
    ]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[^`]+)`", row)
        assert named, f"no test shows: {row}"
        for name in named:
            path, _, test = name.partition("::")
            tree = ast.parse((repo / path).read_text(encoding="utf-8"))
            tests = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert any(each.startswith("test_") for each in tests), name
            assert not test or test in tests, name
