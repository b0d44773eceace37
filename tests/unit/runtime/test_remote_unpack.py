"""Unpacking what was delivered: only bytes with the digest, only plain things, all or nothing."""

from __future__ import annotations

import hashlib
import io
import tarfile

import pytest

from kdskills_runtime.remote_unpack import unpack


@pytest.fixture
def place(tmp_path):
    """Return the folder to unpack below."""
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def archive(tmp_path, *members: tuple[str, bytes, bytes | str]):
    """Write a tar of (name, type, content or link target) and return its path and digest."""
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind, value in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o4755
            if isinstance(value, str):
                info.linkname = value
                tar.addfile(info)
            else:
                info.size = len(value)
                tar.addfile(info, io.BytesIO(value))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def test_files_folders_and_links_arrive(tmp_path, place):
    """Contents and links arrive, modes are masked, folders above files are made."""
    members = [("a/b/f", tarfile.REGTYPE, b"x"), ("l", tarfile.SYMTYPE, "a/b/f"), ("d", tarfile.DIRTYPE, "")]
    unpack(*archive(tmp_path, *members), place / "out")
    found = place / "out"
    assert ((found / "l").read_bytes(), (found / "d").is_dir()) == (b"x", True)
    assert (found / "a/b/f").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize(
    "member",
    [
        ("../up", tarfile.REGTYPE, b"x"),
        ("/abs", tarfile.REGTYPE, b"x"),
        ("a/../../up", tarfile.REGTYPE, b"x"),
        ("fifo", tarfile.FIFOTYPE, ""),
        ("dev", tarfile.CHRTYPE, ""),
        ("hard", tarfile.LNKTYPE, "/etc/passwd"),
    ],
    ids=range(6),
)
def test_anything_else_is_refused_whole(tmp_path, place, member):
    """Paths that lead out, devices and hard links: nothing of the archive is left."""
    path, digest = archive(tmp_path, ("good", tarfile.REGTYPE, b"x"), member)
    with pytest.raises(ValueError, match=r"clean path|neither folder"):
        unpack(path, digest, place / "out")
    assert list(place.iterdir()) == []


def test_nothing_is_written_through_a_link(tmp_path, place):
    """A link and a file below its name cannot both be: the file is never written where the link leads."""
    outside = tmp_path / "outside"
    outside.mkdir()
    path, digest = archive(tmp_path, ("l", tarfile.SYMTYPE, str(outside)), ("l/f", tarfile.REGTYPE, b"x"))
    with pytest.raises(FileExistsError):
        unpack(path, digest, place / "out")
    assert (list(outside.iterdir()), list(place.iterdir())) == ([], [])


def test_other_bytes_are_refused(tmp_path, place):
    """One byte more, and the archive is not the one that was sent."""
    path, digest = archive(tmp_path, ("f", tarfile.REGTYPE, b"x"))
    with path.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match=f"not {digest}"):
        unpack(path, digest, place / "out")
    assert list(place.iterdir()) == []
