"""What the file system says about a file, packed, so that a change is seen without reading it."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

RACY_NS = 2_000_000_000

_STAMP = struct.Struct("<qqQq")
STAMP_BYTES = _STAMP.size
NO_STAMP = _STAMP.pack(-1, -1, 0, -1)
"""What no file has, so that the next walk looks again."""


def stamp_of(status: os.stat_result) -> bytes:
    """Return size, modification time, inode and change time of a file or folder, packed.

    The change time goes beyond the specification: it tells of an edit by a tool that put the modification time back.
    Packed, because ten thousand skills have more than twenty thousand stamps.
    """
    return _STAMP.pack(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def stamps_of(root: int, paths: Iterable[str]) -> bytes:
    """Return the stamps of files or folders below an open folder, packed one after the other. Raises `OSError`."""
    look, pack = os.stat, _STAMP.pack  # asked relative to the folder, the system has shorter ways to go
    return b"".join(
        [
            pack(facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_ctime_ns)
            for path in paths
            for facts in (look(path, dir_fd=root, follow_symlinks=False),)
        ]
    )


def newest_of(stamps: bytes) -> int:
    """Return the latest modification time among packed stamps."""
    newest: int = max([stamp[1] for stamp in _STAMP.iter_unpack(stamps)])
    return newest


def sizes_of(stamps: bytes) -> list[int]:
    """Return the sizes in packed stamps."""
    return [stamp[0] for stamp in _STAMP.iter_unpack(stamps)]
