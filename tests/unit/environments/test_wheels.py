"""Wheels are unpacked by the rules of archives; a hostile one is refused and nothing of it lies outside."""

from __future__ import annotations

import io
import stat
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.environments import wheels
from kdskills.environments.wheels import WheelRefused, unpack_wheel
from tests.unit.environments.conftest import record_of, wheel_bytes

FILE = "good-1.0-py3-none-any.whl"
INFO = "good-1.0.dist-info"


def unpacked(data, tmp_path, file=FILE):
    """Unpack a wheel, and return its tree."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "wheel").write_bytes(data)
    into = tmp_path / "into"
    into.mkdir()
    unpack_wheel(tmp_path / "wheel", file, into)
    return into


def refused(data, tmp_path, file=FILE):
    """Return the refusal of a wheel, after checking that nothing was written outside its folder."""
    with pytest.raises(WheelRefused) as caught:
        unpacked(data, tmp_path, file)
    assert caught.value.code == "environment_wheel_refused"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["into", "wheel"]
    return caught.value


def test_a_wheel_becomes_packages_and_programs(tmp_path):
    """Modules go to `python`, programs to `bin` with our first line, data and headers beside them, with plain modes."""
    data = f"{INFO.removesuffix('.dist-info')}.data"
    files = {
        "good/__init__.py": b"def run(): return 3\n",
        "good/__pycache__/__init__.cpython-311.pyc": b"not ours",
        f"{data}/purelib/pure.py": b"",
        f"{data}/platlib/native.py": b"",
        f"{data}/scripts/tool": b"#!python -x\nprint(1)\n",
        f"{data}/scripts/binary": b"\x7fELF\x00",
        f"{data}/data/share/x.txt": b"x",
        f"{data}/data/bin/other": b"#!/bin/sh\n",
        f"{data}/headers/x.h": b"",
    }
    points = "[console_scripts]\ngood-run = good:run [extra]\n[gui_scripts]\nwin=good:run\n[other]\nx = y\n"
    into = unpacked(wheel_bytes("good", files=files, entry_points=points), tmp_path)
    paths = {str(path.relative_to(into)): path for path in into.rglob("*") if path.is_file()}
    assert set(paths) == {
        *("python/good/__init__.py", "python/pure.py", "python/native.py", "data/share/x.txt", "include/x.h"),
        *("bin/tool", "bin/binary", "bin/other", "bin/good-run", "bin/win"),
        *(f"python/{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")),
    }
    assert paths["bin/tool"].read_bytes() == b"#!/usr/bin/env python3\nprint(1)\n"
    assert paths["bin/binary"].read_bytes() == b"\x7fELF\x00"
    assert paths["bin/good-run"].read_text().startswith("#!/usr/bin/env python3\nfrom good import run\n")
    for name, path in paths.items():
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if name.startswith("bin/") else 0o644), name


def entry(name, data=b"x", mode=0o644, **facts):
    """Return what adds an entry to a zip as a hostile writer would."""

    def add(archive):
        info = zipfile.ZipInfo("x")
        info.filename = name
        info.external_attr = (mode if mode >> 12 else stat.S_IFREG | mode) << 16
        for fact, value in facts.items():
            setattr(info, fact, value)
        archive.writestr(info, data)

    return add


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("name", "mode", "rule"),
    [
        ("../evil.py", 0o644, "archive_path_parent"),
        ("good/../../evil.py", 0o644, "archive_path_parent"),
        ("/tmp/evil.py", 0o644, "archive_path_absolute"),
        ("C:evil.py", 0o644, "archive_path_drive"),
        ("..\\evil.py", 0o644, "archive_path_backslash"),
        ("good/./x.py", 0o644, "archive_path_invalid"),
        ("good//x.py", 0o644, "archive_path_invalid"),
        ("good/\x1b[2J.py", 0o644, "archive_path_invalid"),
        ("link", stat.S_IFLNK | 0o777, "archive_link"),
        ("pipe", stat.S_IFIFO | 0o644, "archive_special_file"),
        ("device", stat.S_IFCHR | 0o644, "archive_special_file"),
        ("good.py", 0o644, "archive_duplicate"),
        ("GOOD.py", 0o644, "archive_case_collision"),
        ("good.py/x", 0o644, "archive_duplicate"),
        ("a/" * 60 + "x", 0o644, "archive_too_deep"),
        ("x" * 3000, 0o644, "archive_path_too_long"),
        ("json.py", 0o644, "wheel_shadows"),
        ("os/__init__.py", 0o644, "wheel_shadows"),
        ("encodings/idna.py", 0o644, "wheel_shadows"),
        ("Typing.py", 0o644, "wheel_shadows"),
        ("_socket.cpython-311-x86_64-linux-gnu.so", 0o755, "wheel_shadows"),
        ("kdskills/__init__.py", 0o644, "wheel_shadows"),
        ("kdskills_runtime/py_code_exec_entry.py", 0o644, "wheel_shadows"),
        ("good-1.0.data/purelib/subprocess.py", 0o644, "wheel_shadows"),
        ("good-1.0.data/scripts/python3", 0o755, "wheel_shadows"),
        ("good-1.0.data/data/bin/bash", 0o755, "wheel_shadows"),
        ("good-1.0.data/purelib/good.py", 0o644, "wheel"),
        ("good-1.0.data/elsewhere/x", 0o644, "wheel"),
        ("unlisted.py", 0o644, "wheel"),
        ("other-1.0.dist-info/METADATA", 0o644, "wheel"),
    ],
)
def test_hostile_entries_are_refused(tmp_path, name, mode, rule):
    """An entry that leads outside, is no file, comes twice, stands in for Python's own, or is not in RECORD is refused."""
    error = refused(wheel_bytes("good", change=entry(name, mode=mode)), tmp_path)
    assert error.details["rule"] == rule, error


def test_amounts_are_bounded(tmp_path, monkeypatch):
    """Too many entries, too many bytes of a file or of all, and content that is nearly nothing packed are refused."""
    bomb = wheel_bytes("good", files={"good.py": b"\0" * (8 << 20)})
    assert refused(bomb, tmp_path / "ratio").details["rule"] == "archive_ratio"
    monkeypatch.setattr(wheels, "MAX_FILE", 1 << 20)
    assert refused(bomb, tmp_path / "file").details["rule"] == "archive_unpacked_too_large"
    small = wheels.ArchiveLimits(archive_bytes=1 << 20, unpacked_bytes=100, entries=3, directory_bytes=1 << 20)
    monkeypatch.setattr(wheels, "WHEEL_LIMITS", small)
    assert refused(wheel_bytes("good"), tmp_path / "count").details["rule"] == "archive_too_many_entries"
    monkeypatch.setattr(wheels, "WHEEL_LIMITS", wheels.ArchiveLimits(unpacked_bytes=100))
    assert refused(wheel_bytes("good"), tmp_path / "total").details["rule"] == "archive_unpacked_too_large"


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff\xfe",
        b'"unclosed',
        b"good.py,,\n",
        b"good.py,md5=1B2M2Y8AsgTpgAmY7PhCfg,0\n",
        b"good.py,sha256=!!!,1\n",
        record_of({"good.py": b"another"}, INFO),
    ],
)
def test_a_record_that_does_not_hold_is_refused(tmp_path, record):
    """A RECORD that is missing, unreadable, weak, or has other digests than the files is refused."""
    refused(wheel_bytes("good", record=record), tmp_path)


@pytest.mark.parametrize(
    "points",
    [
        "[console_scripts]\n../../evil = good:run\n",
        "[console_scripts]\n-rf = good:run\n",
        "[console_scripts]\nx = good:run();import os\n",
        "[console_scripts]\nx = good\n",
        "[console_scripts]\nx = os:system('id')\n",
        "[console_scripts]\npython3 = good:run\n",
        "[console_scripts\n",
    ],
)
def test_hostile_entry_points_are_refused(tmp_path, points):
    """A program whose name is a path, an option or the sandbox's own, or whose target is no name, is not made."""
    refused(wheel_bytes("good", entry_points=points), tmp_path)


@pytest.mark.parametrize(
    ("data", "file"),
    [
        (b"", FILE),
        (b"<html>not found</html>", FILE),
        (wheel_bytes("good")[:-40], FILE),
        (wheel_bytes("other"), FILE),
        (wheel_bytes("good", "2.0"), FILE),
        (wheel_bytes("good"), "good-1.0.tar.gz"),
    ],
    ids=["empty", "page", "cut", "package", "version", "kind"],
)
def test_what_is_another_thing_is_refused(tmp_path, data, file):
    """Bytes that are no zip, and wheels of another package or version than their name says, are refused."""
    refused(data, tmp_path, file)


@given(st.binary(max_size=400), st.integers(0, 600))
def test_damaged_wheels_end_in_a_refusal_or_the_same_files(tmp_path_factory, noise, position):
    """Bytes overwritten anywhere in a wheel end in a refusal, or leave exactly what the wheel had."""
    data = bytearray(wheel_bytes("good"))
    data[position : position + len(noise)] = noise
    folder = tmp_path_factory.mktemp("damaged")
    try:
        into = unpacked(bytes(data), folder)
    except WheelRefused:
        return
    assert (into / "python/good.py").read_bytes() == b"VERSION = '1.0'\n"
    assert sorted(path.name for path in folder.iterdir()) == ["into", "wheel"]


def test_a_wheel_of_format_two_is_not_guessed_at(tmp_path):
    """A wheel whose format is not understood is refused."""
    data = wheel_bytes("good")
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(changed, "w") as new:
        contents = {
            name: old.read(name).replace(b"Wheel-Version: 1.0", b"Wheel-Version: 2.0") for name in old.namelist()
        }
        contents[f"{INFO}/RECORD"] = record_of({n: c for n, c in contents.items() if not n.endswith("RECORD")}, INFO)
        for name, content in contents.items():
            new.writestr(zipfile.ZipInfo(name), content)
    assert "format" in refused(changed.getvalue(), tmp_path).message
