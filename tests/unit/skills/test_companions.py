"""compact.md, tools.yaml and sources.yaml beside a skill file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import FileRefused
from kdskills.skills import SkillTool, parse_skill, validate_skill
from kdskills.skills.folder import LIMITS, code_of, read_compact, read_sources, read_tools, unusable


def tools(text: str) -> tuple[SkillTool, ...] | str:
    """Return the tools in a text, or the code that refuses it."""
    read = read_tools(text.encode())
    if read.diagnostics:
        assert (read.value, [f.severity for f in read.diagnostics]) == ((), ["error"])
        return read.diagnostics[0].code
    return read.value


@pytest.mark.parametrize(
    "text",
    [
        "- web.search\n- {id: io.save, role: out, why: keeps it}",
        "tools:\n- web.search\n- {id: io.save, role: out, reason: keeps it}",
        "tool_ids:\n- web.search\n- {id: io.save, role: out, description: keeps it}",
        "tools: [web.search]\ntool_ids: [{id: io.save, role: out, why: keeps it, reason: no}]",
    ],
)
def test_shapes_of_tools(text: str) -> None:
    """A list, or a mapping with either key or both; entries are ids or mappings."""
    assert tools(text) == (SkillTool("web.search"), SkillTool("io.save", "out", "keeps it"))


@pytest.mark.parametrize(
    ("line", "required"),
    [
        ("required: true", True),
        ("required: false", False),
        ("required: 'no'", False),
        ("required: no", False),
        ("required: Off", False),
        ("required: yes", True),
        ("required: maybe", True),
        ("required: 1", True),
        ("required: 0", True),
        ("required: [false]", True),
        ("required: {}", True),
        ("required: ''", True),
        ("required: ~", False),
        ("hard_required: true", True),
        ("hard_required: false", False),
        ("required: false, hard_required: true", True),
        ("availability: required", True),
        ("availability: Hard", True),
        ("availability: mandatory", True),
        ("availability: optional", False),
        ("availability: sometimes", True),
        ("availability: [optional]", True),
        ("requird: true", True),
        ("Required: true", True),
        ("hard-required: true", True),
        ("availabilty: required", True),
        ("availabilty: optional", False),
        ("requires: false", False),
        ("note: true", False),
        ("role: x", False),
    ],
)
def test_required_in_doubt(line: str, required: bool) -> None:
    """Boolean words count; unknown ones and slips in the key mean required."""
    found = tools(f"- {{id: x, {line}}}")
    assert isinstance(found, tuple)
    assert found[0].required is required


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing",
        "5",
        "text",
        "{}",
        "tool: [a]",
        "tools:",
        "tools: a",
        "tools: {a: b}",
        "tools: [a]\ntool_ids: b",
        "[a",
        "- [a]",
        "- ''",
        "-",
        "- ~",
        "- {role: x}",
        "- {id: [a]}",
        "- {id: ''}",
        "- {id: x, id: y}",
        "- &a x\n- *a",
        "- !!python/object:os.x y",
        "\0",
        "- " + "x" * 70_000,
        "[" * 40,
        "[" + "a," * 2001 + "]",
        "a: b: c",
    ],
)
def test_unusable_tools_refuse(text: str) -> None:
    """Anything not understood is an error, for a lost gate would open the skill."""
    assert tools(text) == "tools_invalid"


def test_empty_list_of_tools_is_fine() -> None:
    """A list may be empty."""
    assert (tools("[]"), tools("tools: []")) == ((), ())


def test_tools_reach_the_skill(put: Callable[..., Path]) -> None:
    """`tools.yaml` wins over `tools.yml`; a CRLF file with a BOM is read."""
    folder = put("brief", **{"tools.yaml": b"\xef\xbb\xbf- a\r\n- {id: b, required: true}\r\n", "tools.yml": b"- c"})
    found = parse_skill(folder)
    assert found.skill is not None
    assert found.skill.tools == (SkillTool("a"), SkillTool("b", required=True))
    (folder / "tools.yaml").unlink()
    again = parse_skill(folder)
    assert again.skill is not None
    assert again.skill.tools == (SkillTool("c"),)


@pytest.mark.parametrize("make", ["link", "folder", "fifo", "nul", "not_utf8", "large"])
def test_tools_that_cannot_be_read_refuse(make: str, put: Callable[..., Path]) -> None:
    """A link, a pipe or a broken file in the place of `tools.yaml` refuses the skill; `tools.yml` does not step in."""
    folder = put("brief", **{"tools.yml": b"- ok"})
    place = folder / "tools.yaml"
    makers: dict[str, Callable[[], object]] = {
        "link": lambda: place.symlink_to("tools.yml"),
        "folder": place.mkdir,
        "fifo": lambda: os.mkfifo(place),
        "nul": lambda: place.write_bytes(b"- a\0"),
        "not_utf8": lambda: place.write_bytes(b"- \xff"),
        "large": lambda: place.write_bytes(b"# x\n" * 20_000),
    }
    makers[make]()
    found = parse_skill(folder)
    assert (found.skill, [(f.code, f.path) for f in found.diagnostics]) == (None, [("tools_invalid", "tools.yaml")])
    assert parse_skill(folder, verdict="skills-ref").ok


@pytest.mark.parametrize("text", ["", " \n\n", "---\nname: x\n---\nbody", "\0", "x" * (256 * 1024 + 1)])
def test_unusable_compact(text: str) -> None:
    """Empty, with frontmatter, with a NUL or too large: the full body serves."""
    read = read_compact(text.encode())
    assert (read.value, [(f.code, f.severity) for f in read.diagnostics]) == (None, [("compact_invalid", "warning")])


def test_compact_text_is_trimmed() -> None:
    """A usable text is trimmed as a body is; a rule of dashes is no frontmatter."""
    assert read_compact(b"\n\n  a\r\nb  \n").value == "  a\nb"
    assert read_compact(b"---\na rule first\n").value == "---\na rule first"
    assert read_compact(b"x" * (256 * 1024)).diagnostics == ()


ROWS = ({"sid": 1, "url": "https://a"}, {"url": "https://b"})


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("- {sid: 1, url: 'https://a'}\n- {url: 'https://b'}", ROWS),
        ("sources:\n- {sid: 1, url: 'https://a'}\n- {url: 'https://b'}", ROWS),
        ("items: [{sid: 1, url: 'https://a'}, {url: 'https://b'}]", ROWS),
        ("1: {url: 'https://a'}\n7: {sid: 9, url: u}", ({"url": "https://a", "sid": "1"}, {"sid": "7", "url": "u"})),
        ("sources:\n  1: {url: 'https://a'}", ({"url": "https://a", "sid": "1"},)),
        ("[]", ()),
        ("- {published: 2024-01-01, n: 007}", ({"published": "2024-01-01", "n": 7},)),
    ],
)
def test_shapes_of_sources(text: str, rows: tuple) -> None:
    """A list or a mapping of sids, bare or under `sources` or `items`."""
    read = read_sources(text.encode())
    assert (read.value, read.diagnostics) == (rows, ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "text",
        "- a\n- b",
        "[a",
        "a: b",
        "- &a {url: x}\n- *a",
        "\0",
        "[" * 30,
        "x: " + "y" * (1024 * 1024),
        "[" + "{a: b}," * 2001 + "]",
    ],
)
def test_unusable_sources(text: str) -> None:
    """What is no list of rows costs the sources, with a warning."""
    read = read_sources(text.encode())
    assert (read.value, [(f.code, f.severity) for f in read.diagnostics]) == ((), [("sources_invalid", "warning")])


def test_large_sources_are_read() -> None:
    """2,000 rows pass: the bounds of frontmatter are not those of sources."""
    assert len(read_sources(b"- {url: 'https://a', title: t, text: x}\n" * 2000).value) == 2000


def test_one_bad_row_costs_only_itself() -> None:
    """Entries that are no rows are left out, with a warning."""
    read = read_sources(b"- {url: a}\n- text\n- {url: b}\n")
    assert (read.value, [f.code for f in read.diagnostics]) == (({"url": "a"}, {"url": "b"}), ["sources_invalid"])


def test_a_key_twice_in_sources() -> None:
    """Lenient keeps the first value; the strict verdicts do without the sources."""
    data = b"- {url: a, url: b}\n"
    lenient, spec = read_sources(data), read_sources(data, verdict="spec")
    assert (lenient.value, [f.code for f in lenient.diagnostics]) == (({"url": "a"},), ["duplicate_key"])
    assert (spec.value, [f.code for f in spec.diagnostics]) == ((), ["sources_invalid"])


def test_long_texts_come_on_first_use(put: Callable[..., Path]) -> None:
    """Body, compact text and sources are read when asked for, and kept."""
    folder = put("brief", **{"compact.md": b"short", "sources.yaml": b"- {url: a}"})
    found = parse_skill(folder).skill
    assert found is not None
    (folder / "compact.md").write_bytes(b"shorter")
    assert (found.body, found.compact, found.sources) == ("# Brief\n\nRead, then write.", "shorter", ({"url": "a"},))
    (folder / "compact.md").unlink()
    (folder / "SKILL.md").unlink()
    assert (found.body, found.compact) == ("# Brief\n\nRead, then write.", "shorter")


def test_a_vanished_body_is_an_error(put: Callable[..., Path]) -> None:
    """A file gone between parsing and reading is said, not taken for empty."""
    folder = put("brief")
    found = parse_skill(folder).skill
    assert found is not None
    (folder / "SKILL.md").unlink()
    with pytest.raises(FileRefused):
        _ = found.body


def test_linked_companions_are_not_followed(put: Callable[..., Path], tmp_path: Path) -> None:
    """A link in the place of a companion is unusable, and nothing of its target shows."""
    (tmp_path / "secret").write_text("secret")
    folder = put("brief")
    for name in ("compact.md", "sources.yaml"):
        (folder / name).symlink_to(tmp_path / "secret")
    found = parse_skill(folder).skill
    assert found is not None
    assert (found.compact, found.sources) == (None, ())
    assert [(f.path, f.code) for f in validate_skill(folder)] == [
        ("compact.md", "compact_invalid"),
        ("sources.yaml", "sources_invalid"),
    ]


def test_tree_digest_of_bytes_and_folder_agree(put: Callable[..., Path]) -> None:
    """A folder with one file has the tree digest of its bytes."""
    folder = put("brief")
    disk = parse_skill(folder).skill
    assert disk is not None
    from kdskills.skills import parse_skill_bytes

    pure = parse_skill_bytes((folder / "SKILL.md").read_bytes(), folder="brief").skill
    assert pure is not None
    assert (pure.digest, pure.tree_digest()) == (disk.digest, disk.tree_digest())


def test_codes_and_limits_by_name() -> None:
    """Discovery asks by file name."""
    assert [(LIMITS[n], code_of(n)) for n in ("compact.md", "tools.yml", "sources.yaml")] == [
        (262_144, "compact_invalid"),
        (65_536, "tools_invalid"),
        (1_048_576, "sources_invalid"),
    ]
    assert [f.message for f in unusable("tools.yaml", "it is a link")] == ["`tools.yaml` cannot be used: it is a link."]
    assert unusable("tools.yaml", "it is a link", verdict="skills-ref") == ()


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "ignore")))
def test_no_companion_raises(data: bytes) -> None:
    """Any bytes give a value or findings."""
    assert read_tools(data).value == () or read_tools(data).diagnostics == ()
    assert isinstance(read_sources(data).value, tuple)
    assert (read_compact(data).value is None) is bool(read_compact(data).diagnostics)
