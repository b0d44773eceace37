"""Explanations: every step, with the rule and the place it stands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kdskills.skills.explain import TITLES, Explanation, explain_steps
from kdskills.skills.model import Skill, SkillTool
from kdskills.skills.selection import STEP_OF, Granted, KnownSkills, Refused, Rules, decide

NEEDED = (SkillTool("io.save", required=True), SkillTool("io.load", required=True), SkillTool("web.search"))


def skill(full_id: str, **fields) -> Skill:
    """Return a skill with this full id."""
    namespace, _, name = full_id.partition(".")
    return Skill(name=name, namespace=namespace, id=name, description=name, content=None, **fields)


def explain(entry: Skill, rules: Rules = Rules(), by="model", **options) -> Explanation:  # noqa: B008 - frozen
    """Explain one skill alone in the world."""
    known, policy = KnownSkills({entry.full_id: entry}), replace(rules, **options)
    found = decide(known, policy, entry.full_id, ref=entry.id, starter=by)
    outcome = found if isinstance(found, Refused) else Granted(found, entry.full_id, "full_id", (found,))
    steps = explain_steps(known, policy, entry.full_id, outcome, by)
    return Explanation(entry.id, policy.consumer, entry.full_id, "full_id", outcome, steps)


def test_a_granted_skill_says_why_each_step_passed() -> None:
    """Passing steps name the rule, list or tools that let the skill through."""
    entry = skill("internal.x", include_for=("solver.*",), tools=NEEDED, layer="plugin")
    found = explain(
        entry,
        Rules(enabled=("internal.*",)),
        consumer="solver.main",
        tools=frozenset({"io.save", "io.load"}),
        include_internal=True,
    )
    assert [(step.step, step.result, step.rule, step.source) for step in found.steps] == [
        (1, "pass", None, "plugin"),
        (2, "pass", None, None),
        (3, "pass", "include_internal", "view"),
        (4, "pass", "solver.*", "include_for"),
        (5, "pass", "internal.*", "agents_config.solver.main.enabled"),
        (6, "pass", "io.load, io.save", "tools.yaml"),
        (7, "pass", None, None),
    ]
    assert tuple(step.title for step in found.steps) == TITLES


def test_a_refused_skill_still_shows_every_step() -> None:
    """Steps after the first refusal are asked too, so that an author mends all of it at once."""
    entry = skill("internal.x", include_for=("v",), tools=NEEDED, disable_model_invocation=True)
    rules = Rules(enabled=("other",), disabled_for_all=("int*",))
    found = explain(entry, rules, consumer="w", tools=frozenset(), plugin_denied={"internal.x": "quota"})
    assert found.code == "denied"
    assert [(step.step, step.code, step.rule, step.source) for step in found.steps if step.result == "refuse"] == [
        (2, "denied", "int*", "agents_config.*.disabled"),
        (3, "internal", None, None),
        (4, "not_for_consumer", "v", "include_for"),
        (5, "not_enabled", None, "agents_config.w.enabled"),
        (6, "tools_missing", "io.load, io.save", "tools.yaml"),
        (7, "user_only", "disable-model-invocation", "SKILL.md"),
    ]


@pytest.mark.parametrize("code", ["invalid_ref", "unknown_skill", "skill_invalid", "not_enabled", "tools_missing"])
def test_without_a_skill_the_other_steps_are_unknown(code: str) -> None:
    """For an id without a skill behind it only the refusing step is known; also when the code came with an export."""
    known = KnownSkills({}, {"a.x": code})
    steps = explain_steps(known, Rules(), "a.x", Refused(code, "why", "x"), "model")
    assert [step.step for step in steps if step.result == "refuse"] == [STEP_OF[code]]
    assert {step.result for step in steps} == {"refuse", "unknown"}


def test_plugin_and_by_user() -> None:
    """A plugin's reason is the rule of its step; a person is told what only agents start."""
    found = explain(skill("a.x"), plugin_denied={"a.x": "over quota"})
    assert (found.steps[1].code, found.steps[1].rule, found.steps[1].source) == (
        "plugin_denied",
        "over quota",
        "plugin",
    )
    agents = explain(skill("a.x", user_invocable=False), by="user")
    assert (agents.code, agents.steps[6].rule) == ("model_only", "user-invocable")
    message = explain(skill("a.x", insert="user-message"))
    assert (message.code, message.steps[6].rule) == ("user_only", "insert: user-message")


def test_forms() -> None:
    """JSON holds every step; the text has a line for each, and names anonymous consumers."""
    found = explain(skill("a.x"), Rules(disabled=("x",)))
    as_json = found.to_json()
    assert (as_json["granted"], as_json["code"], as_json["consumer"], len(as_json["steps"])) == (
        False,
        "denied",
        None,
        7,
    )
    assert as_json["steps"][1] == {
        "step": 2,
        "title": "nothing disables it",
        "result": "refuse",
        "reason": "a.x is disabled by 'x' in agents_config.disabled",
        "code": "denied",
        "rule": "x",
        "source": "agents_config.disabled",
    }
    lines = str(found).splitlines()
    assert lines[0] == "'x' for an anonymous consumer: denied"
    assert [line[:7] for line in lines[1:3]] == ["  1. ok", "  2. NO"]
    assert explain(skill("a.x")).to_json()["reason"] is None
