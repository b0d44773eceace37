"""Requirements in their canonical text, and the lines of a `requirements.txt`."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from kdskills.environments.requirements import RequirementRefused, canonical_requirement, requirement_lines

NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,8}[A-Za-z0-9])?", fullmatch=True)
VERSIONS = st.from_regex(r"(>=|<=|<|>|!=|==)[0-9]{1,3}(\.[0-9]{1,2}){0,2}", fullmatch=True)
MARKERS = st.sampled_from(["", "; python_version<'3.13'", '; sys_platform == "linux" and extra == "x"'])


@given(NAMES, st.lists(NAMES, max_size=3), st.lists(VERSIONS, max_size=3), MARKERS, st.sampled_from(["", " ", "  "]))
def test_a_canonical_text_means_the_same_and_stays(
    name: str, extras: list[str], versions: list[str], marker: str, blank: str
) -> None:
    """Whatever way a requirement is written, its canonical text means the same to everybody and is its own canonical text."""
    text = name + (f"[{', '.join(extras)}]" if extras else "") + blank + f"{blank},{blank}".join(versions) + marker
    canonical = canonical_requirement(text)
    assert canonical_requirement(canonical) == canonical
    assert Requirement(canonical).specifier == Requirement(text).specifier
    assert Requirement(canonical).marker == Requirement(text).marker
    assert [row.text for row in requirement_lines(f"# x\n{text}  # y\n{canonical}")] == [canonical] * 2


@given(st.text())
def test_any_text_is_a_requirement_or_refused(text: str) -> None:
    """No text raises anything but the one refusal."""
    with suppress(RequirementRefused):
        assert canonical_requirement(text)


@given(st.text(alphabet=st.sampled_from("a-r =#\\\n[;@/.'\"1<>"), max_size=60))
def test_any_file_has_lines(text: str) -> None:
    """No text of a file raises; each row is one of three kinds, at a line of the text."""
    for row in requirement_lines(text):
        assert bool(row.text) + bool(row.include) + bool(row.problem) == 1
        assert 1 <= row.line <= text.count("\n") + 1


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("a\n\n# x\n  b >= 1 # y\n", [(1, "a"), (4, "b>=1")]),
        ("a\\\n>=1\nb", [(1, "a>=1"), (3, "b")]),
        ("a>=1, \\\n  <2", [(1, "a<2,>=1")]),
        ("a \\\n# x\nb", [(1, "a"), (3, "b")]),
        ("a\\", [(1, "a")]),
        ("a#b", [(1, "")]),
        ("--require-hashes\na", [(2, "a")]),
        ('Foo_Bar[B.b,a]>=1; python_version < "3"', [(1, 'foo-bar[a,b-b]>=1; python_version < "3"')]),
    ],
)
def test_lines_are_read_as_installers_read_them(text: str, rows: list[tuple[int, str]]) -> None:
    """Comments, continuations, blanks and markers have their usual meaning."""
    assert [(row.line, row.text) for row in requirement_lines(text)] == rows


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-e .", "`-e`"),
        ("--editable=./a", "`--editable`"),
        ("-i https://x.example/simple", "`-i`"),
        ("--index-url https://x.example/simple", "`--index-url`"),
        ("--extra-index-url=https://x.example/simple", "`--extra-index-url`"),
        ("--find-links .", "`--find-links`"),
        ("-c constraints.txt", "`-c`"),
        ("--trusted-host x.example", "`--trusted-host`"),
        ("--no-binary :all:", "`--no-binary`"),
        ("--pre", "`--pre`"),
        ("https://x.example/a.whl", "address"),
        ("git+https://x.example/a.git#egg=a", "address"),
        ("a @ https://x.example/a.whl", "address"),
        ("a @ file:///etc/passwd", "address"),
        ("./a.whl", "path"),
        ("../a", "path"),
        ("/tmp/a", "path"),
        (".", "path"),
        ("C:\\a.whl", "path"),
        ("a --global-option=x", "`--global-option`"),
        ("a --config-settings k=v", "`--config-settings`"),
        ("a --hash=md5:abc", "sha256"),
        (f"a --hash=sha512:{'0' * 128}", "sha256"),
        ("a --hash=sha256:xyz", "sha256"),
        ("${TOKEN}", "no requirement"),
        ("a b", "no requirement"),
        ("a==", "no requirement"),
        (f"a; {'(' * 900}", "no requirement"),
        ("a" * 1_001, "characters"),
    ],
)
def test_what_is_for_operators_is_refused(line: str, words: str) -> None:
    """Addresses, paths, options of indexes and installers, and weak hashes are problems of their line."""
    (row,) = requirement_lines(line)
    assert not row.text
    assert words in row.problem


@pytest.mark.parametrize("piece", ["a\\\n", " ", "#", "--hash=", "-r", "a --hash sha256: ", "[", "\\"])
def test_long_files_take_linear_time(piece: str) -> None:
    """A megabyte of anything is read soon."""
    began = time.process_time()
    list(requirement_lines(piece * (1_000_000 // len(piece))))
    assert time.process_time() - began < 5
