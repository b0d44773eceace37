"""YAML 1.2 core values with positions, out of libyaml's events."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kdskills.skills import yaml_core
from kdskills.skills.yaml_core import Fields, Items, Scalar, YamlLimits, YamlRefused, core_value, load_yaml, to_python


def values(text: str):
    """Return plain values of a YAML text."""
    return to_python(load_yaml(text).root)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-31", "2024-01-31"),
        ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),
        ("=", "="),
        ("<<", "<<"),
        ("0b11", "0b11"),
        ("true", True),
        ("True", True),
        ("TRUE", True),
        ("tRUE", "tRUE"),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("Null", None),
        ("nULL", "nULL"),
        ("12", 12),
        ("-3", -3),
        ("+4", 4),
        ("007", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("0X1F", "0X1F"),
        ("2.50", 2.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("1e3", 1000.0),
        ("-1.5E-2", -0.015),
        (".inf", ".inf"),
        ("-.inf", "-.inf"),
        (".nan", ".nan"),
        ("1e999", "1e999"),
        ("٣", "٣"),
        ("1.2.3", "1.2.3"),
        ("-", "-"),
        (".", "."),
        ("+", "+"),
        ("e3", "e3"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_plain_scalars_follow_the_core_schema(text: str, value: object) -> None:
    """Words, dates and sexagesimals are text; numbers JSON or Python cannot hold stay text."""
    assert (core_value(text), type(core_value(text))) == (value, type(value))


def test_quoted_scalars_are_text() -> None:
    """Quotes and block scalars make text of anything."""
    assert values("a: 'true'\nb: \"12\"\nc: |\n  null\n") == {"a": "true", "b": "12", "c": "null\n"}


def test_structure_order_and_keys() -> None:
    """Collections keep their order, and keys are the characters written."""
    text = "z: [1, {b: c}]\n1: x\ntrue: y\n~: n\n"
    found = values(text)
    assert (found, list(found)) == ({"z": [1, {"b": "c"}], "1": "x", "true": "y", "~": "n"}, ["z", "1", "true", "~"])


def test_scalar_knows_what_is_written() -> None:
    """The text of a scalar is what is written after unquoting and folding."""
    root = load_yaml("version: 2.50\ncode: 0010\nlong: one\n  two\n").root
    assert isinstance(root, Fields)
    assert {key: node.text for key, node in root.items.items()} == {
        "version": "2.50",
        "code": "0010",
        "long": "one two",
    }


def test_positions_are_those_of_keys_and_values() -> None:
    """Each key and value has its place in the text."""
    root = load_yaml("a: 1\nb:\n  - c\n").root
    assert isinstance(root, Fields)
    assert isinstance(root.items["b"], Items)
    item = root.items["b"].items[0]
    assert [(m.line, m.column) for m in (root.keys["b"], item.mark)] == [(1, 0), (2, 4)]


def test_source_of_a_flow_collection() -> None:
    """A flow collection can be had as it is written."""
    document = load_yaml("é: x\nhint: [file,  {a: b}]  # note\n")
    assert isinstance(document.root, Fields)
    node = document.root.items["hint"]
    assert isinstance(node, Items)
    assert document.source(node) == "[file,  {a: b}]"


@pytest.mark.parametrize(
    "text",
    [
        "a: &x 1",
        "a: &x 1\nb: *x",
        "a: !!str 1",
        "a: !foo 1",
        "a: ! 1",
        "&m {a: 1}",
        "a: !!python/object:os.system x",
        "%YAML 1.2\n---\na: 1",
        "%TAG ! tag:x,2000:\n---\na: 1",
        "? [a]\n: b",
        "? {a: b}\n: c",
        "{[a]: b}",
        "a: 1\n---\nb: 2",
        "!!python/object/apply:os.system [x]",
        "a: {&k b: c}",
        "- !!binary aGk=",
        "*x",
    ],
)
def test_what_skills_may_not_use_is_refused_for_good(text: str) -> None:
    """Anchors, aliases, tags, directives, other keys and further documents are refused, never repaired."""
    with pytest.raises(YamlRefused) as caught:
        load_yaml(text)
    assert caught.value.repairable is False


@pytest.mark.parametrize(("depth", "fits"), [(20, True), (21, False), (5000, False)])
def test_depth_is_bounded(depth: int, fits: bool) -> None:
    """Twenty levels are read, more are refused, in flow and block style."""
    for text in ("[" * depth + "]" * depth, "- " * (depth - 1) + "[]"):
        if fits:
            load_yaml(text)
        else:
            with pytest.raises(YamlRefused):
                load_yaml(text)


def test_nodes_and_bytes_are_bounded() -> None:
    """2,000 values and 64 KiB are read; one more is refused."""
    load_yaml("[" + "1," * 1999 + "]")
    load_yaml("a: " + "é" * 32_766 + "x")
    for text in ("[" + "1," * 2000 + "]", "a: " + "é" * 32_767, "{a: [[[" + "x," * 2000 + "]]]}"):
        with pytest.raises(YamlRefused):
            load_yaml(text)


def test_limits_can_be_widened() -> None:
    """A caller with a larger file gives larger bounds."""
    assert len(to_python(load_yaml("[" + "1," * 3000 + "]", YamlLimits(nodes=4000)).root)) == 3000


def test_alias_bomb_is_refused_before_it_grows() -> None:
    """A 400-byte bomb of aliases costs nothing."""
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
    )
    with pytest.raises(YamlRefused, match="anchors"):
        load_yaml(bomb)


def test_duplicates_are_listed_at_any_depth_and_the_first_kept() -> None:
    """Each repeated key is reported with its place; the first value stays."""
    document = load_yaml("a: 1\na: 2\nb: {c: 1, 'c': 2}\nd:\n  - e: 1\n    e: 2\n1: x\n'1': y\n")
    assert to_python(document.root) == {"a": 1, "b": {"c": 1}, "d": [{"e": 1}], "1": "x"}
    assert [(key, mark.line) for key, mark in document.duplicates] == [("a", 1), ("c", 2), ("e", 5), ("1", 7)]


def test_text_only_refuses_flow_style() -> None:
    """Text-only YAML knows block style only, and makes text of every scalar."""
    for text in ("a: []", "a: {}", "[a]", "a:\n  - {b: c}"):
        with pytest.raises(YamlRefused):
            load_yaml(text, text_only=True)
    assert to_python(load_yaml("a: 1\nb:\n- true\n", text_only=True).root, text_only=True) == {"a": "1", "b": ["true"]}


def test_syntax_errors_have_a_place_and_may_be_repaired() -> None:
    """A slip of syntax says where it is."""
    with pytest.raises(YamlRefused) as caught:
        load_yaml("a: b: c")
    assert (caught.value.position, caught.value.repairable) == ((0, 4), True)


def test_control_characters_are_refused_with_their_place() -> None:
    """A character YAML does not allow is found by line and column."""
    with pytest.raises(YamlRefused) as caught:
        load_yaml("a: b\nc: d\x7f")
    assert (caught.value.position, caught.value.repairable) == ((1, 4), False)


@pytest.mark.parametrize("character", ["\x85", "\u2028", "\u2029"])
def test_unicode_line_separators_are_plain_characters(character: str) -> None:
    """YAML 1.2 does not break lines at them, so neither do we."""
    assert values(f"a: x{character}y\nk{character}: [z{character}]\n") == {
        "a": f"x{character}y",
        f"k{character}": [f"z{character}"],
    }


def test_empty_text_has_no_root() -> None:
    """Nothing, blanks and comments are no document."""
    assert [load_yaml(text).root for text in ("", "\n\n", "# note\n")] == [None, None, None]


def test_pure_loader_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libyaml the result is the same."""
    text = "a: [1, 'x', {b: ~}]\nb: |\n  text\nc: 2.50\nd: yes\n"
    fast = values(text)
    monkeypatch.setattr(yaml_core, "LOADER", yaml.SafeLoader)
    assert values(text) == fast
    for refused in ("a: &x 1", "a: b: c", "a: !!str x", "[" * 3000, "a: \x7f"):
        with pytest.raises(YamlRefused):
            load_yaml(refused)


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize("escape", ["\\U00110000", "\\Uffffffff", "\\ud800", "\\ud83d\\ude00", "\\x"])
@pytest.mark.parametrize("place", ['a: "{}"', '"{}": a', '[a, {{b: ["{}"]}}]'])
def test_escapes_that_are_no_characters_are_refused(
    monkeypatch: pytest.MonkeyPatch, place: str, escape: str, pure: bool
) -> None:
    """With libyaml or without, a text never holds what no file can."""
    if pure:
        monkeypatch.setattr(yaml_core, "LOADER", yaml.SafeLoader)
    with pytest.raises(YamlRefused):
        load_yaml(place.format(escape))


def test_libyaml_is_used_here() -> None:
    """This environment has the C parser."""
    assert yaml_core.LOADER is yaml_core.yaml.CSafeLoader


@given(st.text(max_size=200))
def test_nothing_but_a_refusal_comes_out(text: str) -> None:
    """Any text is read or refused; what is read is JSON-able."""
    text = text.encode("utf-8", "ignore").decode()
    try:
        found = values(text)
    except YamlRefused:
        return
    json.dumps(found, allow_nan=False)


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(
        alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Co"], exclude_characters="\ufeff"),
        max_size=30,
    )
)
_TREES = st.dictionaries(
    st.from_regex(r"[a-z]{1,8}", fullmatch=True),
    st.recursive(
        _SCALARS,
        lambda deeper: (
            st.lists(deeper, max_size=4)
            | st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), deeper, max_size=4)
        ),
        max_leaves=15,
    ),
    max_size=6,
)


@given(_TREES)
def test_what_json_writes_is_read_back(tree: dict) -> None:
    """JSON is YAML 1.2: a frontmatter written as JSON comes back equal."""
    found = values(json.dumps(tree, ensure_ascii=False)) if tree else {}
    assert found == json.loads(json.dumps(tree))


@given(_TREES)
def test_what_a_core_dumper_writes_is_read_back(tree: dict) -> None:
    """Block style with every text quoted comes back equal."""
    text = yaml.dump(tree, default_style='"', allow_unicode=True, Dumper=_Quoting) if tree else ""
    assert (values(text) if tree else {}) == tree


class _Quoting(yaml.SafeDumper):
    """Quotes texts, leaves other scalars plain, and never writes anchors or tags."""

    def ignore_aliases(self, data):
        """Write equal objects again."""
        return True

    def represent_scalar(self, tag, value, style=None):
        """Quote only what is text."""
        return super().represent_scalar(tag, value, '"' if tag.endswith(":str") else "")


def test_scalar_null_is_plain_only() -> None:
    """A quoted null is a text."""
    assert [Scalar("null", plain, None).null for plain in (True, False)] == [True, False]


@pytest.mark.parametrize("written", ["9" * 501, "0x" + "f" * 3990, "0o" + "7" * 3990, "-" + "1" * 4000])
def test_numbers_too_long_to_be_written_stay_text(written: str) -> None:
    """Every number that is read can be written as JSON again, in whatever base it stands."""
    found = values(f"a: {written}\nb: {written[:500]}\n")
    assert found["a"] == written
    assert isinstance(found["b"], int)
    assert json.loads(json.dumps(found)) == found


def test_keys_that_stand_twice_are_named_as_written() -> None:
    """A line separator within a key comes back in the list of duplicates too."""
    assert [key for key, _ in load_yaml("k\u2028: 1\nk\u2028: 2\n").duplicates] == ["k\u2028"]


# ---- lines that need no YAML parser ------------------------------------------------------------------------------


def _marks(node):
    """Return a node with all that is told of it: values, ways of writing, positions."""
    place = (node.mark.line, node.mark.column, node.mark.index)
    if isinstance(node, Scalar):
        return node.text, node.plain, place
    if isinstance(node, Items):
        return [_marks(item) for item in node.items], node.flow, place
    keys = {key: (mark.line, mark.column, mark.index) for key, mark in node.keys.items()}
    return {key: (keys[key], _marks(item)) for key, item in node.items.items()}, node.flow, place


def _told(text):
    """Return all that is told of a text, or the refusal."""
    try:
        document = load_yaml(text)
    except YamlRefused as refusal:
        return refusal.message
    duplicates = [(key, mark.line, mark.column, mark.index) for key, mark in document.duplicates]
    return None if document.root is None else _marks(document.root), duplicates


_PIECES = st.sampled_from(
    [*"abcZ019 :#'\"-?,[]{}&*!|>%@`~=.+/\\\t<^$_()", ": ", " #", "\n", "\n  x", "\n  x: y", "\nk: ", "---", "...", "null",
     "\xa0", "\xe9", "\u2028", "\x85", "\ufeff", "\ufffe", "\U0001f600", "\x7f", "\x1b", "\u3000"]
)  # fmt: skip
_TEXTS = st.builds("".join, st.lists(_PIECES, max_size=7))
_KEYS = st.sampled_from(["name", "a", "k-1", "on", "true", "m:\n  k", "m:\n k", "m:\n  a", "  b", "   c"])
_LINES = st.builds("{}: {}\n".format, _KEYS, _TEXTS)


@settings(max_examples=2_000)
@given(st.builds("".join, st.lists(_LINES, min_size=1, max_size=4)))
def test_plain_lines_mean_what_libyaml_says(text):
    """What is read without the YAML parser has the values and positions that the parser gives it."""
    reader = yaml_core._LineReader
    if reader(text).read(yaml_core.FRONTMATTER_LIMITS) is None:
        return  # left to libyaml
    read = _told(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "read", lambda *_: None)
        assert read == _told(text)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("name: brief\ndescription: Writes a brief: short, to the point\n", False),
        ("name: brief\ndescription: Writes a brief in C#, short\n", True),
        ("name: brief\ndescription: Writes a brief # not\n", False),
        ('name: brief\ndescription: "Use it: now"\n', True),
        ("name: brief\ndescription: One line\n  and another\n", True),
        ("name: brief\nmetadata:\n  version: '1.0'\n  author: x\nlicense: MIT\n", True),
        ("name: brief\ntags: [a, b]\n", False),
        ("name: &x brief\n", False),
        ("name: brief\nmetadata:\n  a: 1\n   b: 2\n", False),
        ("name: brief", False),
    ],
)
def test_which_lines_need_no_parser(text, plain):
    """Keys, texts, quoted texts, folded lines and one mapping deep; whatever is in doubt goes to libyaml."""
    assert (yaml_core._LineReader(text).read(yaml_core.FRONTMATTER_LIMITS) is not None) is plain
