"""Indexes of other sites are read strictly, ours read back as they were written, and an artifact is what its index promises."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdskills.errors import NotFound
from kdskills.skills.archives import ArchiveRefused, unpack_skill
from kdskills.supply.index import (
    MAX_ENTRIES,
    MAX_INDEX,
    SCHEMA,
    SiteEntry,
    SiteRefused,
    fetch_archive,
    index_urls,
    read_index,
    write_index,
)

URL = "https://skills.example.net/team/.well-known/agent-skills/index.json"
SKILL = b"---\nname: brief\ndescription: Turns long material into one page.\n---\n\nRead, then write.\n"
DIGEST = "sha256:" + hashlib.sha256(SKILL).hexdigest()
ROW = {"name": "brief", "type": "skill-md", "description": "One page.", "url": "brief.md", "digest": DIGEST}
OLD_ROW = {"name": "brief", "description": "One page.", "files": ["SKILL.md", "references/a b.md"]}


def index(*rows: object, **fields: object) -> bytes:
    """Return a 0.2.0 index of *rows*; `fields` replace those of the document."""
    return json.dumps({"$schema": SCHEMA, "skills": list(rows), **fields}).encode()


def reasons(data: bytes, url: str = URL) -> list[str]:
    """Return why entries are left out of an index that has no entry that could be used."""
    listing = read_index(data, url)
    assert listing.entries == ()
    return [finding.message for finding in listing.diagnostics]


names = st.from_regex(r"[a-z0-9]+(-[a-z0-9]+)*", fullmatch=True).filter(lambda name: len(name) <= 64)
descriptions = st.text(st.characters(codec="utf-8"), min_size=1, max_size=1024).filter(str.strip)


@settings(max_examples=30)
@given(st.dictionaries(names, st.tuples(descriptions, st.sampled_from(["skill-md", "archive"])), max_size=8))
def test_an_index_reads_back_as_it_was_written(rows: dict[str, tuple[str, str]]) -> None:
    """What is written is read as the same entries, in the order of names, and does not depend on the order they came in."""
    base = URL.removesuffix("index.json")
    entries = [SiteEntry(name, text, kind, f"{base}{name}.x", DIGEST) for name, (text, kind) in rows.items()]
    relative = [SiteEntry(name, text, kind, f"{name}.x", DIGEST) for name, (text, kind) in rows.items()]
    listing = read_index(write_index(relative), URL)
    assert (listing.version, listing.diagnostics) == ("0.2.0", ())
    assert listing.entries == tuple(sorted(entries, key=lambda entry: entry.name))
    assert write_index(relative) == write_index(reversed(relative))


@pytest.mark.parametrize(
    ("reference", "url"),
    [
        ("brief.md", "https://skills.example.net/team/.well-known/agent-skills/brief.md"),
        ("/files/brief.zip#top", "https://skills.example.net/files/brief.zip"),
        ("../../brief.md?v=1", "https://skills.example.net/team/brief.md?v=1"),
        ("//cdn.example.net/brief.md", "https://cdn.example.net/brief.md"),
        ("https://cdn.example.net:8443/brief.md", "https://cdn.example.net:8443/brief.md"),
    ],
)
def test_urls_are_relative_to_the_index(reference: str, url: str) -> None:
    """A `url` is resolved against the place of the index, as RFC 3986 says."""
    assert [entry.url for entry in read_index(index(ROW | {"url": reference}), URL).entries] == [url]


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            " ",
            "file:///etc/passwd",
            "data:text/markdown,x",
            "ftp://example.net/x",
            "javascript:x",
            "http://a.net/x",
        ),
        *("https://user:pass@a.net/x", "https://a.net:0/x", "https://a.net:99999/x", "https://[::1/x"),
        *("a b", "a\nb", "\\\\host\\x", "münchen.md", "x" * 2049, None, 7, ["brief.md"], "\ud800"),
    ],
)
def test_urls_that_lead_elsewhere_are_left_out(url: object) -> None:
    """Other schemes, less safe ones, names of users and what is no URL are never fetched."""
    (reason,) = reasons(index(ROW | {"url": url}))
    assert "its url" in reason or "ort " in reason or "IPv6" in reason


def test_an_index_by_http_may_name_http() -> None:
    """A site on this machine needs no certificate."""
    (entry,) = read_index(index(ROW), "http://127.0.0.1:8000/.well-known/agent-skills/index.json").entries
    assert entry.url == "http://127.0.0.1:8000/.well-known/agent-skills/brief.md"


@pytest.mark.parametrize(
    "change",
    [
        *({"name": name} for name in ("", "..", "a/b", "Brief", "-a", "a--b", "x" * 65, None, 3, "a\0b")),
        *({"type": kind} for kind in ("plugin", None, ["archive"], "files")),
        *({"digest": digest} for digest in (DIGEST.upper(), DIGEST[:-1], "md5:" + "0" * 32, None, DIGEST + "\n")),
        *({"description": text} for text in ("", " ", None, "x" * 1025, "\ud800")),
    ],
)
def test_entries_out_of_form_are_left_out(change: dict[str, object]) -> None:
    """An entry with a name, type, digest or description that is none is left out with the reason; the others stay."""
    listing = read_index(index({**ROW, "name": "other"}, ROW | change, "text"), URL)
    assert [entry.name for entry in listing.entries] == ["other"]
    assert [finding.code for finding in listing.diagnostics] == ["site_entry_invalid"] * 2


def test_of_two_entries_with_one_name_neither_is_used() -> None:
    """Nobody can say which of them is meant."""
    assert len(reasons(index(ROW, ROW | {"url": "other.md"}))) == 2


@pytest.mark.parametrize(
    ("data", "code"),
    [
        *((data, "site_index_invalid") for data in (b"", b"[]", b"\xff", b"{", b"null", b"<html>", b"[" * 100_000)),
        *((data, "site_index_invalid") for data in (b"{}", index(skills={}), index(skills=None), b'{"skills": NaN}')),
        (b'{"skills": [], "skills": []}', "site_index_invalid"),
        (b" " * (MAX_INDEX + 1), "site_index_invalid"),
        (index(*[{}] * (MAX_ENTRIES + 1)), "site_index_invalid"),
        *(
            (index(**{"$schema": schema}), "site_version_unknown")
            for schema in (SCHEMA + "/", "0.2.0", "", None, 1, [])
        ),
    ],
)
def test_what_is_no_index_is_refused(data: bytes, code: str) -> None:
    """What is no JSON, too large, ambiguous, or of a version nobody here knows is refused as a whole."""
    with pytest.raises(SiteRefused) as refused:
        read_index(data, URL)
    assert (refused.value.code, refused.value.details["url"]) == (code, URL)


def test_an_index_without_a_schema_is_of_the_older_version() -> None:
    """0.1.0 lists files, whose folder lies beside the index; a digest there is none."""
    url = "https://skills.example.net/.well-known/skills/index.json"
    listing = read_index(json.dumps({"skills": [OLD_ROW]}).encode(), url)
    folder = "https://skills.example.net/.well-known/skills/brief/"
    assert listing.version == "0.1.0"
    assert listing.entries == (SiteEntry("brief", "One page.", None, folder, files=("SKILL.md", "references/a b.md")),)


@pytest.mark.parametrize(
    "files",
    [
        *(
            ["SKILL.md", path]
            for path in ("../x", "/x", "a//b", "a\\b", "a\0b", "./a", "a\nb", "SKILL.md", 3, "x" * 256)
        ),
        *([], ["README.md"], None, "SKILL.md", {"SKILL.md": 1}, [f"{n}" for n in range(600)]),
    ],
)
def test_paths_that_lead_elsewhere_are_left_out(files: object) -> None:
    """A path of 0.1.0 that is not plain, comes twice or lacks SKILL.md leaves the skill out."""
    assert len(reasons(json.dumps({"skills": [OLD_ROW | {"files": files}]}).encode())) == 1


@pytest.mark.parametrize(
    ("site", "urls"),
    [
        ("https://a.net", ("/.well-known/agent-skills/index.json", "/.well-known/skills/index.json")),
        ("https://a.net/p/x/", ("/p/x/.well-known/agent-skills/index.json", "/p/x/.well-known/skills/index.json")),
        ("https://a.net/.well-known/skills/", ("/.well-known/skills/index.json",)),
        ("https://a.net/x/index.json#y", ("/x/index.json",)),
    ],
)
def test_where_an_index_is_looked_for(site: str, urls: tuple[str, ...]) -> None:
    """A site with a path is not answered by the index of its host."""
    assert index_urls(site) == tuple(f"https://a.net{path}" for path in urls)


def zipped(files: dict[str, bytes]) -> bytes:
    """Return a zip of *files*."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


def tarred(files: dict[str, bytes]) -> bytes:
    """Return a tar.gz of *files*."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def entry_of(data: bytes, kind: str = "archive") -> SiteEntry:
    """Return an entry that promises *data*."""
    return SiteEntry("brief", "One page.", kind, "https://a.net/x", "sha256:" + hashlib.sha256(data).hexdigest())


def test_artifacts_come_as_archives(tmp_path) -> None:
    """A single file becomes a zip that unpacks to it; archives are told apart by their bytes."""
    archive = fetch_archive(entry_of(SKILL, "skill-md"), lambda url, limit: SKILL, tmp_path)
    skill = unpack_skill(archive, tmp_path / "out")
    assert (skill.name, (skill.folder / "SKILL.md").read_bytes()) == ("brief", SKILL)
    for data, suffix in ((zipped({"SKILL.md": SKILL}), ".zip"), (tarred({"SKILL.md": SKILL}), ".tar.gz")):
        folder = tmp_path / f"into{suffix}"
        folder.mkdir()
        archive = fetch_archive(entry_of(data), lambda url, limit, data=data: data, folder)
        assert (archive.name, archive.read_bytes()) == (f"brief{suffix}", data)


def test_other_bytes_than_promised_are_refused(tmp_path) -> None:
    """One byte more or less than the index promises, and nothing is written."""
    for data in (SKILL + b"\n", SKILL[:-1], b""):
        with pytest.raises(SiteRefused) as refused:
            fetch_archive(entry_of(SKILL, "skill-md"), lambda url, limit, data=data: data, tmp_path)
        assert refused.value.code == "site_digest_mismatch"
    with pytest.raises(SiteRefused) as refused:
        fetch_archive(entry_of(b"Rar!"), lambda url, limit: b"Rar!", tmp_path)
    assert refused.value.code == "site_artifact_invalid"
    assert not list(tmp_path.iterdir())


def test_files_of_an_older_site_are_fetched_one_by_one(tmp_path) -> None:
    """Each file lies below the skill's folder, its path quoted; together they are bounded, and judged as any archive."""
    files = {"SKILL.md": SKILL, "references/a b.md": b"x"}
    urls = {"https://a.net/brief/SKILL.md": SKILL, "https://a.net/brief/references/a%20b.md": b"x"}
    entry = SiteEntry("brief", "One page.", None, "https://a.net/brief/", files=tuple(files))
    skill = unpack_skill(fetch_archive(entry, lambda url, limit: urls[url], tmp_path), tmp_path / "out")
    assert {path: (skill.folder / path).read_bytes() for path in files} == files
    with pytest.raises(SiteRefused) as refused:
        fetch_archive(entry, lambda url, limit: b"x" * 9 * 2**20, tmp_path)
    assert refused.value.code == "site_artifact_invalid"
    many = SiteEntry("brief", "One page.", None, "https://a.net/brief/", files=("SKILL.md", "a", "A"))
    with pytest.raises(ArchiveRefused):
        unpack_skill(fetch_archive(many, lambda url, limit: SKILL, tmp_path / "out" / "brief"), tmp_path / "again")


def test_what_a_site_does_not_have_is_its_error(tmp_path) -> None:
    """An error of the transport comes through, and nothing is written."""

    def gone(url: str, limit: int) -> bytes:
        raise NotFound(f"there is nothing at {url}")

    with pytest.raises(NotFound):
        fetch_archive(entry_of(SKILL, "skill-md"), gone, tmp_path)
    assert not list(tmp_path.iterdir())
