"""Files, folders and databases for this user only, whatever the umask."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kdskills.skills.private_files import (
    close_to_others,
    make_folder,
    open_private,
    private_database,
    private_folder,
    write_private,
)


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=lambda value: f"umask-{value:03o}", autouse=True)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every promise holds under each of these."""
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    """Return the mode bits of a path."""
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_private_down_from_the_first_new_one(tmp_path: Path) -> None:
    """Every folder that is made has mode 0700, parents included; what was there keeps its own."""
    tmp_path.chmod(0o755)
    make_folder(tmp_path / "a" / "b")
    assert [mode(path) for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")] == [0o755, 0o700, 0o700]


def test_a_wider_folder_is_closed_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of ours that others could read is narrowed, with its contents where asked for, and the log says so once."""
    top = tmp_path / "top"
    (top / "deep").mkdir(parents=True)
    (top / "deep" / "run").write_text("x")
    for path, bits in ((top, 0o755), (top / "deep", 0o755), (top / "deep" / "run", 0o755)):
        path.chmod(bits)
    with caplog.at_level(logging.WARNING):
        private_folder(top, contents=True)
        private_folder(top, contents=True)
    assert [mode(path) for path in (top, top / "deep", top / "deep" / "run")] == [0o700] * 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{top} was open to other users (mode 0755) and is closed to them now"
    ]


def test_passing_is_no_reading(tmp_path: Path) -> None:
    """A folder that others may only pass stays as it is."""
    tmp_path.chmod(0o711)
    assert not close_to_others(tmp_path)
    assert mode(tmp_path) == 0o711


def test_links_are_left_alone(tmp_path: Path) -> None:
    """What a link leads to is not ours to narrow, and is not opened in its place."""
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o644)
    (tmp_path / "link").symlink_to("file")
    assert not close_to_others(tmp_path / "link")
    with pytest.raises(OSError, match="symbolic"):
        open_private(tmp_path / "link", "ab")
    assert mode(tmp_path / "file") == 0o644


def test_files_are_made_and_mended(tmp_path: Path) -> None:
    """A new file has mode 0600, a wider one gets it before anything is written."""
    (tmp_path / "old").touch()
    (tmp_path / "old").chmod(0o666)
    for name in ("old", "new"):
        with open_private(tmp_path / name, "a", encoding="utf-8") as stream:
            stream.write("1")
        write_private(tmp_path / name, "2")
    assert [(mode(tmp_path / name), (tmp_path / name).read_text()) for name in ("old", "new")] == [(0o600, "2")] * 2


def test_a_database_and_what_lies_beside_it(tmp_path: Path) -> None:
    """The file is there before SQLite opens it, so that the write-ahead log gets its mode; wide ones are all narrowed."""
    path = tmp_path / "x.db"
    for _ in range(2):
        private_database(path)
        with closing(sqlite3.connect(path)) as link:
            link.execute("PRAGMA journal_mode=WAL")
            link.execute("CREATE TABLE IF NOT EXISTS t (x)")
            link.commit()
            assert {child.name: mode(child) for child in tmp_path.iterdir()} == dict.fromkeys(
                ("x.db", "x.db-wal", "x.db-shm"), 384
            )
            for child in tmp_path.iterdir():
                child.chmod(0o644)
            private_database(path)
            assert {mode(child) for child in tmp_path.iterdir()} == {0o600}
            path.chmod(0o644)


def test_a_database_without_a_folder(tmp_path: Path) -> None:
    """The folder is the caller's to make: the system's own error says that it is not there."""
    with pytest.raises(FileNotFoundError):
        private_database(tmp_path / "none" / "x.db")


@pytest.mark.parametrize(("inside", "reason"), [("", "exists"), ("folder", "Not a directory")])
def test_what_is_in_the_way_is_told_as_the_system_does(tmp_path: Path, inside: str, reason: str) -> None:
    """A file in a folder's place, or in that of its parent, is an error with the system's own words."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=reason):
        make_folder(tmp_path / "file" / inside)
