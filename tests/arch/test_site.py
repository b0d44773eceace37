"""The documentation as a site: it builds without a warning, and describes every public name from its docstring."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
SHAPES = ("li", "table", "tr", "pre", "h1", "h2", "h3")
pytestmark = [pytest.mark.xdist_group("site"), pytest.mark.timeout(400)]


def build(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Build a site into *folder*."""
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=390)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once."""
    folder = tmp_path_factory.mktemp("site")
    run = build(folder)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "WARNING" not in run.stderr, run.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def hooks() -> dict[str, object]:
    """What the site's hooks define."""
    return runpy.run_path(str(ROOT / ".ci" / "site.py"))


def test_every_page_is_on_the_site(site: Path) -> None:
    """Each page of the documentation is there, in the order of pages, too; fragments of changes are not."""
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if page.parts[0] != "changelog"} - {Path("README.html")}
    assert [page for page in sorted(pages) if not (site / page).exists()] == []
    listed = (site / "index.html").read_text(encoding="utf-8").partition('role="main"')[0]
    assert [page for page in sorted(pages) if f'href="{page}"' not in listed] == []
    assert [path.name for path in (site / "changelog").glob("*.html")] == ["CHANGELOG.html"]


def test_every_public_name_is_described(site: Path, hooks: dict[str, object]) -> None:
    """Each name that a package with a promise exports is described on its page, or linked to where it is."""
    missing = []
    for package, promise in hooks["promises"]().items():
        module = import_module(package)
        page = site / "api" / f"{package}.html"
        assert page.exists() is (promise != "internal")
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        names = getattr(module, "__all__", []) if promise != "internal" else []
        missing += [
            f"{package}.{name}"
            for name in names
            if f'id="{package}.{name}"' not in text
            and not re.search(rf'href="kdskills[\w.]*html#[\w.]*\.{name}"', text)
        ]
    assert missing == []


def test_pages_are_the_same_here_and_there(site: Path) -> None:
    """Lists, tables, blocks and headings of a page are those that hosts of repositories show of it."""
    markdown, different = MarkdownIt("commonmark").enable("table"), {}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        path = page.relative_to(ROOT / "docs").with_suffix(".html")
        html = site / ("index.html" if path == Path("README.html") else path)
        if html.exists():
            shown = html.read_text(encoding="utf-8").partition('role="main"')[2].partition("<footer")[0]
            there = markdown.render(page.read_text(encoding="utf-8"))
            counts = {tag: [len(re.findall(f"<{tag}[ >]", text)) for text in (there, shown)] for tag in SHAPES}
            different |= {f"{path} {tag}": count for tag, count in counts.items() if len(set(count)) > 1}
    assert different == {}


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    """Pages load no script, style, font or picture of another host."""
    tags = re.compile(r"<(?:script|img|iframe)[^>]* src=\"(?:https?:)?//[^\"]+|<link[^>]* href=\"(?:https?:)?//[^\"]+")
    styles = re.compile(r"(?:@import\s+|url\()[\"']?(?:https?:)?//[^)]+")
    pages, sheets = site.rglob("*.html"), site.rglob("*.css")
    foreign = {load for page in pages for load in tags.findall(page.read_text(encoding="utf-8"))}
    foreign |= {load for sheet in sheets for load in styles.findall(sheet.read_text(encoding="utf-8"))}
    assert foreign == set()


@pytest.mark.parametrize("link", ["no-page.md", "#no-anchor", "../README.md", "/other.md"])
def test_a_broken_link_fails_the_build(tmp_path: Path, link: str) -> None:
    """A page, an anchor, a file outside the documentation and an absolute link that lead nowhere are errors."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n[leads nowhere]({link})\n", encoding="utf-8")
    settings = f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {tmp_path / 'docs'}\nhooks: []\nplugins: []\nextra_css: []\n"
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    run = build(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert (run.returncode, link in run.stderr) == (1, True), run.stderr


def test_packages_have_a_promise(hooks: dict[str, object]) -> None:
    """Every package that lists its names has a row in the table of promises, and every row is of one that imports."""
    lists = {
        ".".join(path.relative_to(ROOT).parts[:-1])
        for path in (ROOT / "kdskills").rglob("__init__.py")
        if "\n__all__ = " in path.read_text(encoding="utf-8")
    }
    rows = hooks["promises"]()
    assert lists - set(rows) == set()
    assert [name for name in rows if import_module(name).__name__ != name] == []
    assert set(rows.values()) == {"stable", "provisional", "internal"}


def test_the_first_page_lists_the_extras() -> None:
    """Whoever installs sees every extra that there is, and none that there is not."""
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", text.partition("## Install")[2].partition("\n## ")[0], re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(extras)


def test_the_site_is_not_of_the_repository() -> None:
    """What `make docs` writes is ignored by git."""
    run = subprocess.run(
        ["git", "check-ignore", "site/index.html"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, f"site{os.sep}index.html\n")
