"""Hostile and odd files: nothing raises, nothing hangs, nothing opens."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.skills import parse_skill, parse_skill_bytes, validate_skill

VERDICTS = ("lenient", "spec", "skills-ref")
LONG = 30
"""Seconds: what grows with the square of its input takes minutes, and a busy machine is no defect."""

HEAD = "---\nname: brief\ndescription: d\n"


def test_odd_skills_of_the_world_all_load(odd_skills: Callable[[int], Iterator[tuple[str, bytes]]]) -> None:
    """Skills as many publishers write them load leniently, with findings instead of refusals."""
    for folder, data in odd_skills(400):
        found = parse_skill_bytes(data, folder=folder)
        assert found.skill is not None, (folder, data[:400], [str(f) for f in found.diagnostics])
        json.dumps(dict(found.skill.frontmatter), allow_nan=False)


def test_lenient_takes_what_spec_takes(odd_skills: Callable[[int], Iterator[tuple[str, bytes]]]) -> None:
    """No odd skill is refused leniently and accepted strictly."""
    for folder, data in odd_skills(200):
        accepted = [parse_skill_bytes(data, folder=folder, verdict=v).ok for v in ("spec", "lenient")]
        assert accepted != [True, False]


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
)


@pytest.mark.parametrize(
    "lines",
    [
        BOMB,
        "a: !!python/object/apply:os.system ['touch /tmp/kdskills-hostile-yaml-ran']",
        "a: !!python/name:os.system",
        "a: &x\n  <<: *x",
        "? [a]\n: b",
        "%YAML 1.1\n--- # x",
        "a: " + "[" * 30_000,
        "a: " + "{a: " * 10_000,
        "- " * 20_000,
        "a: !<tag:x> y",
        "\tb: c",
        "a: \x07",
        "a: \x7f",
        "a: 'open",
        "a: |9\n x",
        "a: >\n\tx",
        "{" * 10_000,
        "a:\n" + "".join(" " * i + "b:\n" for i in range(1, 300)),
        "a: [" + "b, " * 3000 + "]",
        "k: " + "v" * 70_000,
        "? " * 5_000,
        "a: \ufeff\x01",
    ],
)
def test_hostile_yaml_is_refused_quickly(lines: str) -> None:
    """Bombs, tags, depth and broken syntax are `invalid_yaml`, at once."""
    started = time.monotonic()
    for verdict in VERDICTS:
        found = parse_skill_bytes(f"{HEAD}{lines}\n---\nx".encode(), folder="brief", verdict=verdict)
        assert (found.skill, found.diagnostics[-1].code) == (None, "invalid_yaml")
    assert time.monotonic() - started < LONG
    assert not Path("/tmp/kdskills-hostile-yaml-ran").exists() or "touch" not in lines


def test_ten_megabytes_are_not_read(put: Callable[..., Path]) -> None:
    """A file of 10 MB is refused by its size."""
    folder = put("brief", HEAD.encode() + b"---\n" + b"x" * 10_000_000)
    assert [f.code for f in parse_skill(folder).diagnostics] == ["too_large"]


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_special_files_do_not_block(kind: str, put: Callable[..., Path]) -> None:
    """A pipe, socket or device in the place of a skill file is refused without opening it."""
    folder = put("brief", None)
    place = folder / "SKILL.md"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(folder)  # socket paths are short
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind("SKILL.md")
        finally:
            os.chdir(here)
    else:
        place.symlink_to("/dev/zero")
    expected = "symlink" if kind == "device" else "unreadable"
    assert [f.code for f in validate_skill(folder)] == [expected]


@pytest.mark.parametrize(
    ("name", "loads"),
    [
        ("'../../etc/passwd'", False),
        ("'/etc/passwd'", False),
        (r"'C:\x'", False),
        (r'"a\nb"', False),
        ('"a\\tb"', False),
        (r'"\e[2J"', False),
        ("'<script>'", True),
        ("'$(rm -rf)'", True),
        ("'a b'", True),
        ("'~'", False),
        ("'*'", False),
        ("'a*'", True),
        ("'💥'", False),
        ("'x💥'", True),
        ("'\u202egnp.exe'", True),
        ("'SK1'", True),
    ],
)
def test_names_with_intent(name: str, loads: bool) -> None:
    """Paths and control characters never load; the rest becomes a plain id."""
    found = parse_skill_bytes(f"---\nname: {name}\ndescription: d\n---\nx".encode(), folder="brief")
    assert found.ok is loads
    assert found.full_id is not None
    assert all(c.isalnum() or c in "-_." for c in found.full_id)


def test_undecodable_folder_names(tmp_path: Path) -> None:
    """A folder whose name is no UTF-8 is read without an exception."""
    folder = tmp_path / os.fsdecode(b"br\xffief")
    folder.mkdir()
    (folder / "SKILL.md").write_bytes(b"---\ndescription: d\n---\nx")
    found = parse_skill(folder)
    assert "name_missing" in {f.code for f in found.diagnostics}
    assert found.full_id == "public.br-ief"
    for finding in validate_skill(folder):
        str(finding).encode()
        json.dumps(finding.to_json()).encode()


def test_an_undecodable_name_never_becomes_a_skill(tmp_path: Path) -> None:
    """A name that cannot be written as UTF-8 would break every prompt, so it is unsafe."""
    folder = tmp_path / os.fsdecode(b"br\xffief")
    folder.mkdir()
    (folder / "SKILL.md").write_bytes(b"---\ndescription: d\n---\nx")
    assert (parse_skill(folder).skill, parse_skill(folder).diagnostics[1].code) == (None, "name_unsafe")


def test_many_lines_do_not_slow_repair() -> None:
    """64 KiB of lines that each need quotes are repaired at once."""
    lines = "\n".join(f"k{n}: a: b" for n in range(950))
    started = time.monotonic()
    assert parse_skill_bytes(f"{HEAD}{lines}\n---\nx".encode(), folder="brief").ok
    assert time.monotonic() - started < LONG


@pytest.mark.parametrize(
    "value",
    ['"' * 60_000, "'" * 60_001, '"\\' * 30_000, "[" + "]" * 50_000, "a" + ":" * 60_000, "a #" * 20_000 + ": b"],
)
def test_repair_is_linear(value: str) -> None:
    """Values made to confuse the repair are judged at once."""
    started = time.monotonic()
    parse_skill_bytes(f"---\nname: brief\ndescription: {value}\n---\nx".encode(), folder="brief")
    assert time.monotonic() - started < LONG


@pytest.mark.parametrize(
    "body", ["$a" * 200_000, "{{ " * 200_000, "\\$" * 200_000, "\n" * 500_000, " \n" * 300_000, "---\n" * 300_000]
)
def test_long_odd_bodies(body: str) -> None:
    """Bodies of odd characters are read at once."""
    started = time.monotonic()
    assert parse_skill_bytes(f"{HEAD}---\n{body}".encode(), folder="brief").ok
    assert time.monotonic() - started < LONG


_BYTES = st.binary(max_size=300)
_FILES = st.builds(
    lambda head, lines, close, body: head + b"\n".join(lines) + b"\n" + close + b"\n" + body,
    st.sampled_from([b"---\n", b"\xef\xbb\xbf---\n", b"--- \r\n", b""]),
    st.lists(
        st.sampled_from(
            [
                b"name: brief",
                b"description: d",
                b"name: [a]",
                b"description: a: b",
                b"tags: [",
                b"include_for: {a: b}",
                b"metadata: *x",
                b"\tx",
                b"? y",
                b"'a': b",
                b"name: ''",
                b"id: .",
                b"namespace: sk",
                b"x: |",
                b"  y: z",
                b"- a",
            ]
        )
        | st.binary(max_size=20),
        max_size=8,
    ),
    st.sampled_from([b"---", b"...", b"", b"----"]),
    st.binary(max_size=20),
)


@given(_BYTES | _FILES, st.sampled_from(VERDICTS), st.text(max_size=8))
def test_nothing_in_a_file_raises(data: bytes, verdict: str, folder: str) -> None:
    """Any bytes in any folder give a skill or an error, never an exception."""
    found = parse_skill_bytes(data, folder=folder, verdict=verdict)
    assert found.ok is not any(f.severity == "error" for f in found.diagnostics)
    assert found.full_id is not None
    assert found.full_id.count(".") == 1
    for finding in found.diagnostics:
        json.dumps(finding.to_json())


@given(_FILES)
def test_lenient_never_refuses_what_spec_accepts(data: bytes) -> None:
    """What passes the published format loads."""
    assert parse_skill_bytes(data, folder="brief").ok or not parse_skill_bytes(data, folder="brief", verdict="spec").ok


@given(_FILES)
def test_parsing_twice_is_equal(data: bytes) -> None:
    """The same bytes give the same skill and findings."""
    one, two = (parse_skill_bytes(data, folder="brief") for _ in range(2))
    assert one == two
