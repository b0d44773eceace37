"""Folders as discovery sees them: what is entered, what is left out and why, and the stamps and records kept for next time.

A stamp packs what the file system says about a file or folder, so that a change is seen without reading it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from kdskills.errors import Diagnostic, FileRefused
from kdskills.skills.model import Skill, maker_of
from kdskills.skills.safe_open import MAX_DEPTH, open_folder_at

RACY_NS = 2_000_000_000

_STAMP = struct.Struct("<qqQq")
STAMP_BYTES = _STAMP.size
NO_STAMP = _STAMP.pack(-1, -1, 0, -1)
"""What no file has, so that the next walk looks again."""


def stamp_of(status: os.stat_result) -> bytes:
    """Return size, modification time, inode and change time of a file or folder, packed.

    The change time goes beyond the specification: it tells of an edit by a tool that put the modification time back.
    Packed, because ten thousand skills have more than twenty thousand stamps.
    """
    return _STAMP.pack(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def stamps_of(root: int, paths: Iterable[str]) -> bytes:
    """Return the stamps of files or folders below an open folder, packed one after the other. Raises `OSError`."""
    look, pack = os.stat, _STAMP.pack  # asked relative to the folder, the system has shorter ways to go
    return b"".join(
        [
            pack(facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_ctime_ns)
            for path in paths
            for facts in (look(path, dir_fd=root, follow_symlinks=False),)
        ]
    )


def newest_of(stamps: bytes) -> int:
    """Return the latest modification time among packed stamps."""
    newest: int = max([stamp[1] for stamp in _STAMP.iter_unpack(stamps)])
    return newest


@dataclass(frozen=True, slots=True)
class PlainFolder:
    """A folder on the way to skills: which folders below were entered, and what was noted in it."""

    stamp: bytes
    children: tuple[str, ...]
    notes: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True, slots=True)
class SkillRecord:
    """A skill's folder as last seen, and what was made of it.

    Attributes:
        path: The folder, posix and relative to the root.
        layout_namespace: The namespace the layout gave it.
        below: Folders entered below it, relative to the root.
        files: The skill file, then its companions, by name.
        digests: The digest of each of `files`; empty for one that was not read (a link, too large, unreadable).
        stamps: Of the folder, `below` and `files`, packed one after the other.
        newest: The latest modification time in `stamps`.
        nested: Folders below with skill files of their own.
        notes: Findings of the walk, not of the parser.
        full_id: What the skill is known as, refused or not.
        skill: The skill, or None when it was refused.
        diagnostics: The parser's findings.
    """

    path: str
    layout_namespace: str
    below: tuple[str, ...]
    files: tuple[str, ...]
    digests: tuple[str, ...]
    stamps: bytes
    newest: int
    nested: tuple[str, ...]
    notes: tuple[Diagnostic, ...]
    full_id: str
    skill: Skill | None
    diagnostics: tuple[Diagnostic, ...]

    @property
    def digest(self) -> str:
        """Digest of the skill file."""
        return self.digests[0]

    @property
    def sizes(self) -> list[int]:
        """Sizes of `files`."""
        return [stamp[0] for stamp in _STAMP.iter_unpack(self.stamps[-STAMP_BYTES * len(self.files) :])]


make_record = maker_of(SkillRecord)
"""Makes a `SkillRecord` as `SkillRecord(…)` does, for who makes thousands."""


@dataclass(frozen=True, slots=True)
class RootScan:
    """Everything found in one root.

    Attributes:
        checked_at: When the scan began. A stamp whose modification time is later than two seconds before proves
            nothing, for the file may have changed again within the same tick of the clock.
        folders: Folders on the way, by path; "" is the root.
        skills: Skill folders by path, in the order they were met, which is sorted part by part.
        notes: Findings about the root as a whole.
        digest: The root's digest.
        present: Whether the root was there.
    """

    checked_at: int
    folders: dict[str, PlainFolder]
    skills: dict[str, SkillRecord]
    notes: tuple[Diagnostic, ...]
    digest: str
    present: bool


SKILL_FILES = ("SKILL.md", "skill.md")
SKILL_YAML = ("skill.yaml", "skill.yml")
COMPANIONS = ("compact.md", "sources.yaml", "sources.yml", "tools.yaml", "tools.yml")
MAX_FILES = 512
MAX_BYTES = 16 * 1024 * 1024

_NOT_ENTERED = frozenset({"node_modules", "__pycache__"})
_NOTED_FILES = frozenset((*SKILL_FILES, *SKILL_YAML, *COMPANIONS))


def enters(name: str) -> bool:
    """Whether discovery looks into a folder of this name."""
    return not name.startswith(".") and name not in _NOT_ENTERED


def join(folder: str, name: str) -> str:
    """Return the posix path of *name* in *folder*; "" is the root."""
    return f"{folder}/{name}" if folder else name


def printable_path(path: str) -> str:
    """Return *path* as text that can be printed; bytes that are no UTF-8 become U+FFFD."""
    return path if path.isascii() else path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@dataclass(slots=True)
class FolderListing:
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


def list_folder(descriptor: int, path: str) -> FolderListing:
    """List an open folder; *path* is its path below the root, for findings. Raises OSError."""
    stamp = stamp_of(os.fstat(descriptor))
    folders: list[str] = []
    files: dict[str, bool] = {}
    notes: list[Diagnostic] = []
    count = size = 0
    with os.scandir(descriptor) as entries:
        for entry in entries:
            name = entry.name
            if name in _NOTED_FILES:
                # Of another kind than a file it is still there, and refuses or warns like one that cannot be read.
                files[name] = entry.is_file(follow_symlinks=False)
            elif entry.is_dir(follow_symlinks=False):
                if enters(name):
                    folders.append(name)
                continue
            elif entry.is_symlink():
                with suppress(OSError):  # a link in a ring, or to where this user may not look: no folder to enter
                    if entry.is_dir():
                        if enters(name):
                            printable = printable_path(join(path, name))
                            message = f"{printable} is a linked folder and was not entered."
                            notes.append(Diagnostic("symlink_skipped", "warning", message, printable))
                        continue
            count += 1
            with suppress(FileNotFoundError):  # gone since it was listed; the folder's stamp will tell
                size += entry.stat(follow_symlinks=False).st_size
    folders.sort()
    if notes:
        notes.sort(key=lambda note: note.path or "")
    skill_file = next((name for name in SKILL_FILES if name in files), None) if files else None
    return FolderListing(stamp, folders, files, count, size, notes, skill_file)


def unreadable_note(path: str, reason: str | FileRefused | OSError) -> Diagnostic:
    """Say that a folder was left out because the system would not show it."""
    printable = printable_path(path) or "."
    if isinstance(reason, FileRefused):
        words = reason.__cause__.strerror if isinstance(reason.__cause__, OSError) else None
        reason = words or "it became something else than a folder while it was looked at"
    elif isinstance(reason, OSError):
        reason = reason.strerror or "the system refused"
    return Diagnostic("unreadable", "warning", f"The folder {printable} cannot be read: {reason}.", printable)


@dataclass(slots=True)
class Subtree:
    """What a skill's folder owns: the folders below it, the stamps of itself and of these, nested skills, and how much."""

    stamps: bytes = b""
    below: list[str] = field(default_factory=list)
    nested: list[str] = field(default_factory=list)
    notes: list[Diagnostic] = field(default_factory=list)
    count: int = 0
    size: int = 0

    @property
    def over(self) -> bool:
        """Whether the skill is beyond its bounds, so that looking further is useless."""
        return self.count > MAX_FILES or self.size > MAX_BYTES or len(self.below) >= MAX_FILES

    def add(self, listing: FolderListing) -> None:
        """Take in one folder."""
        self.stamps += listing.stamp
        self.notes += listing.notes
        self.count += listing.count
        self.size += listing.size


def walk_subtree(descriptor: int, path: str, listing: FolderListing, *, nested: bool) -> Subtree:
    """Look through everything an open skill's folder owns.

    With *nested* deeper skill files are skills of their own, and their folders are left to them.
    """
    subtree = Subtree()
    subtree.add(listing)
    _descend(descriptor, path, listing.folders, subtree, nested, depth=1)
    if subtree.over:
        subtree.notes.append(
            Diagnostic(
                "skill_large",
                "warning",
                f"The skill has more than {MAX_FILES} files or folders, or more than {MAX_BYTES // 2**20} MiB.",
                printable_path(path),
            )
        )
    return subtree


def _descend(parent: int, path: str, names: list[str], subtree: Subtree, nested: bool, depth: int) -> None:
    for name in names:
        if subtree.over:
            return
        folder_path = join(path, name)
        if depth > MAX_DEPTH:
            subtree.notes.append(unreadable_note(folder_path, f"it is deeper than {MAX_DEPTH} folders"))
            return
        try:
            descriptor = open_folder_at(parent, name, folder_path)
        except FileRefused as refusal:
            subtree.notes.append(unreadable_note(folder_path, refusal))
            continue
        try:
            listing = list_folder(descriptor, folder_path)
            subtree.below.append(folder_path)
            if listing.skill_file is not None:
                subtree.nested.append(folder_path)
                if nested:
                    # Its listing still counts here: without its skill file the folder falls back to this skill.
                    subtree.stamps += listing.stamp
                    continue
                printable = printable_path(join(folder_path, listing.skill_file))
                message = f"{printable} lies inside another skill and is one of its resources."
                subtree.notes.append(Diagnostic("nested_skill", "info", message, printable))
            subtree.add(listing)
            _descend(descriptor, folder_path, listing.folders, subtree, nested, depth + 1)
        except OSError as error:
            subtree.notes.append(unreadable_note(folder_path, error))
        finally:
            os.close(descriptor)
