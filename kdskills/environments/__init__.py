"""Packages that scripts of skills need: read from what their authors wrote, locked, built once, and mounted for the script alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.exports import lazy_exports

if TYPE_CHECKING:
    from kdskills.environments.model import EnvironmentSpec, LockedEnvironment, LockedPackage, NodeSpec
    from kdskills.environments.needs import SkillNeeds, combined, needs_of, spec_of
    from kdskills.environments.requirements import RequirementRefused, canonical_requirement
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".model": "EnvironmentSpec LockedEnvironment LockedPackage NodeSpec",
            ".needs": "SkillNeeds combined needs_of spec_of",
            ".requirements": "RequirementRefused canonical_requirement",
        },
    )

__all__ = [
    "EnvironmentSpec",
    "LockedEnvironment",
    "LockedPackage",
    "NodeSpec",
    "RequirementRefused",
    "SkillNeeds",
    "canonical_requirement",
    "combined",
    "needs_of",
    "spec_of",
]
