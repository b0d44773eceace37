"""Read a zip's central directory, strictly: what two readers could understand differently is refused.

Python's own reader takes in a directory of any size and forgives much; this one reads a bounded piece of the file, and every
entry must agree with its local header, so that what was judged is what gets unpacked.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO, Final

from kdskills.skills.archives.refusal import ArchiveLimits, ArchiveRefused

END: Final = struct.Struct("<4s4H2LH")
CENTRAL: Final = struct.Struct("<4s6H3L5H2L")
LOCAL: Final = struct.Struct("<4s5H3L2H")
END_MARK: Final = b"PK\x05\x06"
CENTRAL_MARK: Final = b"PK\x01\x02"
LOCAL_MARK: Final = b"PK\x03\x04"

STORED: Final = 0
DEFLATED: Final = 8
ENCRYPTED: Final = 0x0001
STREAMED: Final = 0x0008
PATCHED: Final = 0x0020
STRONGLY_ENCRYPTED: Final = 0x0040
UTF8_NAME: Final = 0x0800
MASKED: Final = 0x2000

_COMMENT = 0xFFFF
_WIDE16 = 0xFFFF
_WIDE32 = 0xFFFFFFFF
_NTFS_LINK = 0x0400


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as the central directory has it, and where its data begins.

    Attributes:
        raw: The name's bytes.
        flags: General purpose bits.
        method: How it is packed.
        crc: CRC-32 of the content.
        packed: Bytes in the archive.
        size: Bytes it says it unpacks to.
        mode: Unix mode, kind bits included; 0 when the writer gave none.
        reparse: Whether Windows' attributes call it a link.
        offset: Of its local header.
        data: Of its content.
    """

    raw: bytes
    flags: int
    method: int
    crc: int
    packed: int
    size: int
    mode: int
    reparse: bool
    offset: int
    data: int = 0

    @property
    def shown(self) -> str:
        """The name as it can be printed."""
        return printable(self.raw)


def printable(raw: bytes) -> str:
    """Return a name for people: bytes that are no UTF-8, and control characters, as escapes; cut at 300 characters."""
    text = raw.decode("utf-8", "backslashreplace")
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return plain if len(plain) <= 300 else plain[:299] + "…"


def read_directory(archive: BinaryIO, limits: ArchiveLimits) -> tuple[Entry, ...]:
    """Return every entry of the zip, in the order of the directory.

    Args:
        archive: The zip, seekable; positions count from its beginning.
        limits: Bounds.

    Raises:
        ArchiveRefused: It is no zip, or its structure is not sound.
    """
    size = archive.seek(0, os.SEEK_END)
    if size == 0:
        raise ArchiveRefused("archive_empty", "it has no bytes")
    if size > limits.archive_bytes:
        raise ArchiveRefused("archive_too_large", f"it has more than {limits.archive_bytes} bytes")
    count, length, begin = _read_end(archive, size)
    if count > limits.entries:
        raise ArchiveRefused("archive_too_many_entries", f"it has {count} entries, more than {limits.entries}")
    if length > limits.directory_bytes:
        message = f"its directory has {length} bytes, more than {limits.directory_bytes}"
        raise ArchiveRefused("archive_too_many_entries", message)
    archive.seek(begin)
    entries = _split(archive.read(length), count)
    return _located(archive, entries, begin)


def _read_end(archive: BinaryIO, size: int) -> tuple[int, int, int]:
    """Return how many entries the directory has, its size and its offset."""
    tail_size = min(size, END.size + _COMMENT)
    archive.seek(size - tail_size)
    tail = archive.read(tail_size)
    place = tail.rfind(END_MARK)
    while place >= 0:
        if place + END.size <= len(tail):
            fields = END.unpack_from(tail, place)
            if place + END.size + fields[7] == len(tail):
                break
        place = tail.rfind(END_MARK, 0, place)
    else:
        cut = tail.startswith(LOCAL_MARK) or _begins_like_zip(archive)
        code, reason = (
            ("archive_truncated", "its end is missing") if cut else ("archive_not_zip", "it is not a zip archive")
        )
        raise ArchiveRefused(code, reason)
    _, disk, first_disk, here, count, length, begin, _ = fields
    if _WIDE16 in {disk, first_disk, here, count} or _WIDE32 in {length, begin}:
        raise ArchiveRefused("archive_zip64", "it uses Zip64, which nothing of this size needs")
    if (disk, first_disk) != (0, 0) or here != count:
        raise ArchiveRefused("archive_split", "it is a part of several")
    end = size - tail_size + place
    if begin + length > end:
        raise ArchiveRefused("archive_directory_bad", "its directory lies outside the file")
    if begin + length != end:
        raise ArchiveRefused("archive_directory_bad", "its directory does not end where the archive's end begins")
    return count, length, begin


def _begins_like_zip(archive: BinaryIO) -> bool:
    archive.seek(0)
    return archive.read(4) == LOCAL_MARK


def _split(data: bytes, count: int) -> list[Entry]:
    """Return the directory's entries, without places of their data."""
    entries: list[Entry] = []
    place = 0
    while place < len(data):
        if len(entries) == count or place + CENTRAL.size > len(data) or data[place : place + 4] != CENTRAL_MARK:
            raise ArchiveRefused("archive_directory_bad", "its directory is damaged")
        fields = CENTRAL.unpack_from(data, place)
        made_by, _, flags, method, _, _, crc, packed, size, name_size, extra_size, note_size, disk = fields[1:14]
        attributes, offset = fields[15], fields[16]
        after = place + CENTRAL.size + name_size + extra_size + note_size
        raw = data[place + CENTRAL.size : place + CENTRAL.size + name_size]
        if after > len(data):
            raise ArchiveRefused("archive_directory_bad", "its directory is damaged", entry=printable(raw))
        if _WIDE32 in {packed, size, offset}:
            raise ArchiveRefused(
                "archive_zip64", "it uses Zip64, which nothing of this size needs", entry=printable(raw)
            )
        if disk != 0:
            raise ArchiveRefused("archive_split", "it lies in another part", entry=printable(raw))
        unix = attributes >> 16
        windows = made_by >> 8 in {0, 10, 11, 14} or unix == 0
        reparse = windows and bool(attributes & _NTFS_LINK)
        entries.append(Entry(raw, flags, method, crc, packed, size, unix, reparse, offset))
        place = after
    if len(entries) != count:
        raise ArchiveRefused("archive_directory_bad", f"its directory has {len(entries)} entries and says {count}")
    return entries


def _located(archive: BinaryIO, entries: list[Entry], end: int) -> tuple[Entry, ...]:
    """Return the entries with the places of their data, each compared with its local header; no two may overlap."""
    located = [_locate(archive, entry, end) for entry in entries]
    reached, before = 0, ""
    for entry in sorted(located, key=lambda each: (each.offset, each.data + each.packed)):
        if entry.offset < reached:
            raise ArchiveRefused("archive_overlap", f"its bytes are also those of {before!r}", entry=entry.shown)
        reached, before = entry.data + entry.packed, entry.shown
    return tuple(located)


def _locate(archive: BinaryIO, entry: Entry, end: int) -> Entry:
    archive.seek(min(entry.offset, end))
    head = archive.read(LOCAL.size)
    if entry.offset + LOCAL.size > end or len(head) < LOCAL.size or not head.startswith(LOCAL_MARK):
        raise ArchiveRefused("archive_directory_bad", "the directory points at nothing", entry=entry.shown)
    _, _, flags, method, _, _, crc, packed, size, name_size, extra_size = LOCAL.unpack(head)
    raw = archive.read(name_size)
    said = (flags & ~STREAMED, method, raw)
    if said != (entry.flags & ~STREAMED, entry.method, entry.raw):
        raise ArchiveRefused("archive_header_mismatch", "its two headers differ", entry=entry.shown)
    known = (crc, packed, size)
    blank = bool(flags & STREAMED) and known == (0, 0, 0)
    if not blank and known != (entry.crc, entry.packed, entry.size):
        wide = _WIDE32 in {packed, size}
        code = "archive_zip64" if wide else "archive_header_mismatch"
        raise ArchiveRefused(code, "its two headers differ", entry=entry.shown)
    data = entry.offset + LOCAL.size + name_size + extra_size
    if data + entry.packed > end:
        raise ArchiveRefused("archive_directory_bad", "its content lies outside the file", entry=entry.shown)
    return Entry(
        entry.raw,
        entry.flags,
        entry.method,
        entry.crc,
        entry.packed,
        entry.size,
        entry.mode,
        entry.reparse,
        entry.offset,
        data,
    )
