"""What a registry knows at one moment: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kdskills.errors import Diagnostic
from kdskills.skills.digest import rows_digest
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
