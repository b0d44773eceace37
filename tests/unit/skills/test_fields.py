"""Fields of the frontmatter: each type, each coercion, and doubt that restricts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.skills import SkillArgument, parse_skill_bytes
from kdskills.skills.fields import FIELD_OF, NOBODY, misspelt

BASE = "name: brief\ndescription: d\n"


def parsed(lines: str, verdict: str = "lenient"):
    """Parse a file with these further lines."""
    return parse_skill_bytes(f"---\n{BASE}{lines}\n---\nx".encode(), folder="brief", verdict=verdict)


def skill(lines: str):
    """Return the skill and the codes found."""
    found = parsed(lines)
    assert found.skill is not None, found.diagnostics
    return found.skill, [f.code for f in found.diagnostics]


def field(name: str, lines: str) -> tuple[object, list[str]]:
    """Return one attribute and the codes found."""
    found, codes = skill(lines)
    return getattr(found, name), codes


def test_defaults() -> None:
    """A skill of two keys has every attribute."""
    found, codes = skill("")
    assert codes == []
    assert (found.version, found.category, found.author, found.created, found.license, found.compatibility) == (
        None,
    ) * 6
    assert (found.argument_hint, found.tags, found.when_to_use, found.imports, found.include_for) == (
        None,
        (),
        (),
        (),
        (),
    )
    assert (found.disclosure, found.metadata, found.allowed_tools, found.allowed_tool_names) == ("normal", {}, None, ())
    assert (found.disable_model_invocation, found.user_invocable, found.arguments, found.insert) == (
        False,
        True,
        (),
        "instructions",
    )
    assert (found.layer, found.built_in, found.path, found.location) == (
        "bundle",
        False,
        None,
        "skill://public/brief/SKILL.md",
    )
    assert (found.tools, found.body, found.compact, found.sources, found.tokens) == ((), "x", None, (), 1)
    assert found.digest.startswith("sha256:")
    assert found.tree_digest().startswith("sha256:")


@pytest.mark.parametrize("name", ["version", "author", "created"])
@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("2.50", "2.50"),
        ("007", "007"),
        ("2024-01-31", "2024-01-31"),
        ("true", "true"),
        ("' x '", "x"),
        ("null", None),
        ("", None),
        ("~", None),
        ("'null'", "null"),
        ("''", None),
        ("yes", "yes"),
        ("1e3", "1e3"),
    ],
)
def test_source_text_fields_are_what_is_written(name: str, written: str, text: str | None) -> None:
    """Numbers, dates and words keep their characters; a plain null is absent."""
    assert field(name, f"{name}: {written}") == (text, [])


def test_description_folds_and_strips() -> None:
    """A block scalar is folded as YAML says, then stripped; limits count characters."""
    found = parse_skill_bytes(b"---\nname: brief\ndescription: >\n  one\n  two\n\n  three\n---\nx", folder="brief")
    assert found.skill is not None
    assert found.skill.description == "one two\nthree"
    fits = parse_skill_bytes(f"---\nname: brief\ndescription: ' {'é' * 1024} '\n---\nx".encode(), folder="brief")
    assert fits.diagnostics == ()


def test_compatibility_counts_characters() -> None:
    """500 characters pass, whatever their bytes."""
    assert field("compatibility", f"compatibility: {'é' * 500}") == ("é" * 500, [])
    assert skill(f"compatibility: {'é' * 501}")[1] == ["compatibility_too_long"]


@pytest.mark.parametrize(
    ("lines", "value", "codes"),
    [
        ("tags: a, b c,,", ("a", "b c"), []),
        ("tags: [a, b]", ("a", "b"), []),
        ("tags:\n- a\n-\n- ''\n- b", ("a", "b"), ["field_type"]),
        ("tags: [2024, true]", ("2024", "true"), ["field_type"]),
        ("tags: {a: b}", (), ["field_type"]),
        ("tags: 7", ("7",), ["field_type"]),
        ("tags: []", (), []),
        ("tags:", (), []),
    ],
)
def test_tags(lines: str, value: tuple, codes: list[str]) -> None:
    """A text is split at commas; items that are no texts are coerced with a finding."""
    assert field("tags", lines) == (value, codes)


@pytest.mark.parametrize("key", ["when_to_use", "when-to-use", "when_to_use_lines"])
def test_when_to_use(key: str) -> None:
    """A text is split by line without its dashes; a list is taken; `- Note: x` is a text again."""
    assert field("when_to_use", f"{key}: |\n  - one: a\n\n  two\n  -\n  - three") == (("one: a", "two", "three"), [])
    assert field("when_to_use", f"{key}:\n  - one\n  - Note: two") == (("one", "Note: two"), ["field_type"])


@pytest.mark.parametrize("key", ["import", "imports"])
def test_imports(key: str) -> None:
    """A list, or a text split at commas and blanks."""
    assert field("imports", f"{key}: a.b, c  d") == (("a.b", "c", "d"), [])
    assert field("imports", f"{key}: [a.b, c]") == (("a.b", "c"), [])


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("Writer, acme-*", ("writer", "acme-*")),
        ("[A, b]", ("a", "b")),
        ("x", ("x",)),
        ("[]", ()),
        ("''", ()),
        ("", ()),
        ("{a: b}", (NOBODY,)),
        ("[[a]]", (NOBODY,)),
        ("','", (NOBODY,)),
        ("[~]", (NOBODY,)),
        ("true", ("true",)),
    ],
)
def test_include_for_restricts_in_doubt(written: str, value: tuple) -> None:
    """Consumers are lower-cased; what is not understood is for nobody."""
    assert field("include_for", f"include_for: {written}")[0] == value
    assert field("include_for", f"include-for: {written}")[0] == value


@pytest.mark.parametrize("key", ["disclosure", "agent_disclosure", "agent-disclosure"])
@pytest.mark.parametrize(
    ("word", "value", "codes"),
    [
        ("normal", "normal", []),
        ("Normal", "normal", []),
        ("hidden", "hidden", []),
        ("private", "hidden", []),
        ("non-disclosable", "hidden", []),
        ("NON_DISCLOSABLE", "hidden", []),
        ("nondisclosable", "hidden", []),
        ("public", "hidden", ["field_type"]),
        ("false", "hidden", ["field_type"]),
        ("[normal]", "hidden", ["field_type"]),
        ("''", "hidden", ["field_type"]),
        ("~", "normal", []),
    ],
)
def test_disclosure(key: str, word: str, value: str, codes: list[str]) -> None:
    """Only `normal` shows; every other word hides."""
    found, said = skill(f"{key}: {word}")
    assert (found.disclosure, found.hidden, said) == (value, value == "hidden", codes)


@pytest.mark.parametrize(
    ("written", "value", "codes"),
    [
        ("a: x\n  b: '1'", {"a": "x", "b": "1"}, []),
        (
            "code: 0010\n  v: 2.50\n  d: 2024-01-01\n  n: null\n  e:",
            {"code": "0010", "v": "2.50", "d": "2024-01-01", "n": "null", "e": ""},
            ["metadata_type"],
        ),
        ("a: [1, x]\n  b: {c: true}", {"a": [1, "x"], "b": {"c": True}}, ["metadata_type"]),
    ],
)
def test_metadata(written: str, value: dict, codes: list[str]) -> None:
    """Scalars are the characters written, nested values keep their parsed form."""
    assert field("metadata", f"metadata:\n  {written}") == (value, codes)


@pytest.mark.parametrize(
    ("written", "codes"), [("text", ["metadata_type"]), ("[a]", ["metadata_type"]), ("", []), ("{}", [])]
)
def test_metadata_that_is_no_mapping(written: str, codes: list[str]) -> None:
    """No mapping gives an empty one."""
    assert field("metadata", f"metadata: {written}") == ({}, codes)


@pytest.mark.parametrize(
    ("written", "text", "names", "codes"),
    [
        ("Read Bash(git add:*) Grep", "Read Bash(git add:*) Grep", ("Read", "Bash(git add:*)", "Grep"), []),
        ("Read, Bash(a, b), Grep", "Read, Bash(a, b), Grep", ("Read", "Bash(a, b)", "Grep"), []),
        ("[Read, 'Bash(x y)']", "Read Bash(x y)", ("Read", "Bash(x y)"), ["allowed_tools_type"]),
        ("\n  - Read\n  - Write", "Read Write", ("Read", "Write"), ["allowed_tools_type"]),
        ("{a: b}", None, (), ["allowed_tools_type"]),
        ("5", "5", ("5",), ["allowed_tools_type"]),
        ("Bash(open", "Bash(open", ("Bash(open",), []),
        ("", None, (), []),
        ("[]", None, (), ["allowed_tools_type"]),
    ],
)
def test_allowed_tools(written: str, text: str | None, names: tuple, codes: list[str]) -> None:
    """One text, split at blanks outside parentheses; a list is joined."""
    for key in ("allowed-tools", "allowed_tools"):
        found, said = skill(f"{key}: {written}")
        assert (found.allowed_tools, found.allowed_tool_names, said) == (text, names, codes)


@pytest.mark.parametrize(
    ("written", "value", "codes"),
    [
        ("true", True, []),
        ("false", False, []),
        ("yes", True, ["field_type"]),
        ("'no'", False, ["field_type"]),
        ("ON", True, ["field_type"]),
        ("off", False, ["field_type"]),
        ("'true'", True, ["field_type"]),
    ],
)
@pytest.mark.parametrize("name", ["disable_model_invocation", "user_invocable"])
def test_flags(name: str, written: str, value: bool, codes: list[str]) -> None:
    """Booleans are taken, boolean words with a finding."""
    for key in (name, name.replace("_", "-")):
        assert field(name, f"{key}: {written}") == (value, codes)


@pytest.mark.parametrize("written", ["1", "maybe", "[true]", "{}", "''", "0"])
def test_odd_flags_are_restrictive(written: str) -> None:
    """What is no boolean word keeps the model and the user out."""
    assert field("disable_model_invocation", f"disable_model_invocation: {written}") == (True, ["field_type"])
    assert field("user_invocable", f"user_invocable: {written}") == (False, ["field_type"])


@pytest.mark.parametrize(
    ("written", "value", "codes"),
    [
        ("instructions", "instructions", []),
        ("user-message", "user-message", []),
        ("user_message", "user-message", []),
        ("system", "user-message", ["field_type"]),
        ("[instructions]", "user-message", ["field_type"]),
    ],
)
def test_insert(written: str, value: str, codes: list[str]) -> None:
    """An unknown place is the one a model cannot use."""
    assert field("insert", f"insert: {written}") == (value, codes)


def test_arguments_from_names_and_mappings() -> None:
    """Names in a list or text, mappings with a name, or a mapping of names."""
    both = (SkillArgument("file"), SkillArgument("mode", "how", "fast"))
    assert field("arguments", "arguments:\n- file\n- {name: mode, description: how, default: fast}") == (both, [])
    assert field("arguments", "arguments:\n  file:\n  mode: {description: how, default: fast}") == (both, [])
    assert field("arguments", "arguments: file, mode") == ((SkillArgument("file"), SkillArgument("mode")), [])
    assert field("arguments", "arguments:\n  file: the file") == ((SkillArgument("file", "the file"),), [])


def test_odd_arguments_are_left_out() -> None:
    """Names that cannot stand in a body, repeats and more than 64 are reported."""
    assert field("arguments", "arguments: [a-b, ok, ok, [x], {description: d}]") == (
        (SkillArgument("ok"),),
        ["field_type"] * 4,
    )
    many, codes = field("arguments", "arguments: [" + ", ".join(f"a{n}" for n in range(70)) + "]")
    assert (len(many), codes) == (64, ["field_type"])


def test_default_is_the_text_written() -> None:
    """A default of 1.50 stays 1.50; null is none."""
    found, _ = field(
        "arguments", "arguments:\n- {name: a, default: 1.50}\n- {name: b, default: null}\n- {name: c, default: ''}"
    )
    assert [a.default for a in found] == ["1.50", None, ""]


@pytest.mark.parametrize("key", ["argument_hint", "argument-hint"])
def test_argument_hint(key: str) -> None:
    """A hint declares ARGUMENTS; in brackets it is what is written."""
    found, codes = skill(f"{key}: '<file>'")
    assert (found.argument_hint, found.arguments, codes) == ("<file>", (SkillArgument("ARGUMENTS", "<file>"),), [])
    assert field("argument_hint", f"{key}: [issue-number]") == ("[issue-number]", ["field_type"])


def test_category_is_text() -> None:
    """A number as category is coerced with a finding, a list is left out."""
    assert field("category", "category: 5") == ("5", ["field_type"])
    assert field("category", "category: [a]") == (None, ["field_type"])
    assert field("category", "category: writing") == ("writing", [])


def test_frontmatter_is_kept_whole_and_in_order() -> None:
    """Unknown keys stay, typed as YAML 1.2, JSON-able, in file order."""
    found, _ = skill("zeta: 1\nalpha: [true, 1.5, null, 2024-01-01]\n5: yes\nversion: 2.50")
    assert list(found.frontmatter.items()) == [
        ("name", "brief"),
        ("description", "d"),
        ("zeta", 1),
        ("alpha", [True, 1.5, None, "2024-01-01"]),
        ("5", "yes"),
        ("version", 2.5),
    ]
    assert json.loads(json.dumps(dict(found.frontmatter))) == dict(found.frontmatter)


def test_two_spellings_of_one_field() -> None:
    """The first counts; where they restrict differently, the most restrictive reading does."""
    assert field("tags", "tags: a\nwhen_to_use: x\nwhen-to-use: y")[1] == ["field_type"]
    assert field("disable_model_invocation", "disable_model_invocation: false\ndisable-model-invocation: true") == (
        True,
        ["field_type"] * 2,
    )
    assert field("user_invocable", "user_invocable: true\nuser-invocable: true") == (True, ["field_type"])
    assert field("disclosure", "disclosure: normal\nagent_disclosure: private")[0] == "hidden"
    assert field("include_for", "include_for: a\ninclude-for: b")[0] == (NOBODY,)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("Include_For", "include_for"),
        ("include_fro", "include_for"),
        ("included_for", "include_for"),
        ("includefor", "include_for"),
        ("disclousure", "disclosure"),
        ("Agent-Disclosure", "disclosure"),
        ("disable_model_invokation", "disable_model_invocation"),
        ("user-invokable", "user_invocable"),
        ("include", None),
        ("description2", None),
        ("", None),
        ("author_email", None),
        ("i" * 99, None),
    ],
)
def test_misspelt_restrictions_count(key: str, name: str | None) -> None:
    """A slip in a restricting key does not open the skill."""
    assert misspelt(key) == name


def test_a_misspelt_key_restricts_and_is_reported() -> None:
    """The guess counts only where the right key is absent."""
    assert field("include_for", "Include_For: a") == (("a",), ["field_type", "unexpected_fields"])
    assert field("include_for", "Include_For: a\ninclude_for: b") == (("b",), ["unexpected_fields"])
    assert field("disclosure", "disclosures: normal")[0] == "normal"
    assert field("disclosure", "disclosures: ~") == ("normal", ["unexpected_fields"])


def test_a_nul_written_as_an_escape_is_harmless() -> None:
    """An escape can make control characters in a description, and nothing breaks."""
    found = parse_skill_bytes(b'---\nname: brief\ndescription: "a\\0b\\u001b[2J"\n---\nx', folder="brief")
    assert found.skill is not None
    assert found.skill.description == "a\0b\x1b[2J"


_KEYS = st.sampled_from(sorted({*FIELD_OF, "unknown"}))
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(
        alphabet=st.characters(codec="utf-8", exclude_categories=["Cs", "Co"], exclude_characters="\ufeff"), max_size=20
    ),
    lambda deeper: (
        st.lists(deeper, max_size=3) | st.dictionaries(st.text("abcname", min_size=1, max_size=5), deeper, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(_KEYS, _VALUES, max_size=10), st.sampled_from(["lenient", "spec", "skills-ref"]))
def test_no_value_of_any_field_raises(fields: dict, verdict: str) -> None:
    """Any JSON in any field gives a skill or findings, and ok means no error."""
    data = f"---\n{json.dumps(fields, ensure_ascii=False)}\n---\nx".encode()
    found = parse_skill_bytes(data, folder="brief", verdict=verdict)
    assert found.ok is not any(f.severity == "error" for f in found.diagnostics)
    if found.skill is not None:
        json.dumps(dict(found.skill.frontmatter), allow_nan=False)
        assert hash(found.skill.tags + found.skill.imports + found.skill.include_for) is not None


@given(st.dictionaries(_KEYS, _VALUES, max_size=10))
def test_lenient_takes_what_spec_takes(fields: dict) -> None:
    """Lenient never refuses what spec accepts."""
    data = f"---\n{json.dumps({'name': 'brief', 'description': 'd', **fields}, ensure_ascii=False)}\n---\nx".encode()
    spec, lenient = (parse_skill_bytes(data, folder="brief", verdict=v) for v in ("spec", "lenient"))
    assert lenient.ok or not spec.ok


@pytest.mark.parametrize(
    ("written", "namespace"),
    [
        ("namespace: [internal]", "internal"),
        ("namspace: internal", "internal"),
        ("Namespace: internal", "internal"),
        ("name_space: internal", "internal"),
        ("namespace: {internal: true}", None),
        ("namespace: [internal, acme]", None),
        ("namespace: []", None),
        ("namespace: ''", "public"),
        ("namespaced_by: somebody", "public"),
    ],
)
def test_an_odd_namespace_does_not_make_an_internal_skill_public(written: str, namespace: str | None) -> None:
    """A misspelt or oddly typed namespace counts as meant or refuses the skill; it never falls back to `public`."""
    parsed = parse_skill_bytes(f"---\nname: s\ndescription: d\n{written}\n---\nDo it.\n".encode(), folder="s")
    assert (parsed.skill.namespace if parsed.skill else None) == namespace
    if namespace is None:
        assert "name_unsafe" in {found.code for found in parsed.diagnostics}


def test_a_misspelt_insert_still_keeps_the_skill_from_models() -> None:
    """`Insert: user-message` is read as `insert`, with a finding."""
    data = b"---\nname: s\ndescription: d\nInsert: user-message\n---\nDo it.\n"
    parsed = parse_skill_bytes(data, folder="s")
    assert parsed.skill is not None
    assert (parsed.skill.insert, "field_type" in {found.code for found in parsed.diagnostics}) == ("user-message", True)
