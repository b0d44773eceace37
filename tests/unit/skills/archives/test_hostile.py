"""Every hostile archive is refused with the code of its rule, named, and leaves nothing behind."""

from __future__ import annotations

import io
import os
import re
import stat
import zipfile
import zlib
from pathlib import Path

import pytest

from kdskills.errors import CallerMustAct
from kdskills.skills.archives import RULES, ArchiveRefused, unpack_skill

MIB = 1024 * 1024


def refused(archive: Path, into: Path) -> ArchiveRefused:
    """Return the refusal of an archive, after checking that nothing stays beside it."""
    before = sorted(into.rglob("*"))
    with pytest.raises(ArchiveRefused) as caught:
        unpack_skill(archive, into / "out")
    assert sorted(into.rglob("*")) == before
    error = caught.value
    assert isinstance(error, CallerMustAct)
    assert error.code in RULES
    assert error.details["reason"]
    assert "entry" in error.details
    return error


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("../evil", "archive_path_parent"),
        ("brief/../../evil", "archive_path_parent"),
        ("brief/..", "archive_path_parent"),
        ("/etc/passwd", "archive_path_absolute"),
        ("//server/share", "archive_path_absolute"),
        ("C:evil", "archive_path_drive"),
        ("c:/evil", "archive_path_drive"),
        ("brief\\evil", "archive_path_backslash"),
        ("..\\evil", "archive_path_backslash"),
        ("\\\\server\\share", "archive_path_backslash"),
        ("brief//evil", "archive_path_invalid"),
        ("brief/./evil", "archive_path_invalid"),
        ("./brief/evil", "archive_path_invalid"),
        ("brief/a\x00b", "archive_path_invalid"),
        ("brief/a\nb", "archive_path_invalid"),
        ("brief/a\u2028b", "archive_path_invalid"),
        ("", "archive_path_invalid"),
        (b"brief/\xff\xfe", "archive_name_not_utf8"),
        (b"brief/\xc0\xaf", "archive_name_not_utf8"),
        ("brief/" + "a" * 256, "archive_path_too_long"),
        ("brief/" + "ü" * 128, "archive_path_too_long"),
        ("a" * 60_000, "archive_path_too_long"),
        ("brief/" + "a/" * 12 + "b", "archive_too_deep"),
        ("a/" * 30_000 + "b", "archive_too_deep"),
        ("brief/inner.zip", "archive_nested"),
        ("brief/inner.TAR.gz", "archive_nested"),
        ("other/file", "archive_wrong_root"),
        ("file", "archive_wrong_root"),
        ("brief/skill.md", "archive_case_collision"),
        ("Brief/other", "archive_case_collision"),
        ("brief/SKILL.md/below", "archive_duplicate"),
    ],
)
def test_names(zipped, item, brief, tmp_path, name, code) -> None:
    """A name that is not one plain path below the root folder is refused, wherever it stands."""
    assert refused(zipped(brief, item(name)), tmp_path).code == code
    assert refused(zipped(item(name), brief), tmp_path).code in {code, "archive_duplicate", "archive_case_collision"}


def test_hostile_names_are_refused_in_left_out_folders_too(zipped, item, brief, tmp_path) -> None:
    """What a Mac adds is left out, but it is no hiding place."""
    assert refused(zipped(brief, item("__MACOSX/../x")), tmp_path).code == "archive_path_parent"
    assert refused(zipped(brief, item("__MACOSX/link", b"x", mode=0o120777)), tmp_path).code == "archive_link"


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        (stat.S_IFLNK | 0o777, "archive_link"),
        (stat.S_IFCHR | 0o644, "archive_special_file"),
        (stat.S_IFBLK | 0o644, "archive_special_file"),
        (stat.S_IFIFO | 0o644, "archive_special_file"),
        (stat.S_IFSOCK | 0o644, "archive_special_file"),
        (stat.S_IFDIR | 0o755, "archive_special_file"),
    ],
)
def test_kinds(zipped, item, brief, tmp_path, mode, code) -> None:
    """Only regular files are taken; whichever system the writer says it ran on."""
    for system in (0, 3, 19):
        found = refused(zipped(brief, item("brief/x", b"/etc/passwd", mode=mode, made_by=system)), tmp_path)
        assert (found.code, found.details["entry"]) == (code, "brief/x")


def test_links_of_windows(zipped, item, brief, tmp_path) -> None:
    """A reparse point is a link."""
    link = item("brief/x", b"C:", attributes=0x0400, made_by=0)
    assert refused(zipped(brief, link), tmp_path).code == "archive_link"


def test_folders_with_content(zipped, item, brief, tmp_path) -> None:
    """A folder holds no bytes."""
    assert refused(zipped(brief, item("brief/d/", b"x", mode=0)), tmp_path).code == "archive_special_file"


@pytest.mark.parametrize("flag", [0x0001, 0x0040, 0x2000])
def test_encrypted(zipped, item, brief, tmp_path, flag) -> None:
    """Encrypted entries are refused by their flag, before a byte is read."""
    assert refused(zipped(brief, item("brief/x", b"x", flags=flag)), tmp_path).code == "archive_encrypted"


@pytest.mark.parametrize("method", [1, 9, 12, 14, 93, 95, 99])
def test_methods(zipped, item, brief, tmp_path, method) -> None:
    """Methods nobody needs are refused: their readers are not ours to trust."""
    assert refused(zipped(brief, item("brief/x", b"x", method=method)), tmp_path).code == "archive_method"


@pytest.mark.parametrize(
    ("one", "other", "code"),
    [
        ("brief/a", "brief/a", "archive_duplicate"),
        ("brief/a", "brief/A", "archive_case_collision"),
        ("brief/straße", "brief/STRASSE", "archive_case_collision"),
        ("brief/\u00e9", "brief/e\u0301", "archive_case_collision"),
        ("brief/\ufb01le", "brief/file", "archive_case_collision"),
        ("brief/dir/a", "brief/Dir/b", "archive_case_collision"),
        ("brief/dir", "brief/dir/b", "archive_duplicate"),
        ("brief/dir/b", "brief/dir", "archive_duplicate"),
    ],
)
def test_collisions(zipped, item, brief, tmp_path, one, other, code) -> None:
    """Two entries that are one file here or elsewhere are refused."""
    assert refused(zipped(brief, item(one, b"1"), item(other, b"2")), tmp_path).code == code


def test_a_folder_that_is_also_a_file(zipped, item, brief, tmp_path) -> None:
    """A folder's entry with the path of a file is refused."""
    assert refused(zipped(brief, item("brief/SKILL.md/", mode=0)), tmp_path).code == "archive_duplicate"


def test_bombs_by_size(zipped, item, brief, tmp_path) -> None:
    """More than 16 MiB by what the directory says is refused without inflating."""
    parts = [item(f"brief/{n}", b"", size=MIB, packed_size=6000, packed=b"x" * 6000, method=8) for n in range(17)]
    assert refused(zipped(brief, *parts), tmp_path).code == "archive_unpacked_too_large"


def test_bombs_by_count(zipped, item, brief, tmp_path) -> None:
    """More than 512 files are refused, and more than 2,048 entries of any kind."""
    assert refused(zipped(brief, *(item(f"brief/{n}") for n in range(512))), tmp_path).code == "archive_too_many_files"
    folders = [item(f"brief/{n}/", mode=0) for n in range(2048)]
    assert refused(zipped(brief, *folders), tmp_path).code == "archive_too_many_entries"


def test_bombs_by_directory(zipped, item, brief, tmp_path) -> None:
    """A directory of megabytes is not read."""
    fat = [item(f"brief/{n}", extra=b"x" * 60_000) for n in range(40)]
    assert refused(zipped(brief, *fat), tmp_path).code == "archive_too_many_entries"


def test_bombs_by_ratio(zipped, item, brief, tmp_path) -> None:
    """A file of which each packed byte makes more than 200 is refused."""
    bomb = item("brief/zeros", bytes(600 * 1024), method=8)
    found = refused(zipped(brief, bomb), tmp_path)
    assert (found.code, found.details["entry"]) == ("archive_ratio", "brief/zeros")


def test_bombs_that_say_they_are_small(zipped, item, brief, tmp_path) -> None:
    """What unpacks to more than the directory says stops at that byte."""
    bomb = item("brief/zeros", bytes(8 * MIB), method=8, size=1000, crc=0)
    assert refused(zipped(brief, bomb), tmp_path).code == "archive_size_lie"


def test_bombs_of_shared_bytes(zipped, item, brief, skill, tmp_path) -> None:
    """Many entries over the same packed bytes are refused as overlapping."""
    place = 30 + len(b"brief/SKILL.md") + len(skill)
    first = item("brief/a", b"x" * 5000, method=8)
    again = item("brief/b", b"x" * 5000, method=8, offset=place, local_name=b"brief/b")
    code = refused(zipped(brief, first, again), tmp_path).code
    assert code in {"archive_header_mismatch", "archive_overlap"}
    inside = item("brief/c", b"", offset=30 + len(b"brief/SKILL.md"))
    assert refused(zipped(brief, inside), tmp_path).code in {"archive_directory_bad", "archive_overlap"}


def test_quoted_overlap(zipped, item, skill, tmp_path) -> None:
    """An entry whose content is the next entry's header and content is refused, though each header is sound."""
    inner_head_at = 30 + len(b"brief/outer")
    inner = b"PK\x03\x04" + b"\x14\x00\x00\x08\x00\x00\x00\x00\x21\x00"
    data = skill
    inner += zlib.crc32(data).to_bytes(4, "little") + len(data).to_bytes(4, "little") * 2
    inner += len(b"brief/SKILL.md").to_bytes(2, "little") + b"\x00\x00" + b"brief/SKILL.md" + data
    outer = item("brief/outer", inner)
    told = item("brief/SKILL.md", data, offset=inner_head_at)
    assert refused(zipped(outer, told), tmp_path).code == "archive_overlap"


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"size": 10}, "archive_size_lie"),
        ({"size": 12}, "archive_size_lie"),
        ({"crc": 1}, "archive_damaged"),
        ({"method": 8, "packed": b"\xff\xff\xff\xff"}, "archive_damaged"),
        ({"method": 8, "packed": b""}, "archive_ratio"),
        ({"method": 8, "size": 10}, "archive_size_lie"),
        ({"method": 8, "size": 12}, "archive_size_lie"),
        ({"method": 8, "crc": 7}, "archive_damaged"),
        ({"local_name": b"brief/y"}, "archive_header_mismatch"),
        ({"local_size": 5}, "archive_header_mismatch"),
        ({"local_crc": 5}, "archive_header_mismatch"),
        ({"local_flags": 0x0801}, "archive_header_mismatch"),
        ({"offset": 3}, "archive_directory_bad"),
        ({"offset": 10**8}, "archive_directory_bad"),
        ({"packed_size": 10**6, "size": 10**6}, "archive_directory_bad"),
        ({"size": 0xFFFFFFFF}, "archive_zip64"),
        ({"disk": 1}, "archive_split"),
    ],
)
def test_lies(zipped, item, brief, tmp_path, told, code) -> None:
    """Whatever an entry's fields say that is not so is found, and named."""
    found = refused(zipped(brief, item("brief/x", b"hello world", **told)), tmp_path)
    assert (found.code, found.details["entry"]) == (code, "brief/x")


def test_packed_data_that_goes_on(zipped, item, brief, tmp_path) -> None:
    """Bytes behind the end of the packed stream are refused: two readers would see two contents."""
    stream = zlib.compress(b"hello", wbits=-15)
    for tail in (b"more", stream):
        entry = item("brief/x", b"hello", method=8, packed=stream + tail)
        assert refused(zipped(brief, entry), tmp_path).code == "archive_size_lie"


def test_packed_data_that_ends_early(zipped, item, brief, tmp_path) -> None:
    """A cut stream is damaged, however much of it came out."""
    data = os.urandom(1000)
    stream = zlib.compress(data, wbits=-15)
    entry = item("brief/x", data, method=8, packed=stream[:-5])
    assert refused(zipped(brief, entry), tmp_path).code == "archive_damaged"


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"count": 3}, "archive_directory_bad"),
        ({"count": 1}, "archive_directory_bad"),
        ({"directory_size": 10}, "archive_directory_bad"),
        ({"directory_offset": 10**6}, "archive_directory_bad"),
        ({"directory_offset": 0}, "archive_directory_bad"),
        ({"disk": 1}, "archive_split"),
        ({"count": 0xFFFF}, "archive_zip64"),
        ({"directory_size": 0xFFFFFFFF}, "archive_zip64"),
        ({"count": 50_000}, "archive_too_many_entries"),
    ],
)
def test_bad_ends(zipped, item, brief, tmp_path, told, code) -> None:
    """An end record that does not fit its directory is refused."""
    assert refused(zipped(brief, item("brief/x", b"x"), **told), tmp_path).code == code


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "archive_empty"),
        (b"x", "archive_not_zip"),
        (b"\x00" * 100_000, "archive_not_zip"),
        (b"\x1f\x8b\x08" + b"x" * 100, "archive_not_zip"),
        (b"PK\x03\x04" + b"x" * 100_000, "archive_truncated"),
        (b"PK\x05\x06", "archive_not_zip"),
        (b"PK\x05\x06" + b"\x00" * 18, "archive_no_skill"),
        (b"PK\x05\x06" + b"\xff" * 18, "archive_not_zip"),
    ],
)
def test_no_zip(tmp_path, data, code) -> None:
    """What is no archive says so."""
    place = tmp_path / "x.zip"
    place.write_bytes(data)
    assert refused(place, tmp_path).code == code


def test_every_cut_and_every_flip(zipped, item, brief, tmp_path) -> None:
    """Cut at any byte an archive is refused; with any bit turned it is refused or unpacks to what it was."""
    whole = zipped(brief, item("brief/a/b.txt", b"text " * 20, method=8)).read_bytes()
    place = tmp_path / "x.zip"
    for length in range(len(whole)):
        place.write_bytes(whole[:length])
        refused(place, tmp_path)
    place.write_bytes(whole)
    good = unpack_skill(place, tmp_path / "good").files
    for position in range(len(whole)):
        turned = bytearray(whole)
        turned[position] ^= 1 << position % 8
        place.write_bytes(turned)
        try:
            found = unpack_skill(place, tmp_path / f"t{position}").files
        except ArchiveRefused:
            found = good
        assert [file[:3] for file in found] == [file[:3] for file in good]  # but for execute bits


def test_too_large_files(tmp_path) -> None:
    """An archive of more than 32 MiB is not read at all."""
    place = tmp_path / "x.zip"
    with place.open("wb") as out:
        out.truncate(33 * MIB)
    assert refused(place, tmp_path).code == "archive_too_large"


def test_nested_archives_by_content(zipped, item, brief, tmp_path) -> None:
    """An archive under another name is found by its first bytes; documents that are zips inside are files."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as made:
        made.writestr("x", "x")
    data = inner.getvalue()
    assert refused(zipped(brief, item("brief/data.bin", data)), tmp_path).code == "archive_nested"
    unpacked = unpack_skill(zipped(brief, item("brief/assets/form.docx", data)), tmp_path / "good")
    assert [file.path for file in unpacked.files] == ["SKILL.md", "assets/form.docx"]


@pytest.mark.parametrize(
    ("items", "code"),
    [
        ([("readme.txt", b"x")], "archive_wrong_root"),
        ([("brief/readme.txt", b"x")], "archive_no_skill"),
        ([("brief/deep/SKILL.md", None)], "archive_no_skill"),
        ([("a/SKILL.md", None), ("b/SKILL.md", None)], "archive_wrong_root"),
        ([("brief/", b"")], "archive_no_skill"),
        ([("Brief/SKILL.md", None)], "archive_name_invalid"),
        ([("my brief/SKILL.md", None)], "archive_name_invalid"),
        ([("-brief/SKILL.md", None)], "archive_name_invalid"),
        ([("a" * 65 + "/SKILL.md", None)], "archive_name_invalid"),
        ([("other/SKILL.md", None)], "archive_name_mismatch"),
        ([("SKILL.md", b"---\ndescription: no name\n---\nx\n")], "archive_skill_invalid"),
        ([("SKILL.md", b"---\nname: A B\ndescription: bad name\n---\nx\n")], "archive_name_invalid"),
        ([("brief/SKILL.md", b"no frontmatter")], "archive_skill_invalid"),
        ([("brief/SKILL.md", b"---\nname: [\n---\n")], "archive_skill_invalid"),
        ([("brief/SKILL.md", b"---\nname: brief\n---\n")], "archive_skill_invalid"),
        ([("brief/SKILL.md", b"\x00")], "archive_skill_invalid"),
        ([("brief/SKILL.md", b"---\nname: brief\ndescription: &a x\nlicense: *a\n---\n")], "archive_skill_invalid"),
        ([("brief/SKILL.md", None), ("brief/tools.yaml", b"- [")], "archive_skill_invalid"),
    ],
)
def test_wrong_roots_and_bad_skills(zipped, item, skill, tmp_path, items, code) -> None:
    """Where the skill is not where it belongs, or cannot be used, nothing is taken."""
    made = [item(name, skill if data is None else data, mode=0) for name, data in items]
    found = refused(zipped(*made), tmp_path)
    assert found.code == code
    assert ("diagnostics" in found.details) == (code == "archive_skill_invalid")


def test_a_skill_file_of_megabytes_is_not_read(zipped, item, tmp_path) -> None:
    """More than 2 MiB of skill file are refused before they are inflated."""
    fat = item("brief/SKILL.md", b"", size=3 * MIB, packed_size=40_000, packed=b"x" * 40_000, method=8)
    assert refused(zipped(fat), tmp_path).code == "archive_skill_invalid"


def test_names_are_printable_in_refusals(zipped, item, brief, tmp_path) -> None:
    """A refusal can be shown: no control characters, no endless names."""
    found = refused(zipped(brief, item("brief/\x1b[2J" + "x" * 400)), tmp_path)
    assert str(found.details["entry"]).isprintable()
    assert len(str(found.details["entry"])) <= 300


def test_the_target_is_never_touched_when_it_is_there(zipped, brief, tmp_path) -> None:
    """A folder that is there already stays as it is."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(FileExistsError):
        unpack_skill(zipped(brief), tmp_path / "out")
    assert (tmp_path / "out" / "mine").read_text() == "x"


def test_page_has_the_table(repo: Path) -> None:
    """The reference page lists the rules as the code has them."""
    page = (repo / "docs/reference/archives.md").read_text(encoding="utf-8")
    begin, end = "<!-- rules: begin -->\n", "<!-- rules: end -->"
    rows = [f"| `{code}` | {meaning} |" for code, meaning in RULES.items()]
    table = "\n".join(["| code | what is wrong |", "|---|---|", *rows]) + "\n"
    assert page[page.index(begin) + len(begin) : page.index(end)] == table


def test_every_code_is_raised_by_the_code_that_lists_it(repo: Path) -> None:
    """The table has no rule nobody holds, and no rule is held that it lacks."""
    text = (repo / "kdskills/skills/archives.py").read_text()
    in_code = re.findall(r'"(archive_[a-z0-9_]+)"(?!: )', text)
    assert set(in_code) - {"archive_refused", "archive_ignored"} == set(RULES)
