"""Good archives unpack to what they hold, and come out again the same."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.errors import FileRefused
from kdskills.skills import parse_skill
from kdskills.skills.archives import (
    ArchiveLimits,
    ArchiveRefused,
    read_tree,
    remove_tree,
    unpack_skill,
    version_of,
    write_archive,
)

SKILL = b"---\nname: brief\ndescription: Turns long material into one page.\n---\n\nRead, then write.\n"


def modes(folder: Path) -> dict[str, int]:
    """Return the permission bits of everything below *folder*."""
    return {p.relative_to(folder).as_posix(): p.stat().st_mode & 0o7777 for p in folder.rglob("*")}


def test_execute_bits_are_kept_and_other_modes_masked(zipped, item, brief, tmp_path) -> None:
    """A program can be run, nothing can be written, and no set-uid or sticky bit survives."""
    entries = [
        item("brief/run", b"#!/bin/sh\n", mode=0o104755),
        item("brief/any", b"x", mode=0o100001),
        item("brief/open", b"x", mode=0o107666),
        item("brief/none", b"x", attributes=0, made_by=0),
    ]
    found = unpack_skill(zipped(brief, *entries), tmp_path / "out")
    assert modes(found.folder) == {"SKILL.md": 0o400, "run": 0o500, "any": 0o500, "open": 0o400, "none": 0o400}
    assert found.folder.stat().st_mode & 0o777 == 0o500
    assert {f.path for f in found.files if f.executable} == {"run", "any"}


def test_what_a_mac_adds_is_left_out_with_a_note(zipped, item, brief, tmp_path) -> None:
    """`__MACOSX` and `.DS_Store` are no files of the skill, and one note names them."""
    junk = [
        item("__MACOSX/", mode=0),
        item("__MACOSX/brief/._SKILL.md", b"x"),
        item("brief/.DS_Store", b"x"),
        item("brief/__MACOSX/x", b"x"),
    ]
    found = unpack_skill(zipped(brief, *junk), tmp_path / "out")
    assert [file.path for file in found.files] == ["SKILL.md"]
    assert [(d.code, d.severity) for d in found.diagnostics] == [("archive_ignored", "info")]
    assert found.version == unpack_skill(zipped(brief), tmp_path / "plain").version


def test_a_skill_at_the_top_has_the_name_its_file_says(zipped, item, skill, tmp_path) -> None:
    """Without a root folder the name comes from the skill file, and the version is the same as with one."""
    top = unpack_skill(zipped(item("SKILL.md", skill), item("references/a.md", b"a")), tmp_path / "top")
    below = unpack_skill(zipped(item("brief/SKILL.md", skill), item("brief/references/a.md", b"a")), tmp_path / "below")
    assert (top.name, top.folder.name, top.version) == ("brief", "brief", below.version)


def test_the_version_is_that_of_the_content(zipped, item, skill, tmp_path) -> None:
    """Order, packing, times, folders, comments and data descriptors do not count; content and execute bits do."""
    plain = [item("brief/SKILL.md", skill), item("brief/a", b"a" * 50), item("brief/b/c", b"c" * 50)]
    packed = [
        item("brief/", mode=0),
        item("brief/b/", mode=0o040755),
        item("brief/b/c", b"c" * 50, method=8, descriptor=True),
        item("brief/a", b"a" * 50, method=8, time=777),
        item("brief/SKILL.md", skill, method=8, descriptor=True, mode=0o100600),
    ]
    first = unpack_skill(zipped(*plain), tmp_path / "1")
    second = unpack_skill(zipped(*packed, comment=b"hello"), tmp_path / "2")
    assert (first.version, first.files) == (second.version, second.files)
    other = unpack_skill(zipped(*plain[:2], item("brief/b/c", b"c" * 49 + b"d")), tmp_path / "3")
    runs = unpack_skill(zipped(*plain[:2], item("brief/b/c", b"c" * 50, mode=0o100755)), tmp_path / "4")
    assert len({first.version, other.version, runs.version}) == 3


def test_without_programs_the_version_is_the_tree_digest(zipped, item, brief, tmp_path) -> None:
    """The version of a skill nobody runs is the digest exports and mounts compare."""
    found = unpack_skill(zipped(brief, item("brief/a", b"a")), tmp_path / "out")
    parsed = parse_skill(found.folder)
    assert parsed.skill is not None
    assert found.version == parsed.skill.tree_digest() == version_of(read_tree(found.folder))


def test_findings_about_the_skill_come_along(zipped, item, skill, tmp_path) -> None:
    """Warnings about fields and companions are reported, and do not refuse."""
    odd = skill.replace(b"name: brief\n", b"name: brief\nfrobnicate: 1\n")
    found = unpack_skill(zipped(item("brief/SKILL.md", odd), item("brief/compact.md", b"\xff")), tmp_path / "out")
    assert {d.code for d in found.diagnostics} == {"unexpected_fields", "compact_invalid"}


def test_zips_of_other_programs(tmp_path) -> None:
    """What Python's own writer and the tool `zip` make is taken."""
    folder = tmp_path / "brief"
    (folder / "scripts").mkdir(parents=True)
    (folder / "SKILL.md").write_bytes(SKILL)
    (folder / "scripts" / "run.sh").write_text("#!/bin/sh\necho hello\n")
    (folder / "scripts" / "run.sh").chmod(0o755)
    made = tmp_path / "made.zip"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as out:
        for place in sorted(folder.rglob("*")):
            out.write(place, place.relative_to(tmp_path))
    found = unpack_skill(made, tmp_path / "out")
    assert found.files == read_tree(folder)


def test_bounds_are_exact(zipped, item, brief, tmp_path) -> None:
    """512 files, 12 parts and 255 bytes are taken; one more is not."""
    names = ["/".join(["d"] * 11 + ["f"]), "a" * 255, *(f"n{n}" for n in range(509))]
    many = [item(f"brief/{name}") for name in names]
    assert len(unpack_skill(zipped(brief, *many), tmp_path / "out").files) == 512
    small = ArchiveLimits(unpacked_bytes=len(SKILL) + 10, ratio=5)
    assert unpack_skill(zipped(brief, item("brief/x", b"x" * 10)), tmp_path / "fits", limits=small).files
    with pytest.raises(ArchiveRefused):
        unpack_skill(zipped(brief, item("brief/x", b"x" * 11)), tmp_path / "over", limits=small)


def test_the_writer_makes_what_every_reader_reads(zipped, item, brief, tmp_path) -> None:
    """Python's reader finds the same files, modes and checksums, whatever the folder's times."""
    entries = [item("brief/run", b"#!/bin/sh\n", mode=0o100755), item("brief/ü/a b", b"x" * 100_000)]
    found = unpack_skill(zipped(brief, *entries), tmp_path / "out")
    one, two = tmp_path / "one.zip", tmp_path / "two.zip"
    with one.open("wb") as out:
        write_archive(found.folder, out)
    os.utime(found.folder / "run", (1, 1))
    with two.open("wb") as out:
        write_archive(found.folder, out)
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as made:
        assert made.testzip() is None
        listed = {info.filename: (info.external_attr >> 16, info.date_time[:3]) for info in made.infolist()}
    day = (1980, 1, 1)
    assert listed == {
        "brief/SKILL.md": (0o100644, day),
        "brief/run": (0o100755, day),
        "brief/ü/a b": (0o100644, day),
    }


def test_the_writer_refuses_what_is_no_file(tmp_path) -> None:
    """A link in a folder is not followed into an archive."""
    folder = tmp_path / "brief"
    folder.mkdir()
    (folder / "SKILL.md").write_bytes(SKILL)
    (folder / "link").symlink_to("/etc/passwd")
    with (tmp_path / "x.zip").open("wb") as out, pytest.raises(FileRefused):
        write_archive(folder, out)


PARTS = st.text("abcXYZ019._- äß中", min_size=1, max_size=12).filter(
    lambda part: part not in {".", ".."} and part != ".DS_Store" and part != "__MACOSX"
)
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
CONTENT = st.binary(max_size=300).filter(lambda data: not data.startswith(b"PK\x03\x04"))  # nested archives are refused
TREES = st.dictionaries(PATHS, st.tuples(CONTENT, st.booleans()), max_size=8)


def _clear(paths: list[str]) -> bool:
    """Whether no two paths are one for some file system, and none is another's folder."""
    folded = [
        unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())
        for path in {part for path in ["SKILL.md", *paths] for part in _prefixes(path)}
    ]
    files = {"SKILL.md", *paths}
    below = {prefix for path in files for prefix in _prefixes(path)[:-1]}
    return len(folded) == len(set(folded)) and not files & below


def _prefixes(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


@given(TREES.filter(lambda tree: _clear(list(tree))), st.booleans(), st.randoms(use_true_random=False))
def test_round_trip(tree: dict[str, tuple[bytes, bool]], deflated: bool, random) -> None:
    """Any tree survives zip, unpacking, writing and unpacking again: same files, same version, same bytes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as top:
        place, folder = Path(top) / "in.zip", Path(top)
        entries = [("SKILL.md", (SKILL, False)), *tree.items()]
        random.shuffle(entries)
        with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED) as out:
            for path, (data, runs) in entries:
                info = zipfile.ZipInfo(f"brief/{path}", (1990 + random.randrange(30), 1, 2, 3, 4, 5))
                info.external_attr = (0o100755 if runs else 0o100644) << 16
                info.compress_type = zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED
                out.writestr(info, data)
        first = unpack_skill(place, folder / "1")
        assert {f.path: (f.size, f.executable) for f in first.files} == {
            path: (len(data), runs) for path, (data, runs) in entries
        }
        assert all((first.folder / path).read_bytes() == data for path, (data, _) in entries)
        with (folder / "a.zip").open("wb") as out:
            write_archive(first.folder, out)
        second = unpack_skill(folder / "a.zip", folder / "2")
        with (folder / "b.zip").open("wb") as out:
            write_archive(second.folder, out)
        assert (second.version, second.files) == (first.version, first.files)
        assert (folder / "a.zip").read_bytes() == (folder / "b.zip").read_bytes()
        remove_tree(first.folder)
        remove_tree(second.folder)


MEASURE = """
import resource, sys, tracemalloc
from pathlib import Path
from kdskills.skills.archives import ArchiveRefused, unpack_skill
code = ""
tracemalloc.start()
try:
    unpack_skill(Path(sys.argv[1]), Path(sys.argv[2]))
except ArchiveRefused as error:
    code = error.code
print(code, tracemalloc.get_traced_memory()[1])
"""


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """600 MiB of zeros as a zip packs them: about 1 KiB for each MiB."""
    machine = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = bytes(1024 * 1024)
    return b"".join(machine.compress(piece) for _ in range(600)) + machine.flush()


@pytest.mark.parametrize("kind", ["ratio", "lie", "small", "stored", "many", "directory", "full"])
def test_memory_stays_flat(zipped, item, brief, bomb, tmp_path, kind) -> None:
    """600 KiB bombs of every kind, and honest skills at their bounds, cost less than 20 MiB of memory."""
    mib = 1024 * 1024
    assert 550 * 1024 < len(bomb) < 650 * 1024
    bombs = {
        "ratio": lambda: zipped(brief, item("brief/x", method=8, packed=bomb, size=600 * mib)),
        "lie": lambda: zipped(brief, item("brief/x", method=8, packed=bomb, size=15 * mib, crc=0)),
        "small": lambda: zipped(brief, item("brief/x", method=8, packed=bomb, size=10, crc=0)),
        "stored": lambda: zipped(brief, *(item(f"brief/{n}", bytes(1024)) for n in range(600))),
        "many": lambda: zipped(brief, *(item(f"brief/{n:04}/" + "a/" * 10 + "b") for n in range(4000))),
        "directory": lambda: zipped(brief, *(item(f"brief/{n:04}/" + "a/" * 11, mode=0) for n in range(2000))),
        "full": lambda: zipped(brief, *(item(f"brief/{n}", os.urandom(mib)) for n in range(15))),
    }
    place = bombs[kind]()
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(place), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    code, _, peak = run.stdout.strip().rpartition(" ")
    assert int(peak) < 20 * mib
    assert (code == "") == (kind in {"full", "directory"})
