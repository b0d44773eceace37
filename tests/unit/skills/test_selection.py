"""The gate's seven steps, row by row, and what they are called."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.skills.model import Skill, SkillTool
from kdskills.skills.selection import (
    STEP_OF,
    KnownSkills,
    Refused,
    Rules,
    decide,
    decide_dependency,
    refuse,
    tool_ids,
)


@dataclass(frozen=True)
class Text:
    """Content held in memory."""

    def body(self):
        """The body."""
        return "text"

    def compact(self):
        """No compact text."""

    def sources(self):
        """No sources."""
        return ()

    def tree_digest(self):
        """A digest."""
        return "sha256:0"


def skill(full_id: str, **fields) -> Skill:
    """Return a skill with this full id."""
    namespace, _, name = full_id.partition(".")
    return Skill(name=name, namespace=namespace, id=name, description=f"About {name}.", content=Text(), **fields)


def known(*skills: Skill, refused=()) -> KnownSkills:
    """Return what there is."""
    return KnownSkills({entry.full_id: entry for entry in skills}, dict(refused))


def code(world: KnownSkills, rules: Rules, full_id: str, *, by="model", **policy) -> str:
    """Return `granted` or the code of the refusal."""
    found = decide(world, replace(rules, **policy), full_id, ref=full_id, starter=by)
    return found.code if isinstance(found, Refused) else "granted"


NEEDS_IO = (SkillTool("io.save", required=True), SkillTool("web.search"))
OPEN = Rules()


def test_step_1_unknown_and_invalid() -> None:
    """An id that is not there is `unknown_skill`, one refused at load `skill_invalid`."""
    world = known(skill("acme.a"), refused={"acme.broken": "skill_invalid"})
    assert code(world, OPEN, "acme.b") == "unknown_skill"
    assert code(world, OPEN, "acme.broken") == "skill_invalid"
    assert code(world, OPEN, "acme.a") == "granted"


@pytest.mark.parametrize(
    "rules",
    [Rules(disabled=("acme.a",)), Rules(disabled=("a",)), Rules(disabled_for_all=("acme.*",)), Rules(disabled=("*",))],
)
def test_step_2_denied(rules: Rules) -> None:
    """A skill in `disabled` of the consumer or of `"*"` is denied, also when it is enabled."""
    world = known(skill("acme.a"), skill("zeta.b"))
    assert code(world, rules, "acme.a", consumer="w") == "denied"
    assert code(world, replace(rules, enabled=("acme.a",)), "acme.a", consumer="w") == "denied"


def test_step_2_star_binds_anonymous() -> None:
    """The deny layer for all binds a consumer without a name."""
    assert code(known(skill("acme.a")), Rules(disabled_for_all=("acme.a",)), "acme.a") == "denied"


def test_step_2_plugin_denied() -> None:
    """What a plugin denies is `plugin_denied`; a rule of denial is named first."""
    world = known(skill("acme.a"))
    assert code(world, OPEN, "acme.a", plugin_denied={"acme.a": "quota"}) == "plugin_denied"
    assert code(world, Rules(disabled=("a",)), "acme.a", plugin_denied={"acme.a": "quota"}) == "denied"


def test_step_3_internal_is_not_opened_by_enabled() -> None:
    """The internal namespace is shut without `include_internal`; `enabled` cannot open it."""
    world = known(skill("internal.a"))
    assert code(world, OPEN, "internal.a") == "internal"
    assert code(world, Rules(enabled=("internal.a", "*")), "internal.a", consumer="w") == "internal"
    assert code(world, OPEN, "internal.a", include_internal=True) == "granted"


def test_step_4_include_for() -> None:
    """`include_for` holds for consumers in the config and others alike; an absent consumer matches nothing."""
    world = known(skill("acme.a", include_for=("writer", "solver.*")))
    assert code(world, OPEN, "acme.a") == "not_for_consumer"
    assert code(world, OPEN, "acme.a", consumer="reader") == "not_for_consumer"
    assert code(world, OPEN, "acme.a", consumer="writer") == "granted"
    assert code(world, OPEN, "acme.a", consumer="Solver.Codegen") == "granted"
    assert code(known(skill("acme.b", include_for=("*",))), OPEN, "acme.b") == "not_for_consumer"


def test_step_5_not_enabled() -> None:
    """With an allow-list only what matches is visible; an empty or wrong list allows nothing."""
    world = known(skill("acme.a"), skill("public.b"))
    assert code(world, Rules(enabled=("b",)), "acme.a", consumer="w") == "not_enabled"
    assert code(world, Rules(enabled=("b",)), "public.b", consumer="w") == "granted"
    assert code(world, Rules(enabled=("a",)), "acme.a", consumer="w") == "not_enabled"
    assert code(world, Rules(enabled=()), "public.b", consumer="w") == "not_enabled"
    assert code(world, Rules(enabled=("", "a.b.c", "gone")), "public.b", consumer="w") == "not_enabled"
    assert code(world, Rules(enabled=None), "public.b", consumer="w") == "granted"


def test_step_6_tools() -> None:
    """No tools given: no gate. An empty list: gated skills drop. Only required tools count; details name them."""
    world = known(skill("acme.a", tools=NEEDS_IO), skill("acme.free"))
    assert code(world, OPEN, "acme.a", tools=None) == "granted"
    assert code(world, OPEN, "acme.a", tools=frozenset()) == "tools_missing"
    assert code(world, OPEN, "acme.a", tools=frozenset({"web.search"})) == "tools_missing"
    assert code(world, OPEN, "acme.a", tools=frozenset({"io.save"})) == "granted"
    assert code(world, OPEN, "acme.free", tools=frozenset()) == "granted"
    refused = decide(world, replace(OPEN, tools=frozenset()), "acme.a", ref="acme.a", starter="model")
    assert refused.details["missing"] == ["io.save"]


def test_step_7_by() -> None:
    """What only people start is `user_only` for a model; what only agents start is `model_only` for a person."""
    world = known(
        skill("acme.user", disable_model_invocation=True),
        skill("acme.message", insert="user-message"),
        skill("acme.agent", user_invocable=False),
    )
    assert [code(world, OPEN, f"acme.{name}") for name in ("user", "message", "agent")] == [
        "user_only",
        "user_only",
        "granted",
    ]
    assert [code(world, OPEN, f"acme.{name}", by="user") for name in ("user", "message", "agent")] == [
        "granted",
        "granted",
        "model_only",
    ]
    assert {code(world, OPEN, f"acme.{name}", by="code") for name in ("user", "message", "agent")} == {"granted"}


EVERY_STEP = [
    ("denied", {"disabled": ("internal.a",)}, {}),
    ("plugin_denied", {}, {"plugin_denied": {"internal.a": "no"}}),
    ("internal", {}, {"plugin_denied": {}}),
    ("not_for_consumer", {}, {"plugin_denied": {}, "include_internal": True}),
    ("not_enabled", {}, {"plugin_denied": {}, "include_internal": True, "consumer": "writer"}),
    ("tools_missing", {"enabled": None}, {"plugin_denied": {}, "include_internal": True, "consumer": "writer"}),
    (
        "user_only",
        {"enabled": None},
        {"plugin_denied": {}, "include_internal": True, "consumer": "writer", "tools": None},
    ),
]


@pytest.mark.parametrize(("expected", "rules", "policy"), EVERY_STEP)
def test_first_hit_is_the_code(expected: str, rules: dict, policy: dict) -> None:
    """A skill that every step would refuse is refused by the first one; taking each away shows the next."""
    everything = skill("internal.a", include_for=("writer",), tools=NEEDS_IO, disable_model_invocation=True)
    base = {"plugin_denied": {"internal.a": "no"}, "consumer": "reader", "tools": frozenset()}
    assert (
        code(known(everything), Rules(**({"enabled": ("other",)} | rules)), "internal.a", **(base | policy)) == expected
    )


def test_steps_are_numbered_as_documented() -> None:
    """Each code belongs to the step the table gives it."""
    assert [STEP_OF[name] for name, *_ in EVERY_STEP] == [2, 2, 3, 4, 5, 6, 7]
    assert {STEP_OF[name] for name in ("invalid_ref", "unknown_skill", "skill_invalid")} == {1}


def test_refusals_name_rule_and_source() -> None:
    """A refusal says which rule decided and where it stands."""
    policy = replace(Rules(disabled=("acme.*",), disabled_for_all=("b",)), consumer="writer")
    world = known(skill("acme.a"), skill("zeta.b"))
    own = decide(world, policy, "acme.a", ref="sk:acme.a", starter="model")
    everyone = decide(world, policy, "zeta.b", ref="zeta.b", starter="model")
    assert (own.ref, own.full_id, own.details) == (
        "sk:acme.a",
        "acme.a",
        {"rule": "acme.*", "source": "agents_config.writer.disabled"},
    )
    assert everyone.details == {"rule": "b", "source": "agents_config.*.disabled"}
    assert own.to_json()["code"] == "denied"


def test_public_refusal_reads_like_unknown() -> None:
    """To a model a refused skill reads exactly like one that does not exist."""
    world = known(skill("acme.a"))
    policy = Rules(disabled=("acme.a",))
    denied = decide(world, policy, "acme.a", ref="x", starter="model").public()
    absent = decide(world, policy, "acme.zzz", ref="x", starter="model").public()
    assert denied == absent
    assert (denied.code, denied.full_id, denied.details) == ("unknown_skill", None, {})


def test_dependency_private() -> None:
    """Under `private` a dependency need not be enabled, and may be internal for a trusted root's importer."""
    world = known(skill("acme.dep"), skill("internal.dep"))
    policy = replace(Rules(enabled=("acme.top",)), consumer="w")
    for layer, expected in [("builtin", True), ("plugin", True), ("bundle", True), ("user", False), ("project", False)]:
        importer = skill("acme.top", layer=layer)
        assert not isinstance(decide_dependency(world, policy, importer, "acme.dep", ref="dep"), Refused)
        found = decide_dependency(world, policy, importer, "internal.dep", ref="dep")
        assert (not isinstance(found, Refused)) is expected


@pytest.mark.parametrize("imports", ["listed", "strict"])
def test_dependency_listed_must_be_grantable_itself(imports: str) -> None:
    """Under `listed` and `strict` a dependency needs to be enabled and not internal."""
    world = known(skill("acme.dep"), skill("internal.dep"))
    policy = replace(Rules(enabled=("acme.top", "internal.*"), imports=imports), consumer="w")
    top = skill("acme.top")
    assert decide_dependency(world, policy, top, "acme.dep", ref="dep").code == "not_enabled"
    assert decide_dependency(world, policy, top, "internal.dep", ref="dep").code == "internal"


@pytest.mark.parametrize("imports", ["private", "listed", "strict"])
def test_deny_for_and_tools_hold_under_each_policy(imports: str) -> None:
    """Deny, plugins, `include_for` and tool gates refuse a dependency under each policy; step 7 never does."""
    world = known(
        skill("a.denied"),
        skill("a.plugged"),
        skill("a.other", include_for=("other",)),
        skill("a.tooled", tools=NEEDS_IO),
        skill("a.user", disable_model_invocation=True, user_invocable=False),
    )
    policy = replace(
        Rules(disabled=("denied",), imports=imports), consumer="w", tools=frozenset(), plugin_denied={"a.plugged": "no"}
    )
    found = {
        name: decide_dependency(world, policy, skill("a.top"), f"a.{name}", ref=name)
        for name in ("denied", "plugged", "other", "tooled", "user", "gone")
    }
    codes = {name: getattr(entry, "code", "granted") for name, entry in found.items()}
    assert codes == {
        "denied": "denied",
        "plugged": "plugin_denied",
        "other": "not_for_consumer",
        "tooled": "tools_missing",
        "user": "granted",
        "gone": "unknown_skill",
    }


def test_tool_ids() -> None:
    """Tools are ids, mappings or objects; None stays None and `[]` is no tools; a string is one id."""
    entries = ["a", {"id": "b"}, {"tool_id": "c"}, {"name": "d"}, SimpleNamespace(id="e"), SimpleNamespace(name="f")]
    assert tool_ids(entries) == frozenset("abcdef")
    assert tool_ids(None) is None
    assert tool_ids([]) == frozenset()
    assert tool_ids("web.search") == frozenset({"web.search"})


@pytest.mark.parametrize("entry", [3, None, {}, {"id": 3}, SimpleNamespace(), [], {"name": ""}])
def test_tools_not_understood_are_refused(entry) -> None:
    """An entry without id or name is an error of the caller, not silently dropped."""
    with pytest.raises(TypeError):
        tool_ids([entry])


RULE = st.sampled_from(["*", "a.*", "b.*", "x", "y", "a.x", "internal.*", "?.x", "", "a.b.c", "zzz"])
IDS = ["a.x", "a.y", "b.x", "b.y", "public.x", "internal.x"]


def visible(rules: Rules, **policy) -> set[str]:
    """Return the ids the gate lets through."""
    compiled = replace(rules, **policy)
    return {name for name in IDS if refuse(compiled, skill(name, tools=NEEDS_IO if name == "b.y" else ())) is None}


@given(
    enabled=st.none() | st.lists(RULE, max_size=4).map(tuple),
    disabled=st.lists(RULE, max_size=3).map(tuple),
    everyone=st.lists(RULE, max_size=3).map(tuple),
    more=RULE,
    tools=st.none() | st.just(frozenset()),
    internal=st.booleans(),
)
def test_adding_a_deny_never_shows_more(enabled, disabled, everyone, more, tools, internal) -> None:
    """Another denial, anywhere, or a plugin's, only takes away; so does an empty tool list."""
    rules = Rules(enabled, disabled, everyone)
    policy = {"consumer": "w", "tools": tools, "include_internal": internal}
    before = visible(rules, **policy)
    assert visible(replace(rules, disabled=(*disabled, more)), **policy) <= before
    assert visible(replace(rules, disabled_for_all=(*everyone, more)), **policy) <= before
    assert visible(rules, **policy, plugin_denied={"a.x": "no"}) == before - {"a.x"}
    assert visible(rules, consumer="w", tools=frozenset(), include_internal=False) <= before
    assert all(not name.startswith("internal.") for name in before) or internal


def test_checks_in_force_refuse_what_all_checks_refuse():
    """Leaving out idle steps changes no answer: for every policy and skill the first refusal is the same."""
    from itertools import product

    from kdskills.skills import parse_skill_bytes
    from kdskills.skills.selection import Rules, checks_in_force, refuse

    extras = ["", "namespace: internal\n", 'include_for: ["w*"]\n', "namespace: acme\n", "agent_disclosure: hidden\n"]
    texts = [f"---\nname: s{n}\ndescription: d\n{extra}---\nb\n" for n, extra in enumerate(extras)]
    skills = [parse_skill_bytes(text.encode(), folder=f"s{n}").skill for n, text in enumerate(texts)]
    rules = [
        Rules(),
        Rules(enabled=("acme.*",)),
        Rules(disabled=("s0",)),
        Rules(disabled_for_all=("public.*",)),
        Rules(enabled=("s1", "acme.s3"), disabled=("s3",)),
    ]
    options = product(rules, ("w1", "x", None), (None, frozenset()), (False, True), ({}, {"public.s2": "a plugin"}))
    seen = set()
    for rule, consumer, tools, internal, denied in options:
        policy = replace(rule, consumer=consumer, tools=tools, include_internal=internal, plugin_denied=denied)
        checks = checks_in_force(policy)
        for skill in skills:
            found = refuse(policy, skill, checks)
            assert found == refuse(policy, skill)
            seen.add(None if found is None else found.code)
    assert {None, "denied", "plugin_denied", "internal", "not_for_consumer", "not_enabled"} <= seen
