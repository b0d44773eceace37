"""Names, ids and namespaces."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.skills import parse_skill_bytes
from kdskills.skills.fields import clean_name, fallback_id, normal_id, unsafe_name
from kdskills.skills.parse import parse_parts


def parsed(lines: str, folder: str = "brief", **options):
    """Parse a file with a description, these lines and a body."""
    return parse_parts(f"---\ndescription: d\n{lines}\n---\nx".encode(), folder=folder, **options)


def names(lines: str, folder: str = "brief") -> set[str]:
    """Return the codes about names."""
    return {f.code for f in parsed(lines, folder).diagnostics}


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("brief", set()),
        ("  brief  ", set()),
        ("ｂｒｉｅｆ", set()),
        ("a1-b2", {"name_dir_mismatch"}),
        ("Brief", {"name_not_lowercase", "name_dir_mismatch"}),
        ("my skill", {"name_bad_chars", "name_dir_mismatch", "id_normalised"}),
        ("a.b", {"name_bad_chars", "name_dir_mismatch", "id_normalised"}),
        (
            "-a--B_-",
            {
                "name_bad_chars",
                "name_not_lowercase",
                "name_edge_hyphen",
                "name_double_hyphen",
                "name_dir_mismatch",
                "id_normalised",
            },
        ),
        ("x" * 65, {"name_too_long", "name_dir_mismatch"}),
        ("é" * 64, {"name_not_ascii", "name_dir_mismatch"}),
        ("навык", {"name_not_ascii", "name_dir_mismatch"}),
        ("हिन्दी", {"name_not_ascii", "name_bad_chars", "name_dir_mismatch"}),
    ],
)
def test_all_that_applies_is_reported(name: str, codes: set[str]) -> None:
    """Each rule about a name is judged by itself; limits count characters."""
    assert names(f"name: '{name}'") == codes


def test_name_and_folder_are_compared_in_one_form() -> None:
    """A decomposed folder equals a composed name, and the composed form is returned."""
    composed = unicodedata.normalize("NFC", "café")
    for name, folder in (
        (composed, unicodedata.normalize("NFD", composed)),
        (unicodedata.normalize("NFD", composed), composed),
    ):
        found = parsed(f"name: {name}", folder)
        assert found.skill is not None
        assert (found.skill.name, [f.code for f in found.diagnostics]) == (composed, ["name_not_ascii"])


@pytest.mark.parametrize(
    "name", ["a/b", "a\\\\b", ".", "..", "../x", "/", "a\\u0007b", "a\\0b", "a\\nb", "a\\x7fb", "a\\x85b"]
)
def test_unsafe_names_never_load(name: str) -> None:
    """Path and control characters are refused under every verdict."""
    for verdict in ("lenient", "spec", "skills-ref"):
        found = parsed(f'name: "{name}"', verdict=verdict)
        assert (found.skill, {"name_unsafe", "name_bad_chars"} <= {f.code for f in found.diagnostics}) == (None, True)


@pytest.mark.parametrize("lines", ["", "name:", "name: ~", "name: ''", "name: [a]", "name: {a: b}"])
def test_a_missing_name_is_the_folders(lines: str) -> None:
    """Without a name the folder's counts, and no mismatch is reported."""
    found = parsed(lines, "My Folder")
    assert found.skill is not None
    assert (found.skill.name, found.skill.id) == ("My Folder", "My-Folder")
    assert {f.code for f in found.diagnostics} == {"name_missing", "id_normalised"}


def test_a_folder_may_be_unsafe_too() -> None:
    """A folder's name with control characters is no name."""
    assert names("", "a\nb") == {"name_missing", "name_unsafe", "id_normalised"}


@pytest.mark.parametrize("name", ["true", "null", "007", "1.50", "yes", "2024-01-01"])
def test_names_are_the_characters_written(name: str) -> None:
    """A number or date is a name as it is written; only a plain null is none."""
    found = parsed(f"name: {name}", name)
    assert found.skill is not None
    assert found.skill.name == name


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("a b", "a-b"),
        ("a  . b", "a-b"),
        ("a.b.c", "a-b-c"),
        ("A_b-C", "A_b-C"),
        (" x ", "x"),
        ("-x-", "x"),
        ("é ü", "é-ü"),
        ("हिन्दी", "हिन्दी"),
        ("...", ""),
        ("a/../b", "a-b"),
        ("", ""),
        ("--", ""),
        ("_", "_"),
        ("٣", "٣"),
        ("a\u200bb", "a-b"),
    ],
)
def test_ids_hold_letters_marks_digits_and_two_signs(text: str, result: str) -> None:
    """Runs of anything else become one hyphen, edges go, case stays."""
    assert normal_id(text) == result


def test_id_comes_from_field_then_name_then_folder() -> None:
    """The field wins and may differ from the name, with a finding."""
    found = parsed("name: brief\nid: Other One")
    assert found.skill is not None
    assert (found.skill.name, found.skill.id, found.skill.full_id) == ("brief", "Other-One", "public.Other-One")
    assert [f.code for f in found.diagnostics] == ["id_normalised", "id_name_differ"]


@pytest.mark.parametrize("lines", ["name: brief\nid: '...'", "name: '!!'", "name: brief\nnamespace: '//'"])
def test_nothing_left_is_unsafe(lines: str) -> None:
    """An id or namespace of which nothing remains refuses the skill."""
    found = parsed(lines)
    assert (found.skill, "name_unsafe" in {f.code for f in found.diagnostics}) == (None, True)
    assert found.full_id is not None
    assert all(part for part in found.full_id.split("."))


@pytest.mark.parametrize(
    ("lines", "layout", "namespace"),
    [
        ("", None, "public"),
        ("", "acme", "acme"),
        ("namespace: own", "acme", "own"),
        ("namespace: a.b", None, "a-b"),
        ("", "My Space", "My-Space"),
        ("namespace: ''", "acme", "acme"),
        ("namespace: Skills", None, "Skills"),
    ],
)
def test_namespace_comes_from_field_then_layout(lines: str, layout: str | None, namespace: str) -> None:
    """The field wins over the folder, and `public` is the rest."""
    found = parsed(f"name: brief\n{lines}", layout_namespace=layout)
    assert found.skill is not None
    assert found.skill.namespace == namespace


@pytest.mark.parametrize("word", ["skills", "skill", "sk"])
def test_reserved_namespaces(word: str) -> None:
    """Words that prefix refs are no namespaces, from field or folder."""
    for found in (parsed(f"name: brief\nnamespace: {word}"), parsed("name: brief", layout_namespace=word)):
        assert [(f.code, f.severity) for f in found.diagnostics] == [("namespace_reserved", "error")]


def test_a_fixed_namespace_ignores_the_field() -> None:
    """Roots that fix the namespace say that a field is ignored."""
    found = parsed("name: brief\nnamespace: skills", fixed_namespace="mine")
    assert found.skill is not None
    assert (found.skill.namespace, [(f.code, f.severity) for f in found.diagnostics]) == (
        "mine",
        [("namespace_ignored", "warning")],
    )
    assert parsed("name: brief\nnamespace: mine", fixed_namespace="mine").diagnostics == ()
    assert parsed("name: brief", fixed_namespace="mine", verdict="skills-ref").diagnostics == ()


def test_fallback_ids_are_never_empty() -> None:
    """A file that cannot be read still has an id."""
    assert [fallback_id(*given) for given in (("a b", None), ("...", "x.y"), ("", "//"))] == [
        ("public", "a-b"),
        ("x-y", "unnamed"),
        ("public", "unnamed"),
    ]


def test_without_a_folder_nothing_is_compared() -> None:
    """A skill from bytes may have no folder."""
    assert parse_skill_bytes(b"---\nname: brief\ndescription: d\n---\nx", folder="").diagnostics == ()


@given(st.text(max_size=40))
def test_ids_are_stable(text: str) -> None:
    """Normalising twice is normalising once, and no id holds a dot or slash."""
    once = normal_id(text)
    assert (normal_id(once), set("./\\ \n") & set(once)) == (once, set())


@given(st.text(max_size=40))
def test_clean_names_are_stable(text: str) -> None:
    """Cleaning twice is cleaning once; judging never raises."""
    once = clean_name(text)
    assert clean_name(once) == once
    assert unsafe_name(once) in {True, False}
