"""The instruction block of some skills: their texts, adopted into the turn's pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from kdskills.errors import Diagnostic
from kdskills.prompts import BlockPart, render_block
from kdskills.skills.model import Skill
from kdskills.skills.selection import Granted, Refused
from kdskills.sources import SourcesPool, adopt_citations
from kdskills.turn.results import InstructionBlock
from kdskills.turn.view import SkillView

Variant = Literal["full", "compact"]

T_co = TypeVar("T_co", covariant=True)


class CheckedRead(Protocol[T_co]):
    """A text as read just now, with findings such as `stale`."""

    @property
    def value(self) -> T_co:
        """The text or rows."""
        ...

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Findings of this read."""
        ...


@runtime_checkable
class ReadsWithFindings(Protocol):
    """Content whose reads also give findings: that of a registered skill, unlike one parsed from bytes."""

    def read_body(self) -> CheckedRead[str]:
        """Return the body."""
        ...

    def read_compact(self) -> CheckedRead[str | None]:
        """Return the compact text."""
        ...

    def read_sources(self) -> CheckedRead[tuple[Mapping[str, Any], ...]]:
        """Return the rows of sources."""
        ...


@dataclass(slots=True)
class _Building:
    """What a block under construction holds."""

    pool: SourcesPool
    parts: list[BlockPart] = field(default_factory=list)
    sid_map: dict[str, Mapping[int, int]] = field(default_factory=dict)
    findings: list[Diagnostic] = field(default_factory=list)


def instruction_block(
    view: SkillView,
    answers: Iterable[Granted | Refused],
    *,
    variant: Variant = "full",
    header: str = "ACTIVE SKILLS",
    pool: SourcesPool | None = None,
) -> InstructionBlock:
    """Return the block of references already answered by *view*.

    Each skill of their closure stands once, dependencies first; its citations are rewritten to the pool's numbers.

    Args:
        view: The view that answered; its policy decides the imports.
        answers: What `resolve` gave.
        variant: `compact` takes each skill's compact text, or its full one where there is none.
        header: The block's first line, without brackets.
        pool: The turn's pool; None means a fresh one.

    Raises:
        ValueError: *variant* is none of the two.
        RootMissing: A skill's file is gone.
        RootChanged: A verified skill's file has changed.
    """
    if variant not in {"full", "compact"}:
        raise ValueError(f"variant is full or compact, not {variant!r}")
    resolved = tuple(answers)
    closure = view.join(resolved)
    building = _Building(SourcesPool.from_rows(()) if pool is None else pool)
    for skill in closure.order:
        _add(building, skill, variant, view)
    text, disarmed = render_block(building.parts, header, view.state.environment)
    return InstructionBlock.of(
        text,
        pool=building.pool,
        sid_map=building.sid_map,
        granted=tuple(answer for answer in resolved if isinstance(answer, Granted)),
        refused=closure.refused,
        diagnostics=(*closure.diagnostics, *building.findings, *disarmed),
    )


def _add(building: _Building, skill: Skill, variant: Variant, view: SkillView) -> None:
    """Read one skill, adopt its sources and append its part; a skill without text adds nothing."""
    text, rows, findings = read_texts(skill, variant)
    building.findings += findings
    if not text.strip():
        return
    adopted = adopt_citations(text, rows, building.pool, key=view.state.source_key)
    building.pool = adopted.pool
    building.sid_map[skill.full_id] = adopted.sid_map
    building.findings += [
        finding
        if finding.code != "citation_dropped"
        else replace(finding, message=f"{skill.full_id}: {finding.message}")
        for finding in adopted.diagnostics
    ]
    building.parts.append(BlockPart(skill.name, skill.full_id, adopted.text, skill.hidden))


def read_texts(skill: Skill, variant: Variant) -> tuple[str, tuple[Mapping[str, Any], ...], tuple[Diagnostic, ...]]:
    """Return a skill's text, its rows of sources, and what was found reading them, `stale` among it."""
    content = skill.content
    if not isinstance(content, ReadsWithFindings):
        short = skill.compact if variant == "compact" else None
        return short if short and short.strip() else skill.body, skill.sources, ()
    rows = content.read_sources()
    findings = rows.diagnostics
    if variant == "compact":
        compact = content.read_compact()
        findings += compact.diagnostics
        if compact.value and compact.value.strip():
            return compact.value, rows.value, findings
    body = content.read_body()
    return body.value, rows.value, findings + body.diagnostics
