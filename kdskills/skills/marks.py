"""What discovery remembers of the file system, so that the next start need not read it again."""

from __future__ import annotations

from dataclasses import dataclass

from kdskills.errors import Diagnostic
from kdskills.skills.bulk import maker_of
from kdskills.skills.model import Skill
from kdskills.skills.stamps import NO_STAMP, RACY_NS, STAMP_BYTES, newest_of, sizes_of, stamp_of


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
        return sizes_of(self.stamps[-STAMP_BYTES * len(self.files) :])


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


__all__ = ["NO_STAMP", "RACY_NS", "PlainFolder", "RootScan", "SkillRecord", "make_record", "newest_of", "stamp_of"]
