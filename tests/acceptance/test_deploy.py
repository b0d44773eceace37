"""What `deploy/` has is what the product has, and what its pages say was really done."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def commands(page: str) -> list[str]:
    """Return the lines of a how-to that begin with `$ `."""
    text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
    return [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]


@pytest.mark.needs("bubblewrap", "postgres", "nats")
@pytest.mark.xdist_group("postgres")
def test_a_newcomer_brings_up_two_hosts(tmp_path: Path) -> None:
    """Every command of the page works as it stands, one after the other: two hosts come up, share work, and go."""
    (tmp_path / "deploy").symlink_to(DEPLOY)
    lines = commands("deploy.md")
    assert lines[0] == "deploy/try up try"
    assert lines[-1] == "deploy/try down try"
    script = "set -euo pipefail\ntrap 'tail -n 20 try/*.log >&2; deploy/try down try' ERR\n" + "".join(
        f"printf '\\n%s\\n' '== {number}'\n{line}\n" for number, line in enumerate(lines)
    )
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("KDSKILLS_", "AWS_"))}
    path = f"{Path(sys.executable).parent}:{variables['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**variables, "PATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    told = dict(zip(lines, re.split(r"\n== \d+\n", "\n" + ran.stdout)[1:], strict=True))

    def said(beginning: str, number: int = 0) -> str:
        return [words for line, words in told.items() if line.startswith(beginning)][number]

    assert said("kdskills fleet").count("live") == 2
    assert '"status":"succeeded"' in said("curl -sS -H", 2)
    assert "event: end" in said("curl -sS -N")
    assert "takes nothing new" in said("kdskills drain")
    assert '"stdout":"still here\\n"' in said("curl -sS -H", 3)
    assert "takes work again" in said("kdskills undrain")
    assert not (tmp_path / "try").exists()
