"""Skills as zip archives: judged by their directory before anything is inflated, unpacked to disk in pieces, written the
same everywhere.

`unpack_skill` is the way in, `write_archive` the way out. Names, kinds and amounts are decided by the archive's directory
alone, before a file is opened. Nothing of a refused archive stays.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from kdskills.errors import Diagnostic
from kdskills.skills.fields import MAX_NAME, name_problem
from kdskills.skills.folder import SKILL_FILES
from kdskills.skills.frontmatter import MAX_SKILL_BYTES
from kdskills.skills.model import Skill
from kdskills.skills.parse import parse_skill, parse_skill_bytes, validate_skill
from kdskills.skills.private_files import make_folder
from kdskills.skills.zip_format import (
    DEFLATED,
    ENCRYPTED,
    MASKED,
    PATCHED,
    STORED,
    STRONGLY_ENCRYPTED,
    ArchiveLimits,
    ArchiveRefused,
    TreeFile,
    ZipEntry,
    pieces,
    read_directory,
    read_tree,
    version_of,
    write_archive,
)

MACOS = "__MACOSX"
FINDER = ".DS_Store"
EXECUTABLE = 0o111
NESTED = "it is an archive itself: put its files into the skill's folder"
ROOT_BYTES = 4 * MAX_NAME + 2
"""Most bytes of a root folder's name and the slashes around a path below it."""

_DRIVE = re.compile(r"[A-Za-z]:")
_ARCHIVES = (
    *(".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz"),
    *(".tar.zst", ".tbz2", ".txz", ".7z", ".rar", ".skill"),
)
_ENCRYPTIONS = ENCRYPTED | STRONGLY_ENCRYPTED | MASKED


@dataclass(frozen=True, slots=True)
class UnpackPlan:
    """What would be unpacked: entries by where they go below the skill's folder, and what was left out.

    `root` is the single root folder, None when the skill file lies at the top; `skill_file` is `SKILL.md` or
    `skill.md`.
    """

    root: str | None
    skill_file: str
    files: Mapping[str, ZipEntry]
    notes: tuple[Diagnostic, ...]


def plan(entries: Sequence[ZipEntry], limits: ArchiveLimits) -> UnpackPlan:
    """Return what of *entries* makes the skill. Raises ArchiveRefused for the first entry that breaks a rule."""
    files: list[tuple[tuple[str, ...], ZipEntry]] = []
    folders: list[tuple[tuple[str, ...], ZipEntry]] = []
    ignored: list[ZipEntry] = []
    for entry in entries:
        parts, folder = _parts(entry)
        _check_entry(entry, parts, folder, limits)
        if MACOS in parts[:2] or parts[-1] == FINDER:
            ignored.append(entry)
        else:
            (folders if folder else files).append((parts, entry))
    if len(files) > limits.files:
        raise ArchiveRefused("archive_too_many_files", f"it has {len(files)} files, more than {limits.files}")
    _check_distinct([*files, *folders], {entry.offset for _, entry in folders})
    root = _root([parts for parts, _ in files])
    below = 0 if root is None else 1
    planned = {"/".join(parts[below:]): entry for parts, entry in files}
    _check_files(planned, limits)
    skill_file = next(name for name in SKILL_FILES if name in planned)
    notes: tuple[Diagnostic, ...] = ()
    if ignored:
        words = "1 entry that a Mac adds was" if len(ignored) == 1 else f"{len(ignored)} entries that a Mac adds were"
        first = ignored[0].label
        notes = (Diagnostic("archive_ignored", "info", f"{words} left out, such as {first}.", path=first),)
    return UnpackPlan(root, skill_file, dict(sorted(planned.items(), key=lambda item: item[0].encode())), notes)


def check_skill_name(name: str, *, entry: str | None) -> None:
    """Refuse a folder or skill whose name is not one by the grammar of names."""
    problem = name_problem(name)
    if problem is not None:
        raise ArchiveRefused("archive_name_invalid", problem, entry=entry)


def _refuse_first(entry: ZipEntry, rules: Iterable[tuple[bool, str, str]]) -> None:
    """Refuse *entry* for the first rule that is broken; each is whether it is, its code and the reason."""
    for broken, code, reason in rules:
        if broken:
            raise ArchiveRefused(code, reason, entry=entry.label)


def _parts(entry: ZipEntry) -> tuple[tuple[str, ...], bool]:
    """Return an entry's path and whether it is a folder's.

    Refused is a name that could lead anywhere but below the skill's folder, or means different things to readers.
    """
    try:
        name = entry.raw.decode("utf-8")
    except UnicodeDecodeError:
        raise ArchiveRefused("archive_name_not_utf8", "its name is not UTF-8", entry=entry.label) from None
    folder = name.endswith("/")
    parts = tuple((name[:-1] if folder else name).split("/"))
    control = any(unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"} for c in name)
    _refuse_first(
        entry,
        (
            (not name, "archive_path_invalid", "it has no name"),
            ("\\" in name, "archive_path_backslash", "its name has a backslash"),
            (name.startswith("/"), "archive_path_absolute", "its path is absolute"),
            (_DRIVE.match(name) is not None, "archive_path_drive", "its path begins with a drive"),
            (".." in parts, "archive_path_parent", "its path leads upwards"),
            (not {"", "."}.isdisjoint(parts), "archive_path_invalid", "its path has an empty part"),
            (control, "archive_path_invalid", "its name has control characters"),
        ),
    )
    return parts, folder


def _check_entry(entry: ZipEntry, parts: tuple[str, ...], folder: bool, limits: ArchiveLimits) -> None:
    """Refuse a path that no root folder could excuse, what is no plain file or folder, and what cannot be unpacked."""
    kind = stat.S_IFMT(entry.mode)
    long = len(entry.raw) > limits.path_bytes + ROOT_BYTES
    foreign = entry.method not in {STORED, DEFLATED} or bool(entry.flags & PATCHED)
    method = f"it is packed by method {entry.method}; stored (0) and deflated (8) are read"
    lie = entry.method == STORED and entry.packed != entry.size
    _refuse_first(
        entry,
        (
            (len(parts) > limits.depth + 1, "archive_too_deep", f"its path has more than {limits.depth} parts"),
            (long, "archive_path_too_long", f"its path has more than {limits.path_bytes} bytes"),
            (kind == stat.S_IFLNK or entry.reparse, "archive_link", "it is a link"),
            (kind not in {0, stat.S_IFREG, stat.S_IFDIR}, "archive_special_file", "it is no regular file"),
            (
                kind != 0 and (kind == stat.S_IFDIR) != folder,
                "archive_special_file",
                "its name and its kind do not agree",
            ),
            (folder and entry.size > 0, "archive_special_file", "it is a folder with content"),
            (bool(entry.flags & _ENCRYPTIONS), "archive_encrypted", "it is encrypted"),
            (foreign, "archive_method", method),
            (lie, "archive_size_lie", "it is stored, but its two sizes differ"),
        ),
    )


def _folded(path: str) -> str:
    """Return a path as file systems see it that know neither case nor Unicode forms."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())


def _check_distinct(entries: Sequence[tuple[tuple[str, ...], ZipEntry]], folders: set[int]) -> None:
    """Refuse entries that would be one file, here or on a file system without case, and files used as folders."""
    paths: set[str] = set()
    files: set[str] = set()
    above: dict[str, ZipEntry] = {}
    spellings: dict[str, str] = {}
    for parts, entry in entries:
        path = "/".join(parts)
        if path in paths:
            raise ArchiveRefused("archive_duplicate", "it is there twice", entry=entry.label)
        paths.add(path)
        if entry.offset not in folders:
            files.add(path)
        for depth in range(len(parts), 0, -1):
            prefix = "/".join(parts[:depth])
            first_spelling = spellings.setdefault(_folded(prefix), prefix)
            if first_spelling != prefix:
                message = f"it differs from {first_spelling!r} only by case or Unicode form"
                raise ArchiveRefused("archive_case_collision", message, entry=entry.label)
            if depth < len(parts) and above.setdefault(prefix, entry) is not entry:
                break  # what lies above was looked at with its first entry
    used = sorted(files & above.keys())
    if used:
        raise ArchiveRefused("archive_duplicate", "its folder is also a file", entry=above[used[0]].label)


def _root(paths: Sequence[tuple[str, ...]]) -> str | None:
    """Return the single root folder; None when the skill file lies at the top."""
    if any(len(parts) == 1 and parts[0] in SKILL_FILES for parts in paths):
        return None
    tops = sorted({parts[0] for parts in paths})
    if not tops:
        raise ArchiveRefused("archive_no_skill", "it holds no file")
    if len(tops) > 1 or any(len(parts) == 1 for parts in paths):
        message = f"it has no SKILL.md at the top and more than a single root folder: {', '.join(tops[:4])}"
        raise ArchiveRefused("archive_wrong_root", message, entry=tops[0])
    if not any(len(parts) == 2 and parts[1] in SKILL_FILES for parts in paths):
        raise ArchiveRefused("archive_no_skill", "its root folder has no SKILL.md", entry=tops[0])
    check_skill_name(tops[0], entry=tops[0])
    return tops[0]


def _check_files(planned: Mapping[str, ZipEntry], limits: ArchiveLimits) -> None:
    """Refuse paths below the skill's folder, archives within the archive, and amounts that are too large."""
    for path, entry in planned.items():
        deep, long = path.count("/") >= limits.depth, len(path.encode()) > limits.path_bytes
        _refuse_first(
            entry,
            (
                (deep, "archive_too_deep", f"its path has more than {limits.depth} parts"),
                (long, "archive_path_too_long", f"its path has more than {limits.path_bytes} bytes"),
                (path.lower().endswith(_ARCHIVES), "archive_nested", NESTED),
            ),
        )
    total = sum(entry.size for entry in planned.values())
    if total > limits.unpacked_bytes:
        message = f"it unpacks to {total} bytes, more than {limits.unpacked_bytes}"
        raise ArchiveRefused("archive_unpacked_too_large", message)
    for entry in planned.values():
        if entry.size > limits.ratio * entry.packed:
            message = f"it unpacks to more than {limits.ratio} times its packed size"
            raise ArchiveRefused("archive_ratio", message, entry=entry.label)


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
    """A skill unpacked to `folder`, which is called as it is, and found good; `version` is the hash of its tree.

    `diagnostics` are all findings: what was left out, and what the skill's own files say.
    """

    name: str
    folder: Path
    version: str
    files: tuple[TreeFile, ...]
    skill: Skill
    diagnostics: tuple[Diagnostic, ...]


def unpack_skill(archive: Path, into: Path, *, limits: ArchiveLimits | None = None) -> UnpackedSkill:
    """Unpack the zip *archive* to `into/<name>`; files end up read-only, execute bits kept.

    *into* is a folder that is not there yet (else FileExistsError); it is made, and on any failure it is gone again.
    Bounds are those of `docs/reference/archives.md` when *limits* is omitted. Raises ArchiveRefused when a rule is
    broken.
    """
    bounds = limits or ArchiveLimits()
    with archive.open("rb") as stream:
        unpack_plan = plan(read_directory(stream, bounds), bounds)
        name = _name(stream, unpack_plan)
        into.mkdir(mode=0o700)
        try:
            return _unpacked(stream, unpack_plan, name, into)
        except BaseException:  # raised again: nothing half-unpacked stays
            remove_tree(into)
            raise


def remove_tree(folder: Path) -> None:
    """Remove a folder whose folders may be read-only."""
    for directory, _, _ in os.walk(folder):
        Path(directory).chmod(0o700)
    shutil.rmtree(folder)


def _name(stream: BinaryIO, unpack_plan: UnpackPlan) -> str:
    """Return the skill's name, from its file alone; a file that is no skill ends it before anything is written."""
    entry = unpack_plan.files[unpack_plan.skill_file]
    entry_name = entry.label
    if entry.size > MAX_SKILL_BYTES:
        raise ArchiveRefused("archive_skill_invalid", f"it has more than {MAX_SKILL_BYTES} bytes", entry=entry_name)
    data = b"".join(pieces(stream, entry))
    parsed = parse_skill_bytes(data, folder=unpack_plan.root or "", file_name=unpack_plan.skill_file)
    if parsed.skill is None:
        raise _invalid(entry_name, parsed.diagnostics)
    name = parsed.skill.name
    check_skill_name(name, entry=entry_name)
    if unpack_plan.root is not None and name != unpack_plan.root:
        message = f"the skill is called {name!r} and its folder {unpack_plan.root!r}"
        raise ArchiveRefused("archive_name_mismatch", message, entry=entry_name)
    return name


def _invalid(entry: str, findings: tuple[Diagnostic, ...]) -> ArchiveRefused:
    errors = [finding for finding in findings if finding.severity == "error"]
    reason = "; ".join(f"{finding.code}: {finding.message.rstrip('.')}" for finding in errors)
    return ArchiveRefused("archive_skill_invalid", reason, entry=entry, diagnostics=findings)


def _unpacked(stream: BinaryIO, unpack_plan: UnpackPlan, name: str, into: Path) -> UnpackedSkill:
    folder = into / name
    make_folder(folder)
    files = tuple(_write(stream, path, entry, folder) for path, entry in unpack_plan.files.items())
    parsed = parse_skill(folder)
    findings = (*unpack_plan.notes, *validate_skill(folder))
    if parsed.skill is None:
        raise _invalid(unpack_plan.files[unpack_plan.skill_file].label, findings)
    for directory, _, _ in os.walk(folder, topdown=False):
        Path(directory).chmod(FOLDER_MODE)
    return UnpackedSkill(name, folder, version_of(files), files, parsed.skill, findings)


def _write(stream: BinaryIO, path: str, entry: ZipEntry, folder: Path) -> TreeFile:
    """Write one file in pieces; every folder above it was made by us, in a folder only we may enter."""
    target = folder / path
    make_folder(target.parent)
    hasher = hashlib.sha256()
    size = 0
    executable = bool(entry.mode & EXECUTABLE)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        for piece in pieces(stream, entry):
            if size == 0 and piece.startswith(_ZIP) and not path.lower().endswith(_DOCUMENTS):
                raise ArchiveRefused("archive_nested", NESTED, entry=entry.label)
            out.write(piece)
            hasher.update(piece)
            size += len(piece)
        out.flush()
        os.fchmod(out.fileno(), PROGRAM_MODE if executable else FILE_MODE)
        os.fsync(out.fileno())  # a version is renamed into place: its bytes must be there first
    return TreeFile(path, size, hasher.hexdigest(), executable)


__all__ = [
    "ArchiveLimits",
    "ArchiveRefused",
    "TreeFile",
    "UnpackedSkill",
    "read_tree",
    "remove_tree",
    "unpack_skill",
    "version_of",
    "write_archive",
]
