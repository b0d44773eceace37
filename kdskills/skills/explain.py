"""Why a skill is granted or refused, step by step, with the rule and the place it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kdskills.skills.model import Skill
from kdskills.skills.refs import INTERNAL_NAMESPACE
from kdskills.skills.selection import (
    CHECKS,
    SCRIPT_TOOLS,
    STEP_OF,
    By,
    Granted,
    KnownSkills,
    Policy,
    Refused,
    StepRefusal,
    Via,
    for_consumer,
    refuse_by,
)

Result = Literal["pass", "refuse", "unknown"]

TITLES = (
    "the reference names a skill",
    "nothing disables it",
    "it is not internal",
    "it is for this consumer",
    "it is enabled",
    "its required tools are here",
    "it may be started this way",
)


@dataclass(frozen=True, slots=True)
class ExplainedStep:
    """One step of the gate and what it found.

    Attributes:
        step: 1 to 7, as in `docs/reference/visibility.md`.
        title: What the step asks.
        result: `pass`, `refuse`, or `unknown` when there is no skill to ask about.
        reason: One sentence.
        code: The refusal's code.
        rule: The rule, tool or field that decided.
        source: Where that stands, such as `agents_config.writer.enabled`.
    """

    step: int
    title: str
    result: Result
    reason: str
    code: str | None = None
    rule: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """All steps about one reference and the outcome; the first step that refuses gives the code.

    Attributes:
        ref: The reference as asked.
        consumer: Who asked; None for an anonymous consumer.
        full_id: What the reference means, when that is known.
        via: How it named the skill.
        outcome: What `resolve` answers.
        steps: All seven steps, also those after a refusal.
        notes: Facts that decide nothing here: hiding, imports left out.
    """

    ref: str
    consumer: str | None
    full_id: str | None
    via: Via | None
    outcome: Granted | Refused
    steps: tuple[ExplainedStep, ...]
    notes: tuple[str, ...] = ()

    @property
    def granted(self) -> bool:
        """Whether the skill may be used."""
        return isinstance(self.outcome, Granted)

    @property
    def code(self) -> str:
        """`granted`, or the code of the refusal."""
        return self.outcome.code if isinstance(self.outcome, Refused) else "granted"

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON."""
        names = ExplainedStep.__slots__
        return {
            "ref": self.ref,
            "consumer": self.consumer,
            "full_id": self.full_id,
            "via": self.via,
            "granted": self.granted,
            "code": self.code,
            "reason": None if isinstance(self.outcome, Granted) else self.outcome.reason,
            "steps": [{name: getattr(step, name) for name in names} for step in self.steps],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        marks = {"pass": "ok", "refuse": "NO", "unknown": "--"}
        lines = [f"{self.ref!r} for {self.consumer or 'an anonymous consumer'}: {self.code}"]
        lines += [f"  {step.step}. {marks[step.result]} {step.reason}" for step in self.steps]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def needs_scripts(skill: Skill) -> tuple[str, ...]:
    """Return the tools that *skill* requires and that are there only where an engine runs programs."""
    return tuple(sorted({tool.id for tool in skill.tools if tool.required} & SCRIPT_TOOLS))


def explain_steps(
    known_skills: KnownSkills, policy: Policy, full_id: str | None, outcome: Granted | Refused, starter: By
) -> tuple[ExplainedStep, ...]:
    """Ask every step about one id.

    Args:
        known_skills: The skills there are.
        policy: The consumer's policy.
        full_id: The id the reference means, or None.
        outcome: What the gate answered, which tells about ids without a skill behind them.
        starter: Who starts the skill.
    """
    skill = known_skills.skills.get(full_id) if full_id is not None else None
    if skill is None:
        return _without_skill(outcome)
    steps = [_passed(1, f"{skill.full_id} is a skill of a {skill.layer} root", rule=None, source=skill.layer)]
    for number, check in CHECKS.items():
        finding = check(policy, skill)
        steps.append(_PASS[number](policy, skill) if finding is None else _refused(number, finding))
    last = refuse_by(skill, starter)
    steps.append(_passed(7, f"a {starter} may start it") if last is None else _refused(7, last))
    return tuple(steps)


def _without_skill(outcome: Granted | Refused) -> tuple[ExplainedStep, ...]:
    code = outcome.code if isinstance(outcome, Refused) else "unknown_skill"
    reason = outcome.reason if isinstance(outcome, Refused) else ""
    refusing = STEP_OF.get(code, 1)
    return tuple(
        ExplainedStep(number, title, "refuse", reason, code)
        if number == refusing
        else ExplainedStep(number, title, "unknown", "there is no skill here to ask about")
        for number, title in enumerate(TITLES, 1)
    )


def _passed(step: int, reason: str, rule: str | None = None, source: str | None = None) -> ExplainedStep:
    return ExplainedStep(step, TITLES[step - 1], "pass", reason, None, rule, source)


def _refused(step: int, finding: StepRefusal) -> ExplainedStep:
    return ExplainedStep(step, TITLES[step - 1], "refuse", finding.reason, finding.code, finding.rule, finding.source)


def _not_denied(policy: Policy, skill: Skill) -> ExplainedStep:
    return _passed(
        2, f'no rule of "*" or {policy.consumer or "an anonymous consumer"} and no plugin denies {skill.full_id}'
    )


def _not_internal(policy: Policy, skill: Skill) -> ExplainedStep:
    if skill.namespace == INTERNAL_NAMESPACE:
        return _passed(3, "internal skills were asked for", rule="include_internal", source="view")
    return _passed(3, f"the namespace is {skill.namespace}")


def _meant_for(policy: Policy, skill: Skill) -> ExplainedStep:
    entry = for_consumer(skill, policy.consumer)
    if entry is None:
        return _passed(4, "the skill names no consumers")
    return _passed(4, f"include_for lets {policy.consumer} in by {entry!r}", entry, "include_for")


def _is_enabled(policy: Policy, skill: Skill) -> ExplainedStep:
    if policy.enabled is None:
        return _passed(5, f"{policy.source} has no allow-list")
    rule = policy.enabled.match(skill.full_id)
    return _passed(5, f"{policy.source}.enabled holds {rule!r}", rule, f"{policy.source}.enabled")


def _has_tools(policy: Policy, skill: Skill) -> ExplainedStep:
    if policy.tools is None:
        return _passed(6, "no tool gate was asked for")
    needed = ", ".join(sorted({tool.id for tool in skill.tools if tool.required}))
    if not needed:
        return _passed(6, "the skill requires no tools")
    return _passed(6, f"all required tools are here: {needed}", needed, "tools.yaml")


_PASS = {2: _not_denied, 3: _not_internal, 4: _meant_for, 5: _is_enabled, 6: _has_tools}
