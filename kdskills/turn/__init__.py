"""The skills in force for a turn: SkillsSubsystem, SkillView, the context variable and its facade.

`view` is the one gate: everything that reaches a skill asks `SkillView.resolve`. `context` holds what is active here,
set and reset by handles only. `export` and `restore` carry a view into another process, where it answers the same.

Each name is loaded when it is first used: a process that only restores an export needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kdskills.skills.closure import Closure
    from kdskills.skills.explain import ExplainedStep, Explanation
    from kdskills.skills.selection import Granted, Refused
    from kdskills.turn.context import (
        Activation,
        bound,
        get_active_skills_subsystem,
        get_active_view,
        set_active_skills_subsystem,
    )
    from kdskills.turn.export import remap_mounts
    from kdskills.turn.facade import (
        build_skill_short_id_map,
        build_skills_instruction_block,
        get_skill,
        import_skillset,
        instruction_block,
        resolve_skill_ref,
        skills_for_consumer,
        skills_gallery_text,
    )
    from kdskills.turn.restore import set_skills_descriptor
    from kdskills.turn.subsystem import SkillsSubsystem
    from kdskills.turn.view import InstructionBlock, PickerEntry, SkillSet, SkillView

__all__ = [
    "Activation",
    "Closure",
    "ExplainedStep",
    "Explanation",
    "Granted",
    "InstructionBlock",
    "PickerEntry",
    "Refused",
    "SkillSet",
    "SkillView",
    "SkillsSubsystem",
    "bound",
    "build_skill_short_id_map",
    "build_skills_instruction_block",
    "get_active_skills_subsystem",
    "get_active_view",
    "get_skill",
    "import_skillset",
    "instruction_block",
    "remap_mounts",
    "resolve_skill_ref",
    "set_active_skills_subsystem",
    "set_skills_descriptor",
    "skills_for_consumer",
    "skills_gallery_text",
]

_MODULES = MappingProxyType(
    {
        "kdskills.skills.closure": ("Closure",),
        "kdskills.skills.explain": ("ExplainedStep", "Explanation"),
        "kdskills.skills.selection": ("Granted", "Refused"),
        "kdskills.turn.context": (
            "Activation",
            "bound",
            "get_active_skills_subsystem",
            "get_active_view",
            "set_active_skills_subsystem",
        ),
        "kdskills.turn.facade": (
            "build_skill_short_id_map",
            "build_skills_instruction_block",
            "get_skill",
            "import_skillset",
            "instruction_block",
            "resolve_skill_ref",
            "skills_for_consumer",
            "skills_gallery_text",
        ),
        "kdskills.turn.export": ("remap_mounts",),
        "kdskills.turn.restore": ("set_skills_descriptor",),
        "kdskills.turn.subsystem": ("SkillsSubsystem",),
        "kdskills.turn.view": ("InstructionBlock", "PickerEntry", "SkillSet", "SkillView"),
    }
)


def __getattr__(name: str) -> object:
    """Return a name of this room, importing its module now."""
    for module_name, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module_name), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what is here, loaded or not."""
    return sorted({*globals(), *__all__})
