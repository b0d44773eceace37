"""The files of a skill with the version made of them, and the zip of it that has the same bytes everywhere.

Files are stored, not deflated: what a compressor makes of the same bytes differs between its versions, and a digest over
the archive would differ with it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from kdskills.errors import FileRefused
from kdskills.skills.archives.directory import (
    CENTRAL,
    CENTRAL_MARK,
    END,
    END_MARK,
    LOCAL,
    LOCAL_MARK,
    STORED,
    UTF8_NAME,
)
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
    files = []
    for entry in walk_tree(folder):
        if entry.kind != "file":
            raise FileRefused(f"{entry.path!r} is not a regular file", code="not_regular", path=entry.path)
        hasher = hashlib.sha256()
        size = 0
        with open_file(folder, entry.path) as stream:
            while piece := stream.read(PIECE):
                hasher.update(piece)
                size += len(piece)
        files.append(TreeFile(entry.path, size, hasher.hexdigest(), bool(entry.mode & 0o111)))
    return tuple(files)


_VERSION = 20
_UNIX = 3 << 8
_TIME, _DATE = 0, (1 << 5) | 1
"""Midnight of 1 January 1980, the first moment a zip knows."""

FILE_MODE: Final = stat.S_IFREG | 0o644
PROGRAM_MODE: Final = stat.S_IFREG | 0o755


class _Written(NamedTuple):
    name: bytes
    crc: int
    size: int
    offset: int
    mode: int


def write_archive(folder: Path, out: BinaryIO, *, name: str | None = None) -> None:
    """Write the skill in *folder* to *out*, in pieces.

    Args:
        folder: The skill's folder.
        out: Where to; written from its current place on, never read.
        name: Name of the single root folder; the folder's own when omitted.

    Raises:
        FileRefused: Something in the folder is no regular file, cannot be read, or changed meanwhile.
    """
    top = name or folder.name
    entries: list[_Written] = []
    position = 0
    for file in read_tree(folder):
        entry_name = f"{top}/{file.path}".encode()
        crc = _crc(folder, file.path)
        mode = PROGRAM_MODE if file.executable else FILE_MODE
        entries.append(_Written(entry_name, crc, file.size, position, mode))
        head = LOCAL.pack(
            *(LOCAL_MARK, _VERSION, UTF8_NAME, STORED, _TIME, _DATE, crc, file.size, file.size, len(entry_name), 0)
        )
        position += out.write(head) + out.write(entry_name)
        with open_file(folder, file.path) as stream:
            while piece := stream.read(PIECE):
                position += out.write(piece)
    begin = position
    for each in entries:
        position += out.write(_central(each)) + out.write(each.name)
    out.write(END.pack(END_MARK, 0, 0, len(entries), len(entries), position - begin, begin, 0))


def _central(each: _Written) -> bytes:
    fields = (_UNIX | _VERSION, _VERSION, UTF8_NAME, STORED, _TIME, _DATE, each.crc, each.size, each.size)
    return CENTRAL.pack(CENTRAL_MARK, *fields, len(each.name), 0, 0, 0, 0, each.mode << 16, each.offset)


def _crc(folder: Path, path: str) -> int:
    crc = 0
    with open_file(folder, path) as stream:
        while piece := stream.read(PIECE):
            crc = zlib.crc32(piece, crc)
    return crc
