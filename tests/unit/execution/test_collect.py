"""Collecting outputs from a folder an untrusted program filled."""

import hashlib
import os
import socket

import pytest

from kdskills.execution.check import compile_glob
from kdskills.execution.request import Limits
from kdskills.execution.stage import collect


@pytest.fixture
def gather(tmp_path):
    """Collect from tmp_path; return ({path: bytes}, {path: code})."""

    def run(*patterns, **limits):
        fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            found = collect(fd, [compile_glob(pattern) for pattern in patterns], Limits(**limits))
        finally:
            os.close(fd)
        return {item.path: item.content for item in found.artifacts}, {item.path: item.code for item in found.errors}

    return run


def test_files_come_with_size_hash_and_masked_mode(tmp_path):
    """An artifact says what it is; setuid and group bits are gone."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.csv").write_bytes(b"1,2")
    (tmp_path / "a/x.csv").chmod(0o6777)
    fd = os.open(tmp_path, os.O_RDONLY)
    found = collect(fd, [compile_glob("**/*.csv")], Limits())
    os.close(fd)
    (item,) = found.artifacts
    assert (item.path, item.size, oct(item.mode)) == ("a/x.csv", 3, "0o755")
    assert item.sha256 == hashlib.sha256(b"1,2").hexdigest()


def test_links_are_named_not_followed(tmp_path, gather):
    """A symlinked output, file or folder, is refused."""
    (tmp_path / "out.txt").symlink_to("/etc/passwd")
    (tmp_path / "dir").symlink_to("/etc")
    files, errors = gather("out.txt", "dir/hostname")
    assert files == {}
    assert errors == {"out.txt": "link", "dir/hostname": "link"}


def test_special_files_do_not_hang(tmp_path, gather):
    """FIFOs and sockets are named at once."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "sock"))
        files, errors = gather("*")
    assert (files, errors) == ({}, {"pipe": "not_regular", "sock": "not_regular"})


def test_missing_outputs_are_named(gather):
    """A declared output nothing came for is an error of its own."""
    assert gather("report.html", "*.csv") == ({}, {"report.html": "missing", "*.csv": "missing"})


def test_caps_on_size_and_count(tmp_path, gather):
    """Sizes and counts are capped while reading; sparse giants too."""
    for name in "abc":
        (tmp_path / name).write_bytes(b"x" * 10)
    assert gather("*", output_files=2)[1] == {"c": "too_many"}
    assert gather("*", output_size=25) == ({"a": b"x" * 10, "b": b"x" * 10}, {"c": "too_large"})
    os.truncate(tmp_path / "a", 1 << 40)
    assert gather("a", output_size=1000) == ({}, {"a": "too_large"})


def test_floods_of_errors_are_cut(tmp_path, gather):
    """A flood of refused outputs leaves a bounded number of errors."""
    for number in range(200):
        (tmp_path / f"{number:04}").symlink_to("x")
    _, errors = gather("*")
    assert len(errors) == 64


def test_deep_trees_are_cut(tmp_path, gather):
    """A tree deeper than the bound is named."""
    deep = tmp_path
    for _ in range(40):
        deep /= "d"
    deep.mkdir(parents=True)
    _, errors = gather("**/x")
    assert "too_deep" in errors.values()


def test_names_that_are_no_text_are_told(tmp_path, gather):
    """A name that is no UTF-8 does not break collecting; it is named, escaped, and its file left behind."""
    (tmp_path / "ok").write_bytes(b"1")
    fd = os.open(os.fsencode(tmp_path) + b"/\xff\xfe", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"2")
    os.close(fd)
    assert gather("*") == ({"ok": b"1"}, {"\\xff\\xfe": "bad_name"})


def test_unwanted_files_are_left_alone(tmp_path, gather):
    """Only declared outputs are read."""
    (tmp_path / "secret").write_bytes(b"s")
    assert gather() == ({}, {})
    assert gather("*.txt")[0] == {}
