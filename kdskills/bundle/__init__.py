"""The descriptor of a bundle, and loading a bundle from its folder.

`terms` understands what people write, strictly: a typo must not lose a denial. `descriptor` has the models of it that
programs build and read. `load` finds the one descriptor file of a folder and fixes it to that folder.

Each name is loaded when it is first used: a process that only restores an export needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdskills.bundle.descriptor import AgentRules, SkillsDescriptor
    from kdskills.bundle.load import Bundle, load_bundle

__all__ = ["AgentRules", "Bundle", "SkillsDescriptor", "load_bundle"]

_MODULE_NAMES = MappingProxyType(
    {
        "kdskills.bundle.load": ("Bundle", "load_bundle"),
        "kdskills.bundle.descriptor": ("AgentRules", "SkillsDescriptor"),
    }
)


def __getattr__(name: str) -> object:
    """Return a name of this room, importing its module now."""
    for module_name, names in _MODULE_NAMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module_name), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what is here, loaded or not."""
    return sorted({*globals(), *__all__})
