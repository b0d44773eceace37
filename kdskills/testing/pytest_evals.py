"""Evaluations of bundles as tests of pytest: `pytest --kdskills-evals BUNDLE` adds an item for each row.

pytest loads this by the entry point `kdskills_evals` in every run, so that it imports nothing of kdskills before it is asked for.
"""

from __future__ import annotations

import asyncio
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from kdskills.bundle import Bundle
    from kdskills.evals import Eval

KINDS = ("retrieval", "trigger", "run")


class EvalFailed(Exception):
    """A row did not pass; the message says why."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, each of which may stand in the ini file as well."""
    group = parser.getgroup("kdskills", "evaluations of bundles")
    words = "Bundle whose evaluations are run, an item for each row; its Python runs. Again for more."
    group.addoption("--kdskills-evals", action="append", default=[], metavar="BUNDLE", help=words)
    group.addoption("--kdskills-evals-kind", choices=KINDS, help="What is found out; retrieval by default.")
    group.addoption(
        "--kdskills-evals-model", metavar="MODEL", help="Model that trigger and run ask, such as openai:NAME."
    )
    parser.addini("kdskills_evals", "Bundles whose evaluations are run.", type="paths", default=[])
    parser.addini("kdskills_evals_kind", "retrieval, trigger or run.", default="retrieval")
    parser.addini("kdskills_evals_model", "Model that trigger and run ask.", default="replay")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add an item for each evaluation of the bundles that are named."""
    folders: list[Path | str] = config.getoption("--kdskills-evals") or config.getini("kdskills_evals")
    if not folders:
        return
    from kdskills.bundle import load_bundle
    from kdskills.errors import KdskillsError
    from kdskills.evals import read

    for folder in folders:
        try:
            bundle = load_bundle(folder)
        except KdskillsError as error:
            raise pytest.UsageError(f"{error.code}: {error.message}") from None
        rows = read(bundle.root)
        for finding in rows.diagnostics:
            config.issue_config_time_warning(pytest.PytestWarning(str(finding)), 2)
        for row in rows.evals:
            name = f"{folder}::{row.id}"
            items.append(EvalItem.from_parent(session, name=row.id, nodeid=name, bundle=bundle, row=row))


class EvalItem(pytest.Item):
    """One evaluation of a bundle."""

    def __init__(self, *, bundle: Bundle, row: Eval, **node: Any) -> None:
        super().__init__(**node)
        self._bundle, self._row = bundle, row

    def runtest(self) -> None:
        """Run the evaluation. Raises EvalFailed; what nobody judged is skipped."""
        from kdskills import evals

        kind = self.config.getoption("--kdskills-evals-kind") or self.config.getini("kdskills_evals_kind")
        model = self.config.getoption("--kdskills-evals-model") or self.config.getini("kdskills_evals_model")
        with tempfile.TemporaryDirectory(prefix="kdskills-eval-") as folder:
            running = evals.run(self._bundle, [self._row], kind, workspace=folder, model=model)
            rows = asyncio.run(running).rows
        failed = [row for row in rows if row.status in {"failed", "error"} and row.side == "with_skill"]
        if not failed and any(row.status == "ungraded" for row in rows):
            pytest.skip("nobody judged it")
        for row in failed:
            words = [f"{each.text}: {each.evidence}" for each in row.verdicts if each.passed is False]
            picked = f"{', '.join(row.picked[:3]) or 'no skill'} came first, not {row.skill or 'none'}"
            raise EvalFailed(": ".join(row.error) if row.error else "\n".join(words) or picked)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return why a row failed, without a traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, EvalFailed) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int | None, str]:
        """Return where the row stands, and its name."""
        return self._row.source.partition("#")[0], None, self.name
