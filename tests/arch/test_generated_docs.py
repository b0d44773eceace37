"""Reference pages made from code say what the code says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from kdskills.app.settings import BusSettings, kind_of, setting_rows

ROW = re.compile(r"^\| `([^`]+)` \| .* \| `([^`]*)` \| [^|]*\|$", re.MULTILINE)


def test_generated_pages_are_current(repo: Path) -> None:
    """Settings, errors and command-line pages are what `.ci/reference` writes today."""
    run = subprocess.run(
        [sys.executable, str(repo / ".ci" / "reference"), "--check"], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


def test_defaults_stand_as_a_reader_would_write_them(repo: Path) -> None:
    """Defaults of lists and tables are the JSON that their variables take, and are the ones that hold."""
    page = dict(ROW.findall((repo / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")))
    kinds = {name: kind_of(field) for name, field in setting_rows() if kind_of(field)}
    assert {name: type(json.loads(page[name])).__name__ for name in kinds} == {
        name: "dict" if kind == "table" else "list" for name, kind in kinds.items()
    }
    bus = BusSettings()
    assert (json.loads(page["bus.channels"]), json.loads(page["bus.projects"])) == (bus.channels, list(bus.projects))
