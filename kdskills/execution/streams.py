"""Moving bytes between a program and us without ever being held up by it, and logs of long runs.

A grandchild that still holds a pipe cannot hold us: once the tree is dead pipes are read for `DRAIN_S` at most. A log grows
at its end only, so an offset means the same bytes for ever; its oldest MiB are punched out, which keeps its length.
"""

from __future__ import annotations

import ctypes
import errno
import os
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from kdskills.execution.request import ExecRequest, Stream

CHUNK = 65536
DRAIN_S = 0.3
GRACE_S = 0.5
MAX_LATE_BYTES = 2 * 1024 * 1024
"""Bytes read after `DRAIN_S`: more than pipes hold, so that only a living writer can be cut off."""
LONGEST_WAIT_S = 86_400.0
"""A selector takes milliseconds as an int; a longer run looks at its clock once a day."""


class TailBuffer:
    """Keeps the last *limit* bytes, counts all of them; memory stays below twice the limit and a chunk. All of them
    also go to *log*.
    """

    def __init__(self, limit: int, log: LogWriter | None = None) -> None:
        self._limit, self._log = limit, log
        self._data, self._total = bytearray(), 0
        self._lock = threading.Lock()

    def feed(self, data: bytes) -> None:
        """Take bytes that came."""
        with self._lock:
            self._total += len(data)
            self._data += data
            if len(self._data) > 2 * self._limit:
                del self._data[: len(self._data) - self._limit]
        if self._log is not None:
            self._log.write(data)

    def catch_up(self, stream: Stream) -> None:
        """Take what a live view missed of a finished *stream*, as far as its kept tail reaches back."""
        missing = stream.total - self.stream().total
        if missing > 0:
            self.feed(stream.data[-missing:])

    def tail(self, size: int) -> bytes:
        """Return the last *size* kept bytes."""
        with self._lock:
            length = min(size, self._limit)
            return bytes(self._data[-length:]) if length else b""

    def stream(self) -> Stream:
        """Return the kept tail and how many bytes came in all."""
        tail = self.tail(self._limit)
        with self._lock:
            return Stream(tail, self._total, self._total > len(tail))


class HeadBuffer:
    """Keeps the first *limit* bytes and drops the rest: for reports, which are read whole or not at all."""

    def __init__(self, limit: int) -> None:
        self._limit, self._data = limit, bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes that came."""
        self._data += data[: self._limit - len(self._data)]

    def value(self) -> bytes:
        """Return the bytes kept."""
        return bytes(self._data)


@dataclass(slots=True)
class Ending:
    """Why a run ended, and when."""

    reason: Literal["exited", "timeout", "cancelled"]
    duration_s: float


@dataclass(slots=True)
class Pump:
    """One run's pipes and its clock, driven by a single thread of its own."""

    pidfd: int  # readable once the launcher is gone
    outputs: list[tuple[int, Callable[[bytes], None]]]
    inputs: list[tuple[int, bytes]]  # each fd is closed when its bytes are through or the reader went away
    wall_s: float  # until `terminate` is called
    terminate: Callable[[], None]  # asks the whole tree to end
    kill: Callable[[], None]  # ends the whole tree; must not block
    _wake: tuple[int, int] = field(default_factory=os.pipe)
    _cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """End the run from any thread; `drive` then says `cancelled`."""
        with self._lock:
            self._cancelled = True
            if self._wake[1] >= 0:
                os.write(self._wake[1], b"x")

    def drive(self, started: float) -> Ending:
        """Move bytes until the program is gone or made to go; *started* is `time.monotonic()` of its start. Every fd
        given is closed on return.
        """
        selector = selectors.DefaultSelector()
        try:
            selector.register(self.pidfd, selectors.EVENT_READ, "gone")
            selector.register(self._wake[0], selectors.EVENT_READ, "wake")
            for fd, feed in self.outputs:
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ, feed)
            for fd, data in self.inputs:
                os.set_blocking(fd, False)
                if data:
                    selector.register(fd, selectors.EVENT_WRITE, memoryview(data))
                else:
                    os.close(fd)
            return self._loop(selector, started)
        finally:
            for key in list(selector.get_map().values()):
                if key.fd not in {self.pidfd, self._wake[0]}:
                    os.close(key.fd)
            selector.close()
            with self._lock:
                wake, self._wake = self._wake, (-1, -1)
            for fd in wake:
                os.close(fd)

    def _loop(self, selector: selectors.BaseSelector, started: float) -> Ending:
        reason: Literal["exited", "timeout", "cancelled"] = "exited"
        deadline, terminating = started + self.wall_s, False
        while True:
            now = time.monotonic()
            # First TERM, then KILL after the grace, again and again until the launcher is gone.
            if not terminating and (self._cancelled or now >= deadline):
                reason = "cancelled" if self._cancelled else "timeout"
                terminating, deadline = True, now + GRACE_S
                self.terminate()
            elif terminating and now >= deadline:
                self.kill()
                deadline = now + GRACE_S
            exited = False
            for key, _ in selector.select(min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT_S)):
                exited = exited or key.data == "gone"
                if key.data == "wake":
                    os.read(key.fd, 64)
                elif key.data != "gone":
                    _move(selector, key)
            if exited:
                duration = time.monotonic() - started
                self.kill()
                _drain(selector, {self.pidfd, self._wake[0]})
                return Ending(reason, duration)


def _move(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bool:
    """Move one chunk; False when the pipe is finished, and closed."""
    try:
        if isinstance(key.data, memoryview):
            remaining = key.data[os.write(key.fd, key.data[:CHUNK]) :]
            if remaining:
                selector.modify(key.fd, selectors.EVENT_WRITE, remaining)
                return True
        else:
            data = os.read(key.fd, CHUNK)
            if data:
                key.data(data)
                return True
    except BlockingIOError:
        return True
    except (BrokenPipeError, ConnectionResetError):
        pass  # the reader went away; what it did not read is dropped
    selector.unregister(key.fd)
    os.close(key.fd)
    return False


def _drain(selector: selectors.BaseSelector, keep: set[int]) -> None:
    """Read what dead programs left in the pipes; close the ones we were writing to."""
    for key in list(selector.get_map().values()):
        if key.fd in keep:
            selector.unregister(key.fd)
        elif isinstance(key.data, memoryview):
            selector.unregister(key.fd)
            os.close(key.fd)
    end, late_bytes = time.monotonic() + DRAIN_S, 0
    while selector.get_map() and late_bytes < MAX_LATE_BYTES:
        seconds_left = end - time.monotonic()
        ready = selector.select(max(0.0, seconds_left))
        if not ready and seconds_left <= 0:
            return
        for key, _ in ready:
            _move(selector, key)
        late_bytes += CHUNK * len(ready) if seconds_left <= 0 else 0


BLOCK: Final = 1024 * 1024
_PUNCH_AND_KEEP_SIZE: Final = 0x03
_UNSUPPORTED: Final = 4
"""Where a file system cannot punch holes, a log ends at this many times its limit."""


@dataclass(frozen=True, slots=True)
class LogPiece:
    """Bytes of a log."""

    offset: int  # what was asked for, or the first byte still kept
    data: bytes
    total: int  # length of the log so far
    truncated: bool  # whether bytes between the asked offset and this piece are gone

    @property
    def next_offset(self) -> int:
        """Where the following piece begins."""
        return self.offset + len(self.data)


def first_kept(total: int, limit: int) -> int:
    """Return the offset of the first byte a log of *total* bytes still has."""
    return max(0, total - limit) // BLOCK * BLOCK


def read_log(path: Path, offset: int, size: int, limit: int) -> LogPiece:
    """Return up to *size* bytes of the log at *path* from *offset*; a negative offset counts from the end. A log nobody
    has written to yet is empty.
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


ROOM_S: Final = 30.0
"""Seconds a program that prints waits for room on a full disk, before its run is given up."""
_ROOM_LOOK_S: Final = 0.05
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class LogWriter:
    """Appends to one log. It holds no descriptor between writes, so nothing is left open by a run that breaks."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._limit = path, limit
        self._punched, self._can_punch = 0, True

    def write(self, data: bytes) -> None:
        """Append *data*; on a full disk the program waits with it. Raises OSError when there is no room within `ROOM_S`."""
        if not data:
            return
        end: float | None = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o600)
        try:
            remaining = memoryview(data)
            if not self._can_punch:
                remaining = remaining[: max(0, self._limit * _UNSUPPORTED - os.fstat(fd).st_size)]
            while remaining:
                try:
                    remaining = remaining[os.write(fd, remaining) :]
                except OSError as error:
                    end = end or time.monotonic() + ROOM_S
                    if error.errno not in _FULL or time.monotonic() >= end:
                        raise
                    time.sleep(_ROOM_LOOK_S)
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


def output_buffers(request: ExecRequest) -> tuple[TailBuffer, TailBuffer]:
    """Return the buffers of stdout and stderr of a run of *request*, followed by logs where it wants them."""
    limits, logs = request.limits, request.logs
    out, err = (None, None) if logs is None else (LogWriter(path, logs.limit) for path in (logs.stdout, logs.stderr))
    return TailBuffer(limits.stdout, out), TailBuffer(limits.stderr, err)


_LONGEST: Final = 4
"""Bytes of the longest character in UTF-8."""


class StreamText(NamedTuple):
    """A piece of output as text."""

    text: str  # bytes that are no UTF-8 are U+FFFD
    skipped: int = 0  # bytes left out at the front: the rest of a character that began before
    incomplete: int = 0  # bytes left out at the end: the beginning of a character that is not there yet


def text_of(data: bytes, *, cut_before: bool, more_after: bool) -> StreamText:
    """Return *data* as text. With bytes *cut_before* it may begin within a character; when *more_after* may follow, one
    at the end may be incomplete.
    """
    skipped = 0
    while cut_before and skipped < min(_LONGEST, len(data)) and data[skipped] & 0xC0 == 0x80:
        skipped += 1
    skipped %= _LONGEST  # four or more in a row are no UTF-8 and stay
    incomplete = _begun_character(data[skipped:]) if more_after else 0
    complete = data[skipped : len(data) - incomplete]
    return StreamText(complete.decode("utf-8", "replace"), skipped, incomplete)


def _begun_character(data: bytes) -> int:
    """Return how many bytes at the end begin a character that needs more of them."""
    for back in range(1, min(_LONGEST, len(data) + 1)):
        lead = data[-back]
        if lead & 0xC0 == 0x80:
            continue
        needed = 2 if 0xC2 <= lead <= 0xDF else 3 if 0xE0 <= lead <= 0xEF else 4 if 0xF0 <= lead <= 0xF4 else 1
        return back if needed > back else 0
    return 0
