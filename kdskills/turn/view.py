"""What one consumer may use, frozen: the one gate every way to a skill passes, and what it answers with."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypedDict, get_args

from kdskills.errors import Diagnostic
from kdskills.skills.model import Skill, TokenCounter, estimate_tokens
from kdskills.skills.refs import INTERNAL_NAMESPACE, compile_rules, is_number, parse_ref, quoted
from kdskills.skills.roots import far_content
from kdskills.skills.safe_open import rows_digest
from kdskills.skills.selection import (
    By,
    Closure,
    Granted,
    KnownSkills,
    Refused,
    Rules,
    Via,
    broken_imports,
    checks_in_force,
    close,
    decide,
    import_refusal,
    refuse,
    refuse_by,
)
from kdskills.turn.export import SubsystemState, export_view, merged_ids

if TYPE_CHECKING:
    from kdskills.prompts import Catalog, CatalogEntry, CatalogFormat, CatalogListing, Locations
    from kdskills.search import Searcher, SearchResult
    from kdskills.skills.explain import Explanation
    from kdskills.sources import SourcesPool


class PickerEntry(TypedDict):
    """What a person chooses a skill by."""

    id: str
    name: str
    description: str
    when_to_use: list[str]
    namespace: str


class SkillSet(list[str]):
    """Full ids in the order they are read, dependencies first, with what was refused, and findings about imports."""

    def __init__(
        self, ids: Iterable[str] = (), refused: tuple[Refused, ...] = (), diagnostics: tuple[Diagnostic, ...] = ()
    ) -> None:
        super().__init__(ids)
        self.refused = refused
        self.diagnostics = diagnostics


class InstructionBlock(str):
    """The text of an instruction block, with what went into it.

    Attributes:
        pool: The pool given, with the sources of the skills merged in.
        sid_map: `{full id: {sid in the skill: sid in the pool}}`.
        granted: What was granted, in the order asked for.
        refused: What was refused.
        diagnostics: Findings about imports, texts and citations.
    """

    __slots__ = ("diagnostics", "granted", "pool", "refused", "sid_map")

    pool: SourcesPool
    sid_map: Mapping[str, Mapping[int, int]]
    granted: tuple[Granted, ...]
    refused: tuple[Refused, ...]
    diagnostics: tuple[Diagnostic, ...]

    @classmethod
    def of(cls, text: str, **facts: Any) -> InstructionBlock:
        """Return *text* with its facts, one for each attribute."""
        block = cls(text)
        for name, fact in facts.items():
            setattr(block, name, fact)
        return block


_STARTERS = frozenset(get_args(By))

MAX_HITS: Final = 1000
MAX_NAMED: Final = 16
"""Skills that a request may name."""
MAX_NAMING: Final = 20_000
"""Characters of a request that are looked through for names."""
_NAMED = re.compile(r"(?<![\w$:.-])(?:(?:\$|sk:)([\w-]+(?:\.[\w-]+)?)|[\w-]+\.[\w-]+)")


@dataclass(frozen=True, eq=False)
class SkillView:
    """The skills one consumer may use, at one moment; `SkillsSubsystem.view` makes it.

    Attributes:
        consumer: Whose view it is; None for an anonymous consumer.
        tools: Ids of the consumer's tools; None when no tool gate was asked for.
        include_internal: Whether the internal namespace is open.
        skills: Loadable skills by full id, sorted.
        listed: Those a model is shown: without hidden ones and without what only people start.
        short_ids: `{"SK1": full id}` over `listed`.
        names: `{name: full id}` over `listed`: the bare id where it is unique, else the full id.
    """

    consumer: str | None
    tools: frozenset[str] | None
    include_internal: bool
    skills: Mapping[str, Skill]
    listed: Mapping[str, Skill]
    short_ids: Mapping[str, str]
    names: Mapping[str, str]
    state: SubsystemState = field(repr=False)
    index: KnownSkills = field(repr=False)
    rules: Rules = field(repr=False)
    codes: Mapping[str, str] = field(repr=False)
    over: SkillView | None = field(default=None, repr=False)

    def resolve(self, ref: str, *, by: By = "model") -> Granted | Refused:
        """Grant or refuse *ref*: the one gate.

        Args:
            ref: A short id or name of this view, a full id or a bare one, with or without prefix.
            by: Who starts the skill: a model, a person, or code.
        """
        return self.gate(ref, by=by)

    def gate(
        self, ref: str, *, by: By = "model", numbers: Mapping[str, str] | None = None, names: bool = True
    ) -> Granted | Refused:
        """Do what `resolve` does with other short ids (*numbers*), or without this view's *names*; raises ValueError
        for *by*.
        """
        if by not in _STARTERS:
            raise ValueError(f"by is one of model, user, code, not {by!r}")
        full_id, via = self._target(ref, self.short_ids if numbers is None else numbers, names)
        if full_id is None:
            if parse_ref(ref).kind == "invalid":
                return Refused("invalid_ref", f"{quoted(ref)} is no reference: a full id, a bare id or SK<n>", ref)
            return Refused("unknown_skill", f"there is no skill {quoted(ref)}", ref)
        decision = decide(self.index, self.rules, full_id, ref=ref, starter=by)
        if isinstance(decision, Refused):
            return decision
        if full_id not in self.skills:
            refused = import_refusal(self.index, self.rules, decision, ref)
            assert refused is not None  # only a refused import keeps a decided skill out of the view
            return refused
        closure = close(self.index, self.rules, (decision,))
        return Granted(decision, full_id, via, closure.order, closure.skipped, closure.diagnostics)

    def _target(self, ref: str, numbers: Mapping[str, str], names: bool) -> tuple[str | None, Via]:
        """Return the full id a reference means here, and how it says it."""
        parsed = parse_ref(ref)
        if parsed.kind == "number":
            return numbers.get(parsed.value), "short_id"
        if parsed.kind == "bare" and names and parsed.value in self.names:
            return self.names[parsed.value], "name"
        return parsed.full_id(), "full_id" if parsed.kind == "full" else "bare_id"

    def closure(self, refs: Iterable[str] | str, *, by: By = "model") -> Closure:
        """Return everything *refs* (a string is one) bring along, dependencies first, each once."""
        answers = [self.gate(ref, by=by) for ref in ((refs,) if isinstance(refs, str) else refs)]
        return self.join(answers)

    def join(self, answers: Iterable[Granted | Refused]) -> Closure:
        """Return the closure of references already answered."""
        resolved = tuple(answers)
        closure = close(self.index, self.rules, [answer.skill for answer in resolved if isinstance(answer, Granted)])
        refused = tuple(answer for answer in resolved if isinstance(answer, Refused))
        return Closure(closure.order, refused, closure.diagnostics, closure.skipped)

    def explain(self, ref: str, *, by: By = "model") -> Explanation:
        """Return every step of the gate about *ref*, with rule, source and result."""
        from kdskills.skills.explain import Explanation, explain_steps, needs_scripts
        from kdskills.skills.tool_names import mode_note

        outcome = self.gate(ref, by=by)
        full_id, via = self._target(ref, self.short_ids, True)
        steps = explain_steps(self.index, self.rules, full_id, outcome, by)
        notes = (
            [f"import left out: {skipped.reason}" for skipped in outcome.skipped]
            if isinstance(outcome, Granted)
            else []
        )
        if isinstance(outcome, Refused) and outcome.code == "import_refused":
            notes.append(outcome.reason)
        skill = self.index.skills.get(full_id or "")
        if skill is not None and skill.hidden:
            notes.append(f"{full_id} is hidden: in no number, name, catalog or picker, usable by its exact id")
        if skill is not None and (needed := needs_scripts(skill)):
            notes.append(
                f"{full_id} needs {' and '.join(needed)}: where no engine runs scripts, as with executor=None, it is left out"
            )
        if skill is not None and skill.allowed_tool_names:
            mode = self.state.descriptor.allowed_tools_mode(skill.namespace, skill.layer)
            notes.append(mode_note(skill.full_id, skill.allowed_tool_names, mode))
        return Explanation(ref, self.consumer, full_id, via if full_id else None, outcome, steps, tuple(notes))

    def catalog(
        self,
        format: CatalogFormat = "gallery",  # noqa: A002 - the published name of the argument
        *,
        budget: int | None = None,
        count: TokenCounter = estimate_tokens,
        locations: Locations = "logical",
        pinned: Collection[str] = (),
        search_hint: str | None = None,
        names_only: bool = False,
    ) -> Catalog:
        """Render the listed skills within a budget of tokens."""
        from kdskills.prompts import render_catalog

        return render_catalog(
            self._entries,
            format,
            budget=budget,
            count=count,
            locations=locations,
            pinned=pinned,
            search_hint=search_hint,
            names_only=names_only,
            environment=self.state.environment,
        )

    def listing(
        self,
        format: CatalogFormat = "xml",  # noqa: A002 - as `catalog` calls it
        *,
        budget: int,
        count: TokenCounter = estimate_tokens,
        locations: Locations = "logical",
        search_hint: str | None = None,
        mapped: bool = True,
    ) -> CatalogListing:
        """Return what decides and renders which skills are listed where not all fit; *mapped* adds the namespaces."""
        from kdskills.prompts.catalog import draft_of
        from kdskills.prompts.listing import CatalogListing

        draft = draft_of(self._entries, format, locations, search_hint, self.state.environment)
        return CatalogListing(draft, budget, count, mapped)

    @cached_property
    def pinned(self) -> tuple[str, ...]:
        """Full ids of listed skills whose `metadata.kdskills.pin` is true; those of remote origins cannot pin themselves."""
        return tuple(full_id for full_id, skill in self.listed.items() if _pins_itself(skill))

    def named_in(self, text: str) -> tuple[str, ...]:
        """Return the full ids of listed skills that *text* names as `$name`, `sk:name` or by full id, in order."""
        refs = dict.fromkeys(match[1] or match[0] for match in _NAMED.finditer(text[:MAX_NAMING]))
        ids = (self._target(ref, self.short_ids, True)[0] for ref in refs)
        return tuple(dict.fromkeys(full_id for full_id in ids if full_id and full_id in self.listed))[:MAX_NAMED]

    def search(
        self, query: str, *, limit: int = 10, namespace: str | None = None, offset: int = 0, by: By = "model"
    ) -> SearchResult:
        """Return the listed skills that fit *query*, the best first.

        What is hidden, refused or gated changes nothing of the answer. The first search of a set of roots reads the texts of
        all its skills; later ones, in any process, read what has changed.

        Args:
            query: Words, as a person or model would say what is to be done; nothing in them is a command. Of more than
                4,000 characters the rest is not read.
            limit: Most hits, from 1 to 1,000.
            namespace: Only hits of this namespace; their scores are the same without it.
            offset: Hits to pass over.
            by: Who would start the skill.

        Raises:
            ValueError: *limit*, *offset* or *by* is out of range.
        """
        from kdskills.search import CANDIDATES, MAX_QUERY, SearchHit, SearchResult

        if by not in _STARTERS or not 1 <= limit <= MAX_HITS or offset < 0:
            raise ValueError(f"limit is 1 to {MAX_HITS}, offset 0 or more, and by one of model, user, code")
        within = None if namespace is None else lambda full_id: self.listed[full_id].namespace == namespace
        order = self.state.hit_order
        # What may be dropped is fetched beyond the page, which is cut when the order is known.
        page = {"limit": limit, "offset": offset} if order is None else {"limit": CANDIDATES + offset + limit}
        matches = self._searcher(by).find(query, within=within, **page)
        hits = []
        for match in matches.page:
            skill = self.listed[match.full_id]
            facts = (self._short_id_of[match.full_id], self.names_by_id[match.full_id], skill.description, skill.tokens)
            hits.append(SearchHit(match.full_id, *facts, match.score, match.why))
        total, diagnostics = matches.total, (*self.state.search_index().diagnostics, *matches.diagnostics)
        if order is not None and hits:
            best, rest = hits[:CANDIDATES], hits[CANDIDATES:]
            ranked, problems = order(self.consumer, query[:MAX_QUERY], best)
            total, diagnostics = total - len(best) + len(ranked), (*diagnostics, *problems)
            hits = [*ranked, *rest][offset : offset + limit]
        return SearchResult(tuple(hits), total, offset + len(hits) < total, matches.abstained, diagnostics)

    def _searcher(self, by: By) -> Searcher:
        """Return what searches the listed skills that *by* may start; made once."""
        from kdskills.search import Searcher

        searchers = vars(self).setdefault("_searchers", {})
        if by not in searchers:
            listed = [full_id for full_id, skill in self.listed.items() if refuse_by(skill, by) is None]
            parts = (self.state.search_index(), self.state.snapshot.skills, listed, self.state.skill_vectors())
            searchers.setdefault(by, Searcher(*parts))
        searcher: Searcher = searchers[by]
        return searcher

    @cached_property
    def _short_id_of(self) -> Mapping[str, str]:
        return {full_id: short_id for short_id, full_id in self.short_ids.items()}

    @cached_property
    def names_by_id(self) -> Mapping[str, str]:
        """`{full id: name}` of the listed skills."""
        return {full_id: name for name, full_id in self.names.items()}

    @cached_property
    def _entries(self) -> tuple[CatalogEntry, ...]:
        from kdskills.prompts import CatalogEntry

        cache = self.state.entries
        entries = []
        for short, full_id in self.short_ids.items():
            skill, name = self.listed[full_id], self.names_by_id[full_id]
            cached_skill, entry = cache.get(full_id, (None, None))
            if entry is None or cached_skill is not skill or (entry.short_id, entry.display_name) != (short, name):
                entry = _entry(CatalogEntry, skill, short, name)
                cache[full_id] = (skill, entry)
            entries.append(entry)
        return tuple(entries)

    def picker(self, patterns: Iterable[str] | str | None = None) -> list[PickerEntry]:
        """Return what a person chooses from, narrowed by *patterns*: no hidden, internal or agent-only skills."""
        return picker_of(self.skills.values(), patterns)

    @cached_property
    def digest(self) -> str:
        """Digest over the fingerprint, consumer, tools and every answer: it changes whenever an answer may."""
        if self.over is not None:  # which is cheaper, and answers what this one does about all skills but those added
            added = [full_id for full_id in self.skills if full_id not in self.over.skills]
            refused = [[full_id, code] for full_id, code in self.codes.items() if full_id not in self.over.codes]
            head = [["over", self.over.digest], ["fingerprint", self.state.fingerprint], ["granted", *added]]
            return rows_digest([*head, *sorted(refused)])
        tools = ["none"] if self.tools is None else ["some", *sorted(self.tools)]
        agent = ["anonymous"] if self.consumer is None else ["named", self.consumer]
        head = [["fingerprint", self.state.fingerprint], ["consumer", *agent], ["tools", *tools]]
        if self.rules.layers:
            head.append(["user", json.dumps(self.rules.folded())])
        answers = [*((full_id, "granted") for full_id in self.skills), *self.codes.items()]
        return rows_digest([*head, ["internal", str(self.include_internal)], *sorted(answers)])

    @cached_property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Rules of this consumer that match nothing."""
        return self.rules.findings(self.index.ids())

    def export_runtime_globals(self) -> dict[str, Any]:
        """Return `{"SKILLS_DESCRIPTOR": …}` of what this view grants, with private dependencies."""
        needed = close(self.index, self.rules, self.skills.values())
        return export_view(
            self.state,
            {skill.full_id: skill for skill in needed.order},
            consumer=self.consumer,
            tools=self.tools,
            include_internal=self.include_internal,
            refused=self.codes,
            rules=self.rules,
        )


def _pins_itself(skill: Skill) -> bool:
    """Whether the skill's own metadata asks for a position at the beginning of every catalog."""
    ours: Any = skill.metadata.get("kdskills") if skill.metadata else None
    wish = ours.get("pin") if isinstance(ours, Mapping) else skill.metadata.get("kdskills.pin")
    return str(wish).lower() == "true" and not skill.namespace.startswith("mcp-")


def build_view(state: SubsystemState, rules: Rules) -> SkillView:
    """Ask the gate about every skill once and number what is listed."""
    index = state.skill_index(rules.include_internal)
    granted, codes = _judged(index, rules, index.skills)
    order = sorted(granted)  # registries are in this order already, exports may not be
    if order != list(granted):
        granted = {full_id: granted[full_id] for full_id in order}
    listed = _listed(granted)
    return _numbered(state, index, rules, granted, listed, _names(listed), codes)


def extended_view(over: SkillView, state: SubsystemState, rules: Rules, added: Mapping[str, Skill]) -> SkillView:
    """Return *over* with those of *added* skills that *rules* grant: what `build_view` makes of *state*, which has both.

    Nothing is asked about the skills of *over* again: what is added changes no answer about them, since it neither replaces
    nor is imported by any of them.
    """
    index = state.skill_index(rules.include_internal)
    granted, codes = _judged(index, rules, added)
    listed = _listed(granted)
    names = {**over.names, **_names(listed)}
    skills, codes = merged_ids(over.skills, granted), {**over.codes, **codes}
    return replace(_numbered(state, index, rules, skills, merged_ids(over.listed, listed), names, codes), over=over)


def _judged(index: KnownSkills, rules: Rules, skills: Mapping[str, Skill]) -> tuple[dict[str, Skill], dict[str, str]]:
    """Return those of *skills* that are granted, and the codes of all that are refused."""
    codes: dict[str, str] = dict(index.refused)
    granted: dict[str, Skill] = {}
    checks = checks_in_force(rules)
    for full_id, skill in skills.items():
        finding = refuse(rules, skill, checks)
        if finding is None:
            granted[full_id] = skill
        else:
            codes[full_id] = finding.code
    if rules.imports == "strict":
        for full_id in broken_imports(index, rules, tuple(granted.values())) & granted.keys():
            codes[full_id] = "import_refused"
            del granted[full_id]
    return granted, codes


def _listed(granted: Mapping[str, Skill]) -> dict[str, Skill]:
    return {i: skill for i, skill in granted.items() if not skill.hidden and refuse_by(skill, "model") is None}


def _numbered(
    state: SubsystemState,
    index: KnownSkills,
    rules: Rules,
    granted: dict[str, Skill],
    listed: dict[str, Skill],
    names: dict[str, str],
    codes: dict[str, str],
) -> SkillView:
    return SkillView(
        consumer=rules.consumer,
        tools=rules.tools,
        include_internal=rules.include_internal,
        skills=MappingProxyType(granted),
        listed=MappingProxyType(listed),
        short_ids=MappingProxyType(dict(zip(_short_ids(len(listed)), listed, strict=True))),
        names=MappingProxyType(names),
        state=state,
        index=index,
        rules=rules,
        codes=MappingProxyType(codes),
    )


@lru_cache(maxsize=8)
def _short_ids(count: int) -> tuple[str, ...]:
    """Return the numbers of so many skills; they are the same for all."""
    return tuple(f"SK{number}" for number in range(1, count + 1))


def _names(listed: Mapping[str, Skill]) -> dict[str, str]:
    """Name each skill by its bare id where that is unique and no short id, else by its full id.

    Skills that lie elsewhere, or that a user brings along, always have their full id: it shows where they come from, and they
    take no other's name.
    """
    count: dict[str, int] = {}
    for skill in listed.values():
        if _has_bare_name(skill):
            count[skill.id] = count.get(skill.id, 0) + 1
    unique = {bare for bare, skills in count.items() if skills == 1 and not (bare.startswith("SK") and is_number(bare))}
    return {
        skill.id if skill.id in unique and _has_bare_name(skill) else full_id: full_id
        for full_id, skill in listed.items()
    }


def _has_bare_name(skill: Skill) -> bool:
    return far_content(skill) is None and skill.layer != "overlay"


def _entry(kind: type[CatalogEntry], skill: Skill, short_id: str, name: str) -> CatalogEntry:
    # The class is handed in: its room is imported where it is used, and once for all entries.
    return kind(
        short_id=short_id,
        full_id=skill.full_id,
        name=skill.name,
        display_name=name,
        description=skill.description,
        version=skill.version,
        category=skill.category,
        tags=skill.tags,
        when_to_use=skill.when_to_use,
        tools=tuple((tool.id, tool.required) for tool in skill.tools) if skill.tools else (),
        location=skill.location,
        path=skill.file,
        digest=skill.digest,
    )


def picker_of(skills: Iterable[Skill], patterns: Iterable[str] | str | None) -> list[PickerEntry]:
    """Return the picker's entries of *skills*, sorted by full id; a pattern or reference narrows them."""
    matcher = None
    if patterns is not None:
        matcher = compile_rules((patterns,) if isinstance(patterns, str) else patterns, bare="public")
    offered = [
        skill
        for skill in skills
        if not skill.hidden
        and skill.namespace != INTERNAL_NAMESPACE
        and refuse_by(skill, "user") is None
        and (matcher is None or matcher.match(skill.full_id) is not None)
    ]
    return [
        PickerEntry(
            id=skill.full_id,
            name=skill.name,
            description=skill.description,
            when_to_use=list(skill.when_to_use),
            namespace=skill.namespace,
        )
        for skill in sorted(offered, key=lambda skill: skill.full_id)
    ]
