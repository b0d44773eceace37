"""The descriptor of a bundle, and loading a bundle from its folder.

`descriptor` understands what people write, strictly: a typo must not lose a denial. `load` finds the one descriptor file
of a folder and fixes it to that folder.

Each name is loaded when it is first used: a process that only restores an export needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.exports import lazy_exports

if TYPE_CHECKING:
    from kdskills.bundle.descriptor import AgentRules, SkillsDescriptor
    from kdskills.bundle.load import Bundle, load_bundle
else:
    __getattr__, __dir__ = lazy_exports(
        __name__, {".descriptor": "AgentRules SkillsDescriptor", ".load": "Bundle load_bundle"}
    )

__all__ = ["AgentRules", "Bundle", "SkillsDescriptor", "load_bundle"]
