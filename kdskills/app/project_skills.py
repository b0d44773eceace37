"""The skills of a project, as operations look at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdskills.errors import Diagnostic
    from kdskills.turn import SkillsSubsystem


@dataclass(frozen=True, slots=True)
class ProjectSkills:
    """A named set of skills with its policy.

    Attributes:
        name: Name of the bundle, or of the project.
        subsystem: Skills and policy.
        diagnostics: What was found while they were loaded.
    """

    name: str
    subsystem: SkillsSubsystem
    diagnostics: tuple[Diagnostic, ...] = ()
