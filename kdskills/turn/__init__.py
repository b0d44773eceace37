"""The skills in force for a turn: SkillsSubsystem, SkillView, the context variable and its facade.

`view` is the one gate: everything that reaches a skill asks `SkillView.resolve`. `subsystem` also holds what is active
here, set and reset by handles only. `export` and `restore` carry a view into another process, where it answers the same.

Each name is loaded when it is first used: a process that only restores an export needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.exports import lazy_exports

if TYPE_CHECKING:
    from kdskills.skills.explain import ExplainedStep, Explanation
    from kdskills.skills.selection import Closure, Granted, Refused
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
    from kdskills.turn.subsystem import (
        Activation,
        SkillsOverlay,
        SkillsSubsystem,
        bound,
        get_active_skills_subsystem,
        get_active_view,
        set_active_skills_subsystem,
    )
    from kdskills.turn.view import InstructionBlock, PickerEntry, SkillSet, SkillView
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".export": "remap_mounts",
            ".facade": (
                "build_skill_short_id_map build_skills_instruction_block get_skill import_skillset instruction_block "
                "resolve_skill_ref skills_for_consumer skills_gallery_text"
            ),
            ".restore": "set_skills_descriptor",
            ".subsystem": (
                "Activation SkillsOverlay SkillsSubsystem bound get_active_skills_subsystem get_active_view "
                "set_active_skills_subsystem"
            ),
            ".view": "InstructionBlock PickerEntry SkillSet SkillView",
            "kdskills.skills.explain": "ExplainedStep Explanation",
            "kdskills.skills.selection": "Closure Granted Refused",
        },
    )

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
    "SkillsOverlay",
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
