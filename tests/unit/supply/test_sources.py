"""Whatever a source is called and holds, skills come out of it whole, and nothing of it runs or leads elsewhere."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from dataclasses import replace

import pytest

from kdskills.errors import KdskillsError
from kdskills.skills.archives import ArchiveRefused
from kdskills.supply import sources
from kdskills.supply.fetching import SourceFailed
from kdskills.supply.sources import fetch_source, parse_source
from tests.unit.supply.conftest import skill_text, write_skill

SKILL = skill_text("brief").encode()


@pytest.fixture
def fetch(tmp_path):
    """Fetch a source, and return files by skill, and codes of refusals by path."""

    def fetch_text(text, *names, ref="", resolved=""):
        scratch = tmp_path / f"scratch-{len(list(tmp_path.glob('scratch-*')))}"
        scratch.mkdir()
        source = parse_source(str(text), base=tmp_path, ref=ref)
        fetched = fetch_source(source, scratch, names=names, resolved=resolved)
        skills = {each.unpacked.name: [file.path for file in each.unpacked.files] for each in fetched.skills}
        return skills, {each.path: each.code for each in fetched.refused}

    return fetch_text


def refusal(call, *words, **named):
    """Return the code of the error that a call ends in."""
    with pytest.raises(KdskillsError) as caught:
        call(*words, **named)
    return caught.value.code


@pytest.mark.parametrize(
    ("text", "kind", "ref", "below", "locked"),
    [
        ("https://github.com/o/r", "git", "", "", "https://github.com/o/r"),
        ("https://github.com/o/r@v1#a/b", "git", "v1", "a/b", "https://github.com/o/r@v1#a/b"),
        ("https://u:secret@example.net/o/r.git@v1", "git", "v1", "", "https://example.net/o/r.git@v1"),
        ("https://u:se@cr:et@example.net/o/r.git", "git", "", "", "https://example.net/o/r.git"),
        ("git+https://example.net/r", "git", "", "", "git+https://example.net/r"),
        ("git@example.net:o/r.git@feature/x", "git", "feature/x", "", "git@example.net:o/r.git@feature/x"),
        ("ssh://git@example.net/o/r.git", "git", "", "", "ssh://git@example.net/o/r.git"),
        ("https://example.net/a.zip#x", "archive", "", "x", "https://example.net/a.zip#x"),
        ("https://example.net/a.tar.gz", "archive", "", "", "https://example.net/a.tar.gz"),
        ("https://example.net", "site", "", "", "https://example.net"),
        ("http://127.0.0.1:8000", "site", "", "", "http://127.0.0.1:8000"),
        ("mcp+https://example.net/mcp#lab", "mcp", "", "", "mcp+https://example.net/mcp#lab"),
    ],
)
def test_what_a_source_means(tmp_path, text, kind, ref, below, locked):
    """Each spelling has one meaning, and the lock never gets a password."""
    source = parse_source(text, base=tmp_path)
    assert (source.kind, source.ref, source.below, source.text) == (kind, ref, below, locked)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-x",
        "--upload-pack=touch x",
        "ext::sh -c touch% x",
        "git+ext::sh -c touch% x",
        "git://example.net/r.git",
        "git+http://127.0.0.1/r.git",
        "ftp://example.net/a.zip",
        "http://example.net/a.zip",
        "https:///a.zip",
        "https://[::1/a.zip",
        "https://example.net:x/a.zip",
        "nowhere/at/all",
        "https://example.net/r.git@-x",
        "https://example.net/r.git@a..b",
        "https://example.net/r.git@a b",
        "https://example.net/r.git#../x",
        "https://example.net/r.git#/x",
        "https://example.net/a\x1b[2J.zip",
        "ssh://git:secret@example.net/r.git",
        "~nobody-has-this-name/skills",
        "a" * 1000,
        "a/" * 5000,
    ],
)
def test_texts_that_are_no_sources_are_refused(tmp_path, text):
    """Other protocols, options, refs that are options and folders that lead upwards are refused before anything starts."""
    assert refusal(parse_source, text, base=tmp_path) == "source_invalid"


def test_skills_of_any_depth_are_found_in_a_folder(tmp_path, fetch):
    """Every folder with a skill file comes, deep and hidden ones too; what lies inside a skill belongs to it."""
    write_skill(tmp_path / "any/a/b/c/d/e/f/g/deep", "deep")
    write_skill(tmp_path / "any/.claude/skills/brief", "brief")
    write_skill(tmp_path / "any/.claude/skills/brief/inner", "inner")
    write_skill(tmp_path / "any/node_modules/x", "x")
    write_skill(tmp_path / "any/.git/y", "y")
    assert fetch("any") == ({"brief": ["SKILL.md", "inner/SKILL.md"], "deep": ["SKILL.md"]}, {})
    assert fetch("any", "deep")[0] == {"deep": ["SKILL.md"]}
    assert fetch("any#.claude/skills/brief")[0] == {"brief": ["SKILL.md", "inner/SKILL.md"]}


def test_a_bad_skill_costs_only_itself(tmp_path, fetch):
    """A link, a pipe, a file that is too large and a name that is none are refused by the rules of archives; others come."""
    for name in ("linked", "piped", "large", "many", "wrong", "fine"):
        write_skill(tmp_path / f"any/{name}", name)
    (tmp_path / "any/linked/passwd").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "any/piped/pipe")
    with (tmp_path / "any/large/data").open("wb") as out:
        out.truncate(17 * 1024 * 1024)
    for number in range(600):
        (tmp_path / f"any/many/{number}").touch()
    (tmp_path / "any/wrong/SKILL.md").write_text(skill_text("Not A Name"))
    skills, refused = fetch("any")
    assert skills == {"fine": ["SKILL.md"]}
    assert refused == {
        "large": "archive_unpacked_too_large",
        "linked": "archive_link",
        "many": "archive_too_many_files",
        "piped": "archive_special_file",
        "wrong": "archive_name_invalid",
    }


def test_one_name_twice_is_told(tmp_path, fetch):
    """Of two skills with one name none is chosen by chance; their folders can be named."""
    write_skill(tmp_path / "any/a/brief", "brief")
    write_skill(tmp_path / "any/b/brief", "brief", more__md="x")
    assert fetch("any") == ({}, {"brief": "skill_ambiguous"})
    assert fetch("any#b")[0] == {"brief": ["SKILL.md", "more.md"]}


@pytest.mark.parametrize(
    "text", ["empty", "empty#x", "repository@main#docs", "repository@none", f"repository@{'0' * 40}"]
)
def test_nothing_to_take_is_told(tmp_path, repository, fetch, text):
    """A source without skills, a folder, branch or commit that is not there end in an error that says so."""
    (tmp_path / "empty").mkdir()
    assert refusal(fetch, text) in {"source_empty", "source_unreachable"}


def tarball(path, *members, mode="w:gz", **how):
    """Write a tar.gz of these names, infos and bytes."""
    with tarfile.open(path, mode, **how) as tar:
        for name, facts, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for fact, value in facts.items():
                setattr(info, fact, value)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("top", ["", "./", "some-repo-main/skills/brief/"])
def test_tarballs_of_every_format_are_read(tmp_path, fetch, form, top):
    """A skill at the top or deep inside, with long names and programs, comes out the same of every format of tar."""
    long = "n" * (60 if form == tarfile.USTAR_FORMAT else 120) + ".md"
    path = tarball(
        tmp_path / "a.tar.gz",
        (f"{top}SKILL.md", {}, SKILL),
        (f"{top}{long}", {"mtime": 1.5}, b"long"),
        (f"{top}run.sh", {"mode": 0o755}, b"#!/bin/sh\n"),
        *([("other/readme", {}, b"x")] if "/s" in top else []),
        format=form,
    )
    assert fetch(path)[0] == {"brief": ["SKILL.md", long, "run.sh"]}


HOSTILE = {
    "parent": [("a/SKILL.md", {}, SKILL), ("a/../../evil", {}, b"x")],
    "absolute": [("a/SKILL.md", {}, SKILL), ("/a/evil", {}, b"x")],
    "hidden parent": [("x/../a/SKILL.md", {}, SKILL)],
    "link": [("a/SKILL.md", {}, SKILL), ("a/b", {"type": tarfile.SYMTYPE, "linkname": "/etc"}, b"")],
    "hard link": [("a/SKILL.md", {}, SKILL), ("a/b", {"type": tarfile.LNKTYPE, "linkname": "a/SKILL.md"}, b"")],
    "linked skill": [("a/SKILL.md", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, b"")],
    "device": [("a/SKILL.md", {}, SKILL), ("a/b", {"type": tarfile.CHRTYPE}, b"")],
    "pipe": [("a/SKILL.md", {}, SKILL), ("a/b", {"type": tarfile.FIFOTYPE}, b"")],
    "twice": [("a/SKILL.md", {}, SKILL), ("a/x", {}, b"1"), ("a/x", {}, b"2")],
    "case": [("a/SKILL.md", {}, SKILL), ("a/x", {}, b"1"), ("a/X", {}, b"2")],
    "file and folder": [("a/SKILL.md", {}, SKILL), ("a/x", {}, b"1"), ("a/x/y", {}, b"2")],
    "nested": [("a/SKILL.md", {}, SKILL), ("a/x.zip", {}, b"PK\x03\x04")],
    "backslash": [("a/SKILL.md", {}, SKILL), ("a/x\\y", {}, b"1")],
    "control": [("a/SKILL.md", {}, SKILL), ("a/x\ny", {}, b"1")],
    "deep": [("a/SKILL.md", {}, SKILL), ("a/" + "d/" * 20 + "x", {}, b"1")],
    "bomb": [("a/SKILL.md", {}, SKILL), ("a/x", {}, bytes(64 * 1024 * 1024))],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE)
def test_hostile_tarballs_are_refused(tmp_path, fetch, members):
    """What leads outside, is a link or device, comes twice or unpacks to too much is refused, and nothing is written."""
    path = tarball(tmp_path / "a.tar.gz", *members)
    try:
        skills, refused = fetch(path)
    except ArchiveRefused as error:
        skills, refused = {}, {"": error.code}
    assert skills == {}
    assert all(code.startswith("archive_") for code in refused.values())
    assert refused
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("cut", [1, 2, 30, -5])
def test_a_tarball_that_is_cut_off_is_refused(tmp_path, fetch, cut):
    """Half a download ends in a rule of archives, wherever it ends."""
    path = tarball(tmp_path / "a.tar.gz", ("a/SKILL.md", {}, SKILL))
    path.write_bytes(path.read_bytes()[:cut])
    assert refusal(fetch, path).startswith("archive_")


def test_headers_without_end_are_refused(tmp_path, fetch):
    """An extended header of many megabytes is not kept in memory."""
    tarball(
        tmp_path / "a.tar.gz", ("a/SKILL.md", {"pax_headers": {"x": "y" * (8 << 20)}}, SKILL), format=tarfile.PAX_FORMAT
    )
    assert refusal(fetch, "a.tar.gz") == "archive_damaged"


def test_a_zip_of_several_skills_is_taken_apart(tmp_path, fetch):
    """An archive as code hosts make them has many skills below one folder; links beside them do not matter."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as out:
        out.writestr("repo-main/skills/brief/SKILL.md", SKILL)
        out.writestr("repo-main/skills/other/SKILL.md", skill_text("other"))
        link = zipfile.ZipInfo("repo-main/CLAUDE.md")
        link.external_attr = 0o120777 << 16
        out.writestr(link, "AGENTS.md")
    assert fetch("a.zip")[0] == {"brief": ["SKILL.md"], "other": ["SKILL.md"]}
    assert fetch("a.zip#repo-main/skills/other")[0] == {"other": ["SKILL.md"]}
    with zipfile.ZipFile(tmp_path / "a.zip", "a") as out:
        out.writestr("../evil", "x")
    with pytest.raises(ArchiveRefused):
        fetch("a.zip")


def test_a_repository_gives_what_was_committed(repository, fetch):
    """A branch, a tag and a commit give their files, whatever lies in the folder; only programs may be run."""
    first = repository.git("rev-parse", "HEAD")
    repository.git("tag", "v1")
    write_skill(repository.folder / "skills/brief", "brief", more__md="x")
    repository.commit("two")
    write_skill(repository.folder / "skills/brief", "brief", uncommitted__md="x")
    assert fetch("repository@main")[0] == {"brief": ["SKILL.md", "more.md"]}
    assert fetch("repository@v1")[0] == fetch(f"repository@{first}")[0] == {"brief": ["SKILL.md"]}
    assert fetch("git+./repository", ref="refs/heads/main")[0] == {"brief": ["SKILL.md", "more.md"]}
    assert fetch("repository@main", resolved=first)[0] == {"brief": ["SKILL.md"]}
    repository.git("branch", "v1", "main")
    assert refusal(fetch, "repository@v1") == "source_invalid"


def test_nothing_of_a_repository_runs(repository, fetch, tmp_path, monkeypatch):
    """Hooks, filters, drivers and programs that a repository or this account's settings name are not started."""
    mark = tmp_path / "ran"
    script = f"#!/bin/sh\ntouch {mark}\n"
    (repository.folder / ".gitattributes").write_text(
        "* filter=evil diff=evil text ident export-subst\n*.md export-ignore\n"
    )
    lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12\n"
    write_skill(repository.folder / "skills/brief", "brief", data__bin=lfs, ident__txt="$Id$ $Format:%H$")
    repository.commit("attributes")
    for hook in ("post-checkout", "pre-upload-pack", "post-merge", "reference-transaction", "fsmonitor-watchman"):
        path = repository.folder / ".git/hooks" / hook
        path.write_text(script)
        path.chmod(0o755)
    repository.git("config", "filter.evil.smudge", f"touch {mark}")
    repository.git("config", "core.fsmonitor", f"touch {mark}")
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        f'[filter "evil"]\nsmudge = touch {mark}\n[core]\nhooksPath = {repository.folder}/.git/hooks\n'
        '[url "https://elsewhere.invalid/"]\ninsteadOf = /\n'
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.fsmonitor")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", f"touch {mark}")
    assert fetch("repository@main")[0] == {"brief": ["SKILL.md", "data.bin", "ident.txt"]}
    [text] = tmp_path.glob("scratch-*/skills-0/*/brief/ident.txt")
    assert text.read_text() == "$Id$ $Format:%H$"
    assert not mark.exists()


def test_submodules_and_links_of_a_repository_are_no_files(repository, fetch, tmp_path):
    """A skill with a submodule or a link in it is refused; a link outside it does not matter."""
    inner = tmp_path / "inner"
    inner.mkdir()
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        repository.git("-C", str(inner), *words)
    write_skill(repository.folder / "skills/module", "module")
    repository.git("submodule", "--quiet", "add", str(inner), "skills/module/inner")
    write_skill(repository.folder / "skills/linked", "linked")
    (repository.folder / "skills/linked/passwd").symlink_to("/etc/passwd")
    (repository.folder / "escape").symlink_to("/etc")
    repository.commit("odd")
    skills, refused = fetch("repository@main")
    assert skills == {"brief": ["SKILL.md"]}
    assert refused == {"skills/linked": "archive_link", "skills/module": "archive_special_file"}


def test_a_long_history_does_not_come(repository, fetch, tmp_path):
    """Of a repository only the commit that is asked for comes, not what was before it."""
    blob = os.urandom(3 << 20)
    (repository.folder / "large").write_bytes(blob)
    repository.commit("large")
    (repository.folder / "large").unlink()
    repository.commit("small")
    fetch("repository@main")
    packs = list(tmp_path.glob("scratch-*/repository.git/objects/pack/*.pack"))
    assert sum(path.stat().st_size for path in packs) < 1 << 20


def test_a_repository_that_hangs_is_ended(repository, fetch, monkeypatch, tmp_path):
    """Git that does not come to an end is killed with all it started, and the error says so."""
    stuck = tmp_path / "bin"
    stuck.mkdir()
    (stuck / "git").write_text("#!/bin/sh\nsleep 1000 & wait\n")
    (stuck / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{stuck}:{os.environ['PATH']}")
    monkeypatch.setattr("kdskills.supply.fetching.FETCH_S", 0.3)
    assert refusal(fetch, "repository@main") == "source_unreachable"


def test_without_git_the_error_says_so(repository, fetch, monkeypatch, tmp_path):
    """Where there is no program git, that is what the operator is told."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceFailed) as caught:
        fetch("repository@main")
    assert (caught.value.code, caught.value.who) == ("source_unreachable", "operator")


def test_too_much_is_refused_before_it_is_read(tmp_path, fetch, monkeypatch):
    """A folder with more files than are looked at ends in an error, not in an hour."""
    write_skill(tmp_path / "any/brief", "brief")
    for number in range(50):
        (tmp_path / f"any/{number}").touch()
    monkeypatch.setattr(sources, "CONTAINER", replace(sources.CONTAINER, entries=10))
    assert refusal(fetch, "any") == "source_too_large"
