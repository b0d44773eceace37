"""`skills.matrix`: every skill beside every consumer, a page at a time, for who looks after many of both.

A cell is read from what a view has judged already, so that thousands of them cost no more than looking them up.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, get_args

from pydantic import Field

from kdskills.app.operations.bundles import recorded_consumers, visible_skills
from kdskills.app.operations.models import MAX_PAGE, Finding, Input, Output
from kdskills.app.operations.showing import MAX_FILTER, MAX_TEXT, State
from kdskills.bundle.descriptor import EVERYONE, is_group
from kdskills.turn.near_names import asker_findings

if TYPE_CHECKING:
    from kdskills.app.operations.bundles import BundleLoader
    from kdskills.app.operations.table import Context
    from kdskills.errors import Diagnostic
    from kdskills.skills import Skill
    from kdskills.turn import SkillsSubsystem, SkillView

MAX_COLUMNS: Final = 32
MAX_RANKED: Final = 1000
"""Most skills that a ranked search gives."""

FindingFilter = Literal["error", "warning", "any", "none"]
MatrixSort = Literal["id", "name", "state", "tokens", "findings"]


class MatrixInput(Input):
    """Which skills, beside which consumers, and which page of them."""

    bundle: Path | None = Field(None, description="A bundle's folder; none means the skills of the caller's project.")
    consumers: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        max_length=MAX_COLUMNS,
        description="Consumers, a column each; none means those that the bundle names in its rules, its list and its recording.",
    )
    tools: tuple[str, ...] | None = Field(
        None, description="Tools that each consumer has; none given means no tool gate."
    )
    roles: tuple[str, ...] = Field(
        (), max_length=64, description="Roles of the user the consumers work for: rules of `@role` hold."
    )
    include_internal: bool = Field(default=False, description="Grant skills of namespace `internal`, too.")
    filter: str = Field(
        "",
        max_length=MAX_FILTER,
        description="Only skills in whose id, name and description all of these words or parts of words stand, in any case.",
    )
    query: str = Field(
        "",
        max_length=MAX_TEXT,
        description="Only skills that fit these words as `skills.search` finds them, the best 1,000; the best first.",
    )
    namespace: str | None = Field(None, description="Only skills of this namespace.")
    state: State | None = Field(None, description="Only skills that are so for a consumer.")
    consumer: str | None = Field(
        None, description="Column that `state` is looked for in and sorted by; none means any, and the first."
    )
    findings: FindingFilter | None = Field(
        None, description="Only skills whose files have an error, a warning, any of both, or none of them."
    )
    min_tokens: int = Field(0, ge=0, description="Fewest tokens of a body.")
    max_tokens: int | None = Field(None, ge=0, description="Most tokens of a body; none means any number.")
    sort: MatrixSort | None = Field(
        None,
        description="Order of the skills, equal ones by full id; `tokens` and `findings` have the most first. None means by "
        "`query` where there is one, else by id.",
    )
    limit: int = Field(50, ge=1, le=MAX_PAGE, description="Most skills in one answer.")
    offset: int = Field(0, ge=0, le=1_000_000, description="Skills to pass over.")

    MAY_HOLD_NUL: ClassVar[tuple[str, ...]] = ("/query",)


class MatrixCell(Output):
    """What one consumer may do with a skill; `state` as of a `SkillRow`, and the code of a refusal."""

    state: State
    code: str | None = None


class MatrixRow(Output):
    """One skill, with a cell for each column; of one refused at load `reason` says why.

    `errors` and `warnings` count what is known of its files, as `diagnostics` of `skills.show` tell it.
    """

    full_id: str
    namespace: str
    name: str = ""
    description: str = ""
    version: str | None = None
    layer: str = ""
    tokens: int = 0
    errors: int = 0
    warnings: int = 0
    reason: str | None = None
    cells: tuple[MatrixCell, ...]


class MatrixColumn(Output):
    """One consumer, null for an anonymous one, and how many skills are in which state for it, filters aside."""

    consumer: str | None
    counts: dict[State, int]


class MatrixOutput(Output):
    """A page of skills beside consumers.

    `total` counts the skills that are asked for, `skills_total` all that the caller is told of, and `namespaces` counts those by
    namespace. `digest` changes whenever rules or skills do. Callers elsewhere are told of what they may use, for their own agent
    alone, and of no digest.
    """

    bundle: str
    consumers: tuple[MatrixColumn, ...]
    namespaces: dict[str, int]
    skills: tuple[MatrixRow, ...]
    offset: int
    total: int
    skills_total: int
    more: bool
    digest: str = ""
    diagnostics: tuple[Finding, ...] = ()


class _Line(NamedTuple):
    """A skill before it is put into words: those that are refused at load have no `skill`."""

    full_id: str
    skill: Skill | None
    findings: Sequence[Diagnostic]
    namespace: str
    tokens: int = 0

    def count(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.findings)


def named_consumers(subsystem: SkillsSubsystem) -> tuple[str, ...]:
    """Return the consumers that a bundle names: in its rules, in its list, and in its recording."""
    terms = subsystem.descriptor
    root = None if subsystem.bundle_root is None else Path(subsystem.bundle_root)
    in_rules = (each for each in filterfalse(is_group, terms.agents_config) if each != EVERYONE)
    return tuple(dict.fromkeys((*in_rules, *terms.consumers, *recorded_consumers(root))))[:MAX_COLUMNS]


def _views(subsystem: SkillsSubsystem, arguments: MatrixInput, context: Context) -> list[SkillView]:
    """Return the view of each column."""
    identity = context.identity
    tools: Collection[str] | None = arguments.tools
    consumers: Sequence[str | None] = (identity.consumer,)
    if identity.sees_all:
        consumers = arguments.consumers or named_consumers(subsystem) or (None,)
    elif tools is None:
        tools = identity.held_tools
    subsystem = subsystem.overlay(groups=arguments.roles) if arguments.roles else subsystem
    include_internal = arguments.include_internal
    return [subsystem.view(each, tools, include_internal=include_internal) for each in dict.fromkeys(consumers)]


def _cell(view: SkillView, full_id: str) -> tuple[State, str | None]:
    """Return state and code of a skill in a view, as `skills.list` gives them, from what the view has judged already."""
    if full_id in view.listed:
        return "listed", None
    skill = view.skills.get(full_id)
    if skill is not None:
        return ("hidden" if skill.hidden else "unlisted"), None
    code = view.codes.get(full_id, "unknown_skill")
    return ("invalid" if code == "skill_invalid" else "refused"), code


def _lines(views: Sequence[SkillView], context: Context) -> list[_Line]:
    """Return every skill that the caller is told of, sorted by full id."""
    view, identity = views[0], context.identity
    snapshot = view.state.snapshot
    skills = snapshot.skills if identity.sees_all else visible_skills(view, identity)
    lines = [
        _Line(full_id, skill, skill.diagnostics, skill.namespace, skill.tokens) for full_id, skill in skills.items()
    ]
    if identity.sees_all and snapshot.invalid:
        invalid = snapshot.invalid.items()
        lines += [_Line(full_id, None, bad.diagnostics, full_id.partition(".")[0]) for full_id, bad in invalid]
        lines.sort(key=lambda line: line.full_id)
    return lines


def _ranks(view: SkillView, query: str, context: Context) -> Mapping[str, int]:
    """Return the rank of each skill that fits *query*; people who see everything search everything."""
    if context.identity.sees_all:
        page = view.state.searcher.find(query, limit=MAX_RANKED).page
        return {match.full_id: rank for rank, match in enumerate(page)}
    hits = view.search(query, by=context.identity.starter, limit=MAX_RANKED).hits
    return {hit.full_id: rank for rank, hit in enumerate(hits)}


def _chosen(lines: Iterable[_Line], columns: Sequence[SkillView], arguments: MatrixInput) -> list[_Line]:
    """Return those of *lines* that the filters let through; *columns* are those that a state is looked for in."""
    words = set(arguments.filter.casefold().split())
    most = float("inf") if arguments.max_tokens is None else arguments.max_tokens
    namespace, least, state, severity = arguments.namespace, arguments.min_tokens, arguments.state, arguments.findings

    def fits(line: _Line) -> bool:
        if namespace not in {None, line.namespace} or not least <= line.tokens <= most:
            return False
        if state is not None and not any(_cell(view, line.full_id)[0] == state for view in columns):
            return False
        if severity is not None:
            errors, warnings = line.count("error"), line.count("warning")
            number = {"error": errors, "warning": warnings}.get(severity, errors + warnings)
            if (number == 0) != (severity == "none"):
                return False
        if not words:
            return True
        name, description = ("", "") if line.skill is None else (line.skill.name, line.skill.description)
        text = f"{line.full_id}\n{name}\n{description}".casefold()
        return all(word in text for word in words)

    return list(filter(fits, lines))


def _column(view: SkillView, lines: Sequence[_Line], *, sees_all: bool) -> MatrixColumn:
    """Return a column with its counts; of all skills they are those of the view's own parts, which is less to count."""
    if sees_all:
        hidden_flags = [skill.hidden for full_id, skill in view.skills.items() if full_id not in view.listed]
        invalid = len(view.state.snapshot.invalid)
        usable, hidden = len(view.listed) + len(hidden_flags), sum(hidden_flags)
        counts = Counter(listed=len(view.listed), hidden=hidden, unlisted=len(hidden_flags) - hidden, invalid=invalid)
        counts["refused"] = len(lines) - usable - invalid
    else:
        counts = Counter(_cell(view, line.full_id)[0] for line in lines)
    return MatrixColumn(consumer=view.consumer, counts={state: counts[state] for state in get_args(State)})


def _row(line: _Line, cells: Iterable[tuple[State, str | None]]) -> MatrixRow:
    sources = () if line.skill is None else (line.skill,)
    return MatrixRow.of(
        *sources,
        full_id=line.full_id,
        namespace=line.namespace,
        errors=line.count("error"),
        warnings=line.count("warning"),
        reason=None if line.skill is not None else "; ".join(map(str, line.findings)),
        cells=[MatrixCell(state=state, code=code) for state, code in cells],
    )


def _page(subsystem: SkillsSubsystem, name: str, arguments: MatrixInput, context: Context) -> MatrixOutput:
    views = _views(subsystem, arguments, context)
    lines = _lines(views, context)
    columns = [view for view in views if arguments.consumer in {None, view.consumer}]
    chosen = _chosen(lines, columns, arguments)
    ranks = _ranks(views[0], arguments.query, context) if arguments.query.strip() else None
    if ranks is not None:
        chosen = [line for line in chosen if line.full_id in ranks]
    key = _sort_key(arguments.sort, (columns or views)[0], ranks)
    if key is not None:
        chosen.sort(key=key)  # equal ones stay by full id
    page = chosen[arguments.offset : arguments.offset + arguments.limit]
    sees_all = context.identity.sees_all
    findings = [finding for each in arguments.consumers or () for finding in _asker_findings(subsystem, each)]
    return MatrixOutput.of(
        bundle=name,
        consumers=[_column(view, lines, sees_all=sees_all) for view in views],
        namespaces=Counter(line.namespace for line in lines),
        skills=[_row(line, [_cell(view, line.full_id) for view in views]) for line in page],
        offset=arguments.offset,
        total=len(chosen),
        skills_total=len(lines),
        more=arguments.offset + len(page) < len(chosen),
        digest=subsystem.fingerprint if sees_all else "",
        diagnostics=findings if sees_all else (),
    )


def _sort_key(
    sort: MatrixSort | None, column: SkillView, ranks: Mapping[str, int] | None
) -> Callable[[_Line], Any] | None:
    """Return what lines are sorted by; None for by full id, as they are."""
    order = list(get_args(State))
    keys: dict[str | None, Callable[[_Line], Any]] = {
        "name": lambda line: "" if line.skill is None else line.skill.name.casefold(),
        "state": lambda line: order.index(_cell(column, line.full_id)[0]),
        "tokens": lambda line: -line.tokens,
        "findings": lambda line: (-line.count("error"), -line.count("warning")),
    }
    if ranks is not None:
        keys[None] = lambda line: ranks[line.full_id]
    return keys.get(sort)


def _asker_findings(subsystem: SkillsSubsystem, consumer: str) -> tuple[Diagnostic, ...]:
    root = None if subsystem.bundle_root is None else Path(subsystem.bundle_root)
    return asker_findings(subsystem, consumer, recorded_consumers(root))


async def matrix(bundles: BundleLoader, arguments: MatrixInput, context: Context) -> MatrixOutput:
    """Show a page of skills beside consumers, and what each may do with each."""
    skills = await bundles.skills(arguments.bundle, context)
    return await asyncio.to_thread(_page, skills.subsystem, skills.name, arguments, context)
