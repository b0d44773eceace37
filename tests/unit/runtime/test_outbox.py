"""Sending a dead program's outputs out of a container."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from kdskills.execution.check import compile_glob
from kdskills_runtime.outbox import matches, send_outputs

PART = st.sampled_from(["a", "b.txt", "*", "**", "?", "*.txt", "[ab]"])
NAME = st.sampled_from(["a", "b", "b.txt", "ab"])


def sent(folder, globs, max_files=10, max_bytes=1000):
    """Return (files by path, problems by path) that were sent."""
    out = io.BytesIO()
    send_outputs(out, str(folder), globs, max_files, max_bytes)
    data, files, problems = out.getvalue(), {}, {}
    while data:
        line, _, data = data.partition(b"\n")
        event = json.loads(line)
        if event["kind"] == "file":
            files[event["path"]], data = data[: event["size"]], data[event["size"] :]
        else:
            problems[event["path"]] = event["code"]
    return files, problems


@given(pattern=st.lists(PART, min_size=1, max_size=4), path=st.lists(NAME, min_size=1, max_size=4))
def test_patterns_mean_the_same_on_both_sides(pattern, path):
    """What is sent is what the host would take: both matchers agree."""
    assert matches(pattern, path) == compile_glob("/".join(pattern)).matches(tuple(path))


@given(pattern=st.lists(PART, min_size=1, max_size=4), path=st.lists(NAME, min_size=1, max_size=4))
def test_folders_with_matches_are_entered(pattern, path):
    """A folder is passed over only when nothing below it can match."""
    if matches(pattern, path):
        assert all(matches(pattern, path[:size], below=True) for size in range(1, len(path)))


def test_only_what_was_asked_for_is_sent(tmp_path):
    """Files that match come with their bytes, others do not."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "x.txt").write_bytes(b"1\n2")
    (tmp_path / "y.txt").write_bytes(b"")
    (tmp_path / "z.bin").write_bytes(b"no")
    assert sent(tmp_path, ["**/x.txt", "y.txt"]) == ({"deep/er/x.txt": b"1\n2", "y.txt": b""}, {})
    assert sent(tmp_path, []) == ({}, {})


def test_what_is_no_file_is_named(tmp_path):
    """Links, FIFOs and linked folders are never opened."""
    (tmp_path / "link.txt").symlink_to("/etc/passwd")
    (tmp_path / "folder").symlink_to("/etc")
    os.mkfifo(tmp_path / "fifo.txt")
    assert sent(tmp_path, ["*.txt", "folder/passwd"]) == (
        {},
        {"link.txt": "link", "fifo.txt": "not_regular", "folder": "link"},
    )


def test_caps_hold(tmp_path):
    """Files beyond the caps are named."""
    for name in "abc":
        (tmp_path / name).write_bytes(b"x" * 4)
    assert sent(tmp_path, ["*"], max_files=2) == ({"a": b"xxxx", "b": b"xxxx"}, {"c": "too_many"})
    assert sent(tmp_path, ["*"], max_bytes=6) == ({"a": b"xxxx"}, {"b": "too_large", "c": "too_large"})


def test_a_sparse_file_is_not_read(tmp_path):
    """The claimed size counts."""
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert sent(tmp_path, ["*"]) == ({}, {"sparse": "too_large"})


def test_bottomless_folders_end(tmp_path):
    """Depth has a bound."""
    here = tmp_path
    for _ in range(60):
        here = here / "d"
    here.mkdir(parents=True)
    assert sent(tmp_path, ["**"]) == ({}, {})


def test_a_folder_that_is_not_there_is_a_problem(tmp_path):
    """A workdir that cannot be opened is named, and nothing breaks."""
    assert sent(tmp_path / "absent", ["*"]) == ({}, {".": "unreadable"})


def test_names_that_are_not_text_survive(tmp_path):
    """Bytes that are no UTF-8 travel as lone surrogates; the host refuses or shows them."""
    fd = os.open(os.fsencode(tmp_path) + b"/\xff.txt", os.O_CREAT | os.O_WRONLY)
    os.close(fd)
    assert list(sent(tmp_path, ["*"])[0]) == ["\udcff.txt"]


def test_container_init_refuses_to_run_outside_a_container(repo):
    """It would KILL every process it may, so it makes sure of where it is."""
    init = repo / "runtime" / "kdskills_runtime" / "container_init.py"
    done = subprocess.run([sys.executable, "-I", str(init)], input=b"", capture_output=True)
    assert (done.returncode, b"nothing was run" in done.stderr) == (125, True)
