"""Scans as JSON-able rows and back: what the index keeps on disk (spec skills §2.3).

Rows are lists in a fixed order, because ten thousand of them are read at each start. The frontmatter stays JSON text
until somebody asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kdskills.errors import Diagnostic
from kdskills.skills.marks import FileMark, FolderMark, PlainFolder, RootScan, SkillRecord, Stamp
from kdskills.skills.model import Skill, SkillArgument, SkillContent, SkillTool
from kdskills.skills.roots import SkillRoot

Row = list[Any]
ContentMaker = Callable[[str, str, Sequence[FileMark]], SkillContent]
"""Makes the source of a skill's long texts from its folder, full id and files."""

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


def json_text(value: Any) -> str:
    """Return compact JSON; text that is no UTF-8 is escaped."""
    return json.dumps(value, separators=(",", ":"), default=_mapping)


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no place in an index")


# ---- diagnostics -------------------------------------------------------------------------------------------------


def note_row(note: Diagnostic) -> Row:
    """Return a finding as a row."""
    return [note.code, note.severity, note.message, note.path, note.line, note.column, note.ref, note.fix]


def notes_from(rows: list[Row]) -> tuple[Diagnostic, ...]:
    """Return findings from their rows."""
    return tuple([Diagnostic(*row) for row in rows]) if rows else ()


# ---- skills ------------------------------------------------------------------------------------------------------


def skill_row(skill: Skill) -> Row:
    """Return what the frontmatter and companions said, as a row."""
    frontmatter = skill.frontmatter
    return [
        skill.name,
        skill.namespace,
        skill.id,
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
        frontmatter.text if isinstance(frontmatter, JsonMapping) else json_text(frontmatter),
        skill.digest,
        skill.size,
        skill.tokens,
    ]


def skill_from(
    row: Row, diagnostics: tuple[Diagnostic, ...], content: SkillContent, root: SkillRoot, path: str
) -> Skill:
    """Return the skill a row describes.

    Args:
        row: As `skill_row` gave it.
        diagnostics: The parser's findings.
        content: Where its long texts come from.
        root: The root it lies in.
        path: Absolute path of its file.
    """
    (
        name, namespace, skill_id, description, version, category, author, created, licence, compatibility, hint,
        tags, when, imports, include_for, disclosure, metadata, allowed, allowed_names, no_model, invocable,
        arguments, insert, tools, frontmatter, digest, size, tokens,
    ) = row  # fmt: skip
    return Skill(
        name,
        namespace,
        skill_id,
        description,
        content,
        version,
        category,
        author,
        created,
        licence,
        compatibility,
        hint,
        tuple(tags) if tags else (),
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
        root.kind,
        Path(path),
    )


# ---- scans -------------------------------------------------------------------------------------------------------


def record_row(record: SkillRecord) -> Row:
    """Return a skill's record as a row."""
    return [
        record.path,
        record.layout_namespace,
        [[mark.path if mark.path != record.path else "", *mark.stamp] for mark in record.folders],
        [[mark.name, *mark.stamp, mark.digest] for mark in record.files],
        record.nested,
        [note_row(note) for note in record.notes],
        record.full_id,
        None if record.skill is None else skill_row(record.skill),
        [note_row(note) for note in record.diagnostics],
    ]


def record_from(row: Row, root: SkillRoot, base: str, content: ContentMaker) -> SkillRecord:
    """Return the record a row describes; *base* is the resolved root."""
    path, namespace, folder_rows, file_rows, nested, notes, full_id, values, findings = row
    folders = tuple([FolderMark(name or path, Stamp(a, b, c, d)) for name, a, b, c, d in folder_rows])
    files = tuple([FileMark(name, Stamp(a, b, c, d), digest) for name, a, b, c, d, digest in file_rows])
    diagnostics = notes_from(findings)
    skill = None
    if values is not None:
        place = f"{base}/{path}/{files[0].name}"
        skill = skill_from(values, diagnostics, content(path, full_id, files), root, place)
    return SkillRecord(path, namespace, folders, files, tuple(nested), notes_from(notes), full_id, skill, diagnostics)


def scan_document(scan: RootScan) -> dict[str, Any]:
    """Return a scan as one JSON-able document."""
    return {
        "checked_at": scan.checked_at,
        "digest": scan.digest,
        "notes": [note_row(note) for note in scan.notes],
        "folders": [
            [path, *plain.stamp, plain.children, [note_row(note) for note in plain.notes]]
            for path, plain in scan.folders.items()
        ],
        "skills": [record_row(record) for record in scan.skills.values()],
    }


def scan_from(document: Mapping[str, Any], root: SkillRoot, base: str, content: ContentMaker) -> RootScan:
    """Return the scan a document describes."""
    folders = {
        path: PlainFolder(Stamp(a, b, c, d), tuple(children), notes_from(notes))
        for path, a, b, c, d, children, notes in document["folders"]
    }
    records = (record_from(row, root, base, content) for row in document["skills"])
    return RootScan(
        document["checked_at"],
        folders,
        {record.path: record for record in records},
        notes_from(document["notes"]),
        document["digest"],
        present=True,
    )
