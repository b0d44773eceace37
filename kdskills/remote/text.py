"""The catalog as wire tools and as text, byte-exact."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from kdskills.remote.ports import JsonObject
from kdskills.remote.registry import RemoteSkill

HEADER = (
    "Session remote skill catalog (Python-managed):",
    "Use these capabilities when relevant and do not invent unknown tools.",
)
TOOLS_KEYWORDS = ("dynamic_tools", "dynamicTools")
"""The two spellings of the keyword with wire tools; clients convert the first to the second."""

_BREAK = re.compile("\r\n|[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")


def sorted_skills(skills: Iterable[RemoteSkill]) -> list[RemoteSkill]:
    """Return the skills by qualified name."""
    return sorted(skills, key=lambda skill: skill.qualified_name)


def wire_tools(skills: Iterable[RemoteSkill]) -> list[JsonObject]:
    """Return the tools of a catalog, sorted by qualified name, with schemas of their own."""
    return [skill.to_tool() for skill in sorted_skills(skills)]


def instruction_text(skills: Iterable[RemoteSkill]) -> str:
    """Return the catalog as text: empty without skills, no trailing newline."""
    listed_skills = sorted_skills(skills)
    if not listed_skills:
        return ""
    lines = list(HEADER)
    for skill in listed_skills:
        lines.append(f"- {skill.qualified_name}: {_one_line(skill.description)}")
        lines.append(f"  input_schema: {_json(skill.input_schema)}")
        if skill.output_schema:
            lines.append(f"  output_schema: {_json(skill.output_schema)}")
        if skill.output_description:
            lines.append(f"  output_description: {_one_line(skill.output_description)}")
    return "\n".join(lines)


def inject(catalog: str, text: str) -> str:
    """Return the user's text below the catalog; the text alone when there is no catalog."""
    return f"{catalog}\n\nUser request:\n{text}" if catalog else text


def _one_line(text: str) -> str:
    return _BREAK.sub(" ", text)


def _json(value: JsonObject) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True)
