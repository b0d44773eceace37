"""Functions over what is active here, for code that does not pass a view around, and the instruction block of some skills.

Without `consumer` and `tools` they use the active view; with one of them, the view of that consumer (by default the
active one) with those tools (by default the active ones, so that leaving them out never opens a tool gate). `by` says
who starts the skills. All raise `NoActiveSkills` when nothing is active; `instruction_block` takes its view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from kdskills.errors import Diagnostic
from kdskills.prompts import BlockPart, render_block
from kdskills.skills.folder import RegistryContent
from kdskills.skills.model import Skill
from kdskills.skills.selection import By, Granted, Refused, refuse_by
from kdskills.sources import SourcesPool, adopt_citations
from kdskills.turn.subsystem import current
from kdskills.turn.view import InstructionBlock, SkillSet, SkillView

Variant = Literal["full", "compact"]


def instruction_block(
    view: SkillView,
    answers: Iterable[Granted | Refused],
    *,
    variant: Variant = "full",
    header: str = "ACTIVE SKILLS",
    pool: SourcesPool | None = None,
) -> InstructionBlock:
    """Return the block of references already answered by *view*, whose policy decides the imports.

    Each skill of their closure stands once, dependencies first; its citations are rewritten to the pool's numbers (a
    fresh one without *pool*). `compact` takes each skill's compact text, or its full one where there is none.

    Raises RootMissing when a skill's file is gone, RootChanged when a verified one has changed.
    """
    if variant not in {"full", "compact"}:
        raise ValueError(f"variant is full or compact, not {variant!r}")
    resolved = tuple(answers)
    closure = view.join(resolved)
    pool = SourcesPool.from_rows(()) if pool is None else pool
    parts: list[BlockPart] = []
    sid_map: dict[str, Mapping[int, int]] = {}
    findings: list[Diagnostic] = []
    for skill in closure.order:
        text, rows, notes = read_texts(skill, variant)
        findings += notes
        if not text.strip():
            continue
        if view.state.source_resolver is not None:
            rows, problems = view.state.source_resolver.complete(rows)
            findings += problems
        adopted = adopt_citations(text, rows, pool, key=view.state.source_key)
        pool, sid_map[skill.full_id] = adopted.pool, adopted.sid_map
        for note in adopted.diagnostics:
            named = note.code == "citation_dropped"
            findings.append(replace(note, message=f"{skill.full_id}: {note.message}") if named else note)
        parts.append(BlockPart(skill.name, skill.full_id, adopted.text, skill.hidden))
    text, disarmed = render_block(parts, header, view.state.environment)
    return InstructionBlock.of(
        text,
        pool=pool,
        sid_map=MappingProxyType(sid_map),
        granted=tuple(answer for answer in resolved if isinstance(answer, Granted)),
        refused=closure.refused,
        diagnostics=(*closure.diagnostics, *findings, *disarmed),
    )


def read_texts(skill: Skill, variant: Variant) -> tuple[str, tuple[Mapping[str, Any], ...], tuple[Diagnostic, ...]]:
    """Return a skill's text, its rows of sources, and what was found reading them, `stale` among it."""
    content = skill.content
    if not isinstance(content, RegistryContent):
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


Tools = Iterable[Any] | str | None


def _view(consumer: str | None, tools: Tools, include_internal: bool | None = None) -> SkillView:
    """Return the active view, or the one of the consumer and tools that a facade function was called with."""
    active = current()
    active_view = active.view
    internal = active_view.include_internal if include_internal is None else include_internal
    agent = active_view.consumer if consumer is None else consumer
    if consumer is None and tools is None and internal == active_view.include_internal:
        return active_view
    if include_internal is None and agent != active_view.consumer:
        internal = False
    return active.subsystem.view(agent, active_view.tools if tools is None else tools, include_internal=internal)


def get_skill(ref: str, *, consumer: str | None = None, tools: Tools = None, by: By = "model") -> Skill | None:
    """Return the skill *ref* names, hidden ones too, or None when there is none or it is refused.

    *ref* is a full id, bare id or short id of the view; raises NoActiveSkills when nothing is active here.
    """
    outcome = _view(consumer, tools).gate(ref, by=by, names=False)
    return outcome.skill if isinstance(outcome, Granted) else None


def resolve_skill_ref(
    ref: str,
    *,
    short_id_map: Mapping[str, str] | None = None,
    consumer: str | None = None,
    tools: Tools = None,
    by: By = "model",
) -> str | None:
    """Return the full id *ref* names, or None; *short_id_map* replaces the view's numbers, the gate still decides.

    Raises NoActiveSkills when nothing is active here.
    """
    outcome = _view(consumer, tools).gate(ref, by=by, numbers=short_id_map, names=False)
    return outcome.full_id if isinstance(outcome, Granted) else None


def skills_for_consumer(
    consumer: str | None = None,
    *,
    include_internal: bool = False,
    include_hidden: bool = True,
    tools: Tools = None,
    by: By = "model",
) -> list[Skill]:
    """Return the skills a consumer (None: the active one) may load, sorted by full id; by `code` leaves nothing out.

    *include_internal* opens the internal namespace. Raises NoActiveSkills when nothing is active here.
    """
    skills = _view(consumer, tools, include_internal).skills.values()
    return [skill for skill in skills if (include_hidden or not skill.hidden) and refuse_by(skill, by) is None]


def import_skillset(
    refs: Iterable[str] | str,
    *,
    short_id_map: Mapping[str, str] | None = None,
    consumer: str | None = None,
    tools: Tools = None,
    by: By = "model",
) -> SkillSet:
    """Return the full ids of everything *refs* bring along, dependencies first; raises NoActiveSkills."""
    view = _view(consumer, tools)
    references = (refs,) if isinstance(refs, str) else refs
    closure = view.join(view.gate(ref, by=by, numbers=short_id_map, names=False) for ref in references)
    return SkillSet(closure.ids, closure.refused, closure.diagnostics)


def build_skill_short_id_map(*, consumer: str | None = None, tools: Tools = None, by: By = "model") -> dict[str, str]:
    """Return `{"SK1": full id}` of what is listed for a consumer; raises NoActiveSkills.

    *by* changes nothing: numbers are those of the catalog a model reads, whoever asks.
    """
    return dict(_view(consumer, tools).short_ids)


def skills_gallery_text(
    *, consumer: str | None = None, budget: int | None = None, tools: Tools = None, by: By = "model"
) -> str:
    """Return the gallery of what is listed for a consumer, in at most *budget* tokens; raises NoActiveSkills.

    *by* changes nothing: a catalog is what a model reads; people have the picker.
    """
    return _view(consumer, tools).catalog("gallery", budget=budget).text


def build_skills_instruction_block(
    refs: Iterable[str] | str,
    *,
    variant: Variant = "full",
    header: str = "ACTIVE SKILLS",
    pool: SourcesPool | None = None,
    consumer: str | None = None,
    tools: Tools = None,
    by: By = "model",
) -> InstructionBlock:
    """Return the texts of *refs* (a string is one) and what they import as one block; raises NoActiveSkills.

    Short ids are those of the active view, also for another consumer: one view numbers the whole turn. The gate of
    *consumer* decides.

    *pool* is the turn's, None a fresh one: pass it and keep the block's `.pool`.
    """
    view = _view(consumer, tools)
    active_view = current().view
    numbers = active_view.short_ids if active_view.consumer is not None else view.short_ids
    references = (refs,) if isinstance(refs, str) else refs
    answers = [view.gate(ref, by=by, numbers=numbers, names=False) for ref in references]
    return instruction_block(view, answers, variant=variant, header=header, pool=pool)
