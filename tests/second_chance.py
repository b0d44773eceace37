"""Pytest plugin of the gates: notes which tests failed, and runs only those that were noted.

Thousands of tests of real processes share two cores in a run. A test that fails there and passes alone is unsteady: its
name is printed, so that it is mended, and the run is judged by the second look. `.ci/gates` allows that for a few tests
and only where `KDSKILLS_SECOND_CHANCE` says how many.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two options, each with a file of test ids, one a line."""
    group = parser.getgroup("second chance")
    group.addoption("--failed-to", type=Path, help="write the ids of failed tests there")
    group.addoption("--only-from", type=Path, help="run only the tests whose ids stand there")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write what failed, in setup and teardown too."""
    path: Path | None = config.getoption("failed_to")
    if path is not None:
        bad = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, ())]
        path.write_text("".join(f"{one}\n" for one in sorted({report.nodeid for report in bad})), encoding="utf-8")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the noted tests."""
    path: Path | None = config.getoption("only_from")
    if path is None:
        return
    noted = set(path.read_text(encoding="utf-8").splitlines())
    kept = [item for item in items if noted & _names(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _names(item: pytest.Item) -> set[str]:
    """Return the ids a test may have been noted by: tests kept together on one worker have the group's name behind theirs."""
    groups = [mark.args[0] if mark.args else mark.kwargs["name"] for mark in item.iter_markers("xdist_group")]
    return {item.nodeid, *(f"{item.nodeid}@{group}" for group in groups)}
