"""The reference pages say what the code says."""

from __future__ import annotations

import re

import pytest

from kdskills.session.codes import CODES, PATH_REASONS
from kdskills.session.config import BOUNDS, INTERPRETERS, RuntimeLimits
from kdskills.session.tools import INPUTS


@pytest.fixture
def page(repo):
    """The page of the runtime tools."""
    return (repo / "docs/reference/runtime-tools.md").read_text(encoding="utf-8")


def test_every_code_is_documented(page):
    """The table of codes has each code with who must act, and no other."""
    rows = re.findall(r"^\| `([a-z_]+)` \| (model|caller|author|operator|user) \|", page, re.MULTILINE)
    assert rows == [(code, facts.who) for code, facts in CODES.items()]


def test_every_tool_and_field_is_documented(page):
    """Each tool has a section naming its fields in order."""
    for tool, model in INPUTS.items():
        section = page.partition(f"## `{tool}`")[2].partition("\n## ")[0]
        assert re.findall(r"^\| `([a-z_]+)` \| (?!model|caller)", section, re.MULTILINE) == list(model.model_fields)


def test_every_limit_interpreter_and_reason_is_documented(page):
    """Limits, suffixes and reasons of path_denied are all named."""
    limits = RuntimeLimits()
    assert [name for name in BOUNDS if f"| `{name}` | {getattr(limits, name):,} |" not in page] == []
    assert [
        suffix for suffix, command in INTERPRETERS.items() if f"| `{suffix}` | `{' '.join(command)}` |" not in page
    ] == []
    assert [reason for reason in PATH_REASONS if f"`{reason}`" not in page] == []


def test_every_code_has_a_test(repo):
    """Each code of the table stands in a test of this room."""
    text = "".join(path.read_text(encoding="utf-8") for path in (repo / "tests/unit/session").glob("test_*.py"))
    assert [code for code in CODES if f'"{code}"' not in text] == []
