"""The rooms' rules of import hold, told by import-linter from pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_import_contracts_hold(repo: Path) -> None:
    """Every import contract of pyproject.toml is kept."""
    run = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c(['--no-cache'])"],
        cwd=repo,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout.count("BROKEN"), run.stdout.count("KEPT") >= 10) == (0, 0, True), run.stdout[
        -3000:
    ]
