"""Logical URIs and mounts: longest prefix by components, nothing outside."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.turn import remap_mounts
from kdskills.turn.export import below, locate, split_uri


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("bundle://skills", ("bundle", ("skills",))),
        ("bundle://skills/acme/brief", ("bundle", ("skills", "acme", "brief"))),
        ("bundle://", ("bundle", ())),
        ("bundle:///a//b/", ("bundle", ("a", "b"))),
        ("nonsense", ("nonsense", ())),
    ],
)
def test_split_uri(uri: str, expected) -> None:
    """A URI is a scheme and components."""
    assert split_uri(uri) == expected


@pytest.mark.parametrize(
    ("base", "parts", "expected"),
    [
        ("bundle://", ("skills",), "bundle://skills"),
        ("bundle://", (), "bundle://"),
        ("bundle://skills", ("acme", "brief"), "bundle://skills/acme/brief"),
        ("bundle://skills/", ("acme",), "bundle://skills/acme"),
        ("bundle://skills", (), "bundle://skills"),
    ],
)
def test_below(base: str, parts, expected: str) -> None:
    """Joining keeps one slash between components."""
    assert below(base, *parts) == expected


MOUNTS = {
    "bundle://": "/srv/press",
    "bundle://skills/acme": "/mnt/acme",
    "bundle://skills/acme/brief": "/box/acme.brief",
    "custom://": "/opt",
}


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("bundle://skills", "/srv/press/skills"),
        ("bundle://skills/acme", "/mnt/acme"),
        ("bundle://skills/acme/other", "/mnt/acme/other"),
        ("bundle://skills/acme/brief", "/box/acme.brief"),
        ("bundle://skills/acme/brief2", "/mnt/acme/brief2"),
        ("bundle://skills/acmeother/x", "/srv/press/skills/acmeother/x"),
        ("custom://a", "/opt/a"),
        ("plugin://a", None),
        ("bundle://skills/../../etc", None),
        ("bundle://./skills", None),
        ("bundle://skills/a\0b", None),
    ],
)
def test_locate(uri: str, expected: str | None) -> None:
    """The longest prefix by components counts; `acme` is no prefix of `acmeother`; dots lead nowhere."""
    assert locate(uri, MOUNTS) == (None if expected is None else Path(expected))


@given(st.lists(st.text(max_size=5), max_size=5))
def test_nothing_is_located_outside_its_mount(parts) -> None:
    """Whatever components a URI has, its place lies inside the mount."""
    found = locate("x://" + "/".join(parts), {"x://": "/srv/a"})
    assert found is None or (found.is_relative_to("/srv/a") and ".." not in found.parts)


def test_remap_is_pure_and_replaces() -> None:
    """The export given stays as it was; the new one has these mounts and no others, in either form."""
    inner = {"mounts": {"bundle://": "/srv"}, "skills": [{"id": "a.b"}]}
    export = {"SKILLS_DESCRIPTOR": inner}
    before = copy.deepcopy(export)
    remapped = remap_mounts(export, {"bundle://": Path("/mnt")})
    assert remapped == {"SKILLS_DESCRIPTOR": {"mounts": {"bundle://": "/mnt"}, "skills": [{"id": "a.b"}]}}
    assert remap_mounts(inner, {"bundle://skills/a/b": "/box"})["mounts"] == {"bundle://skills/a/b": "/box"}
    remapped["SKILLS_DESCRIPTOR"]["skills"].append(1)
    assert export == before
