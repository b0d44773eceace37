"""Hooks of mkdocs: the order of pages, a list for each folder, and the library's reference from its docstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = {"tutorial": "Tutorial", "how-to": "How-to", "reference": "Reference", "explanation": "Explanation"}
PROMISES = re.compile(r"^\| `(kdskills[\w.]*)` \| (\w+) \|", re.MULTILINE)
FOLDER_LINK = re.compile(rf"\]\(((?:\.\./)*(?:{'|'.join(SECTIONS)}))/?\)")
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
BARE = "    options: {members: false, show_root_heading: false, show_root_toc_entry: false}"


def promises() -> dict[str, str]:
    """Return what each package promises that `docs/reference/stability.md` has a row for."""
    return dict(PROMISES.findall((ROOT / "docs" / "reference" / "stability.md").read_text(encoding="utf-8")))


def source_of(name: str) -> Path:
    """Return the file of a package or module; it need not exist."""
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exports_of(name: str) -> list[str]:
    """Return `__all__`; without one the functions and classes of a module, or the modules of a package."""
    source = source_of(name)
    body = ast.parse(source.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    named = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    modules = sorted(
        {path.stem for path in source.parent.glob("*.py")}
        | {path.parent.name for path in source.parent.glob("*/__init__.py")}
    )
    return [each for each in (modules if source.name == "__init__.py" else named) if not each.startswith("_")]


def _definition(package: str, name: str) -> str:
    """Return the dotted name of what a package exports, where it is defined."""
    source = source_of(package)
    if source.exists():
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and name in {each.asname or each.name for each in node.names}
            ):
                return _definition(node.module, name)
    return f"{package}.{name}"


def api_pages() -> dict[str, str]:
    """Return the text of each package's page; a name of several packages is told once, and on other pages a link."""
    packages = [name for name, promise in promises().items() if promise != "internal"]
    exports = {package: {name: _definition(package, name) for name in exports_of(package)} for package in packages}
    homes: dict[str, str] = {}
    for package in sorted(packages, key=lambda package: (package == "kdskills", package)):
        for definition in exports[package].values():
            homes.setdefault(definition, package)
    pages = {}
    for package, names in exports.items():
        links = [
            f"| `{name}` | [{homes[target]}]({homes[target]}.md#{homes[target]}.{name}) |"
            for name, target in names.items()
            if homes[target] != package
        ]
        text = [f"# {package}", f"::: {package}\n{BARE}"]
        text += ["\n".join(("| name | described at |", "|---|---|", *links))] if links else []
        text += [f"::: {package}.{name}" for name, target in names.items() if homes[target] == package]
        pages[f"api/{package}.md"] = "\n\n".join(text) + "\n"
    return pages


def _title(file: File) -> str:
    """Return the first heading of a page."""
    return re.search(r"^# +(.+)$", file.content_string, re.MULTILINE)[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and order all of them: none is left out."""
    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=text))
    titles = {file.src_uri: _title(file) for file in files.documentation_pages()}
    ordered = sorted(titles, key=lambda uri: titles[uri].lower())
    nav: list[dict[str, str | list[str]]] = [{"First steps": "README.md"}]
    for folder, heading in SECTIONS.items():
        pages = [uri for uri in ordered if uri.startswith(f"{folder}/")]
        text = "\n".join((f"# {heading}", "", *(f"* [{titles[uri]}]({Path(uri).name})" for uri in pages), ""))
        files.append(File.generated(config, f"{folder}/README.md", content=text))
        nav.append({heading: [f"{folder}/README.md", *pages]})
    nav.append({"Library": [uri for uri in ordered if uri.startswith("api/")]})
    config.nav = [*nav, {"Changes": "changelog/CHANGELOG.md"}]
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Read pages as hosts of repositories do: a link to a folder shows its pages, two blanks go on with an item of a list."""
    parts = FENCE.split(FOLDER_LINK.sub(r"](\1/README.md)", markdown))
    indented = [re.sub(r"^(?=  )", "  ", part, flags=re.MULTILINE) for part in parts[::2]]
    parts[::2] = [re.sub(r"(\n\n(?:    .*\n)+)(?=[*-] )", r"\1\n", part) for part in indented]
    return "".join(parts)
