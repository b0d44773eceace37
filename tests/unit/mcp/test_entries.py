"""Entries of other people's servers."""

from __future__ import annotations

import pytest

from kdskills.builtin.roots.mcp.listing import EntryRefused, read_entry, same_value

BASE = "skill://a/tidy"
HEX = "sha256:" + "0" * 64


def row(*paths: str, **changes):
    files = [{"uri": f"{BASE}/{path}", "digest": HEX, "size": 1} for path in ("SKILL.md", *paths)]
    return {"uri": f"{BASE}/SKILL.md", "frontmatter": {"name": "tidy"}, "resources": files} | changes


def test_a_good_entry():
    """Files are known by their path within the skill, with escapes undone."""
    entry = read_entry(row("references/a%20b.md"), allow_dynamic=False)
    assert entry.files is not None
    assert sorted(entry.files) == ["SKILL.md", "references/a b.md"]
    assert entry.parts == ("a", "tidy")


@pytest.mark.parametrize(
    "path",
    [
        "../x", "%2e%2e/x", "a/../x", "a//x", "/x", "a%2fb", "a%2F..%2Fb", "a%5cb", "a\\b", "", ".", "a/.", "a%00b", "a\nb",
        "x#y", "x?y", "n" * 256,
    ],
)  # fmt: skip
def test_hostile_paths(path):
    """A path that could mean another place refuses the whole entry."""
    with pytest.raises(EntryRefused):
        read_entry(row(path), allow_dynamic=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"uri": None},
        {"uri": "https://host/SKILL.md"},
        {"uri": "skill://a/tidy/README.md"},
        {"uri": "skill://a/../SKILL.md"},
        {"uri": "skill:///SKILL.md"},
        {"frontmatter": None},
        {"frontmatter": ["name"]},
        {"resources": None},
        {"resources": "all"},
        {"resources": "dynamic"},
        {"resources": []},
        {"resources": [1]},
        {"resources": [{"uri": f"{BASE}/SKILL.md", "digest": "md5:0", "size": 1}]},
        {"resources": [{"uri": f"{BASE}/SKILL.md", "digest": HEX.upper(), "size": 1}]},
        {"resources": [{"uri": f"{BASE}/SKILL.md", "digest": HEX, "size": -1}]},
        {"resources": [{"uri": f"{BASE}/SKILL.md", "digest": HEX, "size": True}]},
        {"resources": [{"uri": f"{BASE}/SKILL.md", "digest": HEX, "size": "1"}]},
        {"resources": [{"uri": f"{BASE}/SKILL.md", "digest": HEX, "size": 17 * 1024 * 1024}]},
        {"resources": [{"uri": "skill://b/tidy/SKILL.md", "digest": HEX, "size": 1}]},
        {"resources": [{"uri": "https://evil/SKILL.md", "digest": HEX, "size": 1}]},
    ],
)
def test_refused_entries(changes):
    """Missing or ill-typed parts refuse an entry; `dynamic` needs the operator's word."""
    with pytest.raises(EntryRefused):
        read_entry(row() | changes, allow_dynamic=False)


def test_bounds():
    """512 files are an entry, 513 are none; a file twice or one that is a folder too is none."""
    assert read_entry(row(*(f"f{n}" for n in range(511))), allow_dynamic=False).files
    for paths in ([f"f{n}" for n in range(512)], ["a", "a"], ["a", "a/b"], ["%61", "a"]):
        with pytest.raises(EntryRefused):
            read_entry(row(*paths), allow_dynamic=False)


def test_dynamic_is_taken_when_allowed():
    """With allow_dynamic an entry has no set of files, so there is nothing an approval could be bound to."""
    entry = read_entry(row(resources="dynamic"), allow_dynamic=True)
    assert (entry.files, entry.set_digest, entry.tree) == (None, None, None)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (1, 1.0, True), (True, 1, False), (0, False, False), ("1", 1, False), (None, "", False), ({}, [], False),
        ({"a": [1, {"b": True}]}, {"a": [1.0, {"b": True}]}, True), ({"a": 1}, {"a": 1, "b": None}, False),
        ([1, 2], [2, 1], False), ("yes", True, False), (None, None, True), (None, False, False),
    ],
)  # fmt: skip
def test_same_value(left, right, same):
    """Fields are compared as JSON values: numbers by value, nothing across kinds."""
    assert same_value(left, right) is same
    assert same_value(right, left) is same
