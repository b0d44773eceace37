"""Unpack an archive into a folder of its own, or leave nothing behind."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from kdskills.errors import Diagnostic
from kdskills.skills.archives.directory import read_directory
from kdskills.skills.archives.inflate import pieces
from kdskills.skills.archives.refusal import ArchiveLimits, ArchiveRefused
from kdskills.skills.archives.rules import Plan, Planned, check_skill_name, plan
from kdskills.skills.archives.tree import TreeFile, version_of
from kdskills.skills.frontmatter import MAX_SKILL_BYTES
from kdskills.skills.model import Skill
from kdskills.skills.parse import parse_skill, parse_skill_bytes
from kdskills.skills.private_files import make_folder
from kdskills.skills.validate import validate_skill

FILE_MODE: Final = 0o400
PROGRAM_MODE: Final = 0o500
FOLDER_MODE: Final = 0o500
_ZIP = b"PK\x03\x04"
_DOCUMENTS: Final = (
    *(".docx", ".docm", ".dotx", ".xlsx", ".xlsm", ".xltx", ".pptx", ".pptm", ".potx", ".vsdx"),
    *(".odt", ".ods", ".odp", ".odg", ".epub", ".whl", ".jar", ".npz", ".kmz", ".3mf"),
)
"""Files that are zip archives inside and are used as they are."""


@dataclass(frozen=True, slots=True)
class UnpackedSkill:
    """A skill unpacked and found good.

    Attributes:
        name: Its name, which is the folder's.
        folder: Where it lies; below the folder asked for.
        version: The hash of its normalised tree.
        files: Its files, by path.
        skill: The skill as parsed.
        diagnostics: All findings: what was left out, and what the skill's own files say.
    """

    name: str
    folder: Path
    version: str
    files: tuple[TreeFile, ...]
    skill: Skill
    diagnostics: tuple[Diagnostic, ...]


def unpack_skill(archive: Path, into: Path, *, limits: ArchiveLimits | None = None) -> UnpackedSkill:
    """Unpack the zip *archive* to `into/<name>`; files end up read-only, execute bits kept.

    Args:
        archive: The zip file.
        into: A folder that is not there yet; it is made, and on any failure it is gone again.
        limits: Bounds; those of `docs/reference/archives.md` when omitted.

    Raises:
        ArchiveRefused: A rule is broken. Nothing stays.
        FileExistsError: *into* is there already.
    """
    bounds = limits or ArchiveLimits()
    with archive.open("rb") as stream:
        chosen = plan(read_directory(stream, bounds), bounds)
        name = _name(stream, chosen)
        into.mkdir(mode=0o700)
        try:
            return _unpacked(stream, chosen, name, into)
        except BaseException:  # raised again: nothing half-unpacked stays
            remove_tree(into)
            raise


def remove_tree(folder: Path) -> None:
    """Remove a folder whose folders may be read-only."""
    for place, _, _ in os.walk(folder):
        Path(place).chmod(0o700)
    shutil.rmtree(folder)


def seal(folder: Path) -> None:
    """Make every folder below *folder*, and itself, read-only."""
    for place, _, _ in os.walk(folder, topdown=False):
        Path(place).chmod(FOLDER_MODE)


def _name(stream: BinaryIO, chosen: Plan) -> str:
    """Return the skill's name, from its file alone; a file that is no skill ends it before anything is written."""
    planned = chosen.skill
    shown = planned.entry.shown
    if planned.entry.size > MAX_SKILL_BYTES:
        raise ArchiveRefused("archive_skill_invalid", f"it has more than {MAX_SKILL_BYTES} bytes", entry=shown)
    data = b"".join(pieces(stream, planned.entry))
    parsed = parse_skill_bytes(data, folder=chosen.root or "", file_name=chosen.skill_file)
    if parsed.skill is None:
        raise _invalid(shown, parsed.diagnostics)
    name = parsed.skill.name
    check_skill_name(name, entry=shown)
    if chosen.root is not None and name != chosen.root:
        message = f"the skill is called {name!r} and its folder {chosen.root!r}"
        raise ArchiveRefused("archive_name_mismatch", message, entry=shown)
    return name


def _invalid(entry: str, findings: tuple[Diagnostic, ...]) -> ArchiveRefused:
    errors = [found for found in findings if found.severity == "error"]
    reason = "; ".join(f"{found.code}: {found.message.rstrip('.')}" for found in errors)
    return ArchiveRefused("archive_skill_invalid", reason, entry=entry, diagnostics=findings)


def _unpacked(stream: BinaryIO, chosen: Plan, name: str, into: Path) -> UnpackedSkill:
    folder = into / name
    make_folder(folder)
    files = tuple(_write(stream, planned, folder) for planned in chosen.files)
    parsed = parse_skill(folder)
    findings = (*chosen.notes, *validate_skill(folder))
    if parsed.skill is None:
        raise _invalid(chosen.skill.entry.shown, findings)
    seal(folder)
    return UnpackedSkill(name, folder, version_of(files), files, parsed.skill, findings)


def _write(stream: BinaryIO, planned: Planned, folder: Path) -> TreeFile:
    """Write one file in pieces; every folder above it was made by us, in a folder only we may enter."""
    target = folder / planned.path
    make_folder(target.parent)
    hasher = hashlib.sha256()
    size = 0
    mode = PROGRAM_MODE if planned.executable else FILE_MODE
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        for piece in pieces(stream, planned.entry):
            if size == 0 and piece.startswith(_ZIP) and not planned.path.lower().endswith(_DOCUMENTS):
                message = "it is an archive itself: put its files into the skill's folder"
                raise ArchiveRefused("archive_nested", message, entry=planned.entry.shown)
            out.write(piece)
            hasher.update(piece)
            size += len(piece)
        out.flush()
        os.fchmod(out.fileno(), mode)
        os.fsync(out.fileno())  # a version is renamed into place: its bytes must be there first
    return TreeFile(planned.path, size, hasher.hexdigest(), planned.executable)
