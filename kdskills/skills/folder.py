"""One skill folder on disk: the skill file, its companions (compact.md, tools.yaml, sources.yaml), and its long texts.

The readers of companions are pure functions over bytes already read. A broken `tools.yaml` is an error, for a lost gate would
open the skill; the other two only cost what they would have added.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kdskills.errors import Diagnostic, FileRefused
from kdskills.skills.digest import rows_digest, tree_digest
from kdskills.skills.fields import FALSE_WORDS, near_required
from kdskills.skills.findings import FileFindings
from kdskills.skills.frontmatter import BOM, MAX_SKILL_BYTES, read_body, trim_body
from kdskills.skills.listing import SKILL_FILES, SKILL_YAML
from kdskills.skills.model import SkillTool, Verdict
from kdskills.skills.safe_open import read_file
from kdskills.skills.yaml_core import (
    Document,
    Fields,
    Items,
    Node,
    Scalar,
    YamlLimits,
    YamlRefused,
    load_yaml,
    to_python,
)

COMPACT_FILE = "compact.md"
TOOLS_FILES = ("tools.yaml", "tools.yml")
SOURCES_FILES = ("sources.yaml", "sources.yml")
MAX_COMPACT_BYTES = 256 * 1024
MAX_TOOLS_BYTES = 64 * 1024
MAX_SOURCES_BYTES = 1024 * 1024
MAX_SOURCES_ROWS = 2_000

_SOURCES_LIMITS = YamlLimits(nodes=200_000, size=MAX_SOURCES_BYTES)
_FENCES = re.compile(r"---[^\S\n]*\n(?:.*\n)*?---[^\S\n]*(?:\n|$)")
_OPTIONAL = FALSE_WORDS | {"optional", "soft", "preferred", "recommended"}
_TOOL_KEYS = frozenset({"id", "role", "why", "reason", "description", "required", "hard_required", "availability"})


class CompactRead(NamedTuple):
    """`compact.md`: its text, or None when it cannot be used."""

    text: str | None
    findings: tuple[Diagnostic, ...] = ()


class ToolsRead(NamedTuple):
    """`tools.yaml`: its tools."""

    tools: tuple[SkillTool, ...]
    findings: tuple[Diagnostic, ...] = ()


class SourcesRead(NamedTuple):
    """`sources.yaml`: its rows as written."""

    rows: tuple[Mapping[str, Any], ...]
    findings: tuple[Diagnostic, ...] = ()


class _Unusable(Exception):
    """A companion cannot be used; the message says why."""

    def __init__(self, message: str, position: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.position = position


def limit_of(name: str) -> int:
    """Return the most bytes a companion called *name* may have."""
    if name == COMPACT_FILE:
        return MAX_COMPACT_BYTES
    return MAX_TOOLS_BYTES if name in TOOLS_FILES else MAX_SOURCES_BYTES


def code_of(name: str) -> str:
    """Return the code that says that the companion *name* cannot be used."""
    if name == COMPACT_FILE:
        return "compact_invalid"
    return "tools_invalid" if name in TOOLS_FILES else "sources_invalid"


def unusable(
    name: str, reason: str, *, path: str | None = None, verdict: Verdict = "lenient"
) -> tuple[Diagnostic, ...]:
    """Return the finding for a companion that cannot even be read, for the *reason* given.

    Args:
        name: Its file name.
        reason: A clause, such as "it is a link".
        path: Path for the finding; *name* when omitted.
        verdict: Decides on the severity.
    """
    return _finding(name, _Unusable(reason), name if path is None else path, verdict)


def _finding(name: str, error: _Unusable, path: str, verdict: Verdict) -> tuple[Diagnostic, ...]:
    findings = FileFindings(verdict, path)
    findings.add(code_of(name), f"`{name}` cannot be used: {error.message}.", position=error.position)
    return tuple(findings.items)


def read_compact(
    data: bytes, *, name: str = COMPACT_FILE, path: str | None = None, verdict: Verdict = "lenient"
) -> CompactRead:
    """Return the text of `compact.md`; unusable ones give None and `compact_invalid`."""
    try:
        text = _compact_text(data)
    except _Unusable as error:
        return CompactRead(None, _finding(name, error, name if path is None else path, verdict))
    return CompactRead(text)


def _compact_text(data: bytes) -> str:
    text = trim_body(_text(data, MAX_COMPACT_BYTES))
    if _FENCES.match(text):
        raise _Unusable("it begins with frontmatter", (1, 1))
    if not text:
        raise _Unusable("it is empty")
    return text


def read_tools(
    data: bytes, *, name: str = TOOLS_FILES[0], path: str | None = None, verdict: Verdict = "lenient"
) -> ToolsRead:
    """Return the tools named in `tools.yaml`; anything not understood is `tools_invalid`, an error."""
    try:
        return ToolsRead(tuple(_tool(node) for node in _tool_nodes(data)))
    except _Unusable as error:
        return ToolsRead((), _finding(name, error, name if path is None else path, verdict))


def _tool_nodes(data: bytes) -> list[Node]:
    document = _yaml(_text(data, MAX_TOOLS_BYTES), YamlLimits())
    _no_duplicates(document)  # keeping the first could lose a gate
    root = document.root
    if isinstance(root, Fields):
        root = _tool_list(root)
    if not isinstance(root, Items):
        raise _Unusable("it is neither a list nor a mapping with `tools`", (1, 1))
    return root.items


def _tool_list(root: Fields) -> Node | None:
    """Return the list in a mapping; both keys together are joined, lest a gate is lost."""
    lists = [root.items[key] for key in ("tools", "tool_ids") if key in root.items]
    if not lists:
        raise _Unusable("it has neither `tools` nor `tool_ids`", (1, 1))
    if len(lists) == 1:
        return lists[0]
    if not all(isinstance(node, Items) for node in lists):
        raise _Unusable("`tools` and `tool_ids` are not both lists", (1, 1))
    joined = Items(root.mark, flow=False)
    for node in lists:
        assert isinstance(node, Items)
        joined.items.extend(node.items)
    return joined


def _tool(node: Node) -> SkillTool:
    position = (node.mark.line + 1, node.mark.column + 1)
    if isinstance(node, Scalar):
        if node.null or not node.text.strip():
            raise _Unusable("an entry is blank", position)
        return SkillTool(node.text.strip())
    if not isinstance(node, Fields):
        raise _Unusable("an entry is neither an id nor a mapping", position)
    tool_id = _word(node, "id")
    if not tool_id:
        raise _Unusable("an entry has no `id`", position)
    why = next((text for text in (_word(node, key) for key in ("why", "reason", "description")) if text), "")
    return SkillTool(tool_id, _word(node, "role"), why, _required(node))


def _word(node: Fields, key: str) -> str:
    item = node.items.get(key)
    return item.text.strip() if isinstance(item, Scalar) and not item.null else ""


def _required(node: Fields) -> bool:
    """Whether an entry gates its skill; what is not understood does."""
    for key in ("required", "hard_required"):
        if key in node.items and _yes(node.items[key]):
            return True
    if "availability" in node.items and _mandatory(node.items["availability"]):
        return True
    return any(
        (_yes(item) if "avail" not in key.lower() else _mandatory(item))
        for key, item in node.items.items()
        if key not in _TOOL_KEYS and near_required(key)
    )


def _yes(item: Node) -> bool:
    if not isinstance(item, Scalar):
        return True
    return not item.null and item.text.strip().lower() not in FALSE_WORDS


def _mandatory(item: Node) -> bool:
    if not isinstance(item, Scalar):
        return True
    return not item.null and item.text.strip().lower() not in _OPTIONAL


def read_sources(
    data: bytes, *, name: str = SOURCES_FILES[0], path: str | None = None, verdict: Verdict = "lenient"
) -> SourcesRead:
    """Return the rows of `sources.yaml` as written, a mapping of sids with `sid` filled in; else `sources_invalid`.

    What the rows mean is decided by `kdskills.sources.normalize_sources`.
    """
    notes = FileFindings(verdict, name if path is None else path)
    try:
        document = _yaml(_text(data, MAX_SOURCES_BYTES), _SOURCES_LIMITS)
        if verdict == "lenient":
            for key, mark in document.duplicates:
                message = f"The key `{key}` stands twice; the first one counts."
                notes.add("duplicate_key", message, position=(mark.line + 1, mark.column + 1), ref=key)
        else:
            _no_duplicates(document)
        rows = _rows(to_python(document.root), notes)
    except _Unusable as error:
        return SourcesRead((), (*notes.items, *_finding(name, error, notes.path, verdict)))
    return SourcesRead(rows, tuple(notes.items))


def _rows(value: object, notes: FileFindings) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, dict):
        value = next((value[key] for key in ("sources", "items") if isinstance(value.get(key), list | dict)), value)
    if isinstance(value, dict):
        value = [{**row, "sid": sid} if isinstance(row, dict) else row for sid, row in value.items()]
    if not isinstance(value, list):
        raise _Unusable("it is neither a list of rows nor a mapping of them", (1, 1))
    if len(value) > MAX_SOURCES_ROWS:
        raise _Unusable(f"it has {len(value):,} rows, more than {MAX_SOURCES_ROWS:,}")
    rows = tuple(row for row in value if isinstance(row, dict))
    if value and not rows:
        raise _Unusable("it is neither a list of rows nor a mapping of them", (1, 1))
    if len(rows) < len(value):
        notes.add("sources_invalid", f"{len(value) - len(rows)} entries are no rows and are left out.")
    return rows


def _text(data: bytes, limit: int) -> str:
    if len(data) > limit:
        raise _Unusable(f"it has {len(data):,} bytes, more than {limit:,}")
    if b"\0" in data:
        raise _Unusable("it holds a NUL byte", (data.count(b"\n", 0, data.index(b"\0")) + 1, 1))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Unusable("it is not UTF-8", (data.count(b"\n", 0, error.start) + 1, 1)) from error
    return text.removeprefix(BOM).replace("\r\n", "\n").replace("\r", "\n")


def _yaml(text: str, limits: YamlLimits) -> Document:
    try:
        document = load_yaml(text, limits)
    except YamlRefused as refusal:
        position = (refusal.position[0] + 1, refusal.position[1] + 1) if refusal.position else None
        raise _Unusable(refusal.message, position) from refusal
    return document


def _no_duplicates(document: Document) -> None:
    if document.duplicates:
        key, mark = document.duplicates[0]
        raise _Unusable(f"the key `{key}` stands twice", (mark.line + 1, mark.column + 1))


class FolderParts(NamedTuple):
    """What of a skill folder is read to parse it."""

    folder: Path
    file_name: str
    data: bytes
    tools: tuple[SkillTool, ...]
    findings: tuple[Diagnostic, ...]


class TextContent(NamedTuple):
    """The long texts of a skill parsed from bytes: a body and nothing else."""

    text: str
    size: int
    digest: str

    def body(self) -> str:
        """Return the body."""
        return self.text

    def compact(self) -> str | None:
        """Return None: bytes have no companions."""
        return None

    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """Return (): bytes have no companions."""
        return ()

    def tree_digest(self) -> str:
        """Return the digest of a folder with this one file."""
        return rows_digest([["SKILL.md", self.size, self.digest.partition(":")[2]]])


class DiskContent:
    """The long texts of a skill in a folder, read on first use and kept.

    Args:
        folder: The skill's folder.
        file_name: Name of its skill file.
        verdict: Under which it was parsed: only `lenient` lets dots end the frontmatter.
    """

    __slots__ = ("_body", "_compact", "_file_name", "_folder", "_sources", "_verdict")

    def __init__(self, folder: Path, file_name: str, verdict: Verdict = "lenient") -> None:
        self._verdict: Verdict = verdict
        self._folder = folder
        self._file_name = file_name
        self._body: str | None = None
        self._compact: tuple[str | None] | None = None
        self._sources: tuple[Mapping[str, Any], ...] | None = None

    def body(self) -> str:
        """Return the body. Raises `FileRefused` when the file is gone since."""
        if self._body is None:
            data = read_file(self._folder, self._file_name, limit=MAX_SKILL_BYTES).data
            self._body = read_body(data, self._verdict)
        return self._body

    def compact(self) -> str | None:
        """Return the text of `compact.md`, or None."""
        if self._compact is None:
            _, data, _ = read_companion(self._folder, (COMPACT_FILE,), "lenient")
            self._compact = (read_compact(data).text if data is not None else None,)
        return self._compact[0]

    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """Return the rows of `sources.yaml`, or ()."""
        if self._sources is None:
            _, data, _ = read_companion(self._folder, SOURCES_FILES, "lenient")
            self._sources = read_sources(data).rows if data is not None else ()
        return self._sources

    def tree_digest(self) -> str:
        """Return the digest over all files of the folder."""
        return tree_digest(self._folder)


def open_skill(path: str | os.PathLike[str], verdict: Verdict) -> FolderParts | tuple[Diagnostic, ...]:
    """Return the parts of the skill at *path*, or the findings that refuse it. No file-system state raises."""
    skill_path = Path(path)
    findings = FileFindings(verdict, skill_path.name or ".")
    try:
        status = skill_path.stat() if not _is_skill_file(skill_path) else skill_path.lstat()
    except (OSError, ValueError) as error:
        denied = isinstance(error, PermissionError)
        findings.add("unreadable" if denied else "path_missing", f"{_printable_name(skill_path)} cannot be looked at.")
        return tuple(findings.items)
    folder: Path
    names: tuple[str, ...]
    if stat.S_ISDIR(status.st_mode):
        folder, names = skill_path.absolute(), SKILL_FILES
    elif _is_skill_file(skill_path):
        folder, names = skill_path.absolute().parent, (skill_path.name,)
    else:
        findings.add("not_a_directory", f"{_printable_name(skill_path)} is neither a folder nor a skill file.")
        if skill_path.name in SKILL_YAML:
            findings.add(
                "skill_yaml", f"{skill_path.name} is not a skill file; a skill is a SKILL.md with frontmatter."
            )
        return tuple(findings.items)
    if ".." in folder.parts:
        folder = Path(os.path.realpath(folder))
    return _open_folder(folder, names, verdict)


def _is_skill_file(path: Path) -> bool:
    return path.name in SKILL_FILES


def _printable_name(path: Path) -> str:
    return ascii(path.name or str(path))


def _open_folder(folder: Path, names: tuple[str, ...], verdict: Verdict) -> FolderParts | tuple[Diagnostic, ...]:
    refusal: FileRefused | None = None
    for name in names:
        try:
            data = read_file(folder, name, limit=MAX_SKILL_BYTES).data
        except FileRefused as error:
            if error.code == "file_missing":
                refusal = refusal or error
                continue
            refusal = error
            break
        tools, findings = _tools(folder, verdict)
        return FolderParts(folder, name, data, tools, findings)
    assert refusal is not None  # each name was tried, and none was read
    return _refused(folder, names, refusal, verdict)


def _refused(folder: Path, names: tuple[str, ...], refusal: FileRefused, verdict: Verdict) -> tuple[Diagnostic, ...]:
    findings = FileFindings(verdict, str(refusal.details.get("path", names[0])))
    file_codes = {"file_missing", "symlink", "too_large"}
    findings.add(refusal.code if refusal.code in file_codes else "unreadable", f"{refusal.message}.")
    if refusal.code == "file_missing":
        for name in SKILL_YAML:
            if (folder / name).is_file():
                yaml_findings = FileFindings(verdict, name)
                yaml_findings.add("skill_yaml", f"{name} is not a skill file; a skill is a SKILL.md with frontmatter.")
                findings.items.extend(yaml_findings.items)
    return tuple(findings.items)


def read_companion(
    folder: Path, names: tuple[str, ...], verdict: Verdict
) -> tuple[str, bytes | None, tuple[Diagnostic, ...]]:
    """Return the first of *names* that is there, with its bytes, or None and why it cannot be read.

    When none is there, the first name comes back with None and no findings.
    """
    for name in names:
        try:
            return name, read_file(folder, name, limit=limit_of(name)).data, ()
        except FileRefused as refusal:
            if refusal.code != "file_missing":
                return name, None, unusable(name, refusal.message, verdict=verdict)
    return names[0], None, ()


def _tools(folder: Path, verdict: Verdict) -> tuple[tuple[SkillTool, ...], tuple[Diagnostic, ...]]:
    name, data, findings = read_companion(folder, TOOLS_FILES, verdict)
    if data is None:
        return (), findings
    read = read_tools(data, name=name, verdict=verdict)
    return read.tools, read.findings
