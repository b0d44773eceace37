"""References and rules: what is written, what it means, what it matches."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.skills.refs import compile_rules, is_number, is_pattern, parse_ref

WRITTEN = [
    ("acme.brief", "full", "acme.brief"),
    ("  acme.brief\t", "full", "acme.brief"),
    ("brief", "bare", "brief"),
    ("sk:brief", "bare", "brief"),
    ("sk:acme.brief", "full", "acme.brief"),
    ("skill:acme.brief", "full", "acme.brief"),
    ("skills.acme.brief", "full", "acme.brief"),
    ("skills.skills.acme.brief", "full", "acme.brief"),
    ("skills.brief", "bare", "brief"),
    ("skills.skills.brief", "bare", "brief"),
    ("SK3", "number", "SK3"),
    (" SK3 ", "number", "SK3"),
    ("sk:3", "number", "SK3"),
    ("sk:SK3", "number", "SK3"),
    ("skill:SK3", "number", "SK3"),
    ("skills.SK12", "number", "SK12"),
    ("skills.3", "bare", "3"),
    ("skill:3", "bare", "3"),
    ("3", "bare", "3"),
    ("sk2", "bare", "sk2"),
    ("Sk2", "bare", "Sk2"),
    ("SK", "bare", "SK"),
    ("SK3x", "bare", "SK3x"),
    ("SK٣", "bare", "SK٣"),
    ("sk:٣", "bare", "٣"),
    ("SKETCH", "bare", "SKETCH"),
    ("SKILL:brief", "bare", "SKILL:brief"),
    ("sk:skill:brief", "bare", "skill:brief"),
    ("skills.skills.skills.x", "full", "skills.x"),
    ("", "invalid", ""),
    (" \t\n", "invalid", ""),
    ("sk:", "invalid", ""),
    ("skills.", "invalid", ""),
    ("a.b.c", "invalid", "a.b.c"),
    ("...", "invalid", "..."),
    ("../../etc/passwd", "invalid", "../../etc/passwd"),
]


@pytest.mark.parametrize(("text", "kind", "value"), WRITTEN)
def test_parse_ref(text: str, kind: str, value: str) -> None:
    """Prefix, blanks, case and dots decide what a reference is; only `SK` and ASCII digits make a number."""
    ref = parse_ref(text)
    assert (ref.kind, ref.value, ref.text) == (kind, value, text)


def test_full_id_of_refs() -> None:
    """A bare id is public's, or the asked namespace's; numbers and invalid refs have no full id."""
    assert parse_ref("brief").full_id() == "public.brief"
    assert parse_ref("brief").full_id("acme") == "acme.brief"
    assert parse_ref("acme.brief").full_id("other") == "acme.brief"
    assert parse_ref("SK1").full_id() is None
    assert parse_ref("a.b.c").full_id() is None


@given(st.text(max_size=40))
def test_parse_ref_takes_anything(text: str) -> None:
    """Any text is taken apart without an error, and only refs with at most one dot may name a skill."""
    ref = parse_ref(text)
    full_id = ref.full_id()
    assert full_id is None or full_id.count(".") == 1
    assert (ref.kind == "number") is (full_id is None and ref.kind != "invalid")


@pytest.mark.parametrize("entry", ["acme.*", "*", "a?c", "[ab].x", "SK*"])
def test_patterns(entry: str) -> None:
    """`*`, `?` and `[` make a rule a pattern, which is never a number."""
    assert is_pattern(entry)
    assert not is_number(entry)


@pytest.mark.parametrize("entry", ["SK1", "sk:7", " skills.SK2 "])
def test_numbers_in_rules_are_seen(entry: str) -> None:
    """Each spelling of a short id is recognised, so that the descriptor can refuse it."""
    assert is_number(entry)


@given(
    st.text(alphabet="abc.*?[]!-", min_size=1, max_size=8).filter(is_pattern),
    st.text(alphabet="abc-", min_size=1, max_size=4),
    st.text(alphabet="abc-", min_size=1, max_size=4),
)
def test_patterns_are_fnmatchcase_on_the_full_id(pattern: str, namespace: str, name: str) -> None:
    """A pattern matches exactly when `fnmatchcase` on the full id does: `*` spans dots, nothing is special."""
    full_id = f"{namespace}.{name}"
    for bare in ("public", "anywhere"):
        matched = compile_rules([pattern], bare=bare).match(full_id)
        assert (matched is not None) is fnmatchcase(full_id, pattern.strip())


def test_star_spans_dots_and_case_counts() -> None:
    """`ns.*` holds all of a namespace and nothing else; case is not folded."""
    rules = compile_rules(["acme.*"], bare="public")
    assert rules.match("acme.brief") == "acme.*"
    assert rules.match("acmeother.brief") is None
    assert rules.match("Acme.brief") is None
    assert compile_rules(["a*f"], bare="public").match("acme.brief") == "a*f"


def test_bare_id_allows_public_and_denies_everywhere() -> None:
    """A bare id means `public.<id>` when allowing, and that id in every namespace when denying."""
    allowing = compile_rules(["brief"], bare="public")
    denying = compile_rules(["brief"], bare="anywhere")
    assert [allowing.match(f"{ns}.brief") for ns in ("public", "acme")] == ["brief", None]
    assert [denying.match(f"{ns}.brief") for ns in ("public", "acme", "internal")] == ["brief"] * 3
    assert denying.match("acme.briefing") is None


def test_exact_rules_keep_case() -> None:
    """A rule that is a reference matches the id as written: ids keep their case."""
    for bare in ("public", "anywhere"):
        rules = compile_rules(["acme.Brief"], bare=bare)
        assert [rules.match(full_id) for full_id in ("acme.Brief", "acme.brief")] == ["acme.Brief", None]


def test_rules_take_prefixes() -> None:
    """A rule that is a reference may have any prefix."""
    rules = compile_rules(["skill:acme.brief", "skills.other"], bare="anywhere")
    assert rules.match("acme.brief") == "skill:acme.brief"
    assert rules.match("zeta.other") == "skills.other"


def test_wrong_entries_match_nothing_but_stay() -> None:
    """What is neither pattern nor reference matches nothing and is still counted among the rules."""
    rules = compile_rules(["", "a.b.c", "SK1"], bare="anywhere")
    assert rules.entries == ("", "a.b.c", "SK1")
    assert rules.match("public.x") is None
    assert rules.unmatched({"public.x"}) == ("", "a.b.c", "SK1")


def test_unmatched_names_rules_without_effect() -> None:
    """Rules that match no known id are named, in the order written; the others are not."""
    rules = compile_rules(["acme.*", "gone", "zeta.?", "brief", "acme.brief"], bare="anywhere")
    assert rules.unmatched({"acme.brief"}) == ("gone", "zeta.?")


def test_hostile_pattern_is_linear_enough() -> None:
    """A pattern of many stars over a long id ends."""
    assert compile_rules(["*a" * 60 + "b"], bare="public").match("public." + "a" * 3_000) is None
