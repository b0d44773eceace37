"""A descriptor as plain values says exactly what the model says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.bundle import AgentRules, SkillsDescriptor
from kdskills.bundle.terms import EVERYONE, IMPORT_POLICIES, AgentTerms, Terms
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
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(WRITTEN)
def test_terms_and_model_agree(written) -> None:
    """JSON, digest, findings and the rules of each consumer are the same, read as terms or as a model."""
    terms, model = Terms.read(written), SkillsDescriptor.from_json(written)
    assert (terms.to_json(), terms.content_hash) == (model.to_json(), model.content_hash)
    assert (terms.diagnostics, terms.root_omitted) == (model.diagnostics, model.root_omitted)
    for consumer in (None, "w", "v", "x", EVERYONE):
        assert terms.rules(consumer) == model.rules(consumer)


@given(WRITTEN)
def test_terms_travel(written) -> None:
    """Terms made of a model, or read back from their JSON, are the terms first read."""
    terms = Terms.read(written)
    assert Terms.read(SkillsDescriptor.from_json(written)) == terms
    assert Terms.read(json.loads(json.dumps(terms.to_json()))) == terms
    assert Terms.read(terms) is terms


@given(st.dictionaries(st.sampled_from(["version", "agents_config", "bundle_root", "extra", "o"]), ANYTHING) | ANYTHING)
def test_both_refuse_alike(written) -> None:
    """What one refuses the other refuses, with the same code, key and sentence."""

    def answer(read):
        try:
            return read(written).to_json()
        except DescriptorError as error:
            return error.code, error.details["key"], error.message

    assert answer(Terms.read) == answer(SkillsDescriptor.from_json)


@given(RULES, st.lists(ID, min_size=1, max_size=3))
def test_rules_and_terms_deny_alike(written, denied) -> None:
    """Narrowed rules are the same as terms and as a model, and deny what they denied before."""
    terms, rules = AgentTerms.read(written), AgentRules.model_validate(written)
    assert AgentTerms.read(rules) == terms
    narrowed = terms.denying(tuple(denied))
    assert narrowed.to_json() == rules.denying(tuple(denied)).to_json()
    assert narrowed.disabled is True or {*denied, *terms.disabled} == {*narrowed.disabled}


def test_errors_of_rules_name_the_key() -> None:
    """The path in front of a key is the one given."""
    with pytest.raises(DescriptorError) as caught:
        AgentTerms.read({"disbled": ["x"]}, "agents_config.w.")
    assert (caught.value.code, caught.value.details["key"]) == ("descriptor_unknown_key", "agents_config.w.disbled")


def test_what_only_looks_like_terms_is_read_as_written() -> None:
    """An object whose `terms` is something else is refused like any other that is no mapping."""

    class Odd:
        terms = "skills"

    with pytest.raises(DescriptorError, match="not Odd"):
        Terms.read(Odd())


def test_nothing_of_terms_can_be_changed() -> None:
    """Fields and mappings of terms are read-only, and those of a reading are no one else's."""
    written = {"agents_config": {"w": {"disabled": ["x"]}}, "owner": "us"}
    terms = Terms.read(written)
    with pytest.raises(AttributeError):
        terms.bundle_root = "/"
    with pytest.raises(TypeError):
        terms.agents_config["v"] = AgentTerms()
    with pytest.raises(TypeError):
        terms.extra["v"] = 1
    written["agents_config"]["w"]["disabled"].append("y")
    assert terms.rules("w").disabled == ("x",)


def test_terms_need_no_model() -> None:
    """Rules are understood without loading pydantic."""
    code = (
        "import sys; from kdskills.bundle.terms import Terms; Terms.read({'agents_config': {'w': {'disabled': ['x']}}});"
        "print(sorted({'pydantic', 'pydantic_core', 'yaml', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
