"""Unpack one entry in pieces and count what really comes out: what the directory says may be a lie."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final

from kdskills.skills.archives.directory import STORED, Entry
from kdskills.skills.archives.refusal import ArchiveRefused

PIECE: Final = 64 * 1024


def pieces(archive: BinaryIO, entry: Entry) -> Iterator[bytes]:
    """Yield the content of *entry* in pieces of at most 64 KiB.

    Raises:
        ArchiveRefused: `archive_size_lie` as soon as a byte more or less comes out than the directory says,
            `archive_damaged` for data that is not what was packed, or a wrong checksum.
    """
    checksum, total = 0, 0
    for piece in _stored(archive, entry) if entry.method == STORED else _inflated(archive, entry):
        total += len(piece)
        if total > entry.size:
            raise ArchiveRefused("archive_size_lie", f"it unpacks to more than {entry.size} bytes", entry=entry.shown)
        checksum = zlib.crc32(piece, checksum)
        yield piece
    if total != entry.size:
        message = f"it unpacks to {total} bytes, not to {entry.size}"
        raise ArchiveRefused("archive_size_lie", message, entry=entry.shown)
    if checksum != entry.crc:
        raise ArchiveRefused("archive_damaged", "its checksum is wrong", entry=entry.shown)


def _packed(archive: BinaryIO, entry: Entry) -> Iterator[bytes]:
    left, place = entry.packed, entry.data
    while left:
        archive.seek(place)
        piece = archive.read(min(PIECE, left))
        if not piece:
            raise ArchiveRefused("archive_damaged", "its content ends early", entry=entry.shown)
        left -= len(piece)
        place += len(piece)
        yield piece


def _stored(archive: BinaryIO, entry: Entry) -> Iterator[bytes]:
    return _packed(archive, entry)


def _inflated(archive: BinaryIO, entry: Entry) -> Iterator[bytes]:
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for packed in _packed(archive, entry):
            waiting = packed
            while waiting and not machine.eof:
                yield machine.decompress(waiting, PIECE)
                waiting = machine.unconsumed_tail
            if machine.eof and machine.unused_data:
                raise ArchiveRefused("archive_size_lie", "its packed size is wrong", entry=entry.shown)
        while not machine.eof and (piece := machine.decompress(machine.unconsumed_tail, PIECE)):
            yield piece
    except zlib.error:
        raise ArchiveRefused("archive_damaged", "its content cannot be unpacked", entry=entry.shown) from None
    if not machine.eof:
        raise ArchiveRefused("archive_damaged", "its content ends early", entry=entry.shown)
