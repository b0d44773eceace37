"""The descriptor of a bundle, and loading a bundle from its folder.

`rules` and `descriptor` understand what people write, strictly: a typo must not lose a denial. `load` finds the one
descriptor file of a folder and fixes it to that folder (spec skills §3.1, §3.2).
"""

from kdskills.bundle.descriptor import SkillsDescriptor
from kdskills.bundle.load import Bundle, load_bundle
from kdskills.bundle.rules import AgentRules

__all__ = ["AgentRules", "Bundle", "SkillsDescriptor", "load_bundle"]
