"""Skills that are no files of this host: entries of a storage, written where they are skills like others."""

from __future__ import annotations

import gc
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kdskills.errors import BadRequest
from kdskills.skills import SkillRegistry, SkillRoot, roots
from kdskills.testing.roots import ENTRY_CHECKS, FIRST, Entries, EntryCheck, skill


class Memory:
    """Entries in a mapping."""

    def __init__(self) -> None:
        self.entries: Any = {}

    def put(self, entries: Any) -> None:
        self.entries = entries

    def root(self) -> SkillRoot:
        return SkillRoot.of_entries("memory", lambda: self.entries, every_s=0)


class Table:
    """Entries in a table of SQLite, one row a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with sqlite3.connect(path) as link:
            link.execute("CREATE TABLE skill_file (skill TEXT, path TEXT, data BLOB)")

    def put(self, entries: Entries) -> None:
        rows = [(key, path, data) for key, files in entries.items() for path, data in files.items()]
        with sqlite3.connect(self.path) as link:
            link.execute("DELETE FROM skill_file")
            link.executemany("INSERT INTO skill_file VALUES (?, ?, ?)", rows)

    def read(self) -> Mapping[str, Mapping[str, bytes]]:
        entries: dict[str, dict[str, bytes]] = {}
        with sqlite3.connect(self.path) as link:
            for key, path, data in link.execute("SELECT skill, path, data FROM skill_file"):
                entries.setdefault(key, {})[path] = data
        return entries

    def root(self) -> SkillRoot:
        return SkillRoot.of_entries("table", self.read, every_s=0)


@pytest.fixture(params=["memory", "table"])
def storage(request, tmp_path):
    """An empty storage."""
    return Memory() if request.param == "memory" else Table(tmp_path / "skills.db")


@pytest.mark.parametrize("check", ENTRY_CHECKS, ids=lambda check: check.name)
def test_storages(check: EntryCheck, storage):
    """A mapping and a table of a database keep every promise."""
    check.run(storage)


class Lossy(Memory):
    """A storage that keeps no binary files."""

    def put(self, entries: Any) -> None:
        self.entries = {
            key: {path: data for path, data in files.items() if b"\0" not in data} for key, files in entries.items()
        }


def test_a_storage_that_loses_files_is_told():
    """The checks fail where a promise is broken."""
    failed = []
    for check in ENTRY_CHECKS:
        try:
            check.run(Lossy())
        except AssertionError:
            failed.append(check.name)
    assert {"exact", "empty", "changes"} <= set(failed)


HOSTILE = [
    {"SKILL.md": "x", "../out": "x"},
    {"SKILL.md": "x", "/etc/out": "x"},
    {"SKILL.md": "x", "a/../../out": "x"},
    {"SKILL.md": "x", "a//b": "x"},
    {"SKILL.md": "x", "": "x"},
    {"SKILL.md": "x", "a\\b": "x"},
    {"SKILL.md": "x", "a\0b": "x"},
    {"SKILL.md": "x", "n" * 256: "x"},
    {"SKILL.md": "x", "\ud800": "x"},
    {"SKILL.md": "\ud800"},
    {"SKILL.md": 5},
    {"SKILL.md": "x", 5: "x"},
    {"SKILL.md": "x", "a": "x", "a/b": "x"},
    {"SKILL.md": "x", "large": b"x" * (16 * 1024 * 1024)},
    {"SKILL.md": "x"} | {str(number): "" for number in range(512)},
    {"skill": "x"},
    "text",
    None,
]


@pytest.mark.parametrize("files", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_entry_costs_only_itself(files, tmp_path):
    """What cannot be written as files of one skill is left out and named, and nothing is written beside the root."""
    memory = Memory()
    memory.put({**FIRST, "bad": files})
    root = memory.root()
    snapshot = SkillRegistry([root], index_dir=None).snapshot()
    assert set(snapshot.skills) == {"public.greet", "acme.tidy"}
    assert [(note.code, "'bad'" in note.message) for note in snapshot.diagnostics] == [("entry_invalid", True)]
    assert not (root.path / "bad").exists()
    assert not (root.path.parent / "out").exists()


@pytest.mark.parametrize("key", ["../x", "/x", "a/b/c", "", "a/", ".", "greet/inner", 5, "x\ny"])
def test_a_hostile_key_costs_only_itself(key):
    """Keys are ids, or a namespace and an id; no entry lies in the folder of another one."""
    memory = Memory()
    memory.put({**FIRST, key: skill("x")})
    snapshot = SkillRegistry([memory.root()], index_dir=None).snapshot()
    assert set(snapshot.skills) == {"public.greet", "acme.tidy"}
    assert [note.code for note in snapshot.diagnostics] == ["entry_invalid"]


def test_more_entries_than_are_read(monkeypatch):
    """An endless storage is cut, and says so."""
    monkeypatch.setattr(roots, "MAX_ENTRIES", 20)

    class Endless(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            return False

        def items(self) -> Any:
            number = 0
            while True:
                yield f"s{number}", {"SKILL.md": b"x"}
                number += 1

    notes = SkillRoot.of_entries("endless", Endless, every_s=0).fill
    assert notes is not None
    assert [note.code for note in notes()] == ["entry_invalid"]


def test_a_storage_that_fails_keeps_what_was_read():
    """A failure and an answer that holds no entries are told, without the skills going; both are over when it works again."""
    answers: list[Any] = [FIRST, ConnectionError("no route"), ["x"], {"new": skill("new")}]

    def read() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    registry = SkillRegistry([SkillRoot.of_entries("db", read, every_s=0)], index_dir=None)
    before = dict(registry.snapshot().skills)
    for words in ("ConnectionError: no route", "returned list"):
        registry.refresh()
        assert dict(registry.snapshot().skills) == before
        (note,) = registry.snapshot().diagnostics
        assert (note.code, words in note.message) == ("entries_unreadable", True)
    registry.refresh()
    assert (list(registry.snapshot().skills), registry.snapshot().diagnostics) == (["public.new"], ())


def test_a_storage_is_not_asked_at_every_look():
    """Within `every_s` seconds looks cost no question; the first look asks always."""
    asked: list[int] = []
    root = SkillRoot.of_entries("db", lambda: asked.append(1) or FIRST, every_s=3600)
    assert asked == []
    registry = SkillRegistry([root], index_dir=None)
    for _ in range(3):
        registry.refresh()
    assert (len(registry.snapshot().skills), asked) == (2, [1])


def test_files_that_were_cleaned_away_come_back():
    """Whoever removes old temporary files takes no skill away for long."""
    memory = Memory()
    memory.put({"one": skill("one")})
    root = memory.root()
    registry = SkillRegistry([root], index_dir=None)
    registry.snapshot()
    (file,) = Path(root.path).rglob("SKILL.md")
    file.unlink()
    registry.refresh()
    assert file.is_file()


def test_the_folder_goes_with_the_root():
    """Nobody else may look into it; it is removed with the root, and not by a process that was forked meanwhile."""
    memory = Memory()
    memory.put(FIRST)
    root = memory.root()
    SkillRegistry([root], index_dir=None).snapshot()
    folder = root.path
    assert [oct(path.stat().st_mode & 0o777) for path in (folder, folder / "greet/SKILL.md")] == ["0o700", "0o600"]
    child = os.fork()
    if child == 0:
        del root
        gc.collect()
        os._exit(0 if folder.exists() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del root
    gc.collect()
    assert not folder.exists()


def test_a_root_of_entries_has_a_name_and_a_function():
    """What cannot be a root is refused when it is made."""
    for wrong in ({"name": "a/b"}, {"name": ""}, {"kind": "other"}):
        with pytest.raises(BadRequest):
            SkillRoot.of_entries(**{"name": "x", "read": dict, **wrong})
    with pytest.raises(TypeError, match="dict"):
        SkillRoot.of_entries("x", {})  # type: ignore[arg-type]
