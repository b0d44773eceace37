"""The policy gate: seven ordered steps over frozen values; the first hit is the code.

Everything that reaches a skill asks `decide`; imports ask `decide_dependency`. There is no second rule set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from kdskills.errors import Diagnostic
from kdskills.skills.model import Skill
from kdskills.skills.refs import INTERNAL_NAMESPACE, Matcher, compile_rules, quoted

By = Literal["model", "user", "code"]
Via = Literal["full_id", "bare_id", "name", "short_id", "import"]
ImportPolicy = Literal["private", "listed", "strict"]

EMPTY: Mapping[str, Any] = MappingProxyType({})

SCRIPT_TOOLS = frozenset({"skills.run_script", "exec.python"})
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
        return {
            "code": self.code,
            "reason": self.reason,
            "ref": self.ref,
            "full_id": self.full_id,
            "details": dict(self.details),
        }


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


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration says about one consumer, with the deny layer for all.

    Attributes:
        enabled: The allow-list; None when there is none. An empty one allows nothing.
        disabled: The consumer's own denials.
        disabled_for_all: The denials of `"*"`.
        imports: How dependencies are decided.
    """

    enabled: tuple[str, ...] | None = None
    disabled: tuple[str, ...] = ()
    disabled_for_all: tuple[str, ...] = ()
    imports: ImportPolicy = "private"


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


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules, consumer and tools made ready for many decisions; build it with `Policy.compile`.

    `source` is where the consumer's rules stand, for explanations.
    """

    consumer: str | None
    tools: frozenset[str] | None
    include_internal: bool
    imports: ImportPolicy
    denied_for_all: Matcher
    denied: Matcher
    enabled: Matcher | None
    plugin_denied: Mapping[str, str]
    source: str

    @classmethod
    def compile(
        cls,
        rules: Rules,
        *,
        consumer: str | None = None,
        tools: frozenset[str] | None = None,
        include_internal: bool = False,
        plugin_denied: Mapping[str, str] = EMPTY,
    ) -> Policy:
        """Compile *rules* for one consumer, its tools and what plugins deny it."""
        return cls(
            consumer=consumer,
            tools=tools,
            include_internal=include_internal,
            imports=rules.imports,
            denied_for_all=compile_rules(rules.disabled_for_all, bare="anywhere"),
            denied=compile_rules(rules.disabled, bare="anywhere"),
            enabled=None if rules.enabled is None else compile_rules(rules.enabled, bare="public"),
            plugin_denied=plugin_denied,
            source="agents_config" if consumer is None else f"agents_config.{consumer}",
        )

    def rule_findings(self, full_ids: frozenset[str]) -> tuple[Diagnostic, ...]:
        """Return `rule_matches_nothing` for each rule that matches none of *full_ids*."""
        findings: list[Diagnostic] = []
        layers = (
            ("agents_config.*.disabled", self.denied_for_all),
            (f"{self.source}.disabled", self.denied),
            (f"{self.source}.enabled", self.enabled),
        )
        for source, matcher in layers:
            for entry in () if matcher is None else matcher.unmatched(full_ids):
                message = f"{source}: the rule {entry!r} matches no skill"
                findings.append(Diagnostic("rule_matches_nothing", "warning", message, ref=entry))
        return tuple(findings)


class StepRefusal(NamedTuple):
    """A step that refuses: its code, the sentence, the rule and where the rule stands."""

    code: str
    reason: str
    rule: str | None = None
    source: str | None = None
    details: Mapping[str, Any] = EMPTY

    def refusal(self, ref: str, full_id: str) -> Refused:
        """Return the refusal of *ref* by this finding."""
        facts = {key: value for key, value in (("rule", self.rule), ("source", self.source)) if value is not None}
        return Refused(self.code, self.reason, ref, full_id, facts | dict(self.details))


Check = Callable[[Policy, Skill], StepRefusal | None]


def _denied(policy: Policy, skill: Skill) -> StepRefusal | None:
    """Step 2: the deny layer for all, the consumer's own, then plugins."""
    full_id = skill.full_id
    source = "agents_config.*.disabled"
    rule = policy.denied_for_all.match(full_id)
    if rule is None:
        rule = policy.denied.match(full_id)
        source = "" if rule is None else f"{policy.source}.disabled"
    if rule is not None:
        return StepRefusal("denied", f"{full_id} is disabled by {rule!r} in {source}", rule, source)
    reason = policy.plugin_denied.get(full_id)
    if reason is not None:
        return StepRefusal("plugin_denied", f"{full_id} is denied by a plugin: {reason}", reason, "plugin")
    return None


def _internal(policy: Policy, skill: Skill) -> StepRefusal | None:
    """Step 3: the internal namespace, which `enabled` cannot open."""
    if skill.namespace != INTERNAL_NAMESPACE or policy.include_internal:
        return None
    return StepRefusal("internal", f"{skill.full_id} is internal: it is used through skills that import it")


def for_consumer(skill: Skill, consumer: str | None) -> str | None:
    """Return the entry of `include_for` that lets *consumer* in, or None."""
    if consumer is None:
        return None
    lowered = consumer.lower()
    return next((entry for entry in skill.include_for if fnmatchcase(lowered, entry)), None)


def _not_for_consumer(policy: Policy, skill: Skill) -> StepRefusal | None:
    """Step 4: the skill names its consumers and this is none of them."""
    if not skill.include_for or for_consumer(skill, policy.consumer) is not None:
        return None
    consumer_name = "an anonymous consumer" if policy.consumer is None else repr(policy.consumer)
    audience = ", ".join(skill.include_for)
    return StepRefusal(
        "not_for_consumer", f"{skill.full_id} is for {audience}, not for {consumer_name}", audience, "include_for"
    )


def _not_enabled(policy: Policy, skill: Skill) -> StepRefusal | None:
    """Step 5: there is an allow-list without this skill."""
    if policy.enabled is None or policy.enabled.match(skill.full_id) is not None:
        return None
    return StepRefusal(
        "not_enabled", f"{skill.full_id} is not in {policy.source}.enabled", source=f"{policy.source}.enabled"
    )


def _tools_missing(policy: Policy, skill: Skill) -> StepRefusal | None:
    """Step 6: a required tool is absent."""
    if policy.tools is None or not skill.tools:
        return None
    missing = sorted({tool.id for tool in skill.tools if tool.required and tool.id not in policy.tools})
    if not missing:
        return None
    names = ", ".join(missing)
    return StepRefusal(
        "tools_missing",
        f"{skill.full_id} needs tools that are not here: {names}",
        names,
        "tools.yaml",
        {"missing": missing},
    )


CHECKS: Mapping[int, Check] = MappingProxyType(
    {2: _denied, 3: _internal, 4: _not_for_consumer, 5: _not_enabled, 6: _tools_missing}
)
"""Steps 2 to 6, which decide what is in a view; step 1 is the lookup, step 7 depends on who asks."""


_IN_ORDER = tuple(CHECKS.values())


def checks_in_force(policy: Policy) -> tuple[Check, ...]:
    """Return steps 2 to 6 without those that can refuse nothing under *policy*: a view over many skills asks the rest.

    Without any rule or plugin's answer nothing is denied, without an allow-list nothing is left out by it, and so on; the
    first refusal is the same as that of `refuse`.
    """
    idle: set[Check] = set()
    if not (policy.denied_for_all.entries or policy.denied.entries or policy.plugin_denied):
        idle.add(_denied)
    if policy.include_internal:
        idle.add(_internal)
    if policy.enabled is None:
        idle.add(_not_enabled)
    if policy.tools is None:
        idle.add(_tools_missing)
    return tuple(check for check in _IN_ORDER if check not in idle)


def refuse(policy: Policy, skill: Skill, checks: tuple[Check, ...] | None = None) -> StepRefusal | None:
    """Return the first of steps 2 to 6 that refuses *skill*, or None; *checks* as `checks_in_force` gives them."""
    for check in _IN_ORDER if checks is None else checks:
        finding = check(policy, skill)
        if finding is not None:
            return finding
    return None


def refuse_by(skill: Skill, starter: By) -> StepRefusal | None:
    """Step 7: what the skill itself keeps from a model, or from a person."""
    if starter == "model":
        if skill.disable_model_invocation:
            return StepRefusal(
                "user_only", f"{skill.full_id} is started by people only", "disable-model-invocation", "SKILL.md"
            )
        if skill.insert == "user-message":
            return StepRefusal(
                "user_only", f"{skill.full_id} is a message people insert", "insert: user-message", "SKILL.md"
            )
    if starter == "user" and not skill.user_invocable:
        return StepRefusal("model_only", f"{skill.full_id} is started by agents only", "user-invocable", "SKILL.md")
    return None


def missing(known_skills: KnownSkills, ref: str, full_id: str | None) -> Refused:
    """Return the refusal of an id without a skill behind it (step 1, or a code recorded when the view was exported)."""
    code = known_skills.refused.get(full_id, "unknown_skill") if full_id is not None else "unknown_skill"
    if code == "unknown_skill":
        return Refused(code, f"there is no skill {quoted(ref)}", ref, full_id)
    if code == "skill_invalid":
        return Refused(code, f"{full_id} could not be loaded; `kdskills check` says why", ref, full_id)
    return Refused(code, f"{full_id} is refused ({code}) by the policy this view was exported with", ref, full_id)


def decide(known_skills: KnownSkills, policy: Policy, full_id: str, *, ref: str, starter: By) -> Skill | Refused:
    """Decide about one full id: the skill, or the first step that refuses it."""
    skill = known_skills.skills.get(full_id)
    if skill is None:
        return missing(known_skills, ref, full_id)
    finding = refuse(policy, skill) or refuse_by(skill, starter)
    return skill if finding is None else finding.refusal(ref, full_id)


def decide_dependency(
    known_skills: KnownSkills, policy: Policy, importer: Skill, full_id: str, *, ref: str
) -> Skill | Refused:
    """Decide about a dependency of *importer*; step 7 is not applied.

    Under `private` a dependency need not be enabled, and may be internal when the importer's root is builtin, plugin or
    bundle. Deny, `include_for` and tool gates hold under each policy.
    """
    skill = known_skills.skills.get(full_id)
    if skill is None:
        return missing(known_skills, ref, full_id)
    private = policy.imports == "private"
    trusted = importer.layer in {"builtin", "plugin", "bundle"}
    for step, check in CHECKS.items():
        if private and (step == 5 or (step == 3 and trusted)):
            continue
        finding = check(policy, skill)
        if finding is not None:
            return finding.refusal(ref, full_id)
    return skill


def tool_ids(tools: Iterable[Any] | str | None) -> frozenset[str] | None:
    """Return the ids of the tools a consumer has; None means that no tool gate holds.

    Args:
        tools: Ids, mappings with `id`, `tool_id` or `name`, objects with `.id` or `.name`; a string is one id.

    Raises:
        TypeError: An entry has none of these.
    """
    if tools is None:
        return None
    return frozenset(_tool_id(entry) for entry in ((tools,) if isinstance(tools, str) else tools))


def _tool_id(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping):
        candidates = [entry.get(key) for key in ("id", "tool_id", "name")]
    else:
        candidates = [getattr(entry, key, None) for key in ("id", "name")]
    for candidate in candidates:
        if isinstance(candidate, str) and candidate:
            return candidate
    raise TypeError(f"a tool is an id, or has an id or a name: {entry!r}")
