"""Paths a model may name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import ToolCallRefused
from kdskills.session.workspace import clean_path, script_path, suffix_of


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/etc/passwd", "absolute"),
        ("//etc", "absolute"),
        ("../x", "dotdot"),
        ("a/../b", "dotdot"),
        ("scripts/..", "dotdot"),
        ("./..", "dotdot"),
        ("..", "dotdot"),
        ("a\\b", "backslash"),
        ("..\\..\\x", "backslash"),
        ("a\0b", "nul"),
        ("C:/x", "drive"),
        ("c:x", "drive"),
        (".", "root"),
        ("./", "root"),
        ("././/.", "root"),
    ],
)
def test_forms_never_followed(path: str, reason: str) -> None:
    """Each form is path_denied with its own reason, even where it would stay inside."""
    with pytest.raises(ToolCallRefused) as caught:
        clean_path(path)
    assert (caught.value.code, caught.value.who, caught.value.details["reason"]) == ("path_denied", "model", reason)


@pytest.mark.parametrize("path", ["", " ", "\t\n"])
def test_blank_is_invalid(path: str) -> None:
    """A blank path is out of shape, not denied."""
    with pytest.raises(ToolCallRefused) as caught:
        clean_path(path)
    assert caught.value.code == "invalid_argument"


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("./a//b.md", "a/b.md"),
        ("a/./b", "a/b"),
        ("a/", "a"),
        ("%2e%2e/x", "%2e%2e/x"),
        ("...", "..."),
        ("a..b/c", "a..b/c"),
        ("references/Größe.md", "references/Größe.md"),
    ],
)
def test_plain_forms(path: str, clean: str) -> None:
    """Leading ./ and doubled slashes are ignored; nothing is URL-decoded."""
    assert clean_path(path) == clean


@given(st.text(max_size=60))
def test_what_passes_is_plain(path: str) -> None:
    """Whatever passes has no part that leads anywhere but down, and passes again unchanged."""
    try:
        clean = clean_path(path)
    except ToolCallRefused:
        return
    assert not {"", ".", ".."} & set(clean.split("/"))
    assert not clean.startswith("/")
    assert clean_path(clean) == clean or clean[1:2] == ":"


@pytest.mark.parametrize("path", ["run.py", "references/run.py", "scripts", "scriptsx/run.py", "Scripts/run.py"])
def test_scripts_only_below_scripts(path: str) -> None:
    """A script outside scripts/ is refused."""
    with pytest.raises(ToolCallRefused) as caught:
        script_path(path)
    assert caught.value.details["reason"] == "outside_scripts"


def test_dotdot_is_seen_before_the_prefix() -> None:
    """scripts/../x is dotdot: the prefix is not tested before the dots."""
    with pytest.raises(ToolCallRefused) as caught:
        script_path("scripts/../scripts/x.py")
    assert caught.value.details["reason"] == "dotdot"


def test_script_path_is_cleaned() -> None:
    """The prefix is looked for in the clean path."""
    assert script_path("./scripts//a/b.py") == "scripts/a/b.py"


@pytest.mark.parametrize(
    ("path", "suffix"), [("a/b.PY", ".py"), ("x.tar.gz", ".gz"), ("Makefile", ""), (".bashrc", ""), ("a.d/run", "")]
)
def test_suffix(path: str, suffix: str) -> None:
    """The suffix is that of the last part, lower-cased; a dot file has none."""
    assert suffix_of(path) == suffix
