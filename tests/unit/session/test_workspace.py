"""The turn's files: bounded copies in, safe writes back."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kdskills.errors import FileRefused, ToolCallRefused
from kdskills.execution import Artifact, Limits
from kdskills.execution.stage import read_inputs
from kdskills.session.workspace import MAX_FILE, MAX_FILES, FolderWorkspace, media_type


@pytest.fixture
def work(tmp_path: Path) -> FolderWorkspace:
    """A turn folder with a read-only mount and one input."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "rows.csv").write_text("a\n")
    made = FolderWorkspace(tmp_path / "turn", mounts={"data": data}, protected={"in.txt"})
    (made.root / "in.txt").write_text("input")
    return made


def refused(call, *arguments) -> ToolCallRefused:
    with pytest.raises(ToolCallRefused) as caught:
        call(*arguments)
    return caught.value


def test_write_modes(work):
    """Create wants a new file, replace and append take either."""
    assert work.write("a/b.txt", b"one").path == "a/b.txt"
    assert refused(work.write, "a/b.txt", b"two").code == "invalid_argument"
    work.write("a/b.txt", b"two", "replace")
    assert work.write("./a//b.txt", b"!", "append").size == 4
    work.write("new.txt", b"x", "append")
    assert (work.read("a/b.txt"), work.read("new.txt")) == (b"two!", b"x")
    assert sorted(entry.path for entry in work.files()) == ["a/b.txt", "in.txt", "new.txt"]


@pytest.mark.parametrize("path", ["a\x1b[2J.txt", "a\nb.txt", "a\u202etxt.exe"])
def test_names_that_fool_are_not_written(work, path):
    """A model's file is named in plain text, as what a run leaves is."""
    assert refused(work.write, path, b"x").code == "invalid_argument"
    assert [entry.path for entry in work.files()] == ["in.txt"]


@pytest.mark.parametrize(
    "path", ["in.txt", "data/rows.csv", "data/new.csv", "data", "../x", "/tmp/x", "a\\b", "a/../in.txt"]
)
def test_read_only_and_hostile_paths(work, path):
    """Inputs, mounts and forms never followed are path_denied in every mode."""
    for mode in ("create", "replace", "append"):
        assert refused(work.write, path, b"x", mode).code == "path_denied"
    assert (work.root / "in.txt").read_text() == "input"


def test_bounds(work):
    """8 MiB a file and 256 files a turn; what is over leaves nothing behind."""
    assert refused(work.write, "big", b"x" * (MAX_FILE + 1)).code == "too_large"
    for number in range(MAX_FILES - 1):
        (work.root / f"f{number}").write_bytes(b"")
    assert refused(work.write, "one-more", b"x").code == "too_large"
    work.write("f0", b"replaced", "replace")
    assert not (work.root / "big").exists()
    assert [path.name for path in work.root.iterdir() if path.name.startswith(".")] == []


def test_total_bound(work):
    """64 MiB a turn in all."""
    for number in range(8):
        with (work.root / f"f{number}").open("wb") as stream:
            stream.truncate(8 * 1024 * 1024 - 1)
    assert refused(work.write, "more", b"x" * 100).code == "too_large"
    (work.root / "f9").write_bytes(b"x" * 100)
    assert refused(work.inputs).code == "too_large"


@pytest.mark.parametrize("where", ["file", "folder"])
def test_planted_links(work, tmp_path, where):
    """A link planted in the turn folder is refused, and what it points to stays."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.txt").write_text("safe")
    if where == "file":
        (work.root / "x.txt").symlink_to(outside / "x.txt")
        path = "x.txt"
    else:
        (work.root / "sub").symlink_to(outside, target_is_directory=True)
        path = "sub/x.txt"
    for mode in ("create", "append", "replace"):
        error = refused(work.write, path, b"evil", mode)
        assert (error.code, error.details["reason"]) == ("path_denied", "symlink")
    with pytest.raises(FileRefused):
        work.read(path)
    assert (outside / "x.txt").read_text() == "safe"
    assert [item.path for item in work.inputs()] == ["data/rows.csv", "in.txt"]
    assert not work.has_folder("sub")


def test_a_pipe_is_no_input(work):
    """A FIFO is neither handed on nor opened."""
    os.mkfifo(work.root / "pipe")
    assert [item.path for item in work.inputs()] == ["data/rows.csv", "in.txt"]
    assert refused(work.write, "pipe", b"x", "append").code == "not_a_file"


def test_a_file_where_a_folder_is_wanted(work):
    """Writing below a file, or over a folder, is an answer and no crash."""
    work.write("a/b", b"x")
    assert refused(work.write, "in.txt/x", b"x").code == "not_a_file"
    assert refused(work.write, "a", b"x", "replace").code == "not_a_file"


def test_collect(work):
    """New and changed artifacts are kept, equal ones not told, unsafe ones dropped with a reason."""
    work.write("same.txt", b"same")
    digest = "0" * 64
    artifacts = [
        Artifact("out/new.txt", 3, digest, 0o777, b"new"),
        Artifact("same.txt", 4, "0967115f2813a3541eaef77de9d9d5773f1c0c04314b0bbfe4ff3b3b1c55b5d5", 0o644, b"same"),
        Artifact("../evil", 1, digest, 0o644, b"x"),
        Artifact("in.txt", 1, digest, 0o644, b"x"),
        Artifact("big", MAX_FILE + 1, digest, 0o644, b"x" * (MAX_FILE + 1)),
    ]
    found = work.collect(artifacts)
    assert [item.path for item in found.files] == ["out/new.txt"]
    assert [path for path, _ in found.dropped] == ["../evil", "in.txt", "big"]
    assert (work.root / "out/new.txt").stat().st_mode & 0o777 == 0o644
    assert not (work.root.parent / "evil").exists()


def test_programs_stay_programs_and_removed_files_are_gone(work):
    """A later run may execute what a run made executable; on this host nothing is; inputs and mounts are not removed."""
    work.collect([Artifact("run.sh", 1, "0" * 64, 0o755, b"x"), Artifact("plain", 1, "0" * 64, 0o644, b"x")])
    assert {item.path: item.executable for item in work.inputs() if item.content.parent == work.root.absolute()} == {
        "in.txt": False, "plain": False, "run.sh": True,
    }  # fmt: skip
    assert (work.root / "run.sh").stat().st_mode & 0o777 == 0o644
    assert work.remove(["plain", "in.txt", "data/rows.csv", "never"]) == ("plain",)
    work.collect([Artifact("run.sh", 1, "0" * 64, 0o644, b"x")])
    assert [item.path for item in work.inputs() if item.executable] == []


def test_reading_a_mount(work):
    """Mounts are readable below their name, and folders there count."""
    assert work.read("data/rows.csv") == b"a\n"
    assert [work.has_folder(path) for path in (".", "data", "none", "in.txt", "data/none")] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("a.md", "text/markdown"),
        ("a.csv", "text/csv"),
        ("a.svg", "image/svg+xml"),
        ("a.tar.gz", "application/gzip"),
        ("a.unknownsuffix", "application/octet-stream"),
        ("Makefile", "application/octet-stream"),
    ],
)
def test_media_types(path, kind):
    """Types follow the suffix, not the host's tables."""
    assert media_type(path) == kind


def test_threads_append_to_one_file(work):
    """Nothing of six writers is lost, and the file is always whole."""
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda number: work.write("log.txt", b"%03d\n" % number, "append"), range(120)))
    lines = work.read("log.txt").split()
    assert sorted(lines) == [b"%03d" % number for number in range(120)]


def test_a_run_never_gets_a_file_that_is_being_written(work):
    """Inputs listed while other runs' files come in name whole files only, and each can be read."""
    over, seen = threading.Event(), set()
    contents = [bytes([65 + number]) * 50_000 for number in range(4)]

    def collect(number):
        for turn in range(60):
            data = contents[(number + turn) % 4]
            digest = hashlib.sha256(data).hexdigest()
            work.collect([Artifact(f"out-{number}/made.bin", len(data), digest, 0o644, data)])

    def list_inputs():
        while not over.is_set():
            for path, data in read_inputs(work.inputs(), Limits()):
                seen.add(path)
                assert not path.startswith("out-") or data in contents

    with ThreadPoolExecutor(4) as threads:
        looking = [threads.submit(list_inputs) for _ in range(2)]
        writing = [threads.submit(collect, number) for number in range(2)]
        try:
            for done in writing:
                done.result()
        finally:
            over.set()
        for done in looking:
            done.result()
    assert seen <= {"in.txt", "data/rows.csv", "out-0/made.bin", "out-1/made.bin"}
