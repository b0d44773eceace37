"""The engine of the how-to page, a subclass of a few lines, keeps the promises that do not need a wall."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kdskills.execution import IsolationLevel
from kdskills.execution.protocol import ExecutionOptions
from kdskills.testing.executors import conformance

PAGE = Path(__file__).parents[2] / "docs/how-to/write-an-executor.md"
SOURCE = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))


@pytest.fixture
def executor(tmp_path):
    """Return the page's engine with the operator's consent and folders of its own."""
    names = {}
    exec(compile(SOURCE, str(PAGE), "exec"), names)
    options = ExecutionOptions(allow_unisolated=True, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state")
    return names["PlainExecutor"](options)


def test_an_engine_is_small():
    """What differs between engines fits a page."""
    assert SOURCE.count("\n") <= 150


@conformance(IsolationLevel.NONE)
async def test_the_engine_of_the_page_keeps_its_promise(executor, promise):
    """One promise of the suite, by name."""
    await promise.check(executor)
