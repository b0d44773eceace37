"""Decide which root's skill answers to a full id: pure, over finished scans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kdskills.errors import Diagnostic
from kdskills.skills.listing import join, shown
from kdskills.skills.marks import RootScan, SkillRecord
from kdskills.skills.model import Skill
from kdskills.skills.roots import SkillRoot
from kdskills.skills.snapshot import InvalidSkill


class Winner(NamedTuple):
    """The record that answers to a full id, and its root."""

    record: SkillRecord
    root: SkillRoot

    @property
    def path(self) -> str:
        """The skill file, posix and relative to the root."""
        return shown(join(self.record.path, self.record.files[0]))

    def refused(self, extra: tuple[Diagnostic, ...] = ()) -> InvalidSkill:
        """Return the winner as a refused skill."""
        findings = (*self.record.diagnostics, *extra)
        return InvalidSkill(self.record.full_id, self.path, self.root, findings, self.record.digest)


@dataclass(slots=True)
class Merged:
    """Winners by full id, unsorted, and every finding so far."""

    winners: dict[str, Winner] = field(default_factory=dict)
    diagnostics: list[Diagnostic] = field(default_factory=list)


def merge(scans: Sequence[tuple[SkillRoot, RootScan]]) -> Merged:
    """Join the scans of all roots, weakest first.

    The last root wins a full id and replaces the whole skill, also when its own skill was refused; within a root the
    later path wins.
    """
    merged = Merged()
    for root, scan in scans:
        merged.diagnostics += scan.notes
        for folder in scan.folders.values():
            merged.diagnostics += folder.notes
        for record in scan.skills.values():
            merged.diagnostics += record.notes
            merged.diagnostics += record.diagnostics
            _enter(merged, Winner(record, root))
    return merged


def _enter(merged: Merged, winner: Winner) -> None:
    name = winner.record.full_id
    loser = merged.winners.get(name)
    merged.winners[name] = winner
    if loser is None:
        return
    if loser.root is winner.root:
        message = f"{loser.path} and {winner.path} are both {name}; the later one is used."
        merged.diagnostics.append(Diagnostic("duplicate_id", "warning", message, winner.path, ref=name))
    else:
        message = (
            f"{name} of the root {winner.root.label} ({winner.path}) replaces the one of {loser.root.label} "
            f"({loser.path})."
        )
        merged.diagnostics.append(Diagnostic("skill_overridden", "info", message, winner.path, ref=name))


def differences(
    old: dict[str, Skill], new: dict[str, Skill]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return sorted full ids added, changed and removed. An unchanged skill is the same object in both."""
    added = tuple(sorted(new.keys() - old.keys()))
    removed = tuple(sorted(old.keys() - new.keys()))
    changed = tuple(sorted(name for name in new.keys() & old.keys() if new[name] is not old[name]))
    return added, changed, removed
