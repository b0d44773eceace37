"""Artifacts are the same bytes for the same files, and a site on disk is whole at every moment."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdskills.errors import FileRefused
from kdskills.skills.archives import ArchiveRefused, unpack_skill
from kdskills.skills.safe_open import bytes_digest, read_tree, version_of
from kdskills.supply.index import (
    SiteEntry,
    artifact_url,
    fetch_archive,
    read_index,
    write_artifact,
    write_site,
)

HEAD = b"---\nname: brief\ndescription: One page.\n---\n\nRead.\n"
parts = st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=12)
trees = st.dictionaries(st.lists(parts, min_size=1, max_size=4).map("/".join), st.binary(max_size=300), max_size=6)


def put(folder: Path, files: dict[str, bytes], mode: int = 0o644) -> Path:
    """Write a skill with *files* beside its SKILL.md, in the order given."""
    for path, data in {**files, "SKILL.md": HEAD}.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(mode)
        os.utime(file, (len(path), mode))
    return folder


def artifact(folder: Path) -> tuple[str, bytes]:
    """Return kind and bytes of the artifact of a skill."""
    out = io.BytesIO()
    kind, files = write_artifact(folder, out)
    assert files == read_tree(folder)
    return kind, out.getvalue()


@settings(max_examples=20)
@given(trees)
def test_an_artifact_is_its_files_and_nothing_else(files: dict[str, bytes]) -> None:
    """Order, times, umask and the folder's name do not count; what is fetched unpacks to the files that were published."""
    with tempfile.TemporaryDirectory() as text:
        top = Path(text)
        try:
            first = put(top / "brief", files)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            return  # a file is also a folder
        try:
            kind, data = artifact(first)
        except ArchiveRefused:
            return  # paths that differ by case alone, and the like: nobody could unpack it
        assert kind == ("archive" if files else "skill-md")
        again = put(top / "other", dict(reversed(files.items())), 0o600)
        (again / "empty").mkdir(exist_ok=True)
        assert artifact(again) == (kind, data)
        entry = SiteEntry("brief", "One page.", kind, "https://a.net/x", bytes_digest(data))
        skill = unpack_skill(fetch_archive(entry, lambda url, limit: data, top), top / "out")
        assert skill.version == version_of(read_tree(first))


def test_an_execute_bit_is_part_of_an_artifact(tmp_path) -> None:
    """A program can be run where it is installed, and makes another artifact than a file with the same bytes."""
    folder = put(tmp_path / "brief", {"run.sh": b"#!/bin/sh\n"})
    plain = artifact(folder)
    (folder / "run.sh").chmod(0o755)
    assert artifact(folder) != plain
    (folder / "run.sh").unlink()
    (folder / "SKILL.md").chmod(0o755)
    assert artifact(folder)[0] == "archive"


def test_what_no_archive_may_hold_is_not_packed(tmp_path) -> None:
    """Links lead nowhere else, and what is refused on the way in never goes out."""
    linked = put(tmp_path / "linked", {})
    (linked / "secret").symlink_to("/etc/passwd")
    with pytest.raises(FileRefused):
        write_artifact(linked, io.BytesIO())
    for path in ("inner.zip", "a\\b", "/".join("abcdefghijklm")):
        with pytest.raises(ArchiveRefused):
            write_artifact(put(tmp_path / path.replace("/", "_"), {path: b"x"}), io.BytesIO())


def test_a_file_that_changes_while_it_is_packed_is_refused(tmp_path, monkeypatch) -> None:
    """The bytes of an archive are those that its checksums promise."""
    folder = put(tmp_path / "brief", {"data": b"x" * 1000})

    class Changing(io.BytesIO):
        def write(self, data) -> int:  # type: ignore[no-untyped-def]
            if b"data" in bytes(data):  # its header: the content comes next
                (folder / "data").write_bytes(b"y" * 1000)
            return super().write(data)

    with pytest.raises(FileRefused, match="changed while it was read"):
        write_artifact(folder, Changing())


def entries(*skills: tuple[str, bytes]) -> Iterator[tuple[SiteEntry, BinaryIO]]:
    """Yield entries of *skills* with their bytes."""
    for name, data in skills:
        digest = bytes_digest(data)
        yield SiteEntry(name, "d", "skill-md", artifact_url(name, "skill-md", digest), digest), io.BytesIO(data)


def checked(site: Path) -> dict[str, bytes]:
    """Return the skills of a site on disk, each as its index promises it, and nothing else lies there."""
    folder = site / ".well-known" / "agent-skills"
    url = "https://a.net/.well-known/agent-skills/index.json"
    listing = read_index((folder / "index.json").read_bytes(), url)
    assert listing.diagnostics == ()
    skills = {entry.name: (folder / entry.url.rpartition("/")[2]).read_bytes() for entry in listing.entries}
    assert {entry.name: entry.digest for entry in listing.entries} == {
        name: bytes_digest(data) for name, data in skills.items()
    }
    assert {path.name for path in folder.iterdir() if path.name[0] != "."} == {
        "index.json",
        *(entry.url.rpartition("/")[2] for entry in listing.entries),
    }
    return skills


def test_a_site_is_replaced_as_a_whole(tmp_path) -> None:
    """The next index names what is published now, what it no longer names is gone, and files of others stay."""
    write_site(tmp_path, entries(("a", b"1"), ("b", b"2")))
    foreign = tmp_path / ".well-known" / "security.txt"
    foreign.write_text("Contact: x")
    assert checked(tmp_path) == {"a": b"1", "b": b"2"}
    write_site(tmp_path, entries(("b", b"3")))
    assert checked(tmp_path) == {"b": b"3"}
    write_site(tmp_path, entries())
    assert checked(tmp_path) == {}
    assert foreign.exists()


def test_a_site_that_cannot_be_finished_is_as_before(tmp_path) -> None:
    """Whatever breaks off on the way, the index and its artifacts are those of before; the next time tidies up."""
    write_site(tmp_path, entries(("a", b"1")))

    def broken() -> Iterator[tuple[SiteEntry, BinaryIO]]:
        yield from entries(("a", b"2"), ("c", b"4"))
        raise OSError("the disk is gone")

    before = (tmp_path / ".well-known/agent-skills/index.json").read_bytes()
    with pytest.raises(OSError, match="gone"):
        write_site(tmp_path, broken())
    folder = tmp_path / ".well-known" / "agent-skills"
    assert (folder / "index.json").read_bytes() == before
    assert read_index(before, "https://a.net/index.json").entries[0].digest == bytes_digest(b"1")
    assert (folder / artifact_url("a", "skill-md", bytes_digest(b"1"))).read_bytes() == b"1"
    write_site(tmp_path, entries(("a", b"2")))
    assert checked(tmp_path) == {"a": b"2"}


def test_what_a_killed_run_left_goes_and_files_of_others_stay(tmp_path) -> None:
    """Files written aside by a run that was killed are removed the next time; what is not ours is not touched."""
    folder = write_site(tmp_path, entries(("a", b"1"))).parent
    url = artifact_url("b", "archive", bytes_digest(b"2"))
    left = [url, f".{url}.123.{'0' * 12}", f".index.json.7.{'a' * 12}"]
    foreign = [f"{url}.sig", "robots.txt", "b.zip"]
    for name in (*left, *foreign):
        (folder / name).write_bytes(b"x")
    write_site(tmp_path, entries(("a", b"1")))
    assert {path.name for path in folder.iterdir()}.isdisjoint(left)
    assert {path.name for path in folder.iterdir()} >= set(foreign)


def test_two_who_publish_at_once_leave_one_whole_site(tmp_path) -> None:
    """Whoever comes last is what is published, and every artifact it names is there."""
    sites = [[(name, bytes([number])) for name in "abcdef"[number % 3 :]] for number in range(12)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda skills: write_site(tmp_path, entries(*skills)), sites))
    assert checked(tmp_path) in [dict(skills) for skills in sites]


def test_files_of_a_site_can_be_read_by_its_web_server(tmp_path) -> None:
    """A web server of another account reads the files, whatever the umask."""
    before = os.umask(0o077)
    try:
        (tmp_path / "site").mkdir(mode=0o755)
        index = write_site(tmp_path / "site", entries(("a", b"1")))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in index.parent.iterdir() if path.name[0] != "."} == {0o644}
    assert index.parent.stat().st_mode & 0o005 == 0o005
    shutil.rmtree(tmp_path / "site")
