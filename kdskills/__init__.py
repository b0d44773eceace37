"""Agent Skills for Python agents that can be trusted in production.

The names below are the public ones of the ground floor. Each is loaded when it is first used, so that importing one
room does not import them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.exports import lazy_exports

if TYPE_CHECKING:
    from kdskills.bundle import AgentRules, Bundle, SkillsDescriptor, load_bundle
    from kdskills.errors import Diagnostic
    from kdskills.skills import Skill
    from kdskills.sources import (
        CitationStream,
        MergeResult,
        RewriteResult,
        SourcesPool,
        extract_citations,
        render_citations,
        rewrite_citations,
    )
    from kdskills.turn import (
        Granted,
        Refused,
        SkillsSubsystem,
        SkillView,
        build_skill_short_id_map,
        build_skills_instruction_block,
        get_active_skills_subsystem,
        get_skill,
        import_skillset,
        resolve_skill_ref,
        set_active_skills_subsystem,
        set_skills_descriptor,
        skills_for_consumer,
        skills_gallery_text,
    )
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".bundle": "AgentRules Bundle SkillsDescriptor load_bundle",
            ".errors": "Diagnostic",
            ".skills": "Skill",
            ".sources": (
                "CitationStream MergeResult RewriteResult SourcesPool extract_citations render_citations "
                "rewrite_citations"
            ),
            ".turn": (
                "Granted Refused SkillsSubsystem SkillView build_skill_short_id_map build_skills_instruction_block "
                "get_active_skills_subsystem get_skill import_skillset resolve_skill_ref set_active_skills_subsystem "
                "set_skills_descriptor skills_for_consumer skills_gallery_text"
            ),
        },
    )

__all__ = [
    "AgentRules",
    "Bundle",
    "CitationStream",
    "Diagnostic",
    "Granted",
    "MergeResult",
    "Refused",
    "RewriteResult",
    "Skill",
    "SkillView",
    "SkillsDescriptor",
    "SkillsSubsystem",
    "SourcesPool",
    "build_skill_short_id_map",
    "build_skills_instruction_block",
    "extract_citations",
    "get_active_skills_subsystem",
    "get_skill",
    "import_skillset",
    "load_bundle",
    "render_citations",
    "resolve_skill_ref",
    "rewrite_citations",
    "set_active_skills_subsystem",
    "set_skills_descriptor",
    "skills_for_consumer",
    "skills_gallery_text",
]
