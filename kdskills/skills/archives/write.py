"""Write a skill's folder as a zip that has the same bytes everywhere.

Files are stored, not deflated: what a compressor makes of the same bytes differs between its versions, and a digest over
the archive would differ with it.
"""

from __future__ import annotations

import stat
import zlib
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

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
from kdskills.skills.archives.tree import PIECE, read_tree
from kdskills.skills.safe_open import open_file

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
    written: list[_Written] = []
    place = 0
    for file in read_tree(folder):
        entry_name = f"{top}/{file.path}".encode()
        crc = _crc(folder, file.path)
        mode = PROGRAM_MODE if file.executable else FILE_MODE
        written.append(_Written(entry_name, crc, file.size, place, mode))
        head = LOCAL.pack(
            *(LOCAL_MARK, _VERSION, UTF8_NAME, STORED, _TIME, _DATE, crc, file.size, file.size, len(entry_name), 0)
        )
        place += out.write(head) + out.write(entry_name)
        with open_file(folder, file.path) as stream:
            while piece := stream.read(PIECE):
                place += out.write(piece)
    begin = place
    for each in written:
        place += out.write(_central(each)) + out.write(each.name)
    out.write(END.pack(END_MARK, 0, 0, len(written), len(written), place - begin, begin, 0))


def _central(each: _Written) -> bytes:
    fields = (_UNIX | _VERSION, _VERSION, UTF8_NAME, STORED, _TIME, _DATE, each.crc, each.size, each.size)
    return CENTRAL.pack(CENTRAL_MARK, *fields, len(each.name), 0, 0, 0, 0, each.mode << 16, each.offset)


def _crc(folder: Path, path: str) -> int:
    crc = 0
    with open_file(folder, path) as stream:
        while piece := stream.read(PIECE):
            crc = zlib.crc32(piece, crc)
    return crc
