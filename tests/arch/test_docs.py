"""Every example in the documentation runs, and says what it prints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kdskills.models import ModelReply
from kdskills.testing.model_server import Asked, ModelServer
from kdskills.testing.models import call, say

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.timeout(400)
KNOWN = {"python", "console", "text", "yaml", "json", "markdown", "toml", "xml", "ini", "html", "dockerfile"}


@dataclass(frozen=True)
class Example:
    """One fenced block."""

    language: str
    options: str
    text: str
    line: int


def examples(page: Path) -> list[Example]:
    """Return the fenced blocks of *page*."""
    text = page.read_text(encoding="utf-8")
    return [Example(m[1], m[2].strip(), m[3], text[: m.start()].count("\n") + 1) for m in FENCE.finditer(text)]


def matches(expected: str, printed: str) -> bool:
    """Compare output with `...` standing for any text, within a line or over lines."""
    pattern = re.escape(expected.strip()).replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that looks like the repository's top to an example."""
    shutil.copytree(ROOT / "bundles", tmp_path / "bundles", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_fences_have_a_known_language(page: Path) -> None:
    """A block names its language, so that none escapes the tests by accident."""
    opened = re.findall(r"^```([^\n]*)$", page.read_text(encoding="utf-8"), re.MULTILINE)[::2]
    assert [word for word in opened if word.split(" ")[0] not in KNOWN] == []


def _environment(place: Path) -> dict[str, str]:
    """Return the variables of an example's program: nothing of it stays on the machine."""
    bin_folder = str(Path(sys.executable).parent)
    return os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "NO_COLOR": "1",
        "COLUMNS": "120",
        "TERM": "dumb",
        "KDSKILLS_STATE_DIR": f"{place}-state",
    }


def reader(asked: Asked) -> ModelReply:
    """Stands for a provider's model in the programs of pages: loads a skill, and answers once it has its text."""
    if not asked.results:
        return call("skills_load", names=["profile"])
    assert "# Profile" in asked.instructions
    return say("The table has no gaps.")


@pytest.fixture(scope="module")
def providers() -> Iterator[dict[str, str]]:
    """Variables that lead the SDKs of model providers to a server of ours."""
    with ModelServer(reader) as server:
        yield {
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": f"{server.url}/v1",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_BASE_URL": server.url,
            "GOOGLE_API_KEY": "none",
            "GOOGLE_GEMINI_BASE_URL": server.url,
        }


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if any(e.language == "python" for e in examples(p))],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_python_examples_run(page: Path, place: Path, providers: dict[str, str]) -> None:
    """The Python blocks of a page, run in order as one program, end without an error or warning."""
    program = "\n".join(f"# line {e.line}\n{e.text}" for e in examples(page) if e.language == "python")
    # google-genai's own class, which warns where aiohttp is installed, as the client of Kubernetes brings it
    theirs = "ignore:Inheritance class AiohttpClientSession:DeprecationWarning"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-W", theirs, "-"],
        input=program,
        cwd=place,
        env=_environment(place) | providers,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.needs("bubblewrap")
@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if any(e.language == "console" for e in examples(p))],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_console_examples_run(page: Path, place: Path) -> None:
    """Each `$ command` of a page prints what the page shows below it; `...` stands for what differs from run to run."""
    for example in (e for e in examples(page) if e.language == "console"):
        for part in re.split(r"^\$ ", example.text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            while command.endswith("\\"):
                more, _, expected = expected.partition("\n")
                command = f"{command[:-1]} {more.strip()}"
            run = subprocess.run(
                ["bash", "-c", command],
                cwd=place,
                env=_environment(place),
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
            printed = run.stdout + run.stderr
            assert matches(expected, printed) or not expected.strip(), f"line {example.line}: {command}\n{printed}"
            if not expected.strip():
                assert run.returncode == 0, f"line {example.line}: {command}\n{printed}"


def test_links_between_pages_resolve() -> None:
    """Every relative link of a page leads to a file that exists."""
    broken = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target and not target.startswith("mailto:") and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


PATH_IN_TEXT = re.compile(r"`((?:kdskills|runtime|tests|bundles)/[\w/.]+|(?:README|pyproject)\.\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    """A path of this repository in a page is that of a file or folder, so that a tour does not lead astray."""
    if page.name == "CHANGELOG.md":  # what was, keeps its names
        return
    names = PATH_IN_TEXT.findall(page.read_text(encoding="utf-8"))
    assert [name for name in names if not (ROOT / name.rstrip("/")).exists()] == []
