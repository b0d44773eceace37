"""The descriptor: every accepted form, and every typo that must not lose a denial."""

from __future__ import annotations

import copy
import json
import pickle
import time
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.bundle import AgentRules, SkillsDescriptor
from kdskills.errors import DescriptorError
from kdskills.skills.selection import Rules


def refusal(value) -> tuple[str, str]:
    """Return code and key of the error a descriptor raises."""
    with pytest.raises(DescriptorError) as caught:
        SkillsDescriptor.from_json(value)
    assert caught.value.details["key"] in str(caught.value)
    return caught.value.code, caught.value.details["key"]


def test_both_spellings_are_the_same() -> None:
    """Lower and upper case keys mean the same, also side by side when they agree."""
    lower = SkillsDescriptor.from_json({"custom_skills_root": "s", "agents_config": {"w": {"disabled": "x"}}})
    upper = SkillsDescriptor.from_json({"CUSTOM_SKILLS_ROOT": Path("s"), "AGENTS_CONFIG": {"w": {"disabled": ["x"]}}})
    both = SkillsDescriptor.from_json({"custom_skills_root": "s", "CUSTOM_SKILLS_ROOT": Path("s"), **upper.to_json()})
    assert lower == upper == both
    assert hash(lower) == hash(upper)


@pytest.mark.parametrize(
    ("lower", "upper", "one", "two"),
    [
        ("custom_skills_root", "CUSTOM_SKILLS_ROOT", "a", "b"),
        ("custom_skills_root", "CUSTOM_SKILLS_ROOT", "a", None),
        ("agents_config", "AGENTS_CONFIG", {}, {"w": {}}),
        ("agents_config", "AGENTS_CONFIG", {"w": {"disabled": ["x"]}}, {"w": {}}),
    ],
)
def test_unequal_spellings_conflict(lower, upper, one, two) -> None:
    """Two spellings that disagree are `descriptor_conflict`, whichever comes first."""
    assert refusal({lower: one, upper: two})[0] == "descriptor_conflict"
    assert refusal({upper: two, lower: one})[0] == "descriptor_conflict"


def test_root_forms() -> None:
    """A path is its string; blank, null and false mean no root, which is not the same as saying nothing."""
    assert SkillsDescriptor(custom_skills_root=Path("a/b")).custom_skills_root == "a/b"
    none = [SkillsDescriptor.from_json({"custom_skills_root": value}) for value in ("", "  \n", None, False)]
    assert {(entry.custom_skills_root, entry.root_omitted) for entry in none} == {(None, False)}
    assert {json.dumps(entry.to_json()) for entry in none} == {'{"custom_skills_root": null}'}
    assert SkillsDescriptor().root_omitted
    assert SkillsDescriptor() != none[0]


@pytest.mark.parametrize("value", [True, 3, ["a"], b"a", "a\0b"])
def test_root_of_other_types_is_an_error(value) -> None:
    """A root is text or a path."""
    assert refusal({"custom_skills_root": value}) == ("descriptor_type", "custom_skills_root")


def test_string_is_a_list_of_one() -> None:
    """A string for a list of rules is a list of one."""
    rules = AgentRules(enabled="a.b", disabled="c")
    assert (rules.enabled, rules.disabled) == (("a.b",), ("c",))


@pytest.mark.parametrize("value", [None, [], True, ()])
def test_no_allow_list(value) -> None:
    """`enabled` left out, null, empty or true is no allow-list."""
    assert AgentRules(enabled=value) == AgentRules()
    descriptor = SkillsDescriptor(agents_config={"w": {"enabled": value}})
    assert descriptor.rules("w") == Rules(enabled=None, consumer="w")


@pytest.mark.parametrize(
    ("rules", "expected"),
    [({"enabled": False}, Rules(enabled=())), ({"disabled": True}, Rules(disabled=("*",)))],
)
def test_nothing_for_this_consumer(rules, expected) -> None:
    """`enabled: false` and `disabled: true` leave a consumer nothing."""
    assert SkillsDescriptor(agents_config={"w": rules}).rules("w") == replace(expected, consumer="w")


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"agents_config": []}, "agents_config"),
        ({"agents_config": None}, "agents_config"),
        ({"agents_config": "w"}, "agents_config"),
        ({"agents_config": {"w": []}}, "agents_config.w"),
        ({"agents_config": {"w": None}}, "agents_config.w"),
        ({"agents_config": {"w": "x"}}, "agents_config.w"),
        ({"agents_config": {3: {}}}, "agents_config.3"),
        ({"agents_config": {" ": {}}}, "agents_config. "),
        ({"agents_config": {"w": {"enabled": {"a": 1}}}}, "agents_config.w.enabled"),
        ({"agents_config": {"w": {"enabled": 1}}}, "agents_config.w.enabled"),
        ({"agents_config": {"w": {"disabled": 0}}}, "agents_config.w.disabled"),
        ({"agents_config": {"w": {"disabled": ["a", 3]}}}, "agents_config.w.disabled"),
        ({"agents_config": {"w": {"disabled": [["a"]]}}}, "agents_config.w.disabled"),
        ({"agents_config": {"w": {"imports": "open"}}}, "agents_config.w.imports"),
        ({"agents_config": {"w": {"imports": None}}}, "agents_config.w.imports"),
        ({"version": "1"}, "version"),
        ({"version": True}, "version"),
        ({"version": 0}, "version"),
        ({"allow_outside_bundle": 1}, "allow_outside_bundle"),
        ({"allow_outside_bundle": "yes"}, "allow_outside_bundle"),
        ({"bundle_root": 3}, "bundle_root"),
        ({"extra": []}, "extra"),
        ({"owner": object()}, "owner"),
        ({"owner": float("nan")}, "owner"),
        ([], "descriptor"),
        (None, "descriptor"),
        ("skills", "descriptor"),
        ({3: 4}, "3"),
    ],
)
def test_other_types_are_errors(value, key) -> None:
    """A value of another type is an error that names the key's path."""
    assert refusal(value) == ("descriptor_type", key)


def test_unknown_rule_keys_are_errors() -> None:
    """Any unknown key of a rule is an error, a misspelt one with the word meant."""
    for key in ("enable", "Disabled", "deny", "x", 3):
        code, path = refusal({"agents_config": {"w": {key: ["a"]}}})
        assert (code, path) == ("descriptor_unknown_key", f"agents_config.w.{key}")
    with pytest.raises(DescriptorError, match="did you mean 'disabled'"):
        AgentRules.model_validate({"disbled": ["x"]})


@pytest.mark.parametrize("key", ["w*", "**", "solver.*"])
def test_consumer_patterns_are_errors(key: str) -> None:
    """A consumer key with a star other than the one for all is an error: consumers match exactly."""
    assert refusal({"agents_config": {key: {}}}) == ("descriptor_consumer_pattern", f"agents_config.{key}")


@pytest.mark.parametrize("entry", ["SK1", "sk:3", " skills.SK9"])
@pytest.mark.parametrize("key", ["enabled", "disabled"])
def test_short_ids_in_rules_are_errors(entry: str, key: str) -> None:
    """A number belongs to one view, so no rule may hold it."""
    assert refusal({"agents_config": {"w": {key: [entry]}}}) == ("descriptor_short_id", f"agents_config.w.{key}")


def test_unknown_top_level_keys_are_kept_with_a_warning() -> None:
    """An unknown key is kept in `extra` and warned about."""
    descriptor = SkillsDescriptor.from_json({"owner": {"team": ["press", 1, None]}, "extra": {"note": "x"}})
    assert dict(descriptor.extra) == {"note": "x", "owner": {"team": ["press", 1, None]}}
    assert [(found.code, found.severity, found.ref) for found in descriptor.diagnostics] == [
        ("descriptor_unknown_key", "warning", "note"),
        ("descriptor_unknown_key", "warning", "owner"),
    ]


@pytest.mark.parametrize(
    "key",
    ["agent_config", "AGENT_CONFIG", "Agents_Config", "agents-config", "agents", "agentsConfig", "custom_skill_root",
     "skills_root", "CUSTOM_ROOT", "bundleroot", "allow_outside", "versions", "Version", "EXTRA"],
)  # fmt: skip
def test_keys_resembling_known_ones_are_errors(key: str) -> None:
    """A key that looks like a known one is an error: a typo must not lose a denial."""
    assert refusal({key: {}}) == ("descriptor_unknown_key", key)


def test_later_versions_are_errors() -> None:
    """A version above 1 is an error of its own."""
    assert refusal({"version": 2}) == ("descriptor_version", "version")
    assert SkillsDescriptor.from_json({"version": 1}) == SkillsDescriptor()


def test_frozen() -> None:
    """Nothing of a descriptor can be changed, nor its mappings."""
    descriptor = SkillsDescriptor(agents_config={"w": {"disabled": ["x"]}}, owner="us")
    with pytest.raises(FrozenInstanceError):
        descriptor.version = 1
    with pytest.raises(TypeError):
        descriptor.agents_config["v"] = AgentRules()
    with pytest.raises(TypeError):
        descriptor.extra["v"] = 1
    with pytest.raises(FrozenInstanceError):
        descriptor.agents_config["w"].disabled = ()


def test_copies_and_pickles() -> None:
    """A descriptor can be copied, deep or not, and pickled; what comes out is equal."""
    descriptor = SkillsDescriptor(agents_config={"w": {"disabled": ["x"]}}, custom_skills_root=None, owner="us")
    for twin in (copy.copy(descriptor), copy.deepcopy(descriptor), pickle.loads(pickle.dumps(descriptor))):
        assert twin == descriptor
    assert copy.deepcopy({"d": descriptor})["d"].root_omitted is False


def test_direct_construction_is_as_strict() -> None:
    """The constructors refuse what the reader refuses, with the same error."""
    with pytest.raises(DescriptorError):
        SkillsDescriptor(agents_config=[])
    with pytest.raises(DescriptorError):
        AgentRules(enabeld=["x"])


def test_rules_of_consumers() -> None:
    """A consumer's key counts exactly; the layer for all binds everyone, and its allow-list is ignored with a warning."""
    descriptor = SkillsDescriptor(
        agents_config={
            "*": {"disabled": "d.*", "enabled": ["a"]},
            "Writer": {"enabled": ["b"]},
            "default": {"disabled": "z"},
        }
    )
    assert descriptor.rules("Writer") == Rules(("b",), (), ("d.*",), consumer="Writer")
    for consumer in ("writer", "other", None, "*"):
        assert descriptor.rules(consumer) == Rules(None, (), ("d.*",), consumer=consumer)
    assert [(found.code, found.severity) for found in descriptor.diagnostics] == [("rule_ignored", "warning")]


def test_star_can_only_restrict() -> None:
    """`"*"` with `disabled: true` or `enabled: false` denies all; the stricter `imports` holds."""
    for rules in ({"disabled": True}, {"enabled": False}):
        assert SkillsDescriptor(agents_config={"*": rules}).rules("w").disabled_for_all == ("*",)
    descriptor = SkillsDescriptor(agents_config={"*": {"imports": "listed"}, "w": {"imports": "strict"}, "v": {}})
    assert [descriptor.rules(name).imports for name in ("w", "v", None)] == ["strict", "listed", "listed"]


def test_content_hash() -> None:
    """The hash is over the content: not over `bundle_root`, nor the order of keys."""
    one = SkillsDescriptor(agents_config={"a": {}, "b": {"disabled": ["x"]}}, bundle_root="/one")
    two = SkillsDescriptor(agents_config={"b": {"disabled": "x"}, "a": {}}, bundle_root="/two")
    assert one.content_hash == two.content_hash
    assert one.content_hash.startswith("sha256:")
    assert one.content_hash != SkillsDescriptor(agents_config={"a": {}}).content_hash
    assert SkillsDescriptor().content_hash != SkillsDescriptor(custom_skills_root=None).content_hash


def test_narrow() -> None:
    """More is denied to every consumer and to all; nothing denied gives the same object."""
    descriptor = SkillsDescriptor(
        agents_config={"w": {"enabled": ["a"], "disabled": ["x"]}, "v": {"disabled": True}}, bundle_root="/b", owner=1
    )
    assert descriptor.narrow([]) is descriptor
    assert descriptor.narrow(()) is descriptor
    narrowed = descriptor.narrow(["x", "y.*"])
    assert narrowed.to_json()["agents_config"] == {
        "*": {"disabled": ["x", "y.*"]},
        "w": {"enabled": ["a"], "disabled": ["x", "y.*"]},
        "v": {"disabled": True},
    }
    assert (narrowed.bundle_root, dict(narrowed.extra)) == ("/b", {"owner": 1})
    assert descriptor.narrow("y").rules(None).disabled_for_all == ("y",)
    with pytest.raises(DescriptorError):
        descriptor.narrow(["SK1"])


# ---- the root on this host -----------------------------------------------------------------------------------------


def root_refusal(descriptor: SkillsDescriptor, bundle_root=None) -> str:
    """Return the code `resolve_root` refuses with."""
    with pytest.raises(DescriptorError) as caught:
        descriptor.resolve_root(bundle_root)
    assert caught.value.details["key"] == "custom_skills_root"
    return caught.value.code


def test_omitted_root_is_skills_if_there(tmp_path: Path) -> None:
    """Left out, the root is `skills/` below the bundle when that exists, else none."""
    assert SkillsDescriptor().resolve_root() is None
    assert SkillsDescriptor().resolve_root(tmp_path) is None
    (tmp_path / "skills").mkdir()
    assert SkillsDescriptor().resolve_root(tmp_path) == tmp_path / "skills"
    assert SkillsDescriptor(bundle_root=tmp_path).resolve_root() == tmp_path / "skills"
    assert SkillsDescriptor(custom_skills_root=None).resolve_root(tmp_path) is None


def test_relative_root(tmp_path: Path) -> None:
    """A relative root is joined to the bundle; without one it is refused. It need not exist."""
    descriptor = SkillsDescriptor(custom_skills_root="my/skills")
    assert descriptor.resolve_root(tmp_path) == tmp_path / "my/skills"
    assert root_refusal(descriptor) == "descriptor_root_relative"


def test_argument_wins_over_the_descriptors_bundle_root(tmp_path: Path) -> None:
    """The caller's bundle root counts before the descriptor's own."""
    descriptor = SkillsDescriptor(custom_skills_root="s", bundle_root="/elsewhere")
    assert descriptor.resolve_root(tmp_path) == tmp_path / "s"


@pytest.mark.parametrize("root", ["..", "../x", "a/../../x", "../bundlex"])
def test_root_leaving_by_dots(tmp_path: Path, root: str) -> None:
    """`..` out of the bundle is refused, part by part: a sibling with the same beginning is outside."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    assert root_refusal(SkillsDescriptor(custom_skills_root=root), bundle) == "descriptor_root_outside_bundle"
    allowed = SkillsDescriptor(custom_skills_root=root, allow_outside_bundle=True)
    assert allowed.resolve_root(bundle) == bundle / root


def test_root_leaving_by_a_link(tmp_path: Path) -> None:
    """A link out of the bundle is refused, as root and as the omitted `skills`; one that stays inside is fine."""
    bundle, outside = tmp_path / "bundle", tmp_path / "outside"
    bundle.mkdir()
    outside.mkdir()
    (bundle / "skills").symlink_to(outside)
    (bundle / "real").mkdir()
    (bundle / "inside").symlink_to(bundle / "real")
    assert root_refusal(SkillsDescriptor(custom_skills_root="skills"), bundle) == "descriptor_root_outside_bundle"
    assert root_refusal(SkillsDescriptor(), bundle) == "descriptor_root_outside_bundle"
    assert SkillsDescriptor(custom_skills_root="inside").resolve_root(bundle) == bundle / "inside"
    assert SkillsDescriptor(custom_skills_root="a/../real").resolve_root(bundle) is not None


def test_absolute_root_of_host_code(tmp_path: Path) -> None:
    """An absolute root from host code is taken as given, wherever it is."""
    descriptor = SkillsDescriptor(custom_skills_root=tmp_path / "x", bundle_root="/somewhere")
    assert descriptor.resolve_root() == tmp_path / "x"


# ---- round trip ------------------------------------------------------------------------------------------------------

RULE = st.text(alphabet="ab.*?-", max_size=6)
RULES = st.lists(RULE, max_size=3) | RULE
AGENT = st.fixed_dictionaries(
    {},
    optional={
        "enabled": RULES | st.none() | st.booleans(),
        "disabled": RULES | st.none() | st.booleans(),
        "imports": st.sampled_from(["private", "listed", "strict"]),
    },
)
CONSUMER = st.text(min_size=1, max_size=6).filter(lambda name: name.strip() and "*" not in name) | st.just("*")
JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
DESCRIPTOR = st.fixed_dictionaries(
    {},
    optional={
        "version": st.just(1),
        "custom_skills_root": st.none() | st.just(False) | st.text(alphabet="ab/. ", max_size=8) | st.just(Path("p/q")),
        "AGENTS_CONFIG": st.dictionaries(CONSUMER, AGENT, max_size=4),
        "bundle_root": st.none() | st.just("/srv/b") | st.just(Path("/srv/c")),
        "allow_outside_bundle": st.booleans(),
        "owner": JSON_VALUE,
        "zzz_note": JSON_VALUE,
    },
)


@given(DESCRIPTOR)
def test_json_round_trip(written) -> None:
    """`to_json` works for every accepted input, is JSON, leaves defaults out, and reads back as the same descriptor."""
    descriptor = SkillsDescriptor.from_json(written)
    as_json = descriptor.to_json()
    again = SkillsDescriptor.from_json(json.loads(json.dumps(as_json)))
    assert again == descriptor
    assert again.to_json() == as_json
    assert again.content_hash == descriptor.content_hash
    assert {"version", "diagnostics"}.isdisjoint(as_json)
    assert all(as_json.values()) or as_json.get("custom_skills_root", "x") is None
    assert descriptor.model_dump()["agents_config"] == as_json.get("agents_config", {})


@given(
    st.recursive(
        JSON_VALUE,
        lambda inner: st.dictionaries(
            st.sampled_from(["agents_config", "custom_skills_root", "enabled", "disabled", "version", "x", "*"]),
            inner,
            max_size=4,
        ),
    )
)
def test_anything_else_is_a_descriptor_error(value) -> None:
    """Whatever is read, it is a descriptor or a `DescriptorError` with code and key; never another exception."""
    try:
        SkillsDescriptor.from_json(value)
    except DescriptorError as error:
        found = (error.code.partition("_")[0], "key" in error.details)
    else:
        found = ("descriptor", True)
    assert found == ("descriptor", True)


@pytest.mark.parametrize(
    "value",
    [
        {"note": 10**5000},
        {"extra": {"a": [10**5000]}},
        {"version": 10**5000},
        {10**5000: 1},
        {"allow_outside_bundle": 10**5000},
        {"agents_config": {10**5000: {}}},
        {"agents_config": {"w": {"imports": 10**5000}}},
    ],
)
def test_numbers_nobody_can_write_are_refused(value) -> None:
    """A number of thousands of digits, which neither JSON nor a message can hold, is refused by name."""
    assert refusal(value)[0] == "descriptor_type"


@pytest.mark.parametrize("key", ["versio" * 100_000, "_" * 600_000, "agents_confi" * 50_000])
def test_long_keys_cost_little(key: str) -> None:
    """Whether a key is a misspelling is not asked of one that is far too long to be one."""
    started = time.process_time()
    assert SkillsDescriptor.from_json({key: 1}).extra == {key: 1}
    assert time.process_time() - started < 1
