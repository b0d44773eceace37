"""Logs of long runs: exact by offset, bounded on disk, whatever comes."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.execution import streams
from kdskills.execution.request import ExecRequest, LogFiles, Stream
from kdskills.execution.streams import BLOCK, LogPiece, LogWriter, TailBuffer, first_kept, output_buffers, read_log


@given(st.lists(st.binary(max_size=2000), max_size=20), st.integers(0, 3000), st.integers(0, 3000))
def test_any_piece_of_a_short_log_reads_back(tmp_path_factory, parts, offset, size):
    """Below the limit every offset gives exactly the bytes that were written there."""
    path = tmp_path_factory.mktemp("log") / "out"
    writer = LogWriter(path, BLOCK)
    for part in parts:
        writer.write(part)
    whole = b"".join(parts)
    piece = read_log(path, offset, size, BLOCK)
    start = min(offset, len(whole))
    assert piece == LogPiece(start, whole[start : start + size], len(whole), truncated=False)
    assert piece.next_offset == start + len(piece.data)


@given(st.integers(0, 10**12), st.integers(1, 10**9))
def test_what_is_kept_covers_the_limit_and_little_more(total, limit):
    """At least the limit's worth of bytes is kept, and less than one block beyond it."""
    kept = total - first_kept(total, limit)
    assert min(total, limit) <= kept < min(total, limit) + BLOCK + 1
    assert first_kept(total, limit) % BLOCK == 0


def test_a_flood_takes_bounded_disk_and_keeps_its_offsets(tmp_path):
    """Of 64 MiB with a limit of 4, the file keeps its length and gives back the blocks of its beginning."""
    path = tmp_path / "out"
    writer = LogWriter(path, 4 * BLOCK)
    for number in range(64):
        writer.write(bytes([number]) * BLOCK)
    info = path.stat()
    assert info.st_size == 64 * BLOCK
    assert info.st_blocks * 512 <= 6 * BLOCK
    assert read_log(path, 62 * BLOCK, 1, 4 * BLOCK) == LogPiece(62 * BLOCK, b"\x3e", 64 * BLOCK, truncated=False)
    assert read_log(path, 5, 1, 4 * BLOCK) == LogPiece(60 * BLOCK, b"\x3c", 64 * BLOCK, truncated=True)


def test_a_negative_offset_counts_from_the_end(tmp_path):
    """The last bytes are asked for without knowing the length; more than there is means all."""
    path = tmp_path / "out"
    LogWriter(path, BLOCK).write(b"0123456789")
    assert read_log(path, -3, 10, BLOCK).data == b"789"
    assert read_log(path, -99, 4, BLOCK) == LogPiece(0, b"0123", 10, truncated=False)


def test_a_log_nobody_wrote_is_empty(tmp_path):
    """Before the first byte there is no file, and that is no error."""
    assert read_log(tmp_path / "none", 7, 10, BLOCK) == LogPiece(0, b"", 0, truncated=False)
    LogWriter(tmp_path / "none", BLOCK).write(b"")
    assert list(tmp_path.iterdir()) == []


def test_logs_follow_no_links_and_are_private(tmp_path):
    """A link planted where the log should be is neither written nor read through."""
    other = tmp_path / "other"
    other.write_bytes(b"secret")
    (tmp_path / "out").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        LogWriter(tmp_path / "out", BLOCK).write(b"x")
    with pytest.raises(OSError, match="symbolic links"):
        read_log(tmp_path / "out", 0, 10, BLOCK)
    assert other.read_bytes() == b"secret"
    LogWriter(tmp_path / "fresh", BLOCK).write(b"x")
    assert (tmp_path / "fresh").stat().st_mode & 0o777 == 0o600


def test_without_holes_a_log_ends_at_four_times_its_limit(tmp_path, monkeypatch):
    """On a file system that cannot punch, the beginning stays and the disk is bounded all the same."""
    path = tmp_path / "out"
    writer = LogWriter(path, BLOCK)
    monkeypatch.setattr(writer, "_can_punch", False)
    for _ in range(6):
        writer.write(b"a" * BLOCK)
    assert path.stat().st_size == 4 * BLOCK
    assert path.stat().st_blocks * 512 >= 4 * BLOCK


def test_buffers_log_what_they_are_fed(tmp_path):
    """With logs asked for, the tail is bounded and the file has everything, NUL bytes and bad UTF-8 included."""
    request = ExecRequest(argv=("x",), logs=LogFiles(tmp_path / "o", tmp_path / "e"))
    out, err = output_buffers(request)
    out.feed(b"a\x00\xff" * 10)
    err.feed(b"e")
    assert read_log(tmp_path / "o", 0, 99, BLOCK).data == b"a\x00\xff" * 10
    assert read_log(tmp_path / "e", 0, 99, BLOCK).data == b"e"
    assert type(output_buffers(ExecRequest(argv=("x",)))[0]) is TailBuffer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e", "o"]


def test_a_live_view_catches_up_with_the_finished_stream(tmp_path):
    """Bytes a live view missed are appended from the kept tail, never twice."""
    out, _ = output_buffers(ExecRequest(argv=("x",), logs=LogFiles(tmp_path / "o", tmp_path / "e")))
    out.feed(b"abc")
    out.catch_up(Stream(b"cdef", 6, truncated=True))
    out.catch_up(Stream(b"cdef", 6, truncated=True))
    assert read_log(tmp_path / "o", 0, 99, BLOCK).data == b"abcdef"


def test_a_program_that_prints_waits_for_room_on_a_full_disk(tmp_path, monkeypatch):
    """Nothing of what it printed is lost; when no room comes, the disk's own error is told."""
    path, write, refusals = tmp_path / "out", os.write, [errno.ENOSPC, errno.EDQUOT]

    def full(fd, data):
        if refusals:
            raise OSError(refusals.pop(0), "no room")
        return write(fd, data[:3])

    monkeypatch.setattr(os, "write", full)
    LogWriter(path, BLOCK).write(b"0123456789")
    assert path.read_bytes() == b"0123456789"
    monkeypatch.setattr(streams, "ROOM_S", 0.1)
    refusals.extend([errno.ENOSPC] * 100)
    with pytest.raises(OSError, match="no room"):
        LogWriter(path, BLOCK).write(b"more")
    refusals[:] = [errno.EIO]
    with pytest.raises(OSError, match="no room") as broken:
        LogWriter(path, BLOCK).write(b"more")
    assert (broken.value.errno, refusals) == (errno.EIO, [])
