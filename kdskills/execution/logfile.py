"""Output of long runs in files on the host, followed while it comes and read by offset.

A file grows at its end only, so an offset means the same bytes for ever. Disk use stays bounded all the same: beyond the
limit the oldest whole MiB are punched out of the file, which keeps its length and loses their blocks.
"""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kdskills.execution.pump import TailBuffer
from kdskills.execution.request import ExecRequest

BLOCK: Final = 1024 * 1024
_PUNCH_AND_KEEP_SIZE: Final = 0x03
_UNSUPPORTED: Final = 4
"""Where a file system cannot punch holes, a log ends at this many times its limit."""


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Bytes of a log.

    Attributes:
        offset: Where the piece begins: what was asked for, or the first byte still kept.
        data: The bytes.
        total: Length of the log so far.
        truncated: Whether bytes between the asked offset and this piece are gone.
    """

    offset: int
    data: bytes
    total: int
    truncated: bool

    @property
    def next_offset(self) -> int:
        """Where the following piece begins."""
        return self.offset + len(self.data)


def first_kept(total: int, limit: int) -> int:
    """Return the offset of the first byte a log of *total* bytes still has."""
    return max(0, total - limit) // BLOCK * BLOCK


def read_log(path: Path, offset: int, size: int, limit: int) -> LogPiece:
    """Return up to *size* bytes of the log at *path* from *offset*; a negative offset counts from the end.

    A log nobody has written to yet is empty.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return LogPiece(0, b"", 0, truncated=False)
    try:
        total = os.fstat(fd).st_size
        requested = max(0, total + offset) if offset < 0 else min(offset, total)
        start = max(requested, first_kept(total, limit))
        return LogPiece(start, os.pread(fd, max(0, size), start), total, truncated=start > requested)
    finally:
        os.close(fd)


class LogWriter:
    """Appends to one log. It holds no descriptor between writes, so nothing is left open by a run that breaks."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = limit
        self._punched = 0
        self._can_punch = True

    def write(self, data: bytes) -> None:
        """Append *data*. Raises OSError when the disk takes no more."""
        if not data:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        try:
            remaining = memoryview(data)
            if not self._can_punch:
                remaining = remaining[: max(0, self._limit * _UNSUPPORTED - os.fstat(fd).st_size)]
            while remaining:
                remaining = remaining[os.write(fd, remaining) :]
            self._bound(fd)
        finally:
            os.close(fd)

    def _bound(self, fd: int) -> None:
        """Give back the blocks before what is kept."""
        keep = first_kept(os.fstat(fd).st_size, self._limit)
        if keep <= self._punched or not self._can_punch:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        size = ctypes.c_int64
        if libc.fallocate(fd, _PUNCH_AND_KEEP_SIZE, size(self._punched), size(keep - self._punched)):
            number = ctypes.get_errno()
            if number not in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
                raise OSError(number, os.strerror(number), str(self._path))
            self._can_punch = False
            return
        self._punched = keep


class LoggedTail(TailBuffer):
    """A tail whose bytes also go into a log."""

    def __init__(self, limit: int, writer: LogWriter) -> None:
        super().__init__(limit)
        self._writer = writer

    def feed(self, data: bytes) -> None:
        """Take bytes that came."""
        super().feed(data)
        self._writer.write(data)


def output_buffers(request: ExecRequest) -> tuple[TailBuffer, TailBuffer]:
    """Return the buffers of stdout and stderr of a run of *request*, followed by logs where it wants them."""
    limits, logs = request.limits, request.logs
    if logs is None:
        return TailBuffer(limits.stdout), TailBuffer(limits.stderr)
    return (
        LoggedTail(limits.stdout, LogWriter(logs.stdout, logs.limit)),
        LoggedTail(limits.stderr, LogWriter(logs.stderr, logs.limit)),
    )
