"""Skills as files: read them, find them in roots, keep them in a registry, and decide who may use which.

`parse_skill` reads one folder, `SkillRegistry` finds all skills below its roots, `kdskills.skills.selection` holds the
steps of the one policy gate. Reading is pure once bytes are there; the file system is touched at the rim only.

Each name is loaded when it is first used: a process that only restores an export needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

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
    from kdskills.skills.roots import SkillRoot, agent_skill_roots
    from kdskills.skills.snapshot import InvalidSkill, RefreshReport, RootState, Snapshot

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

_MODULE_NAMES = MappingProxyType(
    {
        "kdskills.skills.model": (
            "ParsedSkill",
            "RenderedBody",
            "Skill",
            "SkillArgument",
            "SkillContent",
            "SkillTool",
            "Verdict",
            "estimate_tokens",
            "render_body",
        ),
        "kdskills.skills.parse": ("parse_skill", "parse_skill_bytes", "validate_skill"),
        "kdskills.skills.registry": ("SkillRegistry",),
        "kdskills.skills.roots": ("SkillRoot", "agent_skill_roots"),
        "kdskills.skills.snapshot": ("InvalidSkill", "RefreshReport", "RootState", "Snapshot"),
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
