"""What `kdskills.lock` says of skills from elsewhere: where each came from, and every file of it as it was then.

There is one table `[skill."<namespace>/<name>"]` for each. A skill that came from a folder of this machine and was not
pinned has no digest and no files there: what it may be is nobody's word but that folder's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kdskills.bundle.lock_file import read_entries, table_text
from kdskills.errors import FileRefused
from kdskills.skills.fields import name_problem
from kdskills.skills.safe_open import TreeFile, read_tree, split_relative, tree_digest_of, version_of

TABLE: Final = "skill"
LockStanding = Literal["ok", "changed", "missing", "unlocked"]
"""How a skill's folder stands to its entry."""

_FILE: Final = re.compile(r"([0-9a-f]{64}) (0|[1-9][0-9]{0,11}) ([x-]) (.+)", re.DOTALL)
_DIGEST: Final = re.compile(r"(sha256:[0-9a-f]{64})?")


@dataclass(frozen=True, slots=True)
class LockedSkill:
    """What was locked of one skill.

    Attributes:
        source: Where it is fetched from, as `kdskills add` takes it, without credentials; a relative path begins at the
            bundle's folder.
        resolved: What the source was then: a commit in hex, or `sha256:` and the digest of what was downloaded.
        digest: Tree digest, as the registry has it; empty where nothing was locked but the source.
        files: Every file by path bytes, with its size, SHA-256 and whether it may be run.
        signer: Name of the trust anchor its signature was checked against; empty without one.
        added_with: Program and version that wrote the entry.
        pinned: Whether `update` leaves it alone.
    """

    source: str
    resolved: str = ""
    digest: str = ""
    files: tuple[TreeFile, ...] = ()
    signer: str = ""
    added_with: str = ""
    pinned: bool = False

    @property
    def version(self) -> str:
        """The digest over all files that says which may be run, too; empty where no files are locked."""
        return version_of(self.files) if self.files else ""


@dataclass(frozen=True, slots=True)
class LockComparison:
    """How a folder stands to its entry, and the paths that differ: added, removed, or with another content or mode."""

    standing: LockStanding
    files: tuple[str, ...] = ()


def skill_key(namespace: str, name: str) -> str:
    """Return the key of a skill in the lock."""
    return f"{namespace}/{name}"


def read_skills(path: Path) -> dict[str, LockedSkill]:
    """Return the skills that the lock file at *path* has, by key, sorted; nothing when there is no file.

    Raises LockFileInvalid (`lock_invalid`) for a file that is none, or an entry that says two things.
    """
    return read_entries(path, TABLE, _entry)


def skills_text(path: Path, skills: Mapping[str, LockedSkill]) -> str:
    """Return the text of the lock file at *path* with *skills* as all its skills; other tables stay. Raises LockFileInvalid."""
    return table_text(path, TABLE, {key: _row(skill) for key, skill in skills.items()})


def compare_folder(folder: Path, locked: LockedSkill) -> LockComparison:
    """Compare a skill's folder with its entry. A link, and what is no regular file, differs from any file."""
    if not folder.is_dir() or folder.is_symlink():
        return LockComparison("missing")
    if not locked.files:
        return LockComparison("unlocked")
    try:
        present = {file.path: file for file in read_tree(folder)}
    except FileRefused as error:
        return LockComparison("changed", (str(error.details.get("path", "")),))
    expected = {file.path: file for file in locked.files}
    paths = sorted({*present, *expected}, key=lambda path: path.encode("utf-8", "surrogateescape"))
    files = tuple(path for path in paths if present.get(path) != expected.get(path))
    return LockComparison("changed" if files else "ok", files)


def _row(skill: LockedSkill) -> dict[str, Any]:
    facts = {"source": skill.source, "resolved": skill.resolved, "digest": skill.digest}
    facts |= {"signer": skill.signer, "added_with": skill.added_with}
    row: dict[str, Any] = {name: value for name, value in facts.items() if value}
    row |= {"pinned": True} if skill.pinned else {}
    return row | ({"files": [file.line for file in skill.files]} if skill.files else {})


def _entry(key: str, row: dict[str, Any]) -> LockedSkill:
    namespace, _, name = key.partition("/")
    problem = name_problem(name) or name_problem(namespace)
    if problem is not None:
        raise ValueError(f"{key[:200]!r} is no key of a skill: {problem}")
    texts = {field: row.get(field, "") for field in ("source", "resolved", "digest", "signer", "added_with")}
    unknown = row.keys() - texts.keys() - {"files", "pinned"}
    if unknown or not all(isinstance(text, str) for text in texts.values()) or not texts["source"]:
        raise ValueError(f"{key} has no source, a value of another kind, or one that is not known")
    files = tuple(_file(key, line) for line in row.get("files", ()))
    paths = [file.path.encode() for file in files]
    pinned = row.get("pinned", False)
    if paths != sorted(set(paths)) or not isinstance(pinned, bool):
        raise ValueError(f"files of {key} are not sorted, or there twice")
    if not _DIGEST.fullmatch(texts["digest"]) or texts["digest"] != (tree_digest_of(files) if files else ""):
        raise ValueError(f"the digest of {key} is not that of its files")
    return LockedSkill(**texts, files=files, pinned=pinned)


def _file(key: str, line: str) -> TreeFile:
    parts = _FILE.fullmatch(line)
    if parts is None:
        raise ValueError(f"{line[:200]!r} is no file of {key}")
    try:
        split_relative(parts[4])
    except FileRefused as error:
        raise ValueError(error.message) from None
    return TreeFile(parts[4], int(parts[2]), parts[1], parts[3] == "x")
