"""Zip archives as bytes: a strict reader of the central directory, and a writer whose archives have the same bytes everywhere.

Python's own reader takes in a directory of any size and forgives much; this one reads a bounded piece of the file, and every
entry must agree with its local header, so that what was judged is what gets unpacked: what two readers could understand
differently is refused.

Written files are stored, not deflated: what a compressor makes of the same bytes differs between its versions, and a digest
over the archive would differ with it.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, NamedTuple

from kdskills.errors import CallerMustAct, Diagnostic, FileRefused
from kdskills.skills.safe_open import file_digest, open_file, rows_digest, walk_tree

MIB = 1024 * 1024


class ArchiveRefused(CallerMustAct, code="archive_refused"):
    """The archive breaks a rule and nothing of it was kept; `details` has `entry`, `reason` and, for a skill file that cannot
    be used, `diagnostics`. An *entry* of None is the archive as a whole.
    """

    def __init__(
        self, code: str, reason: str, *, entry: str | None = None, diagnostics: Sequence[Diagnostic] = ()
    ) -> None:
        subject = "the archive" if entry is None else f"the archive's entry {entry!r}"
        super().__init__(f"{subject} is refused: {reason}", code=code, entry=entry, reason=reason)
        if diagnostics:
            self.details["diagnostics"] = [finding.to_json() for finding in diagnostics]


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """Bounds of an archive; the defaults are those of `docs/reference/archives.md`.

    Attributes:
        archive_bytes: Size of the zip file itself.
        directory_bytes: Size of the zip's central directory, which is held in memory.
        entries: Entries of any kind, left-out ones and folders too.
        files: Files of the skill.
        unpacked_bytes: All files of the skill together.
        ratio: Unpacked to packed size, of one file and of all together.
        depth: Parts of a path below the skill's folder.
        path_bytes: UTF-8 bytes of a path below the skill's folder.
    """

    archive_bytes: int = 32 * MIB
    directory_bytes: int = 2 * MIB
    entries: int = 2048
    files: int = 512
    unpacked_bytes: int = 16 * MIB
    ratio: int = 200
    depth: int = 12
    path_bytes: int = 255


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
class ZipEntry:
    """One entry as the central directory has it, and where its data begins.

    `packed` are its bytes in the archive, `size` those it says it unpacks to, `crc` is the content's CRC-32. `mode` is
    Unix', kind bits included, 0 when the writer gave none; `reparse` says whether Windows' attributes call it a link.
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
    def label(self) -> str:
        """The name as it can be printed."""
        return printable(self.raw)


def printable(raw: bytes) -> str:
    """Return a name for people: bytes that are no UTF-8, and control characters, as escapes; cut at 300 characters."""
    text = raw.decode("utf-8", "backslashreplace")
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return plain if len(plain) <= 300 else plain[:299] + "…"


def read_directory(archive: BinaryIO, limits: ArchiveLimits) -> tuple[ZipEntry, ...]:
    """Return every entry of a seekable zip, in the order of the directory; positions count from its beginning.

    Raises ArchiveRefused when it is no zip, or its structure is not sound.
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
    position = tail.rfind(END_MARK)
    while position >= 0:
        if position + END.size <= len(tail):
            fields = END.unpack_from(tail, position)
            if position + END.size + fields[7] == len(tail):
                break
        position = tail.rfind(END_MARK, 0, position)
    else:
        archive.seek(0)
        if archive.read(4) == LOCAL_MARK:
            raise ArchiveRefused("archive_truncated", "its end is missing")
        raise ArchiveRefused("archive_not_zip", "it is not a zip archive")
    _, disk, first_disk, disk_count, count, length, begin, _ = fields
    if _WIDE16 in {disk, first_disk, disk_count, count} or _WIDE32 in {length, begin}:
        raise ArchiveRefused("archive_zip64", "it uses Zip64, which nothing of this size needs")
    if (disk, first_disk) != (0, 0) or disk_count != count:
        raise ArchiveRefused("archive_split", "it is a part of several")
    end = size - tail_size + position
    if begin + length > end:
        raise ArchiveRefused("archive_directory_bad", "its directory lies outside the file")
    if begin + length != end:
        raise ArchiveRefused("archive_directory_bad", "its directory does not end where the archive's end begins")
    return count, length, begin


def _split(data: bytes, count: int) -> list[ZipEntry]:
    """Return the directory's entries, without places of their data."""
    entries: list[ZipEntry] = []
    position = 0
    while position < len(data):
        if (
            len(entries) == count
            or position + CENTRAL.size > len(data)
            or data[position : position + 4] != CENTRAL_MARK
        ):
            raise ArchiveRefused("archive_directory_bad", "its directory is damaged")
        fields = CENTRAL.unpack_from(data, position)
        writer, _, flags, method, _, _, crc, packed, size, name_size, extra_size, note_size, disk = fields[1:14]
        attributes, offset = fields[15], fields[16]
        after = position + CENTRAL.size + name_size + extra_size + note_size
        raw = data[position + CENTRAL.size : position + CENTRAL.size + name_size]
        if after > len(data):
            raise ArchiveRefused("archive_directory_bad", "its directory is damaged", entry=printable(raw))
        if _WIDE32 in {packed, size, offset}:
            raise ArchiveRefused(
                "archive_zip64", "it uses Zip64, which nothing of this size needs", entry=printable(raw)
            )
        if disk != 0:
            raise ArchiveRefused("archive_split", "it lies in another part", entry=printable(raw))
        unix = attributes >> 16
        windows = writer >> 8 in {0, 10, 11, 14} or unix == 0
        reparse = windows and bool(attributes & _NTFS_LINK)
        entries.append(ZipEntry(raw, flags, method, crc, packed, size, unix, reparse, offset))
        position = after
    if len(entries) != count:
        raise ArchiveRefused("archive_directory_bad", f"its directory has {len(entries)} entries and says {count}")
    return entries


def _located(archive: BinaryIO, entries: list[ZipEntry], end: int) -> tuple[ZipEntry, ...]:
    """Return the entries with the places of their data, each compared with its local header; no two may overlap."""
    located = [_locate(archive, entry, end) for entry in entries]
    reached, before = 0, ""
    for entry in sorted(located, key=lambda each: (each.offset, each.data + each.packed)):
        if entry.offset < reached:
            raise ArchiveRefused("archive_overlap", f"its bytes are also those of {before!r}", entry=entry.label)
        reached, before = entry.data + entry.packed, entry.label
    return tuple(located)


def _locate(archive: BinaryIO, entry: ZipEntry, end: int) -> ZipEntry:
    archive.seek(min(entry.offset, end))
    head = archive.read(LOCAL.size)
    if entry.offset + LOCAL.size > end or len(head) < LOCAL.size or not head.startswith(LOCAL_MARK):
        raise ArchiveRefused("archive_directory_bad", "the directory points at nothing", entry=entry.label)
    _, _, flags, method, _, _, crc, packed, size, name_size, extra_size = LOCAL.unpack(head)
    raw = archive.read(name_size)
    local_header = (flags & ~STREAMED, method, raw)
    if local_header != (entry.flags & ~STREAMED, entry.method, entry.raw):
        raise ArchiveRefused("archive_header_mismatch", "its two headers differ", entry=entry.label)
    local_sizes = (crc, packed, size)
    blank = bool(flags & STREAMED) and local_sizes == (0, 0, 0)
    if not blank and local_sizes != (entry.crc, entry.packed, entry.size):
        wide = _WIDE32 in {packed, size}
        code = "archive_zip64" if wide else "archive_header_mismatch"
        raise ArchiveRefused(code, "its two headers differ", entry=entry.label)
    data = entry.offset + LOCAL.size + name_size + extra_size
    if data + entry.packed > end:
        raise ArchiveRefused("archive_directory_bad", "its content lies outside the file", entry=entry.label)
    return replace(entry, data=data)


RULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "archive_empty": "It has no bytes.",
        "archive_not_zip": "It is not a zip archive.",
        "archive_truncated": "It begins like a zip archive and its end is missing.",
        "archive_too_large": "The archive itself has more than 32 MiB.",
        "archive_directory_bad": "Its central directory is damaged, or points at nothing.",
        "archive_header_mismatch": "The directory and an entry's own header differ.",
        "archive_overlap": "Two entries share bytes.",
        "archive_split": "It is a part of an archive in several.",
        "archive_zip64": "It uses Zip64, which nothing of this size needs.",
        "archive_encrypted": "An entry is encrypted.",
        "archive_method": "An entry is packed by another method than stored or deflated.",
        "archive_too_many_entries": "It has more than 2,048 entries, or a directory of more than 2 MiB.",
        "archive_name_not_utf8": "A name is not UTF-8.",
        "archive_path_absolute": "A path begins with a slash.",
        "archive_path_drive": "A path begins with a drive letter.",
        "archive_path_backslash": "A path has a backslash.",
        "archive_path_parent": "A path has a part `..`.",
        "archive_path_invalid": "A path has an empty part, a part `.`, or control characters.",
        "archive_path_too_long": "A path below the skill's folder has more than 255 bytes.",
        "archive_too_deep": "A path below the skill's folder has more than 12 parts.",
        "archive_link": "An entry is a link.",
        "archive_special_file": "An entry is a device, pipe or socket, or its name and its kind do not agree.",
        "archive_duplicate": "Two entries have one path, or a file is also a folder.",
        "archive_case_collision": "Two paths differ only by case or Unicode form.",
        "archive_nested": "A file is an archive itself.",
        "archive_wrong_root": "There is neither a SKILL.md at the top nor a single root folder.",
        "archive_no_skill": "There is no SKILL.md where it belongs.",
        "archive_name_invalid": "The name of the root folder or of the skill is not one.",
        "archive_name_mismatch": "The root folder is not called as the skill is.",
        "archive_too_many_files": "It has more than 512 files.",
        "archive_unpacked_too_large": "It unpacks to more than 16 MiB.",
        "archive_ratio": "A file unpacks to more than 200 times its packed size.",
        "archive_size_lie": "A file unpacks to more or less than the directory says.",
        "archive_damaged": "A file's content cannot be unpacked, or its checksum is wrong.",
        "archive_skill_invalid": "The skill file or `tools.yaml` cannot be used; `diagnostics` says why.",
    }
)


PIECE: Final = 64 * 1024


def pieces(archive: BinaryIO, entry: ZipEntry) -> Iterator[bytes]:
    """Yield the content of *entry* in pieces of at most 64 KiB.

    Raises ArchiveRefused: `archive_size_lie` as soon as a byte more or less comes out than the directory says,
    `archive_damaged` for data that is not what was packed, or a wrong checksum.
    """
    checksum, total = 0, 0
    for piece in _packed(archive, entry) if entry.method == STORED else _inflated(archive, entry):
        total += len(piece)
        if total > entry.size:
            raise ArchiveRefused("archive_size_lie", f"it unpacks to more than {entry.size} bytes", entry=entry.label)
        checksum = zlib.crc32(piece, checksum)
        yield piece
    if total != entry.size:
        message = f"it unpacks to {total} bytes, not to {entry.size}"
        raise ArchiveRefused("archive_size_lie", message, entry=entry.label)
    if checksum != entry.crc:
        raise ArchiveRefused("archive_damaged", "its checksum is wrong", entry=entry.label)


def _packed(archive: BinaryIO, entry: ZipEntry) -> Iterator[bytes]:
    remaining, position = entry.packed, entry.data
    while remaining:
        archive.seek(position)
        piece = archive.read(min(PIECE, remaining))
        if not piece:
            raise ArchiveRefused("archive_damaged", "its content ends early", entry=entry.label)
        remaining -= len(piece)
        position += len(piece)
        yield piece


def _inflated(archive: BinaryIO, entry: ZipEntry) -> Iterator[bytes]:
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for packed in _packed(archive, entry):
            waiting = packed
            while waiting and not machine.eof:
                yield machine.decompress(waiting, PIECE)
                waiting = machine.unconsumed_tail
            if machine.eof and machine.unused_data:
                raise ArchiveRefused("archive_size_lie", "its packed size is wrong", entry=entry.label)
        while not machine.eof and (piece := machine.decompress(machine.unconsumed_tail, PIECE)):
            yield piece
    except zlib.error:
        raise ArchiveRefused("archive_damaged", "its content cannot be unpacked", entry=entry.label) from None
    if not machine.eof:
        raise ArchiveRefused("archive_damaged", "its content ends early", entry=entry.label)


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
    """Return the files of a skill's folder, sorted by path bytes. Raises FileRefused for what is no regular file."""
    files = []
    for entry in walk_tree(folder):
        if entry.kind != "file":
            raise FileRefused(f"{entry.path!r} is not a regular file", code="not_regular", path=entry.path)
        files.append(TreeFile(entry.path, *file_digest(folder, entry.path), bool(entry.mode & 0o111)))
    return tuple(files)


_VERSION = 20
_UNIX = 3 << 8
_TIME, _DATE = 0, (1 << 5) | 1
"""Midnight of 1 January 1980, the first moment a zip knows."""

FILE_MODE: Final = stat.S_IFREG | 0o644
PROGRAM_MODE: Final = stat.S_IFREG | 0o755


def write_archive(folder: Path, out: BinaryIO, *, name: str | None = None) -> None:
    """Write the skill in *folder* to *out*, from its current place on, in pieces, below the root folder *name*.

    The name is the folder's own when omitted. Raises FileRefused for what is no regular file, cannot be read, or
    changed meanwhile.
    """
    top = name or folder.name
    directory: list[bytes] = []
    position = 0
    for file in read_tree(folder):
        name_bytes = f"{top}/{file.path}".encode()
        crc = 0
        with open_file(folder, file.path) as stream:
            while piece := stream.read(PIECE):
                crc = zlib.crc32(piece, crc)
        fields = (_VERSION, UTF8_NAME, STORED, _TIME, _DATE, crc, file.size, file.size, len(name_bytes), 0)
        mode = PROGRAM_MODE if file.executable else FILE_MODE
        row = CENTRAL.pack(CENTRAL_MARK, _UNIX | _VERSION, *fields, 0, 0, 0, mode << 16, position)
        directory.append(row + name_bytes)
        position += out.write(LOCAL.pack(LOCAL_MARK, *fields)) + out.write(name_bytes)
        with open_file(folder, file.path) as stream:
            while piece := stream.read(PIECE):
                position += out.write(piece)
    begin = position
    for row in directory:
        position += out.write(row)
    out.write(END.pack(END_MARK, 0, 0, len(directory), len(directory), position - begin, begin, 0))
