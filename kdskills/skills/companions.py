"""What lies beside a skill file: compact.md, tools.yaml, sources.yaml.

Pure functions over bytes already read. A broken `tools.yaml` is an error, for a lost gate would open the skill; the
other two only cost what they would have added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kdskills.errors import Diagnostic
from kdskills.skills.fields import near_required
from kdskills.skills.findings import FileFindings
from kdskills.skills.frontmatter import BOM, trim_body
from kdskills.skills.model import SkillTool, Verdict
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
_FALSE = frozenset({"false", "no", "off"})
_OPTIONAL = frozenset({"optional", "soft", "preferred", "recommended", "false", "no", "off"})
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
    return not item.null and item.text.strip().lower() not in _FALSE


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
