"""Reference pages made from code say what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_generated_pages_are_current(repo: Path) -> None:
    """Settings, errors and command-line pages are what `.ci/reference` writes today."""
    run = subprocess.run(
        [sys.executable, str(repo / ".ci" / "reference"), "--check"], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, ""), run.stderr
