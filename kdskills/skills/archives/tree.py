"""The normalised tree of a skill: its files with their execute bits, and the version that is its hash."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from kdskills.errors import FileRefused
from kdskills.skills.digest import rows_digest
from kdskills.skills.safe_open import open_file, walk_tree

PIECE: Final = 64 * 1024


class TreeFile(NamedTuple):
    """One file of a skill: posix path below its folder, size, SHA-256 in hex, and whether it may be run."""

    path: str
    size: int
    sha256: str
    executable: bool


def version_of(files: Iterable[TreeFile]) -> str:
    """Return the version: a digest over `[[path, size, hex], ...]` by path bytes, `"x"` added to files that may be run.

    A skill without such files has its tree digest as version. Times, owners, other modes, empty
    folders, the order and packing of an archive do not count.
    """
    ordered = sorted(files, key=lambda each: os.fsencode(each.path))
    return rows_digest([file.path, file.size, file.sha256, *(["x"] if file.executable else [])] for file in ordered)


def read_tree(folder: Path) -> tuple[TreeFile, ...]:
    """Return the files of a skill's folder, sorted by path bytes.

    Raises:
        FileRefused: Something in it is no regular file, or cannot be read.
    """
    found = []
    for entry in walk_tree(folder):
        if entry.kind != "file":
            raise FileRefused(f"{entry.path!r} is not a regular file", code="not_regular", path=entry.path)
        hasher = hashlib.sha256()
        size = 0
        with open_file(folder, entry.path) as stream:
            while piece := stream.read(PIECE):
                hasher.update(piece)
                size += len(piece)
        found.append(TreeFile(entry.path, size, hasher.hexdigest(), bool(entry.mode & 0o111)))
    return tuple(found)
