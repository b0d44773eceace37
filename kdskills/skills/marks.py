"""What discovery remembers of the file system, so that the next start need not read it again (spec skills §2.3)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

from kdskills.errors import Diagnostic
from kdskills.skills.model import Skill

RACY_NS = 2_000_000_000


class Stamp(NamedTuple):
    """Facts that change when a file or folder does: the listed ones of the specification, and the change time."""

    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int


NO_STAMP = Stamp(-1, -1, -1, -1)


def stamp_of(found: os.stat_result) -> Stamp:
    """Return the stamp of a file or folder."""
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)


class FileMark(NamedTuple):
    """A skill file or companion: its name, stamp, and digest of its bytes.

    `digest` is empty when the file was not read (a link, too large, unreadable).
    """

    name: str
    stamp: Stamp
    digest: str


class FolderMark(NamedTuple):
    """A folder and its stamp; `path` is posix and relative to the root."""

    path: str
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class PlainFolder:
    """A folder on the way to skills: which folders below were entered, and what was noted in it."""

    stamp: Stamp
    children: tuple[str, ...]
    notes: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True, slots=True)
class SkillRecord:
    """A skill's folder as last seen, and what was made of it.

    Attributes:
        path: The folder, posix and relative to the root.
        layout_namespace: The namespace the layout gave it.
        folders: The folder itself and the ones entered below it.
        files: The skill file, then its companions by name.
        nested: Folders below with skill files of their own.
        notes: Findings of the walk, not of the parser.
        full_id: What the skill is known as, refused or not.
        skill: The skill, or None when it was refused.
        diagnostics: The parser's findings.
    """

    path: str
    layout_namespace: str
    folders: tuple[FolderMark, ...]
    files: tuple[FileMark, ...]
    nested: tuple[str, ...]
    notes: tuple[Diagnostic, ...]
    full_id: str
    skill: Skill | None
    diagnostics: tuple[Diagnostic, ...]

    @property
    def digest(self) -> str:
        """Digest of the skill file."""
        return self.files[0].digest

    @property
    def digests(self) -> tuple[tuple[str, str], ...]:
        """Names and digests of skill file and companions."""
        return tuple((mark.name, mark.digest) for mark in self.files)


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
