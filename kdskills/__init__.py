"""Agent Skills for Python agents that can be trusted in production.

The names below are those of the ground floor, and what a program needs first of the floors above: `SolverSystem`,
`ReactSolver`, `SkillRuntime`, `Host`, `Settings`, and `ScriptedModel` for its tests. Each is loaded when it is first used, so
that importing one room does not import them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.exports import lazy_exports

if TYPE_CHECKING:
    from kdskills.app import Host, Settings
    from kdskills.bundle import AgentRules, Bundle, SkillsDescriptor, load_bundle
    from kdskills.errors import Diagnostic
    from kdskills.session import SkillRuntime
    from kdskills.skills import Skill
    from kdskills.solver import ReactSolver, SolverSystem
    from kdskills.sources import (
        CitationStream,
        MergeResult,
        RewriteResult,
        SourcesPool,
        extract_citations,
        render_citations,
        rewrite_citations,
    )
    from kdskills.testing import ScriptedModel
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

    __version__: str
else:
    _load, __dir__ = lazy_exports(
        __name__,
        {
            ".app": "Host Settings",
            ".bundle": "AgentRules Bundle SkillsDescriptor load_bundle",
            ".errors": "Diagnostic",
            ".session": "SkillRuntime",
            ".skills": "Skill",
            ".solver": "ReactSolver SolverSystem",
            ".sources": (
                "CitationStream MergeResult RewriteResult SourcesPool extract_citations render_citations "
                "rewrite_citations"
            ),
            ".testing": "ScriptedModel",
            ".turn": (
                "Granted Refused SkillsSubsystem SkillView build_skill_short_id_map build_skills_instruction_block "
                "get_active_skills_subsystem get_skill import_skillset resolve_skill_ref set_active_skills_subsystem "
                "set_skills_descriptor skills_for_consumer skills_gallery_text"
            ),
        },
    )

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("kdskills")
        return _load(name)


__all__ = [
    "AgentRules",
    "Bundle",
    "CitationStream",
    "Diagnostic",
    "Granted",
    "Host",
    "MergeResult",
    "ReactSolver",
    "Refused",
    "RewriteResult",
    "ScriptedModel",
    "Settings",
    "Skill",
    "SkillRuntime",
    "SkillView",
    "SkillsDescriptor",
    "SkillsSubsystem",
    "SolverSystem",
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
