"""Scans as lines of JSON and back: what the index keeps on disk.

Rows are lists in a fixed order, because ten thousand of them are read at each start. The frontmatter stays JSON text
until somebody asks for it. Texts that many skills share (licences, authors, tags) are kept once for all of them.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from kdskills.errors import Diagnostic
from kdskills.skills.marks import PlainFolder, RootScan, SkillRecord, make_record
from kdskills.skills.model import RootKind, Skill, SkillArgument, SkillContent, SkillTool, make_skill
from kdskills.skills.roots import SkillRoot

Row = list[Any]
ContentMaker = Callable[[str, str, tuple[str, ...], tuple[str, ...]], SkillContent]
"""Makes the source of a skill's long texts from its folder, full id, file names and their digests."""

_NOTHING: Mapping[str, str] = MappingProxyType({})


class JsonMapping(Mapping[str, Any]):
    """A mapping kept as JSON text and decoded when it is looked into; equal to any mapping with the same items."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def _decoded(self) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self._text)
        return decoded

    def __getitem__(self, key: str) -> Any:
        return self._decoded()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def __len__(self) -> int:
        return len(self._decoded())

    def __repr__(self) -> str:
        return repr(self._decoded())

    @property
    def text(self) -> str:
        """The JSON text."""
        return self._text


def compact_mapping(values: dict[str, Any]) -> JsonMapping:
    """Return *values* as JSON text that is decoded when it is looked into: thousands of frontmatters weigh much."""
    return JsonMapping(json_text(values))


def json_text(value: Any) -> str:
    """Return compact JSON; text that is no UTF-8 is escaped."""
    return _ENCODER.encode(value)


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no place in an index")


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_mapping)


# ---- diagnostics -------------------------------------------------------------------------------------------------


def note_row(note: Diagnostic) -> Row:
    """Return a finding as a row."""
    return [note.code, note.severity, note.message, note.path, note.line, note.column, note.ref, note.fix]


def notes_from(rows: list[Row] | None) -> tuple[Diagnostic, ...]:
    """Return findings from their rows."""
    return tuple([Diagnostic(*row) for row in rows]) if rows else ()


# ---- skills ------------------------------------------------------------------------------------------------------


def skill_row(skill: Skill) -> Row:
    """Return what the frontmatter and companions said, as a row, without the frontmatter itself."""
    return [
        skill.name,
        skill.namespace,
        skill.id if skill.id != skill.name else None,
        skill.description,
        skill.version,
        skill.category,
        skill.author,
        skill.created,
        skill.license,
        skill.compatibility,
        skill.argument_hint,
        skill.tags,
        skill.when_to_use,
        skill.imports,
        skill.include_for,
        skill.disclosure,
        skill.metadata,
        skill.allowed_tools,
        skill.allowed_tool_names,
        skill.disable_model_invocation,
        skill.user_invocable,
        [[argument.name, argument.description, argument.default] for argument in skill.arguments],
        skill.insert,
        [[tool.id, tool.role, tool.why, tool.required] for tool in skill.tools],
        skill.size,
        skill.tokens,
    ]


def frontmatter_text(skill: Skill) -> str:
    """Return a skill's frontmatter as JSON text of one line."""
    frontmatter = skill.frontmatter
    return frontmatter.text if isinstance(frontmatter, JsonMapping) else json_text(frontmatter)


def skill_from(
    row: Row,
    frontmatter: str,
    diagnostics: tuple[Diagnostic, ...],
    content: SkillContent,
    kind: RootKind,
    file: str,
    digest: str,
) -> Skill:
    """Return the skill a row describes.

    Args:
        row: As `skill_row` gave it.
        frontmatter: As `frontmatter_text` gave it.
        diagnostics: The parser's findings.
        content: Where its long texts come from.
        kind: Kind of its root.
        file: Absolute path of its file.
        digest: Digest of its file.
    """
    (
        name, namespace, skill_id, description, version, category, author, created, licence, compatibility, hint,
        tags, when, imports, include_for, disclosure, metadata, allowed, allowed_names, no_model, invocable,
        arguments, insert, tools, size, tokens,
    ) = row  # fmt: skip
    return make_skill(
        name,
        sys.intern(namespace),
        name if skill_id is None else skill_id,
        description,
        content,
        version and sys.intern(version),
        category and sys.intern(category),
        author and sys.intern(author),
        created and sys.intern(created),
        licence and sys.intern(licence),
        compatibility and sys.intern(compatibility),
        hint,
        tuple(map(sys.intern, tags)) if tags else (),
        tuple(when) if when else (),
        tuple(imports) if imports else (),
        tuple(include_for) if include_for else (),
        disclosure,
        metadata or _NOTHING,
        allowed,
        tuple(allowed_names) if allowed_names else (),
        no_model,
        invocable,
        tuple([SkillArgument(*argument) for argument in arguments]) if arguments else (),
        insert,
        tuple([SkillTool(*tool) for tool in tools]) if tools else (),
        JsonMapping(frontmatter),
        diagnostics,
        digest,
        size,
        tokens,
        kind,
        file,
    )


# ---- scans -------------------------------------------------------------------------------------------------------


def _stamp_text(stamps: bytes) -> str:
    return base64.b64encode(stamps).decode("ascii")


def record_row(record: SkillRecord) -> Row:
    """Return a skill's record as a row."""
    return [
        record.path,
        record.layout_namespace,
        record.below or None,
        "/".join(record.files),
        " ".join(record.digests),
        len(record.stamps),
        record.newest,
        record.nested or None,
        [note_row(note) for note in record.notes] or None,
        record.full_id,
        None if record.skill is None else skill_row(record.skill),
        [note_row(note) for note in record.diagnostics] or None,
    ]


@lru_cache(maxsize=256)
def _file_names(names: str) -> tuple[str, ...]:
    """Return names of files that were joined; thousands of skills have the same ones."""
    return tuple(map(sys.intern, names.split("/")))


def _record_from(
    row: Row, frontmatter: str, stamps: bytes, root: SkillRoot, base: str, content: ContentMaker
) -> SkillRecord:
    """Return the record a row describes; *base* is the resolved root."""
    path, namespace, below, names, hashes, _, newest, nested, notes, full_id, values, findings = row
    files = _file_names(names)
    digests = tuple(hashes.split(" "))
    diagnostics = notes_from(findings)
    skill = None
    if values is not None:
        source = content(path, full_id, files, digests)
        file = f"{base}/{path}/{files[0]}"
        skill = skill_from(values, frontmatter, diagnostics, source, root.kind, file, digests[0])
    return make_record(
        path,
        sys.intern(namespace),
        tuple(below) if below else (),
        files,
        digests,
        stamps,
        newest,
        tuple(nested) if nested else (),
        notes_from(notes),
        full_id,
        skill,
        diagnostics,
    )


def scan_lines(scan: RootScan) -> list[str]:
    """Return a scan as lines of ASCII: one JSON document, the stamps of all skills, and a frontmatter for each skill.

    What is not read at a start, the frontmatters, is not decoded at a start: each stays the text of its own line.
    """
    records = list(scan.skills.values())
    document = {
        "checked_at": scan.checked_at,
        "digest": scan.digest,
        "notes": [note_row(note) for note in scan.notes],
        "folders": [
            [path, _stamp_text(plain.stamp), plain.children, [note_row(note) for note in plain.notes]]
            for path, plain in scan.folders.items()
        ],
        "skills": [record_row(record) for record in records],
    }
    stamps = _stamp_text(b"".join([record.stamps for record in records]))
    return [
        json_text(document),
        stamps,
        *("" if record.skill is None else frontmatter_text(record.skill) for record in records),
    ]


def scan_from(lines: Sequence[str], root: SkillRoot, base: str, content: ContentMaker) -> RootScan:
    """Return the scan that `scan_lines` wrote.

    Raises:
        ValueError, TypeError, KeyError, IndexError, AttributeError: The lines have another shape.
    """
    document: Mapping[str, Any] = json.loads(lines[0])
    packed = base64.b64decode(lines[1], validate=True)
    rows = document["skills"]
    skills: dict[str, SkillRecord] = {}
    position = 0
    for row, frontmatter in zip(rows, lines[2:], strict=True):
        end = position + row[5]
        record = _record_from(row, frontmatter, packed[position:end], root, base, content)
        skills[record.path] = record
        position = end
    if position != len(packed):
        raise ValueError("there are other stamps than skills")
    folders = {
        path: PlainFolder(base64.b64decode(stamp), tuple(children), notes_from(notes))
        for path, stamp, children, notes in document["folders"]
    }
    return RootScan(
        document["checked_at"], folders, skills, notes_from(document["notes"]), document["digest"], present=True
    )
