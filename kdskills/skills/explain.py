"""Why a skill is granted or refused, step by step, with the rule and the place it stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
    Refused,
    Rules,
    Via,
    for_consumer,
    refuse_by,
)
from kdskills.skills.tool_names import tool_id

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
        return {
            "ref": self.ref,
            "consumer": self.consumer,
            "full_id": self.full_id,
            "via": self.via,
            "granted": self.granted,
            "code": self.code,
            "reason": None if isinstance(self.outcome, Granted) else self.outcome.reason,
            "steps": [asdict(step) for step in self.steps],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        marks = {"pass": "ok", "refuse": "NO", "unknown": "--"}
        lines = [f"{self.ref!r} for {self.consumer or 'an anonymous consumer'}: {self.code}"]
        lines += [f"  {step.step}. {marks[step.result]} {step.reason}" for step in self.steps]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def needs_scripts(skill: Skill) -> tuple[str, ...]:
    """Return the tools that *skill* requires and that are there only where an engine runs programs."""
    return tuple(sorted({tool_id(tool.id) for tool in skill.tools if tool.required} & SCRIPT_TOOLS))


def explain_steps(
    known_skills: KnownSkills, rules: Rules, full_id: str | None, outcome: Granted | Refused, starter: By
) -> tuple[ExplainedStep, ...]:
    """Ask every step about one id; *outcome* is the gate's answer, which tells about ids without a skill behind them."""
    skill = known_skills.skills.get(full_id) if full_id is not None else None
    if skill is None:
        code, reason = (outcome.code, outcome.reason) if isinstance(outcome, Refused) else ("unknown_skill", "")
        return tuple(
            ExplainedStep(number, title, "refuse", reason, code)
            if number == STEP_OF.get(code, 1)
            else ExplainedStep(number, title, "unknown", "there is no skill here to ask about")
            for number, title in enumerate(TITLES, 1)
        )
    steps = [ExplainedStep(1, TITLES[0], "pass", f"{full_id} is a skill of a {skill.layer} root", source=skill.layer)]
    for number, refusal in (
        *((number, check(rules, skill)) for number, check in CHECKS.items()),
        (7, refuse_by(skill, starter)),
    ):
        title = TITLES[number - 1]
        if refusal is not None:
            rule, source = refusal.details.get("rule"), refusal.details.get("source")
            steps.append(ExplainedStep(number, title, "refuse", refusal.reason, refusal.code, rule, source))
        elif number == 7:
            steps.append(ExplainedStep(number, title, "pass", f"a {starter} may start it"))
        else:
            reason, rule, source = _passed(number, rules, skill)
            steps.append(ExplainedStep(number, title, "pass", reason, None, rule, source))
    return tuple(steps)


def _passed(step: int, rules: Rules, skill: Skill) -> tuple[str, str | None, str | None]:
    """Return why *skill* passes one of the steps 2 to 6: the reason, the rule that let it through, where that stands."""
    rule = source = None
    if step == 2:
        reason = f'no rule of "*" or {rules.consumer or "an anonymous consumer"} and no plugin denies {skill.full_id}'
    elif step == 3 and skill.namespace == INTERNAL_NAMESPACE:
        reason, rule, source = "internal skills were asked for", "include_internal", "view"
    elif step == 3:
        reason = f"the namespace is {skill.namespace}"
    elif step == 4 and (entry := for_consumer(skill, rules.consumer)) is not None:
        reason, rule, source = f"include_for lets {rules.consumer} in by {entry!r}", entry, "include_for"
    elif step == 4:
        reason = "the skill names no consumers"
    elif step == 5 and rules.enabled is not None:
        rule, source = rules.allowed.match(skill.full_id), rules.allow_source
        reason = f"{source} holds {rule!r}"
    elif step == 5:
        reason = f"{rules.source} has no allow-list"
    elif rules.tools is None:
        reason = "no tool gate was asked for"
    elif needed := ", ".join(sorted({tool.id for tool in skill.tools if tool.required})):
        reason, rule, source = f"all required tools are here: {needed}", needed, "tools.yaml"
    else:
        reason = "the skill requires no tools"
    return reason, rule, source
