"""What a registry knows at one moment, as frozen values, and which root's skill answers to a full id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kdskills.errors import Diagnostic
from kdskills.skills.digest import rows_digest
from kdskills.skills.listing import RootScan, SkillRecord, join, printable_path
from kdskills.skills.model import Skill
from kdskills.skills.roots import SkillRoot


@dataclass(frozen=True, slots=True)
class InvalidSkill:
    """A skill that is there but was refused at load; it keeps hiding a weaker root's skill of the same id.

    `path` is posix and relative to the root.
    """

    full_id: str
    path: str
    root: SkillRoot
    diagnostics: tuple[Diagnostic, ...]
    digest: str = ""


@dataclass(frozen=True, slots=True)
class RootState:
    """A root as it was found: the digest over its skill files and companions, and whether it was there at all."""

    root: SkillRoot
    digest: str
    present: bool


@dataclass(frozen=True)
class Snapshot:
    """All skills of all roots at one moment.

    Attributes:
        skills: Usable skills by full id, sorted; immutable.
        invalid: Refused skills by full id, sorted; never in `skills` too.
        diagnostics: Every finding: roots first, then skills in the order of roots and paths.
        roots: The roots in order, weakest first.
        origins: Root of each full id in `skills`.
        generation: Grows by one with each change.
        built_at: Nanoseconds since the epoch.
    """

    skills: Mapping[str, Skill]
    invalid: Mapping[str, InvalidSkill]
    diagnostics: tuple[Diagnostic, ...]
    roots: tuple[RootState, ...]
    origins: Mapping[str, SkillRoot]
    generation: int
    built_at: int

    @cached_property
    def digest(self) -> str:
        """Digest over the roots' digests and the winner of each full id: what a fingerprint is made of."""
        rows = [["root", state.root.label, state.root.kind, state.root.uri, state.digest] for state in self.roots]
        rows += [["skill", name, self.origins[name].uri, skill.digest] for name, skill in self.skills.items()]
        rows += [["invalid", name, entry.root.uri, entry.digest] for name, entry in self.invalid.items()]
        return rows_digest(rows)


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """What a refresh found, as sorted full ids; `diagnostics` are those of the new snapshot."""

    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    diagnostics: tuple[Diagnostic, ...]
    generation: int


class Winner(NamedTuple):
    """The record that answers to a full id, and its root."""

    record: SkillRecord
    root: SkillRoot

    @property
    def path(self) -> str:
        """The skill file, posix and relative to the root."""
        return printable_path(join(self.record.path, self.record.files[0]))

    def refused(self, extra: tuple[Diagnostic, ...] = ()) -> InvalidSkill:
        """Return the winner as a refused skill."""
        findings = (*self.record.diagnostics, *extra)
        return InvalidSkill(self.record.full_id, self.path, self.root, findings, self.record.digest)


def merge(scans: Sequence[tuple[SkillRoot, RootScan]]) -> tuple[dict[str, Winner], list[Diagnostic]]:
    """Join the scans of all roots, weakest first; return winners by full id, unsorted, and every finding so far.

    The last root wins a full id and replaces the whole skill, also when its own skill was refused; within a root the
    later path wins.
    """
    winners: dict[str, Winner] = {}
    diagnostics: list[Diagnostic] = []
    for root, scan in scans:
        diagnostics += scan.notes
        for folder in scan.folders.values():
            diagnostics += folder.notes
        for record in scan.skills.values():
            diagnostics += record.notes
            diagnostics += record.diagnostics
            name, winner = record.full_id, Winner(record, root)
            loser = winners.get(name)
            winners[name] = winner
            if loser is not None and loser.root is root:
                message = f"{loser.path} and {winner.path} are both {name}; the later one is used."
                diagnostics.append(Diagnostic("duplicate_id", "warning", message, winner.path, ref=name))
            elif loser is not None:
                message = (
                    f"{name} of the root {root.label} ({winner.path}) replaces the one of {loser.root.label} "
                    f"({loser.path})."
                )
                diagnostics.append(Diagnostic("skill_overridden", "info", message, winner.path, ref=name))
    return winners, diagnostics
