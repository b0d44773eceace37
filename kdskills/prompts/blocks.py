"""The texts of active skills, as sections no body can break out of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kdskills.errors import Diagnostic
from kdskills.prompts.environment import render
from kdskills.prompts.escape import DISCLOSURE_RULE, cdata, disarm, one_line, xml_attribute

if TYPE_CHECKING:
    import jinja2

_ATTRIBUTE = r"[A-Za-z_][A-Za-z0-9_.-]*"


@dataclass(frozen=True, slots=True)
class ActiveEntry:
    """One active skill.

    Attributes:
        name: Its name; not shown when there is an alias.
        text: Its body.
        hidden_alias: `hidden_alias(full_id)` of a hidden skill, else None.
        attributes: Further attributes, such as `origin`, `stale`, `imported-by`.
    """

    name: str
    text: str
    hidden_alias: str | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One skill of an instruction block, in the order of its closure."""

    name: str
    full_id: str
    text: str
    hidden: bool = False


def render_active(entries: Sequence[ActiveEntry], *, environment: jinja2.Environment | None = None) -> str:
    """Return `<active_skills>` with one CDATA section per skill, in load order; `""` when nothing is active.

    Bodies stay raw: an XML parser gives them back as they were, whatever they hold.

    Raises:
        ValueError: The name of a further attribute is no XML name, or is `name`.
    """
    if not entries:
        return ""
    rows = [{"attributes": _attributes(entry), "text": cdata(entry.text)} for entry in entries]
    return render("active_skills.xml.j2", environment, {"entries": rows})


def _attributes(entry: ActiveEntry) -> list[tuple[str, str]]:
    for key in entry.attributes:
        if key == "name" or not re.fullmatch(_ATTRIBUTE, key):
            raise ValueError(f"{key!r} cannot be a further attribute of an active skill")
    further = sorted(entry.attributes.items())
    return [(key, xml_attribute(value)) for key, value in (("name", entry.hidden_alias or entry.name), *further)]


def render_block(
    parts: Sequence[BlockPart], header: str = "ACTIVE SKILLS", environment: jinja2.Environment | None = None
) -> tuple[str, tuple[Diagnostic, ...]]:
    """Return the instruction block of *parts*, and what was disarmed in their texts.

    Each skill stands once, whole. A hidden one stands under a heading that does not name it. Lines that begin like
    the block's own structure get a backslash, reported as `forged_structure`.

    Returns:
        The block without a final newline, or `""` when no part has text.
    """
    header = one_line(header)
    rows: dict[str, dict[str, object]] = {}
    findings = []
    for part in parts:
        text, forged = disarm(part.text.strip(), header)
        if not text or part.full_id in rows:
            continue
        rows[part.full_id] = {
            "name": one_line(part.name),
            "full_id": one_line(part.full_id),
            "text": text,
            "hidden": part.hidden,
        }
        if forged:
            message = f"{part.full_id} has {len(forged)} line(s) that look like the block's own structure; disarmed"
            findings.append(Diagnostic("forged_structure", "info", message, line=forged[0], ref=part.full_id))
    if not rows:
        return "", ()
    values = {"header": header, "parts": list(rows.values()), "disclosure_rule": DISCLOSURE_RULE}
    return render("instruction_block.j2", environment, values), tuple(findings)
