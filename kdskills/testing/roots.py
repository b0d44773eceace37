"""The promises of a root of entries, as named checks that any storage of skills can be run through.

@pytest.mark.parametrize("check", ENTRY_CHECKS, ids=lambda check: check.name)
def test_my_table(check):
    check.run(MyTable())
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, Protocol

from kdskills.skills import SkillRegistry, SkillRoot, Snapshot
from kdskills.skills.safe_open import read_file
from kdskills.testing.stores import expect

Entries = Mapping[str, Mapping[str, bytes]]


class EntryStorage(Protocol):
    """What is checked: a storage of skills, empty at first, and the root over it."""

    def put(self, entries: Entries) -> None:
        """Let *entries* be all there are: `{"id" or "namespace/id": {path: bytes}}`."""
        ...

    def root(self) -> SkillRoot:
        """Return a root over the storage, made by `SkillRoot.of_entries(..., every_s=0)`."""
        ...


@dataclass(frozen=True, slots=True)
class EntryCheck:
    """One promise: `run` takes an empty storage and raises AssertionError when it is broken."""

    name: str
    promise: str
    run: Callable[[EntryStorage], None]


def skill(name: str, body: str = "Do it.", **files: bytes) -> dict[str, bytes]:
    """Return the files of a skill; in their names `__` stands for a slash."""
    text = f"---\nname: {name}\ndescription: About {name}.\n---\n{body}\n"
    return {"SKILL.md": text.encode(), **{word.replace("__", "/"): data for word, data in files.items()}}


FIRST: Final[Entries] = {
    "greet": skill("greet", "Grüße: 你好 🎉", data__every_byte=bytes(range(256)), empty=b"", a__b__c=b"deep"),
    "acme/tidy": skill("tidy", scripts__run=b"print(1)\r\n"),
}


def _snapshot(storage: EntryStorage, entries: Entries) -> tuple[SkillRegistry, Snapshot]:
    storage.put(entries)
    registry = SkillRegistry([storage.root()], index_dir=None)
    return registry, registry.snapshot()


def _holds(snapshot: Snapshot, entries: Entries) -> None:
    """Expect the skills of *entries* and no others, each with its files and no others, byte for byte."""
    ids = {key.replace("/", ".") if "/" in key else f"public.{key}": files for key, files in entries.items()}
    expect(set(snapshot.skills) == set(ids), f"the skills are {sorted(ids)}, not {sorted(snapshot.skills)}")
    for full_id, files in ids.items():
        folder = snapshot.skills[full_id].folder
        assert folder is not None
        here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        expect(here == set(files), f"{full_id} has the files {sorted(files)}, not {sorted(here)}")
        for path, data in files.items():
            expect(read_file(folder, path, limit=1 << 20).data == data, f"{path} of {full_id} comes byte for byte")


def _exact(storage: EntryStorage) -> None:
    _holds(_snapshot(storage, FIRST)[1], FIRST)


def _empty(storage: EntryStorage) -> None:
    registry, snapshot = _snapshot(storage, {})
    expect((dict(snapshot.skills), snapshot.diagnostics) == ({}, ()), "a storage without entries is an empty root")
    storage.put(FIRST)
    registry.refresh()
    _holds(registry.snapshot(), FIRST)


def _changes(storage: EntryStorage) -> None:
    registry, before = _snapshot(storage, FIRST)
    expect(registry.refresh().generation == before.generation, "without a change the snapshot stays")
    expect(registry.snapshot() is before, "without a change the snapshot stays the same object")
    greet = {path: data for path, data in FIRST["greet"].items() if path != "empty"} | {"a/b/c": b"other"}
    after = {"greet": greet, "new": skill("new")}
    storage.put(after)
    report = registry.refresh()
    expect(report.added == ("public.new",), "an entry that was added is a skill at the next look")
    expect(report.removed == ("acme.tidy",), "an entry that was removed is none any more")
    _holds(registry.snapshot(), after)


def _digests(storage: EntryStorage) -> None:
    registry, snapshot = _snapshot(storage, FIRST)
    before = snapshot.skills["public.greet"].tree_digest()
    storage.put({**FIRST, "greet": {**FIRST["greet"], "a/b/c": b"DEEP"}})
    registry.refresh()
    changed = registry.snapshot().skills["public.greet"].tree_digest()
    expect(changed != before, "a change of one byte of a file is another tree")
    storage.put(FIRST)
    registry.refresh()
    expect(registry.snapshot().skills["public.greet"].tree_digest() == before, "equal files are the same tree")


def _broken(storage: EntryStorage) -> None:
    _, snapshot = _snapshot(storage, {**FIRST, "broken": {"SKILL.md": b"no skill at all"}})
    _holds(snapshot, FIRST)
    expect("public.broken" in snapshot.invalid, "an entry that is no skill is named, and costs only itself")


def _many(storage: EntryStorage) -> None:
    entries = {f"area-{number % 7}/skill-{number}": skill(f"skill-{number}") for number in range(300)}
    _holds(_snapshot(storage, entries)[1], entries)


def _threads(storage: EntryStorage) -> None:
    registry, _ = _snapshot(storage, FIRST)
    storage.put({"new": skill("new")})
    thread = threading.Thread(target=registry.refresh)
    thread.start()
    thread.join()
    _holds(registry.snapshot(), {"new": skill("new")})


def _names(storage: EntryStorage) -> None:
    expect(PurePosixPath(storage.root().uri).parts[0] == "entries:", "the root names no folder of this host")


ENTRY_CHECKS: Final = (
    EntryCheck("exact", "Files come byte for byte, texts of all languages, empty ones and nested ones, too.", _exact),
    EntryCheck("empty", "No entries are no skills and no error; the first entry is seen at the next look.", _empty),
    EntryCheck(
        "changes", "What is added, changed and removed is so at the next look; what stays is the same.", _changes
    ),
    EntryCheck("digests", "The digest of a skill changes with its files, and only with them.", _digests),
    EntryCheck("broken", "An entry that is no skill costs only itself.", _broken),
    EntryCheck("many", "Hundreds of entries are hundreds of skills.", _many),
    EntryCheck("threads", "Entries are read from any thread.", _threads),
    EntryCheck("names", "The root has a name that holds on every host.", _names),
)
"""What `SkillRoot.of_entries` promises of skills that lie in a storage, for any storage."""
