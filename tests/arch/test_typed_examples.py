"""Type checkers accept the Python examples of the documentation, strictly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if FENCE.search(page.read_text(encoding="utf-8"))
)

SURFACE = """\
from typing import assert_type

from pydantic import BaseModel

from kdskills import Host, SkillRuntime
from kdskills.app.operations.showing import ListOutput
from kdskills.session import ToolReply


def narrow(reply: ToolReply) -> None:
    if reply.ok is True:
        assert_type(reply.error, None)
        print(reply.result["names"])
    else:
        assert_type(reply.result, None)
        print(reply.error["code"])
    if reply.error is None:
        print(reply.result["names"])


async def typed(host: Host, operation: str) -> None:
    assert_type(host.run("skills.list"), ListOutput)
    assert_type(await host.call("skills.list"), ListOutput)
    assert_type(await host.call(operation), BaseModel)
    async with SkillRuntime() as runtime:
        assert_type(runtime, SkillRuntime)
"""
"""What a newcomer relies on: replies are narrowed by `ok`, operations are typed by their names."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the examples of each page as one program, at the lines where they stand in the page."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [""] * (text.count("\n") + 2)
        for match in FENCE.finditer(text):
            start = text[: match.start()].count("\n") + 1
            for number, line in enumerate(match[1].splitlines()):
                lines[start + number] = line
        name = re.sub(r"\W+", "_", str(page.relative_to(ROOT).with_suffix("")))
        (tmp_path / f"{name}.py").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "the_surface.py").write_text(SURFACE, encoding="utf-8")
    return tmp_path


def test_there_are_examples() -> None:
    """There are pages to check."""
    assert len(PAGES) > 25


def test_mypy_accepts_the_examples(programs: Path) -> None:
    """`mypy --strict` finds nothing; a page may define a name again, as its programs are several."""
    files = sorted(str(path) for path in programs.glob("*.py"))
    cache = "--cache-dir=.mypy_cache/examples"  # one shared with the gate's other options would be made anew each time
    config = programs / "mypy.ini"  # no page shows anything of the cluster's client, which is some hundred modules
    config.write_text("[mypy]\n[mypy-kubernetes.*]\nfollow_imports = skip\nignore_missing_imports = true\n")
    options = ["--strict", "--disable-error-code=no-redef", f"--config-file={config}", cache]
    command = [sys.executable, "-m", "mypy", *options, *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=390)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]


@pytest.mark.needs("pyright")
def test_pyright_accepts_the_examples(programs: Path) -> None:
    """Pyright in strict mode finds nothing, either."""
    config = {
        "typeCheckingMode": "strict",
        "pythonVersion": "3.11",
        "include": ["."],
        "reportRedeclaration": "none",  # a page holds several programs
        "reportDuplicateImport": "none",
    }
    (programs / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", str(programs)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=390)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
