"""List folders for discovery: what is entered, what is left out and why."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import NamedTuple

from kdskills.errors import Diagnostic, FileRefused
from kdskills.skills.findings import shown
from kdskills.skills.marks import stamp_of
from kdskills.skills.safe_open import MAX_DEPTH, open_folder_at

SKILL_FILES = ("SKILL.md", "skill.md")
SKILL_YAML = ("skill.yaml", "skill.yml")
COMPANIONS = ("compact.md", "sources.yaml", "sources.yml", "tools.yaml", "tools.yml")
MAX_FILES = 512
MAX_BYTES = 16 * 1024 * 1024

_NOT_ENTERED = frozenset({"node_modules", "__pycache__"})
_KNOWN = frozenset((*SKILL_FILES, *SKILL_YAML, *COMPANIONS))


def enters(name: str) -> bool:
    """Whether discovery looks into a folder of this name."""
    return not name.startswith(".") and name not in _NOT_ENTERED


def join(folder: str, name: str) -> str:
    """Return the posix path of *name* in *folder*; "" is the root."""
    return f"{folder}/{name}" if folder else name


@dataclass(slots=True)
class Listing:
    """One folder's entries, as far as discovery cares.

    `folders` are sorted; `files` maps the known file names present to whether each is a regular file.
    `count` and `size` add up the regular files and links directly inside. `skill_file` is `SKILL.md`, else `skill.md`.
    """

    stamp: bytes
    folders: list[str]
    files: dict[str, bool]
    count: int
    size: int
    notes: list[Diagnostic]
    skill_file: str | None

    @property
    def yaml_file(self) -> str | None:
        """A YAML file that looks as if it were meant for a skill file, or None."""
        return next((name for name in SKILL_YAML if name in self.files), None)


def list_folder(descriptor: int, path: str) -> Listing:
    """List an open folder.

    Args:
        descriptor: The folder.
        path: Its path relative to the root, for findings.

    Raises:
        OSError: The folder cannot be listed.
    """
    stamp = stamp_of(os.fstat(descriptor))
    folders: list[str] = []
    files: dict[str, bool] = {}
    notes: list[Diagnostic] = []
    count = size = 0
    with os.scandir(descriptor) as entries:
        for entry in entries:
            name = entry.name
            if name in _KNOWN:
                # Of another kind than a file it is still there, and refuses or warns like one that cannot be read.
                files[name] = entry.is_file(follow_symlinks=False)
            elif entry.is_dir(follow_symlinks=False):
                if enters(name):
                    folders.append(name)
                continue
            elif entry.is_symlink() and _leads_to_folder(entry):
                if enters(name):
                    notes.append(_link_note(join(path, name)))
                continue
            count += 1
            size += _size(entry)
    folders.sort()
    if notes:
        notes.sort(key=lambda note: note.path or "")
    skill_file = next((name for name in SKILL_FILES if name in files), None) if files else None
    return Listing(stamp, folders, files, count, size, notes, skill_file)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:  # gone since it was listed; the folder's stamp will tell
        return 0


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a ring, or to where this user may not look: no folder to enter
        return False


def _link_note(path: str) -> Diagnostic:
    place = shown(path)
    return Diagnostic("symlink_skipped", "warning", f"{place} is a linked folder and was not entered.", place)


def unreadable_note(path: str, reason: str | FileRefused) -> Diagnostic:
    """Say that a folder was left out because the system would not show it."""
    place = shown(path) or "."
    if isinstance(reason, FileRefused):
        cause = reason.__cause__
        words = cause.strerror if isinstance(cause, OSError) else None
        reason = words or "it became something else than a folder while it was looked at"
    return Diagnostic("unreadable", "warning", f"The folder {place} cannot be read: {reason}.", place)


class FolderMark(NamedTuple):
    """A folder, posix and relative to the root, and its stamp."""

    path: str
    stamp: bytes


@dataclass(slots=True)
class Subtree:
    """What lies below a skill's folder: marks of the folders entered, nested skills, and how much there is."""

    marks: list[FolderMark] = field(default_factory=list)
    nested: list[str] = field(default_factory=list)
    notes: list[Diagnostic] = field(default_factory=list)
    count: int = 0
    size: int = 0

    @property
    def over(self) -> bool:
        """Whether the skill is beyond its bounds, so that looking further is useless."""
        return self.count > MAX_FILES or self.size > MAX_BYTES or len(self.marks) > MAX_FILES

    def add(self, path: str, listing: Listing) -> None:
        """Take in one folder."""
        self.marks.append(FolderMark(path, listing.stamp))
        self.notes += listing.notes
        self.count += listing.count
        self.size += listing.size


def walk_subtree(descriptor: int, path: str, listing: Listing, *, nested: bool) -> Subtree:
    """Look through everything a skill's folder owns.

    Args:
        descriptor: The skill's open folder.
        path: Its path relative to the root.
        listing: Its listing.
        nested: Whether deeper skill files are skills of their own; then their folders are left to them.
    """
    found = Subtree()
    found.add(path, listing)
    _descend(descriptor, path, listing.folders, found, nested, depth=1)
    if found.over:
        found.notes.append(
            Diagnostic(
                "skill_large",
                "warning",
                f"The skill has more than {MAX_FILES} files or folders, or more than {MAX_BYTES // 2**20} MiB.",
                shown(path),
            )
        )
    return found


def _descend(parent: int, path: str, names: list[str], found: Subtree, nested: bool, depth: int) -> None:
    for name in names:
        if found.over:
            return
        place = join(path, name)
        if depth > MAX_DEPTH:
            found.notes.append(unreadable_note(place, f"it is deeper than {MAX_DEPTH} folders"))
            return
        try:
            descriptor = open_folder_at(parent, name, place)
        except FileRefused as refusal:
            found.notes.append(unreadable_note(place, refusal))
            continue
        try:
            listing = list_folder(descriptor, place)
            if listing.skill_file is not None:
                found.nested.append(place)
                if nested:
                    # Its listing still counts here: without its skill file the folder falls back to this skill.
                    found.marks.append(FolderMark(place, listing.stamp))
                    continue
                found.notes.append(_nested_note(join(place, listing.skill_file)))
            found.add(place, listing)
            _descend(descriptor, place, listing.folders, found, nested, depth + 1)
        except OSError as error:
            found.notes.append(unreadable_note(place, error.strerror or "the system refused"))
        finally:
            os.close(descriptor)


def _nested_note(path: str) -> Diagnostic:
    place = shown(path)
    return Diagnostic("nested_skill", "info", f"{place} lies inside another skill and is one of its resources.", place)


__all__ = [
    "MAX_BYTES",
    "MAX_FILES",
    "FolderMark",
    "Listing",
    "Subtree",
    "enters",
    "join",
    "list_folder",
    "shown",
    "unreadable_note",
    "walk_subtree",
]
