"""Open one skill folder on disk: the skill file, its companions, and its long texts on first use."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kdskills.errors import Diagnostic, FileRefused
from kdskills.skills.companions import (
    COMPACT_FILE,
    SOURCES_FILES,
    TOOLS_FILES,
    limit_of,
    read_compact,
    read_sources,
    read_tools,
    unusable,
)
from kdskills.skills.digest import rows_digest, tree_digest
from kdskills.skills.findings import FileFindings
from kdskills.skills.frontmatter import MAX_SKILL_BYTES, read_body
from kdskills.skills.model import SkillTool, Verdict
from kdskills.skills.safe_open import read_file

SKILL_FILES = ("SKILL.md", "skill.md")
YAML_FILES = ("skill.yaml", "skill.yml")


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
        if skill_path.name in YAML_FILES:
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
        for name in YAML_FILES:
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
