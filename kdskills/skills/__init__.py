"""Skills as files: read them, find them in roots, keep them in a registry, and decide who may use which.

`parse_skill` reads one folder, `SkillRegistry` finds all skills below its roots, `kdskills.skills.selection` holds the
steps of the one policy gate. Reading is pure once bytes are there; the file system is touched at the rim only
(spec skills §1, §2, §4).
"""

from kdskills.skills.arguments import render_body
from kdskills.skills.model import (
    ParsedSkill,
    RenderedBody,
    Skill,
    SkillArgument,
    SkillContent,
    SkillTool,
    Verdict,
    estimate_tokens,
)
from kdskills.skills.parse import parse_skill, parse_skill_bytes
from kdskills.skills.registry import SkillRegistry
from kdskills.skills.roots import SkillRoot, agent_skill_roots
from kdskills.skills.snapshot import InvalidSkill, RefreshReport, RootState, Snapshot
from kdskills.skills.validate import validate_skill

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
