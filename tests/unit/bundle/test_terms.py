"""Descriptors and rules as values: read, frozen, handed on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from kdskills.bundle import AgentRules, SkillsDescriptor
from kdskills.bundle.descriptor import EVERYONE, IMPORT_POLICIES, TrustPolicy
from kdskills.errors import DescriptorError

ID = st.from_regex(r"[a-z]{1,6}(\.[a-z*]{1,6})?", fullmatch=True)
ENTRIES = st.none() | st.booleans() | ID | st.lists(ID, max_size=3) | st.sets(ID, max_size=3) | st.tuples(ID)
RULES = st.fixed_dictionaries(
    {}, optional={"enabled": ENTRIES, "disabled": ENTRIES, "imports": st.sampled_from(IMPORT_POLICIES)}
)
CONSUMER = st.sampled_from(["w", "v", EVERYONE])
WRITTEN = st.fixed_dictionaries(
    {},
    optional={
        "version": st.just(1),
        "CUSTOM_SKILLS_ROOT": st.sampled_from([None, False, "", "skills", "a/b"]),
        "agents_config": st.dictionaries(CONSUMER, RULES, max_size=3),
        "bundle_root": st.sampled_from([None, "", "/srv/bundle", Path("/srv/other")]),
        "allow_outside_bundle": st.booleans(),
        "extra": st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2),
        "owner": st.text(max_size=3),
    },
)
POLICIES = st.builds(
    TrustPolicy,
    lock=st.sampled_from(["off", "warn", "enforce"]),
    signatures=st.sampled_from(["off", "warn", "require"]),
    signers=st.none() | st.just(False) | st.sets(st.sampled_from(["acme", "other"])),
    audit=st.sampled_from(["off", "warn", "block-high"]),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(WRITTEN)
def test_descriptors_travel(written) -> None:
    """A descriptor read back from its JSON is the one first read, with the same digest, findings and rules."""
    descriptor = SkillsDescriptor.from_json(written)
    again = SkillsDescriptor.from_json(json.loads(json.dumps(descriptor.to_json())))
    assert again == descriptor
    assert (again.content_hash, again.diagnostics) == (descriptor.content_hash, descriptor.diagnostics)
    assert again.root_omitted == descriptor.root_omitted
    for consumer in (None, "w", "v", "x", EVERYONE):
        assert again.rules(consumer) == descriptor.rules(consumer)
    assert SkillsDescriptor.from_json(descriptor) is descriptor


@given(st.dictionaries(st.sampled_from(["version", "agents_config", "bundle_root", "extra", "o"]), ANYTHING))
def test_reading_and_construction_refuse_alike(written) -> None:
    """What the reader refuses the constructor refuses, with the same code, key and sentence."""

    def answer(read):
        try:
            return read().to_json()
        except DescriptorError as error:
            return error.code, error.details["key"], error.message

    assert answer(lambda: SkillsDescriptor.from_json(written)) == answer(lambda: SkillsDescriptor(**written))


@given(WRITTEN)
def test_descriptors_are_fields_of_models(written) -> None:
    """A pydantic model may have a descriptor as a field: it is read, and dumped as JSON."""

    class Row(BaseModel):
        descriptor: SkillsDescriptor

    row = Row.model_validate({"descriptor": written})
    assert row.descriptor == SkillsDescriptor.model_validate(written)
    assert row.model_dump() == {"descriptor": row.descriptor.to_json()}


@given(RULES, st.lists(ID, min_size=1, max_size=3))
def test_narrowed_rules_deny_more(written, denied) -> None:
    """Narrowed rules deny what they denied before, and more."""
    rules = AgentRules.from_json(written)
    narrowed = rules.denying(tuple(denied))
    assert narrowed.disabled is True or {*denied, *rules.disabled} == {*narrowed.disabled}
    assert (narrowed.enabled, narrowed.imports) == (rules.enabled, rules.imports)


def test_errors_of_rules_name_the_key() -> None:
    """The path in front of a key is the one given."""
    with pytest.raises(DescriptorError) as caught:
        AgentRules.from_json({"disbled": ["x"]}, "agents_config.w.")
    assert (caught.value.code, caught.value.details["key"]) == ("descriptor_unknown_key", "agents_config.w.disbled")


def test_what_only_looks_like_terms_is_read_as_written() -> None:
    """An object whose `terms` is something else is refused like any other that is no mapping."""

    class Odd:
        terms = "skills"

    with pytest.raises(DescriptorError, match="not Odd"):
        SkillsDescriptor.from_json(Odd())


def test_nothing_of_terms_can_be_changed() -> None:
    """Fields and mappings of terms are read-only, and those of a reading are no one else's."""
    written = {"agents_config": {"w": {"disabled": ["x"]}}, "owner": "us"}
    terms = SkillsDescriptor.from_json(written)
    with pytest.raises(AttributeError):
        terms.bundle_root = "/"
    with pytest.raises(TypeError):
        terms.agents_config["v"] = AgentRules()
    with pytest.raises(TypeError):
        terms.extra["v"] = 1
    written["agents_config"]["w"]["disabled"].append("y")
    assert terms.rules("w").disabled == ("x",)


def test_terms_need_no_model() -> None:
    """Rules are understood without loading pydantic."""
    code = (
        "import sys; from kdskills.bundle.descriptor import SkillsDescriptor; SkillsDescriptor.from_json({'agents_config': {'w': {'disabled': ['x']}}});"
        "print(sorted({'pydantic', 'pydantic_core', 'yaml', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_copy_with_changes_is_read_as_strictly() -> None:
    """`model_copy` keeps what is not changed, and refuses what a descriptor could not say."""
    descriptor = SkillsDescriptor(agents_config={"desk": {"enabled": ["a.*"]}}, consumers=["desk"])
    changed = descriptor.model_copy(update={"consumers": ["desk", "writer"]})
    assert (changed.agents_config, changed.consumers) == (descriptor.agents_config, ("desk", "writer"))
    with pytest.raises(DescriptorError):
        descriptor.model_copy(update={"consumers": 7})


@given(POLICIES, POLICIES)
def test_stricter_policy(one: TrustPolicy, other: TrustPolicy) -> None:
    """Of two policies the stricter holds in every part, whichever comes first; nothing of it loosens either."""
    both = one.stricter(other)
    assert both == other.stricter(one) == both.stricter(one)
    levels = ["off", "warn", "enforce", "require", "block-high"]
    for part in ("lock", "signatures", "audit"):
        assert levels.index(getattr(both, part)) >= levels.index(getattr(one, part))
    for policy in (one, other):
        assert policy.signers == () or both.signers is False or set(both.signers) <= set(policy.signers or ())
        assert both.signers != () or policy.signers == ()
    descriptor = SkillsDescriptor(trust={EVERYONE: one, "acme": other})
    assert descriptor.trust_policy("acme") == both
    assert descriptor.trust_policy("lab") == one
    assert SkillsDescriptor.from_json(json.loads(json.dumps(descriptor.to_json()))) == descriptor


@pytest.mark.parametrize(
    "trust",
    [
        "enforce",
        ["acme"],
        {"acme": "enforce"},
        {"acme": {"lock": "on"}},
        {"acme": {"lock": True}},
        {"acme": {"locks": "enforce"}},
        {"acme": {"signatures": "enforce"}},
        {"acme": {"signers": [1]}},
        {"acme": {"signers": {"a": 1}}},
        {"acme": {"audit": "high"}},
        {"ac*": {"lock": "enforce"}},
        {"": {"lock": "enforce"}},
        {1: {"lock": "enforce"}},
    ],
)
def test_policy_strictness(trust: object) -> None:
    """A policy that is not understood is an error, for a typo must not lose a lock."""
    with pytest.raises(DescriptorError):
        SkillsDescriptor.from_json({"trust": trust})


def test_policy_off() -> None:
    """A bare `off`, which YAML reads as false, is off; what is not said is off, too."""
    assert SkillsDescriptor.from_json({"trust": {"*": {"lock": False}}}).trust_policy("x") == TrustPolicy()
    assert not SkillsDescriptor().trust_policy("x").judges
