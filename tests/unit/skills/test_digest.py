"""Digests say exactly which bytes were there."""

import hashlib
import json
import os

import pytest

from kdskills.errors import FileRefused
from kdskills.skills.safe_open import bytes_digest, rows_digest, tree_digest


def test_a_digest_is_sha256_with_its_prefix():
    """`sha256:` and 64 hex digits over the raw bytes."""
    assert "sha256:" + hashlib.sha256(b"abc").hexdigest() == bytes_digest(b"abc")


def test_a_tree_digest_is_what_the_specification_says(tmp_path):
    """The digest is taken over compact JSON of path, size and hex, by path bytes, links by their target."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "SKILL.md").write_bytes(b"one")
    (tmp_path / "scripts" / "ä.py").write_bytes(b"two!")
    (tmp_path / "scripts.txt").write_bytes(b"")
    (tmp_path / "link").symlink_to("scripts/ä.py")
    rows = [
        ["SKILL.md", 3, hashlib.sha256(b"one").hexdigest()],
        ["link", 0, "link:scripts/ä.py"],
        ["scripts.txt", 0, hashlib.sha256(b"").hexdigest()],
        ["scripts/ä.py", 4, hashlib.sha256(b"two!").hexdigest()],
    ]
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()
    assert "sha256:" + hashlib.sha256(text).hexdigest() == tree_digest(tmp_path)
    assert tree_digest(tmp_path) == tree_digest(tmp_path.parent, tmp_path.name)


@pytest.mark.parametrize("change", ["content", "name", "add", "remove", "link"])
def test_any_change_changes_the_tree_digest(tmp_path, change):
    """Content, names, presence and link targets all count."""
    (tmp_path / "SKILL.md").write_bytes(b"one")
    (tmp_path / "data").write_bytes(b"two")
    (tmp_path / "link").symlink_to("data")
    before = tree_digest(tmp_path)
    if change == "content":
        (tmp_path / "data").write_bytes(b"owt")
    elif change == "name":
        (tmp_path / "data").rename(tmp_path / "atad")
    elif change == "add":
        (tmp_path / ".new").write_bytes(b"")
    elif change == "remove":
        (tmp_path / "data").unlink()
    else:
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("/data")
    assert before != tree_digest(tmp_path)


def test_modification_times_and_empty_folders_do_not_count(tmp_path):
    """Equal files give equal digests, wherever and whenever they were written."""
    (tmp_path / "SKILL.md").write_bytes(b"one")
    before = tree_digest(tmp_path)
    os.utime(tmp_path / "SKILL.md", (1, 1))
    (tmp_path / "empty").mkdir()
    assert before == tree_digest(tmp_path)


def test_names_that_are_no_utf8_count_as_their_bytes(tmp_path):
    """A name of any bytes has a digest, and two such names differ."""
    (tmp_path / os.fsdecode(b"\xe9")).write_bytes(b"")
    one = tree_digest(tmp_path)
    (tmp_path / os.fsdecode(b"\xe9")).rename(tmp_path / os.fsdecode(b"\xe8"))
    assert one != tree_digest(tmp_path)


def test_a_fifo_in_a_tree_neither_blocks_nor_goes_unseen(tmp_path):
    """What is no regular file counts by its kind."""
    before = tree_digest(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert before != tree_digest(tmp_path)


def test_a_missing_tree_is_refused(tmp_path):
    """Nothing there is an error, not the digest of nothing."""
    with pytest.raises(FileRefused):
        tree_digest(tmp_path / "none")


def test_rows_are_told_apart():
    """Rows cannot be shifted into one another."""
    assert rows_digest([["a", 1], ["b", 2]]) != rows_digest([["a", 1, "b", 2]])
