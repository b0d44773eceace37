"""From bytes to frontmatter and body: fences, encodings, repair."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.skills import parse_skill, parse_skill_bytes
from kdskills.skills.frontmatter import MAX_SKILL_BYTES, read_body, repair_lines, trim_body

HEAD = "name: brief\ndescription: d"


def codes(data: bytes | str, verdict: str = "lenient") -> list[str]:
    """Return the codes found in a skill file of a folder called `brief`."""
    raw = data.encode() if isinstance(data, str) else data
    return [found.code for found in parse_skill_bytes(raw, folder="brief", verdict=verdict).diagnostics]


def skill(data: bytes | str, verdict: str = "lenient"):
    """Return the skill in a file."""
    raw = data.encode() if isinstance(data, str) else data
    found = parse_skill_bytes(raw, folder="brief", verdict=verdict)
    assert found.skill is not None, found.diagnostics
    return found.skill


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_line_ends_and_bom_do_not_matter(end: str, bom: bytes) -> None:
    """CRLF and CR become LF, one BOM is dropped and said."""
    data = bom + f"---\n{HEAD}\n---\n\n a\nb\n".replace("\n", end).encode()
    assert (skill(data).body, codes(data)) == (" a\nb", ["bom"] if bom else [])


def test_only_one_bom_is_dropped() -> None:
    """A second BOM stands before the fence."""
    assert codes(b"\xef\xbb\xbf" * 2 + f"---\n{HEAD}\n---\nx".encode()) == ["bom", "no_frontmatter"]


@pytest.mark.parametrize("verdict", ["lenient", "spec", "skills-ref"])
@pytest.mark.parametrize(
    "start", ["\n---", "# c\n---", "----", " ---", "--- x", "---x", "", "\ufeff\ufeff---", "+++", "```"]
)
def test_first_line_must_be_the_fence(start: str, verdict: str) -> None:
    """Only a right-trimmed `---` on the first line opens."""
    found = codes(f"{start}\n{HEAD}\n---\nx", verdict)
    assert [code for code in found if code != "bom"] == ["no_frontmatter"]


@pytest.mark.parametrize("fence", ["---", "--- ", "---\t", "---  \t "])
def test_fences_are_right_trimmed(fence: str) -> None:
    """Blanks after a fence do not count."""
    assert skill(f"{fence}\n{HEAD}\n{fence}\nx").body == "x"


def test_dashes_inside_do_not_close() -> None:
    """Dashes in a value or indented are no fence; later fences are body."""
    text = "---\nname: brief\ndescription: |\n  a\n  ---\n  b --- c\n---\nbody\n---\nmore\n"
    found = skill(text)
    assert (found.description, found.body) == ("a\n---\nb --- c", "body\n---\nmore")


@pytest.mark.parametrize("tail", ["", "\n", "\n\n"])
def test_no_final_newline_is_needed(tail: str) -> None:
    """A file may end with its closing fence."""
    assert codes(f"---\n{HEAD}\n---{tail}") == ["empty_body"]


@pytest.mark.parametrize("verdict", ["lenient", "spec", "skills-ref"])
@pytest.mark.parametrize("text", ["---", "---\n", f"---\n{HEAD}\n", f"---\n{HEAD}\n ---\nx", f"---\n{HEAD}\n----\nx"])
def test_missing_closing_fence(text: str, verdict: str) -> None:
    """Without a closing line there is no frontmatter to trust."""
    assert codes(text, verdict) == ["unclosed_frontmatter"]


def test_dots_close_leniently_only() -> None:
    """`...` closes under lenient when it comes first; the strict verdicts only mention it."""
    text = f"---\n{HEAD}\n...\nbody\n"
    assert (skill(text).body, codes(text)) == ("body", ["dots_close"])
    for verdict in ("spec", "skills-ref"):
        found = parse_skill_bytes(text.encode(), folder="brief", verdict=verdict).diagnostics
        assert [(f.code, f.severity) for f in found] == [("dots_close", "info"), ("unclosed_frontmatter", "error")]


@pytest.mark.parametrize("hint", ["[--on | --clear [--skill name | --all]]", "[x]: y", "{a} or {b}", "[a] # not this"])
def test_hints_in_brackets_are_quoted_when_they_are_no_lists(hint: str) -> None:
    """Brackets as people write them in usages are text where YAML cannot read them."""
    found = skill(f"---\n{HEAD}\nlicense: a: b\nargument-hint: {hint}\n---\nx")
    assert found.argument_hint == hint.partition(" #")[0]
    assert (found.license, repair_lines(f"argument-hint: {hint}")[1] == ()) == ("a: b", "#" in hint)


def test_dots_before_the_fence_do_not_close_strictly(tmp_path: Path) -> None:
    """Where only dashes close, the body on disk begins behind the dashes too."""
    (tmp_path / "SKILL.md").write_text(f"---\n{HEAD}\n...\n---\nbody\n")
    found = [parse_skill(tmp_path, verdict=verdict).skill for verdict in ("lenient", "spec", "skills-ref")]
    assert [None if one is None else one.body for one in found] == ["---\nbody", None, None]
    folder = tmp_path / "brief"
    folder.mkdir()
    (tmp_path / "SKILL.md").rename(folder / "SKILL.md")
    assert [parse_skill(folder, verdict=v).skill.body for v in ("spec", "skills-ref")] == ["body", "body"]


@pytest.mark.parametrize(
    "line", ["x" + " " * 60_000 + "x", "license: a: b" + " \t" * 30_000 + "x", "license: a: b #" + " " * 60_000]
)
def test_repair_is_linear(line: str) -> None:
    """A long run of blanks costs one look at each."""
    started = time.process_time()
    parse_skill_bytes(f"---\n{HEAD}\nlicense: a: b\n{line}\n---\n".encode(), folder="brief")
    assert time.process_time() - started < 1


def test_repair_keeps_blanks_around_the_value() -> None:
    """What stands around a quoted value stays: blanks before the colon, behind it, and at the end."""
    text, repairs = repair_lines("license \t:  a: b \t#c  ")
    assert (text, [repair.key for repair in repairs]) == ("license \t:  'a: b' \t#c  ", ["license"])


def test_dots_after_the_fence_are_body() -> None:
    """Dots behind the closing fence mean nothing."""
    assert (skill(f"---\n{HEAD}\n---\n...\n").body, codes(f"---\n{HEAD}\n---\n...\n")) == ("...", [])


@pytest.mark.parametrize(
    "data", [b"---\nname: a\n\xff\n---\nx", "---\n".encode("utf-16-le") + b"\n", b"\xc3(", b"\xed\xa0\x80"]
)
def test_bytes_must_be_utf8(data: bytes) -> None:
    """Anything but strict UTF-8 is refused; UTF-16 shows by its NULs."""
    assert codes(data) in (["not_utf8"], ["nul_byte"])


@pytest.mark.parametrize("verdict", ["lenient", "spec", "skills-ref"])
def test_nul_is_refused_anywhere(verdict: str) -> None:
    """A NUL in the body refuses too, with its line."""
    found = parse_skill_bytes(f"---\n{HEAD}\n---\nx\0y".encode(), folder="brief", verdict=verdict).diagnostics
    assert [(f.code, f.line) for f in found] == [("nul_byte", 5)]


def test_size_is_bounded_to_the_byte() -> None:
    """2 MiB are read, one byte more is not."""
    start = f"---\n{HEAD}\n---\n".encode()
    full = start + b"x" * (MAX_SKILL_BYTES - len(start))
    assert (codes(full), codes(full + b"x")) == ([], ["too_large"])


@pytest.mark.parametrize(
    "text",
    [
        "---\n---\nx",
        "---\n\n---\nx",
        "---\n# c\n---\nx",
        "---\n- a\n---\nx",
        "---\ntext\n---\nx",
        "---\n{}\n---\nx",
        "---\n~\n---\nx",
    ],
)
def test_frontmatter_must_be_a_mapping(text: str) -> None:
    """Nothing, a list or a text is no frontmatter."""
    assert codes(text) == ["not_a_mapping"]


def test_duplicate_keys() -> None:
    """Lenient keeps the first and warns; the strict verdicts refuse, at any depth."""
    text = "---\nname: brief\ndescription: one\ndescription: two\nmetadata:\n  a: x\n  a: y\n---\nb\n"
    found = skill(text)
    assert (found.description, dict(found.metadata)) == ("one", {"a": "x"})
    assert [(f.code, f.line) for f in found.diagnostics] == [("duplicate_key", 4), ("duplicate_key", 7)]
    for verdict in ("spec", "skills-ref"):
        assert codes(text, verdict) == ["duplicate_key", "duplicate_key", "invalid_yaml"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a: b", "a: b"),
        ("a: b: c", "a: b: c"),
        ("ends:", "ends:"),
        ("@x", "@x"),
        ("%x", "%x"),
        ("`x`", "`x`"),
        ('"a" b', '"a" b'),
        ("'a' b", "'a' b"),
        ("it's: so", "it's: so"),
        ('"a": b', '"a": b'),
        ("a: b # note", "a: b"),
        ("- x: y", "- x: y"),
        ('say "x: y" # n', 'say "x: y"'),
        ("a:\tb: c", "a:\tb: c"),
        ("'it''s' so: x", "'it''s' so: x"),
    ],
)
def test_lenient_repairs_one_line_values(value: str, text: str) -> None:
    """A value which only lacks quotes gets them, once, and quotes that were there stay in the text."""
    data = f"---\nname: brief\ndescription: {value}\n---\nx"
    assert (skill(data).description, codes(data)) == (text, ["yaml_repaired"])
    for verdict in ("spec", "skills-ref"):
        assert codes(data, verdict) == ["invalid_yaml"]


def test_brackets_that_go_on_are_text_in_hints() -> None:
    """`argument-hint: [file] [options]` is a text; in a list field it is an error."""
    hint = f"---\n{HEAD}\nargument-hint: [file] [options]\n---\nx"
    assert (skill(hint).argument_hint, codes(hint)) == ("[file] [options]", ["yaml_repaired"])
    assert codes(f"---\n{HEAD}\ntags: [a] b\n---\nx") == ["invalid_yaml"]


@pytest.mark.parametrize(
    "value",
    ["*bold* text", "&anchor text", "!tag text", "[a, b", "{a: b", '"open', "'open", "| x: y", "*a: b"],
)
def test_what_is_not_repaired(value: str) -> None:
    """Anchors, tags, collections, open quotes and block scalars stay as they are, and are refused."""
    assert codes(f"---\nname: brief\ndescription: {value}\n---\nx") == ["invalid_yaml"]


@pytest.mark.parametrize(
    "lines",
    [
        "description: first: line\n  goes on: here",
        "metadata:\n  note: a: b",
        "tags:\n  - a: b: c",
        "\tdescription: d",
        "description: d\nbroken line",
    ],
)
def test_only_top_level_one_line_values_are_repaired(lines: str) -> None:
    """Deeper or longer values are not touched."""
    assert codes(f"---\nname: brief\n{lines}\n---\nx")[:1] == ["invalid_yaml"]


def test_repair_happens_only_after_a_failure() -> None:
    """What parses is taken as YAML means it."""
    data = f"---\n{HEAD} # x\nurl: http://a:80/b\n---\nx"
    assert (skill(data).description, codes(data)) == ("d", ["unexpected_fields"])


def test_repair_leaves_other_lines_alone() -> None:
    """Quoted, flow and block values in the same file are byte-equal after a repair."""
    text = 'a: "x: y"\nb: [p, q]\nc: |\n  m: n: o\nd: \'q: r\'\ne: "open\nf: g: h\n  close"\ng: one: two'
    mended, done = repair_lines(text)
    assert (mended, [r.key for r in done]) == (text.replace("g: one: two", "g: 'one: two'"), ["g"])


def test_repair_names_the_first_failure_when_it_does_not_help() -> None:
    """The place reported is where the author's own text breaks."""
    found = parse_skill_bytes(b"---\nname: a: b\ntags: [x\n---\n", folder="brief").diagnostics
    assert [(f.code, f.line, f.column) for f in found] == [("invalid_yaml", 2, 8)]


@pytest.mark.parametrize(
    ("rest", "body"),
    [("", ""), ("\n\n  \n\t\n  x\n\n", "  x"), ("x  \n y \n\n", "x  \n y"), ("\n---\n", "---"), ("\u00a0\nx", "x")],
)
def test_body_is_trimmed(rest: str, body: str) -> None:
    """Leading blank lines and trailing whitespace go; indentation of the first line stays."""
    data = f"---\n{HEAD}\n---\n{rest}".encode()
    assert (read_body(data), trim_body(rest)) == (body, body)


def test_large_bodies_are_read() -> None:
    """300 KB of body are a skill like any other."""
    found = skill(f"---\n{HEAD}\n---\n" + "line é\n" * 40_000)
    assert (found.size > 300_000, found.tokens) == (True, -(-(8 * 40_000 - 1) // 4))


def test_body_of_a_broken_file_is_empty() -> None:
    """A body is read again only from files that parsed; others give nothing."""
    assert [read_body(data) for data in (b"", b"\xff", b"x\0", b"---\nname: a")] == [""] * 4


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=120))
def test_repair_never_changes_the_number_of_lines(text: str) -> None:
    """Repair works line by line."""
    mended, done = repair_lines(text)
    assert (mended.count("\n"), bool(done)) == (text.count("\n"), mended != text)


@given(
    st.text(
        alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\ufeff"),
        min_size=1,
        max_size=60,
    )
)
def test_any_one_line_description_round_trips_when_quoted(text: str) -> None:
    """Quoted as YAML says, any text comes back stripped."""
    quoted = "'" + text.replace("'", "''") + "'"
    found = parse_skill_bytes(f"---\nname: brief\ndescription: {quoted}\n---\nx".encode(), folder="brief")
    assert (found.skill.description if found.skill else "") == text.strip()
