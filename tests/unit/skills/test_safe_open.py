"""Files below a root are opened part by part, and never through a link."""

import os
import socket
import threading
from pathlib import Path

import pytest

from kdskills.errors import FileRefused
from kdskills.skills.private_files import replace_file
from kdskills.skills.safe_open import (
    MAX_DEPTH,
    open_file,
    open_file_at,
    read_descriptor,
    read_file,
    split_relative,
    walk_tree,
)


def _code(call) -> str:
    with pytest.raises(FileRefused) as caught:
        call()
    return caught.value.code


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file.txt").write_bytes(b"inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file.txt").write_bytes(b"outside")
    return folder


def test_a_plain_file_gives_its_bytes_and_facts(root):
    """A regular file is read whole, with the facts of the very file that was read."""
    got = read_file(root, "a/b/file.txt", limit=6)
    assert (got.data, got.stat.st_size) == (b"inside", 6)
    assert (root / "a/b/file.txt").stat().st_ino == got.stat.st_ino


@pytest.mark.parametrize("path", ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a/./b", "a\0b", "a/.."])
def test_paths_that_are_not_plain_are_refused(root, path):
    """Empty, absolute, dotted and NUL paths never reach the system."""
    assert _code(lambda: read_file(root, path, limit=10)) == "path_unsafe"


def test_a_path_of_absurd_depth_is_refused():
    """Depth is bounded before anything is opened."""
    assert _code(lambda: split_relative("/".join(["x"] * (2 * MAX_DEPTH + 1)))) == "path_unsafe"


def test_a_linked_file_is_refused_even_inside_the_root(root):
    """A link is refused wherever it leads."""
    (root / "link.txt").symlink_to(root / "a/b/file.txt")
    (root / "out.txt").symlink_to(root.parent / "outside/file.txt")
    assert [_code(lambda n=n: read_file(root, n, limit=10)) for n in ("link.txt", "out.txt")] == ["symlink", "symlink"]


def test_a_linked_folder_on_the_way_is_refused(root):
    """No part of the way may be a link."""
    (root / "out").symlink_to(root.parent / "outside")
    (root / "in").symlink_to(root / "a")
    assert _code(lambda: read_file(root, "out/file.txt", limit=10)) == "symlink"
    assert _code(lambda: read_file(root, "in/b/file.txt", limit=10)) == "symlink"


def test_the_root_itself_may_be_a_link(root):
    """The root is resolved when it is opened."""
    alias = root.parent / "alias"
    alias.symlink_to(root)
    assert read_file(alias, "a/b/file.txt", limit=10).data == b"inside"


def test_a_fifo_does_not_block(root):
    """A FIFO nobody writes to is refused at once."""
    os.mkfifo(root / "pipe")
    assert _code(lambda: read_file(root, "pipe", limit=10)) == "not_regular"


def test_sockets_devices_and_folders_are_refused(root, tmp_path, monkeypatch):
    """Only regular files are read."""
    monkeypatch.chdir(root)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock")
        assert _code(lambda: read_file(root, "sock", limit=10)) == "not_regular"
    assert _code(lambda: read_file(root, "a", limit=10)) == "not_regular"
    assert _code(lambda: read_file("/dev", "zero", limit=10)) == "not_regular"


def test_absent_files_folders_and_roots_are_named(root):
    """What is not there is told apart from what is no folder."""
    assert _code(lambda: read_file(root, "a/none", limit=10)) == "file_missing"
    assert _code(lambda: read_file(root, "none/file", limit=10)) == "file_missing"
    assert _code(lambda: read_file(root, "a/b/file.txt/x", limit=10)) == "not_a_directory"
    assert _code(lambda: read_file(root / "none", "x", limit=10)) == "file_missing"


def test_the_limit_is_exact(root):
    """One byte more than the limit is refused, the limit itself is read."""
    assert _code(lambda: read_file(root, "a/b/file.txt", limit=5)) == "too_large"
    assert read_file(root, "a/b/file.txt", limit=6).data == b"inside"


def test_a_file_whose_size_is_unknown_is_read_within_the_limit():
    """Files of the proc file system say size 0 and still have content, which the limit bounds."""
    assert read_file("/proc/self", "status", limit=65536).data != b""
    assert _code(lambda: read_file("/proc/self", "status", limit=10)) == "too_large"


def test_open_file_streams_and_closes(root):
    """A file can be read in pieces; nothing stays open afterwards."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with open_file(root, "a/b/file.txt") as stream:
        assert [stream.read(3), stream.read(3)] == [b"ins", b"ide"]
    for name in ("none", "a/b/file.txt/x", "a"):
        _code(lambda name=name: read_file(root, name, limit=10))
    assert before == len(list(Path("/proc/self/fd").iterdir()))


def test_a_folder_swapped_for_a_link_never_shows_the_outside(root):
    """While another thread swaps a folder for a link, a read gives the inside or a refusal, never the outside."""
    stop = threading.Event()

    def swap():
        while not stop.is_set():
            (root / "a").rename(root / "kept")
            (root / "a").symlink_to(root.parent)
            (root / "a").unlink()
            (root / "kept").rename(root / "a")

    (root.parent / "b").mkdir()
    (root.parent / "b" / "file.txt").write_bytes(b"outside")
    thread = threading.Thread(target=swap)
    thread.start()
    seen = set()
    try:
        for _ in range(2000):
            try:
                seen.add(read_file(root, "a/b/file.txt", limit=100).data)
            except FileRefused as refusal:
                seen.add(refusal.code)
    finally:
        stop.set()
        thread.join()
    assert seen <= {b"inside", "symlink", "file_missing", "not_a_directory"}


def test_a_tree_lists_every_file_by_path_bytes(root):
    """Dot files and links are listed, folders and order follow the bytes of the whole path."""
    (root / "a-b").write_bytes(b"1")
    (root / ".hidden").write_bytes(b"22")
    (root / "a" / "z").symlink_to("/etc/hostname")
    (root / "folder-link").symlink_to(root.parent)
    os.mkfifo(root / "pipe")
    found = walk_tree(root)
    assert [entry.path for entry in found] == [".hidden", "a-b", "a/b/file.txt", "a/z", "folder-link", "pipe"]
    assert [entry.kind for entry in found] == ["file", "file", "file", "link", "link", "other"]
    assert (2, "/etc/hostname", str(root.parent)) == (found[0].size, found[3].target, found[4].target)


def test_a_tree_below_is_reached_without_links(root):
    """The way to a tree is walked like the way to a file."""
    (root / "link").symlink_to(root / "a")
    assert [entry.path for entry in walk_tree(root, "a/b")] == ["file.txt"]
    assert _code(lambda: walk_tree(root, "link/b")) == "symlink"
    assert _code(lambda: walk_tree(root / "none")) == "file_missing"


def test_a_tree_too_deep_is_refused(tmp_path):
    """A tree without end costs bounded descriptors and an error."""
    deep = tmp_path.joinpath(*["d"] * (MAX_DEPTH + 2))
    deep.mkdir(parents=True)
    assert _code(lambda: walk_tree(tmp_path)) == "too_deep"


def test_names_that_are_no_utf8_are_listed(tmp_path):
    """Any name the system allows is listed and can be read."""
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_bytes(b"x")
    assert [name] == [entry.path for entry in walk_tree(tmp_path)]
    assert read_file(tmp_path, name, limit=1).data == b"x"


@pytest.mark.parametrize(("kind", "code"), [("link", "symlink"), ("fifo", "not_regular"), ("folder", "not_regular")])
def test_a_file_swapped_after_it_was_looked_at_is_still_refused(root, kind, code):
    """What became a link is not followed, what became a FIFO does not block: opening itself decides, not the look before."""
    place = root / "swapped"
    if kind == "link":
        place.symlink_to(root.parent / "outside" / "file.txt")
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        place.mkdir()
    parent = os.open(root, os.O_RDONLY)
    caught: list[str] = []

    def read() -> None:
        try:
            descriptor = open_file_at(parent, "swapped", "swapped", listed=True)
            try:
                read_descriptor(descriptor, "swapped", 100)
            finally:
                os.close(descriptor)
        except FileRefused as refusal:
            caught.append(refusal.code)

    worker = threading.Thread(target=read, daemon=True)
    worker.start()
    worker.join(5)
    os.close(parent)
    assert (worker.is_alive(), caught) == (False, [code])


def test_a_tree_is_listed_while_others_replace_its_files(tmp_path):
    """Files and folders that go between being named and being looked at are left out; the walk goes on."""
    (tmp_path / "a.md").write_text("a")
    (tmp_path / "z.md").write_text("z")
    stopped = threading.Event()

    def change() -> None:
        while not stopped.is_set():
            replace_file(tmp_path / "a.md", b"b")
            (tmp_path / "folder").mkdir()
            (tmp_path / "folder").rmdir()

    writer = threading.Thread(target=change)
    writer.start()
    try:
        for _ in range(1500):
            listed = {entry.path for entry in walk_tree(tmp_path)}
            assert "z.md" in listed
    finally:
        stopped.set()
        writer.join()
