"""Skills as files: read them, find them in roots, keep them in a registry, and decide who may use which.

`parse_skill` reads one folder, `SkillRegistry` finds all skills below its roots, `kdskills.skills.selection` holds the
steps of the one policy gate. Reading is pure once bytes are there; the file system is touched at the rim only.

Each name is loaded when it is first used: a process that only restores an export needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdskills.exports import lazy_exports

if TYPE_CHECKING:
    from kdskills.skills.model import (
        ParsedSkill,
        RenderedBody,
        Skill,
        SkillArgument,
        SkillContent,
        SkillTool,
        Verdict,
        estimate_tokens,
        render_body,
    )
    from kdskills.skills.parse import parse_skill, parse_skill_bytes, validate_skill
    from kdskills.skills.registry import SkillRegistry
    from kdskills.skills.roots import InvalidSkill, RefreshReport, RootState, SkillRoot, Snapshot, agent_skill_roots
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".model": (
                "ParsedSkill RenderedBody Skill SkillArgument SkillContent SkillTool Verdict estimate_tokens "
                "render_body"
            ),
            ".parse": "parse_skill parse_skill_bytes validate_skill",
            ".registry": "SkillRegistry",
            ".roots": "InvalidSkill RefreshReport RootState SkillRoot Snapshot agent_skill_roots",
        },
    )

__all__ = [
    "InvalidSkill",
    "ParsedSkill",
    "RefreshReport",
    "RenderedBody",
    "RootState",
    "Skill",
    "SkillArgument",
    "SkillContent",
    "SkillRegistry",
    "SkillRoot",
    "SkillTool",
    "Snapshot",
    "Verdict",
    "agent_skill_roots",
    "estimate_tokens",
    "parse_skill",
    "parse_skill_bytes",
    "render_body",
    "validate_skill",
]
