"""What the lock says of skills reads as it was written, is read with suspicion, and every file that differs is named."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdskills.bundle.lock_file import LockFileInvalid, write_text
from kdskills.environments.lock import write_lock
from kdskills.skills.safe_open import TreeFile, read_tree, tree_digest
from kdskills.supply.lock import LockedSkill, compare_folder, read_skills, skills_text, tree_digest_of

paths = st.lists(
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="/\0"), min_size=1, max_size=8).filter(
        lambda part: part not in {".", ".."}
    ),
    min_size=1,
    max_size=3,
).map("/".join)
files = st.dictionaries(
    paths, st.tuples(st.integers(0, 10**9), st.from_regex(r"[0-9a-f]{64}", fullmatch=True), st.booleans()), max_size=5
).map(lambda rows: tuple(TreeFile(path, *rows[path]) for path in sorted(rows, key=str.encode)))
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
skills = st.dictionaries(
    st.from_regex(r"[a-z]{1,5}/[a-z]{1,5}", fullmatch=True),
    st.tuples(texts.filter(bool), texts, files, texts, texts, st.booleans()).map(
        lambda row: LockedSkill(row[0], row[1], tree_digest_of(row[2]) if row[2] else "", *row[2:])
    ),
    max_size=4,
)


def folder_of(tmp_path, **contents):
    """Make a skill's folder with these files, `__` for the dot of a suffix."""
    folder = tmp_path / "brief"
    for name, text in contents.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def entry_of(folder):
    """Return what would be locked of a folder."""
    rows = read_tree(folder)
    return LockedSkill("./brief", digest=tree_digest_of(rows), files=rows)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(skills)
def test_what_is_written_is_read(tmp_path, written):
    """Every lock reads as it was written, whatever its texts, and the order of its making changes no byte."""
    path = tmp_path / "kdskills.lock"
    path.write_bytes(skills_text(path, written).encode())
    assert read_skills(path) == written
    assert write_text(path, skills_text(path, dict(reversed(written.items())))) is False


def test_the_digest_is_that_of_the_registry(tmp_path):
    """What is locked of a folder is the tree digest that the registry gives the skill."""
    folder = folder_of(tmp_path, SKILL__md="text", notes__md="more")
    assert entry_of(folder).digest == tree_digest(folder)


def test_tables_of_environments_and_skills_do_not_touch_each_other(tmp_path):
    """Writing skills leaves other tables as they are, and two who write at once both end up in the file."""
    path = tmp_path / "kdskills.lock"
    path.write_text('version = 3\n\n[environment]\n\n[other.one]\nvalue = "x"\n')
    write_text(path, skills_text(path, {"public/brief": LockedSkill("./brief")}))
    assert path.read_text().startswith("version = 3\n")
    assert '[other.one]\nvalue = "x"\n' in path.read_text()
    threads = [threading.Thread(target=write_lock, args=(path, {})) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_skills(path) == {"public/brief": LockedSkill("./brief")}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("public/brief", "../brief"),
        ("public/brief", "brief"),
        ("public/brief", "public/Brief"),
        ('source = "./brief"', 'source = ""'),
        ('source = "./brief"', "source = 3"),
        ("source", "sources"),
        ("sha256:", "sha512:"),
        ("sha256:0", "sha256:f"),
        (" - SKILL.md", " - ../SKILL.md"),
        (" - SKILL.md", " - /SKILL.md"),
        (" - SKILL.md", " x SKILL"),
        (" - SKILL.md", " SKILL.md"),
        ("4 - SKILL.md", "5 - SKILL.md"),
        ("pinned = true", "pinned = 1"),
        ("files = [", "files = 3\nmore = ["),
        ('[skill."public/brief"]', "[skill]"),
    ],
)
def test_entries_that_are_none_are_refused(tmp_path, old, new):
    """What could not have been written by us, half of a bad merge too, ends in `lock_invalid`."""
    path = tmp_path / "kdskills.lock"
    text_file = TreeFile("SKILL.md", 4, "00" * 32, executable=False)
    digest = tree_digest_of((text_file,))
    locked = LockedSkill("./brief", digest=digest, files=(text_file,), pinned=True)
    text = skills_text(path, {"public/brief": locked})
    old = old.replace("sha256:0", digest[:8])
    new = "sha256:" + ("0" if digest[7] == "f" else "f") if new == "sha256:f" else new
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(LockFileInvalid) as caught:
        read_skills(path)
    assert (caught.value.code, caught.value.who, caught.value.details) == (
        "lock_invalid",
        "author",
        {"path": str(path)},
    )


@pytest.mark.parametrize("data", [b"\xff", b"a = [" * 5000, b"skill = 3", b"x" * (33 << 20)])
def test_files_that_are_no_locks_are_refused(tmp_path, data):
    """Bytes that are no text, no TOML, too deep or too many end in `lock_invalid`."""
    path = tmp_path / "kdskills.lock"
    path.write_bytes(data)
    with pytest.raises(LockFileInvalid):
        read_skills(path)


def test_every_difference_is_named(tmp_path):
    """A changed text, a new file, a missing one and a mode each make a folder `changed`, by their paths."""
    folder = folder_of(tmp_path, SKILL__md="text", notes__md="more", run__sh="#!/bin/sh")
    locked = entry_of(folder)
    assert compare_folder(folder, locked).standing == "ok"
    (folder / "SKILL.md").write_text("other")
    (folder / "notes.md").unlink()
    (folder / "run.sh").chmod(0o755)
    (folder / ".hidden").write_text("new")
    comparison = compare_folder(folder, locked)
    assert (comparison.standing, comparison.files) == ("changed", (".hidden", "SKILL.md", "notes.md", "run.sh"))


def test_links_and_pipes_differ_from_any_file(tmp_path):
    """A link to the very same bytes, a pipe, and a linked folder are not what was locked."""
    folder = folder_of(tmp_path, SKILL__md="text", notes__md="more")
    locked = entry_of(folder)
    (folder / "notes.md").rename(tmp_path / "notes.md")
    (folder / "notes.md").symlink_to(tmp_path / "notes.md")
    assert compare_folder(folder, locked).files == ("notes.md",)
    (folder / "notes.md").unlink()
    os.mkfifo(folder / "notes.md")
    assert compare_folder(folder, locked).files == ("notes.md",)
    folder.rename(tmp_path / "moved")
    assert compare_folder(folder, locked).standing == "missing"
    folder.symlink_to(tmp_path / "moved")
    assert compare_folder(folder, locked).standing == "missing"


def test_what_was_not_pinned_is_unlocked(tmp_path):
    """An entry with its source alone says nothing of files; a missing folder is missing all the same."""
    folder = folder_of(tmp_path, SKILL__md="text")
    locked = replace(entry_of(folder), digest="", files=())
    assert compare_folder(folder, locked).standing == "unlocked"
    assert compare_folder(tmp_path / "none", locked).standing == "missing"
