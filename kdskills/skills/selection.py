"""The policy gate: seven ordered steps over frozen values; the first hit is the code.

Everything that reaches a skill asks `decide`; imports ask `decide_dependency`. There is no second rule set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal

from kdskills.errors import Diagnostic
from kdskills.skills.model import Skill
from kdskills.skills.refs import INTERNAL_NAMESPACE, RuleMatcher, compile_rules, parse_ref, quoted
from kdskills.skills.tool_names import tool_id

By = Literal["model", "user", "code"]
Via = Literal["full_id", "bare_id", "name", "short_id", "import"]
CatalogMode = Literal["auto", "all", "names", "search-only"]
"""What a catalog lists: what fits the request where not all fit, all while they fit, names, or nothing but a map."""

ImportPolicy = Literal["private", "listed", "strict"]

EMPTY: Mapping[str, Any] = MappingProxyType({})

SCRIPT_TOOLS = frozenset({"skills.run_script", "exec.python", "exec.shell"})
"""Tools that are there only where an engine runs programs."""

STEP_OF: Mapping[str, int] = MappingProxyType(
    {
        "invalid_ref": 1,
        "unknown_skill": 1,
        "skill_invalid": 1,
        "denied": 2,
        "plugin_denied": 2,
        "internal": 3,
        "not_for_consumer": 4,
        "not_enabled": 5,
        "tools_missing": 6,
        "user_only": 7,
        "model_only": 7,
    }
)
"""The step each refusal code belongs to."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a skill is not to be had, for people; a model is given `public()`.

    Attributes:
        code: A code of the table in `docs/reference/visibility.md`, or `import_refused`.
        reason: One sentence for people.
        ref: The reference as asked.
        full_id: What it meant, when that is known.
        details: Facts: the rule and where it stands, missing tools, the chain of imports.
    """

    code: str
    reason: str
    ref: str
    full_id: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def public(self) -> Refused:
        """Return the refusal a model may read: the same whether the skill is refused or does not exist."""
        return Refused("unknown_skill", f"there is no skill {self.ref!r}", self.ref)

    def to_json(self) -> dict[str, Any]:
        """Return the refusal as JSON, for people and logs."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Granted:
    """A skill that may be used, with what it imports.

    Attributes:
        skill: The skill asked for.
        full_id: Its full id.
        via: How the reference named it.
        closure: Its dependencies and itself, in the order they are read; the skill stands last.
        skipped: Dependencies left out, each with its reason.
        diagnostics: Cycles and skipped dependencies as findings.
    """

    skill: Skill
    full_id: str
    via: Via
    closure: tuple[Skill, ...]
    skipped: tuple[Refused, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True)
class Rules:
    """What holds for one consumer (None: an anonymous one): its own rules, the denials for all, and its tools.

    `enabled` is the allow-list of all layers, None when there is none; an empty one allows nothing. `disabled` are the
    consumer's own denials, `disabled_for_all` those of `"*"`, and `layers` those of the user it works for, each with where
    they stand; `allow_sources` are whose allow-lists there are. `tools` None means no tool gate. `plugin_denied` is
    `{full id: reason}` of what plugins deny.
    Of the agent that handed over to this one, `parent`, denials and allow-list hold, too.
    """

    enabled: tuple[str, ...] | None = None
    disabled: tuple[str, ...] = ()
    disabled_for_all: tuple[str, ...] = ()
    imports: ImportPolicy = "private"
    catalog: CatalogMode | None = None
    consumer: str | None = None
    tools: frozenset[str] | None = None
    include_internal: bool = False
    plugin_denied: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    parent: Rules | None = None
    layers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    allow_sources: tuple[str, ...] = ()

    @cached_property
    def source(self) -> str:
        """Where the consumer's rules stand, for explanations."""
        return "agents_config" if self.consumer is None else f"agents_config.{self.consumer}"

    @cached_property
    def denials(self) -> tuple[tuple[str, RuleMatcher], ...]:
        """The layers that deny, the one for all first, each with where it stands."""
        return tuple(
            (source, compile_rules(rules, bare="anywhere"))
            for source, rules in (
                ("agents_config.*.disabled", self.disabled_for_all),
                (f"{self.source}.disabled", self.disabled),
                *((f"{source}.disabled", denied) for source, denied in self.layers),
            )
        )

    @cached_property
    def allow_source(self) -> str:
        """Where the allow-list stands, or would stand."""
        return ", ".join(f"{source}.enabled" for source in self.allow_sources or (self.source,))

    def folded(self) -> dict[str, Any]:
        """Return the consumer's own rules and those of its user as one entry of `agents_config`."""
        denied = dict.fromkeys((*self.disabled, *(rule for _, rules in self.layers for rule in rules)))
        enabled = None if self.enabled is None else list(self.enabled) or False
        return {"enabled": enabled, "disabled": list(denied), "imports": self.imports}

    @cached_property
    def tool_ids(self) -> frozenset[str]:
        """The consumer's tools by id, those under published names such as `Bash` too."""
        return frozenset(map(tool_id, self.tools or ()))

    @cached_property
    def allowed(self) -> RuleMatcher:
        """The allow-list, empty also when there is none."""
        return compile_rules(self.enabled or (), bare="public")

    def findings(self, full_ids: frozenset[str]) -> tuple[Diagnostic, ...]:
        """Return `rule_matches_nothing` for each rule that matches none of *full_ids*."""
        return tuple(
            Diagnostic("rule_matches_nothing", "warning", f"{source}: the rule {entry!r} matches no skill", ref=entry)
            for source, matcher in (*self.denials, (self.allow_source, self.allowed))
            for entry in matcher.unmatched(full_ids)
        )


@dataclass(frozen=True, slots=True)
class KnownSkills:
    """The skills there are, and ids known without a skill behind them: `{full id: refusal code}`."""

    skills: Mapping[str, Skill]
    refused: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, full_id: object) -> bool:
        return full_id in self.skills or full_id in self.refused

    def ids(self) -> frozenset[str]:
        """Return every id known, usable or not."""
        return frozenset(self.skills) | frozenset(self.refused)


def _refused(
    code: str, skill: Skill, reason: str, rule: str | None = None, source: str | None = None, **facts: Any
) -> Refused:
    """Return the refusal of *skill*, whose full id stands in front of *reason*, by a rule and where it stands."""
    full_id = skill.full_id
    details = {key: value for key, value in (("rule", rule), ("source", source)) if value is not None}
    return Refused(code, f"{full_id} {reason}", full_id, full_id, details | facts)


Check = Callable[[Rules, Skill], Refused | None]
"""One step about one skill; a refusal has the full id as its `ref`, for no reference was asked about."""


def _denied(rules: Rules, skill: Skill) -> Refused | None:
    """Step 2: the deny layer for all, the consumer's own, then plugins."""
    full_id = skill.full_id
    for source, matcher in rules.denials:
        rule = matcher.match(full_id)
        if rule is not None:
            return _refused("denied", skill, f"is disabled by {rule!r} in {source}", rule, source)
    reason = rules.plugin_denied.get(full_id)
    if reason is None:
        return None if rules.parent is None else _denied(rules.parent, skill)
    return _refused("plugin_denied", skill, f"is denied by a plugin: {reason}", reason, "plugin")


def _internal(rules: Rules, skill: Skill) -> Refused | None:
    """Step 3: the internal namespace, which `enabled` cannot open."""
    if skill.namespace != INTERNAL_NAMESPACE or rules.include_internal:
        return None
    return _refused("internal", skill, "is internal: it is used through skills that import it")


def for_consumer(skill: Skill, consumer: str | None) -> str | None:
    """Return the entry of `include_for` that lets *consumer* in, or None."""
    if consumer is None:
        return None
    lowered = consumer.lower()
    return next((entry for entry in skill.include_for if fnmatchcase(lowered, entry)), None)


def _not_for_consumer(rules: Rules, skill: Skill) -> Refused | None:
    """Step 4: the skill names its consumers and this is none of them."""
    if not skill.include_for or for_consumer(skill, rules.consumer) is not None:
        return None
    consumer_name = "an anonymous consumer" if rules.consumer is None else repr(rules.consumer)
    audience = ", ".join(skill.include_for)
    return _refused("not_for_consumer", skill, f"is for {audience}, not for {consumer_name}", audience, "include_for")


def _not_enabled(rules: Rules, skill: Skill) -> Refused | None:
    """Step 5: there is an allow-list without this skill."""
    if rules.enabled is None or rules.allowed.match(skill.full_id) is not None:
        return None if rules.parent is None else _not_enabled(rules.parent, skill)
    return _refused("not_enabled", skill, f"is not in {rules.allow_source}", source=rules.allow_source)


def _tools_missing(rules: Rules, skill: Skill) -> Refused | None:
    """Step 6: a required tool is absent."""
    if rules.tools is None or not skill.tools:
        return None
    missing = sorted({tool.id for tool in skill.tools if tool.required and tool_id(tool.id) not in rules.tool_ids})
    if not missing:
        return None
    names = ", ".join(missing)
    message = f"needs tools that are not here: {names}"
    return _refused("tools_missing", skill, message, names, "tools.yaml", missing=missing)


CHECKS: Mapping[int, Check] = MappingProxyType(
    {2: _denied, 3: _internal, 4: _not_for_consumer, 5: _not_enabled, 6: _tools_missing}
)
"""Steps 2 to 6, which decide what is in a view; step 1 is the lookup, step 7 depends on who asks."""


def checks_in_force(rules: Rules) -> tuple[Check, ...]:
    """Return steps 2 to 6 without those that can refuse nothing under *rules*: a view over many skills asks the rest.

    Without any rule or plugin's answer nothing is denied, without an allow-list nothing is left out by it, and so on; the
    first refusal is the same as that of `refuse`.
    """
    idle: dict[Check, bool] = {
        _denied: not (rules.disabled_for_all or rules.disabled or rules.plugin_denied or rules.layers or rules.parent),
        _internal: rules.include_internal,
        _not_enabled: rules.enabled is None and rules.parent is None,
        _tools_missing: rules.tools is None,
    }
    return tuple(check for check in CHECKS.values() if not idle.get(check))


def refuse(rules: Rules, skill: Skill, checks: Iterable[Check] = CHECKS.values()) -> Refused | None:
    """Return the first of steps 2 to 6 that refuses *skill*, or None; *checks* as `checks_in_force` gives them."""
    for check in checks:
        refusal = check(rules, skill)
        if refusal is not None:
            return refusal
    return None


def refuse_by(skill: Skill, starter: By) -> Refused | None:
    """Step 7: what the skill itself keeps from a model, or from a person."""
    if starter == "model" and skill.disable_model_invocation:
        return _refused("user_only", skill, "is started by people only", "disable-model-invocation", "SKILL.md")
    if starter == "model" and skill.insert == "user-message":
        return _refused("user_only", skill, "is a message people insert", "insert: user-message", "SKILL.md")
    if starter == "user" and not skill.user_invocable:
        return _refused("model_only", skill, "is started by agents only", "user-invocable", "SKILL.md")
    return None


def missing(known_skills: KnownSkills, ref: str, full_id: str | None) -> Refused:
    """Return the refusal of an id without a skill behind it (step 1, or a code recorded when the view was exported)."""
    code = known_skills.refused.get(full_id or "", "unknown_skill")
    if code == "unknown_skill":
        reason = f"there is no skill {quoted(ref)}"
    elif code == "skill_invalid":
        reason = f"{full_id} could not be loaded; `kdskills check` says why"
    else:
        reason = f"{full_id} is refused ({code}) by the policy this view was exported with"
    return Refused(code, reason, ref, full_id)


def decide(known_skills: KnownSkills, rules: Rules, full_id: str, *, ref: str, starter: By) -> Skill | Refused:
    """Decide about one full id: the skill, or the first step that refuses it."""
    skill = known_skills.skills.get(full_id)
    if skill is None:
        return missing(known_skills, ref, full_id)
    refusal = refuse(rules, skill) or refuse_by(skill, starter)
    return skill if refusal is None else replace(refusal, ref=ref)


def _is_out_of_reach(skill: Skill | None, importer: Skill) -> bool:
    """Whether a skill that a user brings along would be imported by one that they did not bring."""
    return skill is not None and skill.layer == "overlay" and importer.layer != "overlay"


def decide_dependency(
    known_skills: KnownSkills, rules: Rules, importer: Skill, full_id: str, *, ref: str
) -> Skill | Refused:
    """Decide about a dependency of *importer*; step 7 is not applied.

    Under `private` a dependency need not be enabled, and may be internal when the importer's root is builtin, plugin or
    bundle. Deny, `include_for` and tool gates hold under each rules. What a user brings along imports only what is granted
    by itself, and nothing else imports it.
    """
    skill = known_skills.skills.get(full_id)
    if skill is None or _is_out_of_reach(skill, importer):
        return missing(known_skills, ref, full_id)
    trusted = importer.layer in {"builtin", "plugin", "bundle"}
    waived = {5, 3} if trusted else {5}
    strict = rules.imports != "private" or importer.layer == "overlay"
    checks = [check for step, check in CHECKS.items() if strict or step not in waived]
    refusal = refuse(rules, skill, checks)
    return skill if refusal is None else replace(refusal, ref=ref)


def tool_ids(tools: Iterable[Any] | str | None) -> frozenset[str] | None:
    """Return the ids of the tools a consumer has; None means that no tool gate holds.

    A tool is an id, a mapping with `id`, `tool_id` or `name`, or an object with `.id` or `.name`; a string is one id.
    Raises TypeError for an entry that is none of these.
    """
    if tools is None:
        return None
    ids: set[str] = set()
    for entry in (tools,) if isinstance(tools, str) else tools:
        if isinstance(entry, Mapping):
            candidates = [entry.get(key) for key in ("id", "tool_id", "name")]
        else:
            candidates = [getattr(entry, key, None) for key in ("id", "name")]
        named = [entry] if isinstance(entry, str) else [text for text in candidates if isinstance(text, str) and text]
        if not named:
            raise TypeError(f"a tool is an id, or has an id or a name: {entry!r}")
        ids.add(named[0])
    return frozenset(ids)


_CHAIN = 16


@dataclass(frozen=True, slots=True)
class Closure:
    """Skills in the order they are read, dependencies before dependents, each once, and what was left out.

    `refused` are asked references, `skipped` dependencies with their chains; `diagnostics` are `import_cycle` and
    `import_skipped`.
    """

    order: tuple[Skill, ...] = ()
    refused: tuple[Refused, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    skipped: tuple[Refused, ...] = ()

    @property
    def ids(self) -> tuple[str, ...]:
        """The full ids of `order`."""
        return tuple(skill.full_id for skill in self.order)


def dependency_id(known_skills: KnownSkills, importer: Skill, ref: str) -> str | None:
    """Return the full id an import means; a bare id is a sibling when there is one, else public. None: no id at all."""
    parsed = parse_ref(ref)
    if parsed.kind == "bare":
        sibling = parsed.full_id(importer.namespace)
        if sibling in known_skills and not _is_out_of_reach(known_skills.skills.get(sibling or ""), importer):
            return sibling
    return parsed.full_id()


def dependency(known_skills: KnownSkills, rules: Rules, importer: Skill, ref: str) -> Skill | Refused:
    """Decide about one import of *importer*."""
    full_id = dependency_id(known_skills, importer, ref)
    if full_id is None:
        number = parse_ref(ref).kind == "number"
        code, why = ("unknown_skill", "numbers belong to one view") if number else ("invalid_ref", "it is no skill id")
        return Refused(code, f"the import {ref!r} of {importer.full_id} is left out: {why}", ref)
    return decide_dependency(known_skills, rules, importer, full_id, ref=ref)


def _ends(path: dict[str, Iterator[str]]) -> list[str]:
    """Return the ids of a path, a long one cut in the middle: chains are read by people."""
    if len(path) <= _CHAIN:
        return [*path]
    return [next(iter(path)), "…", *reversed([*islice(reversed(path), _CHAIN - 2)])]


def close(known_skills: KnownSkills, rules: Rules, skills: Iterable[Skill]) -> Closure:
    """Return *skills*, already granted, with everything they bring along."""
    order: dict[str, Skill] = {}
    skipped: list[Refused] = []
    findings: list[Diagnostic] = []
    for top in skills:
        if top.full_id in order:
            continue
        # Depth first and without recursion: an import chain may be as long as a root has skills.
        path: dict[str, Iterator[str]] = {top.full_id: iter(top.imports)}
        importers = [top]
        while importers:
            importer = importers[-1]
            ref = next(path[importer.full_id], None)
            if ref is None:
                order[importer.full_id] = importer
                del path[importer.full_id]
                importers.pop()
                continue
            decision = dependency(known_skills, rules, importer, ref)
            if isinstance(decision, Refused):
                chain = [*_ends(path), decision.full_id or decision.ref]
                skipped.append(replace(decision, details={**decision.details, "chain": chain}))
                message = f"{importer.full_id} goes without its import {decision.ref!r}: {decision.reason}"
                findings.append(Diagnostic("import_skipped", "warning", message, ref=importer.full_id))
            elif decision.full_id in path:
                message = f"an import leads back: {' -> '.join([*_ends(path), decision.full_id])}"
                findings.append(Diagnostic("import_cycle", "warning", message, ref=importer.full_id))
            elif decision.full_id not in order:
                path[decision.full_id] = iter(decision.imports)
                importers.append(decision)
    return Closure(tuple(order.values()), (), tuple(findings), tuple(skipped))


def broken_imports(known_skills: KnownSkills, rules: Rules, skills: Sequence[Skill]) -> frozenset[str]:
    """Return the ids whose imports, at any depth, hold a refused one: what `imports: strict` refuses.

    Linear in skills and imports: refused edges are found once and handed up to the importers.
    """
    importers: dict[str, list[str]] = {}
    broken: set[str] = set()
    visited = {skill.full_id for skill in skills}
    waiting = list(skills)
    while waiting:
        skill = waiting.pop()
        for ref in skill.imports:
            decision = dependency(known_skills, rules, skill, ref)
            if isinstance(decision, Refused):
                broken.add(skill.full_id)
                continue
            importers.setdefault(decision.full_id, []).append(skill.full_id)
            if decision.full_id not in visited:
                visited.add(decision.full_id)
                waiting.append(decision)
    spread = list(broken)
    while spread:
        for importer in importers.get(spread.pop(), ()):
            if importer not in broken:
                broken.add(importer)
                spread.append(importer)
    return frozenset(broken)


def import_refusal(known_skills: KnownSkills, rules: Rules, skill: Skill, ref: str) -> Refused | None:
    """Return why `imports: strict` refuses *skill*, with the chain to the first refused import, or None."""
    skipped = close(known_skills, rules, (skill,)).skipped
    if not skipped:
        return None
    first = skipped[0]
    chain = list(first.details["chain"])
    reason = f"{skill.full_id} needs an import that is refused: {' -> '.join(chain)} ({first.code})"
    return Refused("import_refused", reason, ref, skill.full_id, {"chain": chain, "code": first.code})
