"""What a script of a skill needs, as its author declared it; nothing is run, and nothing outside the skill's folder is read.

The first that says something about Python speaks alone: the script's own block of inline metadata, a `requirements.txt`, the
skill's `pyproject.toml`, then `python` of `tools.yaml` or of the frontmatter's `metadata.kdskills`. What is declared and cannot
be honoured is an error (`environment_invalid`) with its file and line.
"""

from __future__ import annotations

import json
import posixpath
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from kdskills.environments.model import EnvironmentSpec, NodeSpec
from kdskills.environments.requirements import (
    MAX_REQUIREMENT,
    MAX_REQUIREMENTS,
    RequirementRefused,
    canonical_requirement,
    requirement_lines,
)
from kdskills.errors import AuthorMustAct, Diagnostic, FileRefused
from kdskills.skills import Skill
from kdskills.skills.folder import TOOLS_FILES
from kdskills.skills.safe_open import printable_path, read_file
from kdskills.skills.yaml_core import YamlRefused, load_yaml, to_python

CODE: Final = "environment_invalid"
MAX_FILE_BYTES: Final = 1024 * 1024
"""Bytes of a file that declares something, scripts aside."""
MAX_BLOCK_BYTES: Final = 16 * 1024 * 1024
"""Bytes of a script whose block is read, which may stand anywhere in it; a longer one is refused."""
MAX_LOCK_BYTES: Final = 8 * 1024 * 1024
MAX_INCLUDES: Final = 16
"""Files that one `requirements.txt` may name, those named by them counted."""

MAX_FINDINGS: Final = 50

REQUIREMENTS: Final = "requirements.txt"
NODE_SUFFIXES: Final = frozenset({".js", ".cjs", ".mjs", ".ts"})
_START = re.compile(r"# /// ([A-Za-z0-9-]+)")
_END: Final = "# ///"
_PROGRAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_NODE_NAME = re.compile(r"(?:@[a-z0-9~-][a-z0-9._~-]*/)?[a-z0-9~-][a-z0-9._~-]*", re.IGNORECASE)
_NODE_GROUPS = ("dependencies", "optionalDependencies", "peerDependencies", "devDependencies")
NPM_REGISTRY: Final = "https://registry.npmjs.org/"
_UV_INDEXES = ("index", "index-url", "extra-index-url", "find-links")


class SkillNeeds(NamedTuple):
    """What is declared for a script or for a whole skill, and what of it cannot be honoured.

    `python_origin` and `program_origin` name the file that speaks for Python packages, and for programs.
    """

    spec: EnvironmentSpec
    diagnostics: tuple[Diagnostic, ...] = ()
    python_origin: str = ""
    program_origin: str = ""


def spec_of(skill: Skill, script: str | None = None, *, folder: Path | None = None) -> EnvironmentSpec:
    """Return what *script*, a posix path in the skill, declares that it needs; without one what the skill declares for all.

    *folder* holds the skill's files where they are not at its own path; a skill without files needs nothing.

    Raises AuthorMustAct (`environment_invalid`, with `path` and `line`) for a declaration that cannot be honoured.
    """
    needs = needs_of(skill, script, folder=folder)
    for finding in needs.diagnostics:
        if finding.severity == "error":
            position = f"{finding.path}:{finding.line}" if finding.line else finding.path
            raise AuthorMustAct(
                f"{position}: {finding.message}",
                code=finding.code,
                skill=skill.full_id,
                path=finding.path,
                line=finding.line,
            )
    return needs.spec


def needs_of(skill: Skill, script: str | None = None, *, folder: Path | None = None) -> SkillNeeds:
    """Return what `spec_of` does, with all findings instead of the first as an error."""
    folder = folder or skill.folder
    if folder is None:
        return SkillNeeds(EnvironmentSpec())
    reader = _Reader(folder)
    suffix = posixpath.splitext(script or "")[1].lower()
    fields = _kdskills_fields(skill, reader)
    python = _python_spec(reader, script, fields) if suffix not in NODE_SUFFIXES else EnvironmentSpec()
    node, node_origins = _node_spec(reader, script, fields) if suffix != ".py" else (None, ())
    programs, program_origin = _programs(reader, fields)
    origins = [*python.origins, *node_origins, *([program_origin] if programs else [])]
    spec = replace(python, node=node, programs=programs, origins=tuple(dict.fromkeys(origins)))
    return SkillNeeds(spec, tuple(reader.findings), next(iter(python.origins), ""), program_origin)


def combined(specs: Iterable[EnvironmentSpec]) -> EnvironmentSpec:
    """Return what is needed where all of *specs* are to hold together; whether they can is told by their resolution.

    Node packages stay only where all that have any have the same: each lock is a tree of its own. Raises AuthorMustAct
    (`environment_conflict`) when two allow no common file of one requirement.
    """
    every = list(specs)
    hashes: dict[str, tuple[str, ...]] = {}
    for spec in every:
        for requirement, digests in spec.hashes.items():
            common = sorted(set(digests) & set(hashes.get(requirement, digests)))
            if not common:
                message = f"two files of requirements allow different files of {requirement}"
                raise AuthorMustAct(message, code="environment_conflict", requirement=requirement)
            hashes[requirement] = tuple(common)
    versions = SpecifierSet(",".join(spec.requires_python for spec in every if spec.requires_python))
    nodes = {spec.node for spec in every if spec.node is not None}
    return EnvironmentSpec(
        tuple(sorted({requirement for spec in every for requirement in spec.requirements})),
        str(versions),
        hashes,
        nodes.pop() if len(nodes) == 1 else None,
        tuple(sorted({program for spec in every for program in spec.programs})),
        tuple(sorted({origin for spec in every for origin in spec.origins})),
    )


@dataclass(slots=True)
class _Reader:
    """Reads files of one skill's folder, never through links, and gathers what is wrong with them."""

    folder: Path
    findings: list[Diagnostic] = field(default_factory=list)

    def refuse(self, path: str, message: str, line: int | None = None, *, cure: str | None = None) -> None:
        """Say once that a line cannot be honoured; more than `MAX_FINDINGS` help nobody."""
        path = printable_path(path)
        finding = Diagnostic(CODE, "error", f"{message[:1].upper()}{message[1:]}.", path, line, fix=cure)
        if len(self.findings) < MAX_FINDINGS and finding not in self.findings:
            self.findings.append(finding)

    def data(self, path: str, limit: int = MAX_FILE_BYTES) -> bytes | None:
        """Return a file's bytes, or None when it is not there or, with a finding, cannot be read."""
        try:
            return read_file(self.folder, path, limit=limit).data
        except FileRefused as refusal:
            if refusal.code not in {"file_missing", "not_a_directory"}:
                self.refuse(path, refusal.message)
            return None

    def text(self, path: str) -> str | None:
        """Return a file as text with line ends LF, or None."""
        data = self.data(path)
        if data is None:
            return None
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            self.refuse(path, "it is not UTF-8", data.count(b"\n", 0, error.start) + 1)
            return None
        if "\0" in text:
            self.refuse(path, "it holds a NUL byte", text.count("\n", 0, text.index("\0")) + 1)
            return None
        return text.replace("\r\n", "\n").replace("\r", "\n")


def _candidates(script: str | None, name: str) -> Iterator[str]:
    """Yield where a file that speaks for *script* may lie: beside it, in `scripts/`, at the skill's top."""
    folders = (posixpath.dirname(script) if script else "scripts", "scripts", "")
    yield from dict.fromkeys(posixpath.join(folder, name) for folder in folders)


# -- Python ------------------------------------------------------------------------------------------------------------


def _python_spec(reader: _Reader, script: str | None, fields: Mapping[str, _Field]) -> EnvironmentSpec:
    spec = None if script is None else _inline_spec(reader, script)
    for path in _candidates(script, REQUIREMENTS):
        spec = _file_spec(reader, path) if spec is None else spec
    spec = _project_spec(reader) if spec is None else spec
    if spec is None and "python" in fields:
        origin, words = fields["python"]
        spec = _listed_spec(reader, origin, words)
    return EnvironmentSpec() if spec is None else spec


def script_blocks(text: str) -> tuple[list[str], list[int]]:
    """Return the inline metadata of type `script` in a program's text, one entry a block, with the line each begins at.

    The grammar is that of the published rule: a line `# /// script`, lines that are `#` or begin with `# `, and the last line
    `# ///` before the first that is neither; what is not closed is none. Takes time linear in the text.
    """
    blocks: list[str] = []
    begins: list[int] = []
    comments: list[str] = []
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for number, line in enumerate([*lines, ""]):
        if line == "#" or line.startswith("# "):
            comments.append(line)
            continue
        end = len(comments) - 1
        while end >= 0 and comments[end] != _END:
            end -= 1
        starts = ((index, _START.fullmatch(comment)) for index, comment in enumerate(comments[: max(end - 1, 0)]))
        index, start = next(((index, match) for index, match in starts if match), (0, None))
        if start is not None and start[1] == "script":
            blocks.append("".join(comment[2:] + "\n" for comment in comments[index + 1 : end]))
            begins.append(number - len(comments) + index + 1)
        comments.clear()
    return blocks, begins


def _inline_spec(reader: _Reader, script: str) -> EnvironmentSpec | None:
    """Return what a script says for itself, or None; a script that cannot be looked into says nothing."""
    try:
        data = read_file(reader.folder, script, limit=MAX_BLOCK_BYTES).data
    except FileRefused as refusal:
        if refusal.code != "too_large" or not script.lower().endswith(".py"):
            return None
        message = f"it has more than {MAX_BLOCK_BYTES} bytes, and is not searched for a block of inline metadata"
        reader.refuse(script, message, cure="Keep its data in a file beside it.")
        return EnvironmentSpec()
    if not script.lower().endswith(".py") and not re.match(rb"#![^\n]*python", data):
        return None
    blocks, begins = script_blocks(data.decode("utf-8", "replace").removeprefix("\ufeff"))
    if not blocks:
        return None
    if len(blocks) > 1:
        reader.refuse(script, "it has two blocks of inline metadata", begins[1], cure="Join them.")
        return EnvironmentSpec()
    table = _toml(reader, script, blocks[0], begins[0])
    return _table_spec(reader, script, table, table, blocks[0], begins[0])


def _project_spec(reader: _Reader) -> EnvironmentSpec | None:
    path = "pyproject.toml"
    text = reader.text(path)
    if text is None:
        return None
    table = _toml(reader, path, text, 0)
    project = table.get("project")
    if not isinstance(project, dict) or not project.keys() & {"dependencies", "requires-python"}:
        return None
    return _table_spec(reader, path, project, table, text, 0)


def _toml(reader: _Reader, path: str, text: str, before: int) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        line = re.search(r"at line (\d+)", str(error))
        reader.refuse(path, "its TOML cannot be read", before + int(line[1]) if line else before or None)
        return {}


def _table_spec(
    reader: _Reader, path: str, project: Mapping[str, Any], table: Mapping[str, Any], text: str, before: int
) -> EnvironmentSpec:
    """Return what `dependencies` and `requires-python` of *project* say; *before* lines stand above *text* in the file."""
    lines = text.split("\n")

    def line_of(part: str) -> int | None:
        return next((before + number for number, line in enumerate(lines, 1) if part in line), before or None)

    spec = EnvironmentSpec()
    words = project.get("dependencies", [])
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        spec = _listed_spec(reader, path, words, line_of)
    else:
        reader.refuse(path, "`dependencies` is no list of texts", line_of("dependencies"))
    tool = table.get("tool")
    uv = tool.get("uv") if isinstance(tool, dict) else None
    if isinstance(uv, dict):
        for key in _UV_INDEXES:
            if uv.get(key):
                reader.refuse(path, f"`tool.uv.{key}` is for operators, not for skills", line_of(key))
        names = {re.split(r"[^a-z0-9-]", requirement)[0] for requirement in spec.requirements}
        sources = uv.get("sources")
        for name in sources if isinstance(sources, dict) else ():
            if re.sub(r"[-_.]+", "-", name).lower() in names:
                reader.refuse(
                    path,
                    f"{name!r} has a source of its own, and packages come from the operator's index",
                    line_of(name),
                )
    versions = project.get("requires-python", "")
    try:
        readable = isinstance(versions, str) and len(versions) <= MAX_REQUIREMENT
        return replace(spec, requires_python=str(SpecifierSet(versions if readable else "?")))
    except InvalidSpecifier:
        reader.refuse(path, "`requires-python` is no range of versions", line_of("requires-python"))
        return spec


def _listed_spec(reader: _Reader, path: str, words: Sequence[str], line_of: Any = lambda _: None) -> EnvironmentSpec:
    requirements = set()
    for word in words[:MAX_REQUIREMENTS]:
        try:
            requirements.add(canonical_requirement(word))
        except RequirementRefused as refusal:
            reader.refuse(path, f"{word[:80]!r} cannot be used: {refusal}", line_of(word))
    if len(words) > MAX_REQUIREMENTS:
        reader.refuse(path, f"it names more than {MAX_REQUIREMENTS} packages", line_of(words[MAX_REQUIREMENTS]))
    return EnvironmentSpec(tuple(sorted(requirements)), origins=(path,))


def _file_spec(reader: _Reader, path: str) -> EnvironmentSpec | None:
    """Return what a file of requirements says with those it names, or None when it is not there or names nothing."""
    pending: list[tuple[str, str, int]] = [(path, "", 0)]
    origins: dict[str, None] = {}
    hashes: dict[str, set[str]] = {}
    sound = len(reader.findings)
    while pending:
        current, includer, number = pending.pop(0)
        text = None if current in origins else reader.text(current)
        if text is None:
            if includer and current not in origins:
                reader.refuse(includer, f"{current[:80]!r} cannot be read", number)
            continue
        origins[current] = None
        for row in requirement_lines(text):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(current), row.include))
            if row.problem:
                reader.refuse(current, row.problem, row.line)
            elif not row.include:
                hashes.setdefault(row.text, set()).update(row.hashes)
            elif "://" in row.include or target.startswith(("/", "../")):
                reader.refuse(current, f"{row.include[:80]!r} lies outside the skill", row.line)
            elif len(origins) + len(pending) > MAX_INCLUDES:
                reader.refuse(current, f"more than {MAX_INCLUDES} files are named", row.line)
            else:
                pending.append((target, current, row.line))
            if len(hashes) > MAX_REQUIREMENTS:
                reader.refuse(current, f"more than {MAX_REQUIREMENTS} packages are named", row.line)
                return EnvironmentSpec()
    if not hashes and len(reader.findings) == sound:
        return None
    digests = {requirement: tuple(sorted(each)) for requirement, each in sorted(hashes.items()) if each}
    return EnvironmentSpec(tuple(sorted(hashes)), hashes=digests, origins=tuple(origins))


# -- Fields of skills --------------------------------------------------------------------------------------------------


class _Field(NamedTuple):
    """One list of names in a skill's own files, and which file it stands in."""

    origin: str
    words: list[str]


def _kdskills_fields(skill: Skill, reader: _Reader) -> dict[str, _Field]:
    """Return `python`, `node` and `programs` of `tools.yaml`, or of the frontmatter's `metadata.kdskills`."""
    file_name = Path(skill.file).name if skill.file else "SKILL.md"
    ours: Any = skill.metadata.get("kdskills")
    front = {key: skill.metadata.get(f"kdskills.{key}") for key in ("python", "node", "programs")}
    front |= {key: ours[key] for key in front if isinstance(ours, Mapping) and key in ours}
    tools_file, tools = _tools_table(reader)
    fields: dict[str, _Field] = {}
    for key, frontmatter_value in front.items():
        for origin, value in ((tools_file, tools.get(key)), (file_name, frontmatter_value)):
            words = value.split() if isinstance(value, str) else value
            if isinstance(words, list | tuple) and all(isinstance(word, str) for word in words):
                fields.setdefault(key, _Field(origin, list(words)))
            elif words is not None:
                reader.refuse(origin, f"`{key}` is no list of texts")
    return fields


def _tools_table(reader: _Reader) -> tuple[str, Mapping[str, Any]]:
    for name in TOOLS_FILES:
        try:
            table = to_python(load_yaml(read_file(reader.folder, name, limit=MAX_FILE_BYTES).data.decode()).root)
        except (FileRefused, UnicodeDecodeError, YamlRefused):  # the reader of tools says what is wrong with it
            continue
        return name, table if isinstance(table, Mapping) else {}
    return TOOLS_FILES[0], {}


def _programs(reader: _Reader, fields: Mapping[str, _Field]) -> tuple[tuple[str, ...], str]:
    if "programs" not in fields:
        return (), ""
    origin, words = fields["programs"]
    for word in words:
        if not _PROGRAM.fullmatch(word):
            reader.refuse(origin, f"{word[:80]!r} is no name of a program")
    return tuple(sorted({word for word in words if _PROGRAM.fullmatch(word)})), origin


# -- Node --------------------------------------------------------------------------------------------------------------


def _node_spec(
    reader: _Reader, script: str | None, fields: Mapping[str, _Field]
) -> tuple[NodeSpec | None, tuple[str, ...]]:
    """Return the Node packages of a script and which files say so."""
    for path in _candidates(script, "package.json"):
        manifest = reader.data(path)
        table = None if manifest is None else _json(reader, path, manifest)
        if manifest is not None and table is not None and _check_manifest(reader, path, table):
            lock_path = posixpath.join(posixpath.dirname(path), "package-lock.json")
            lock = reader.data(lock_path, MAX_LOCK_BYTES)
            if lock is not None:
                _check_lock(reader, lock_path, _json(reader, lock_path, lock) or {})
            return NodeSpec(manifest, lock), (path,) if lock is None else (path, lock_path)
    if "node" not in fields:
        return None, ()
    origin, words = fields["node"]
    packages = {}
    for word in words:
        sign = word.find("@", 1)
        packages[word if sign < 0 else word[:sign]] = "*" if sign < 0 else word[sign + 1 :]
    table = {"dependencies": dict(sorted(packages.items()))}
    return (NodeSpec(json.dumps(table).encode()), (origin,)) if _check_manifest(reader, origin, table) else (None, ())


def _json(reader: _Reader, path: str, data: bytes) -> dict[str, Any] | None:
    try:
        table = json.loads(data)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        reader.refuse(path, "it is no JSON object")
        return None
    return table


def _check_manifest(reader: _Reader, path: str, table: Mapping[str, Any]) -> bool:
    """Refuse packages that come from elsewhere than a registry; return whether any is needed."""
    for group in _NODE_GROUPS:
        packages = table.get(group, {})
        if not isinstance(packages, dict):
            reader.refuse(path, f"`{group}` is no mapping of names to versions")
            continue
        for name, versions in packages.items():
            if not _NODE_NAME.fullmatch(name):
                reader.refuse(path, f"{name[:80]!r} is no name of a package")
            elif not isinstance(versions, str) or re.search(r"[:/\\]", versions):
                reader.refuse(path, f"{name!r} comes from elsewhere than the operator's registry")
    for key in ("workspaces", "overrides"):
        if table.get(key):
            reader.refuse(path, f"`{key}` cannot be honoured")
    return bool(table.get("dependencies"))


def _check_lock(reader: _Reader, path: str, table: Mapping[str, Any]) -> None:
    packages = table.get("packages")
    if not isinstance(packages, dict):
        cure = "Write it anew with npm 7 or later."
        reader.refuse(path, "it has no `packages`, as locks of lockfileVersion 2 and 3 do", cure=cure)
        return
    for name, row in packages.items():
        if not name or (isinstance(row, dict) and row.get("inBundle")):
            continue
        row = row if isinstance(row, dict) else {}
        if not str(row.get("resolved") or NPM_REGISTRY).startswith(NPM_REGISTRY) or not row.get("integrity"):
            reader.refuse(path, f"{name[:80]!r} is not locked to a file of the registry with its digest")


def node_packages(node: NodeSpec) -> list[str]:
    """Return the names of the packages that a manifest, already found good, depends on."""
    return sorted(json.loads(node.manifest)["dependencies"])
