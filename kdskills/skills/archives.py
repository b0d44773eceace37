"""Skills as zip archives: judged by their directory before anything is inflated, unpacked to disk in pieces, written the
same everywhere.

`unpack_skill` is the way in, `write_archive` the way out. Names, kinds and amounts are decided by the archive's directory
alone, before a file is opened. Nothing of a refused archive stays.

Python's own reader takes in a directory of any size and forgives much; this one reads a bounded piece of the file, and every
entry must agree with its local header, so that what was judged is what gets unpacked: what two readers could understand
differently is refused. Written files are stored, not deflated: what a compressor makes of the same bytes differs between its
versions, and a digest over the archive would differ with it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final

from kdskills.errors import CallerMustAct, Diagnostic, FileRefused
from kdskills.skills.fields import MAX_NAME, name_problem
from kdskills.skills.folder import SKILL_FILES
from kdskills.skills.frontmatter import MAX_SKILL_BYTES
from kdskills.skills.model import Skill
from kdskills.skills.parse import parse_skill, parse_skill_bytes, validate_skill
from kdskills.skills.private_files import make_folder, remove_tree
from kdskills.skills.safe_open import TreeFile, open_file, read_tree, version_of

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

    def refused(self, code: str, reason: str) -> ArchiveRefused:
        """Return the refusal of the archive for this entry."""
        return ArchiveRefused(code, reason, entry=self.label)


def printable(raw: bytes) -> str:
    """Return a name for people: bytes that are no UTF-8, and control characters, as escapes; cut at 300 characters."""
    text = raw.decode("utf-8", "backslashreplace")
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return plain if len(plain) <= 300 else plain[:299] + "…"


def _refuse_first(entry: ZipEntry, *rules: tuple[bool, str, str]) -> None:
    """Refuse *entry* for the first rule that is broken; each is whether it is, its code and the reason."""
    for broken, code, reason in rules:
        if broken:
            raise entry.refused(code, reason)


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
        beyond = len(entries) == count or position + CENTRAL.size > len(data)
        if beyond or not data.startswith(CENTRAL_MARK, position):
            raise ArchiveRefused("archive_directory_bad", "its directory is damaged")
        fields = CENTRAL.unpack_from(data, position)
        writer, _, flags, method, _, _, crc, packed, size, name_size, extra_size, note_size, disk = fields[1:14]
        attributes, offset = fields[15], fields[16]
        after = position + CENTRAL.size + name_size + extra_size + note_size
        raw = data[position + CENTRAL.size : position + CENTRAL.size + name_size]
        unix = attributes >> 16
        windows = writer >> 8 in {0, 10, 11, 14} or unix == 0
        reparse = windows and bool(attributes & _NTFS_LINK)
        entry = ZipEntry(raw, flags, method, crc, packed, size, unix, reparse, offset)
        wide = _WIDE32 in {packed, size, offset}
        _refuse_first(
            entry,
            (after > len(data), "archive_directory_bad", "its directory is damaged"),
            (wide, "archive_zip64", "it uses Zip64, which nothing of this size needs"),
            (disk != 0, "archive_split", "it lies in another part"),
        )
        entries.append(entry)
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
            raise entry.refused("archive_overlap", f"its bytes are also those of {before!r}")
        reached, before = entry.data + entry.packed, entry.label
    return tuple(located)


def _locate(archive: BinaryIO, entry: ZipEntry, end: int) -> ZipEntry:
    archive.seek(min(entry.offset, end))
    head = archive.read(LOCAL.size)
    if entry.offset + LOCAL.size > end or len(head) < LOCAL.size or not head.startswith(LOCAL_MARK):
        raise entry.refused("archive_directory_bad", "the directory points at nothing")
    _, _, flags, method, _, _, crc, packed, size, name_size, extra_size = LOCAL.unpack(head)
    raw = archive.read(name_size)
    local_header = (flags & ~STREAMED, method, raw)
    if local_header != (entry.flags & ~STREAMED, entry.method, entry.raw):
        raise entry.refused("archive_header_mismatch", "its two headers differ")
    local_sizes = (crc, packed, size)
    blank = bool(flags & STREAMED) and local_sizes == (0, 0, 0)
    if not blank and local_sizes != (entry.crc, entry.packed, entry.size):
        wide = _WIDE32 in {packed, size}
        code = "archive_zip64" if wide else "archive_header_mismatch"
        raise entry.refused(code, "its two headers differ")
    data = entry.offset + LOCAL.size + name_size + extra_size
    if data + entry.packed > end:
        raise entry.refused("archive_directory_bad", "its content lies outside the file")
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
            raise entry.refused("archive_size_lie", f"it unpacks to more than {entry.size} bytes")
        checksum = zlib.crc32(piece, checksum)
        yield piece
    if total != entry.size:
        message = f"it unpacks to {total} bytes, not to {entry.size}"
        raise entry.refused("archive_size_lie", message)
    if checksum != entry.crc:
        raise entry.refused("archive_damaged", "its checksum is wrong")


def _packed(archive: BinaryIO, entry: ZipEntry) -> Iterator[bytes]:
    remaining, position = entry.packed, entry.data
    while remaining:
        archive.seek(position)
        piece = archive.read(min(PIECE, remaining))
        if not piece:
            raise entry.refused("archive_damaged", "its content ends early")
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
                raise entry.refused("archive_size_lie", "its packed size is wrong")
        while not machine.eof and (piece := machine.decompress(machine.unconsumed_tail, PIECE)):
            yield piece
    except zlib.error:
        raise entry.refused("archive_damaged", "its content cannot be unpacked") from None
    if not machine.eof:
        raise entry.refused("archive_damaged", "its content ends early")


_VERSION = 20
_UNIX = 3 << 8
_TIME, _DATE = 0, (1 << 5) | 1
"""Midnight of 1 January 1980, the first moment a zip knows."""


class StoredZip:
    """Writes a zip of stored files to *out*, from its current place on: the same bytes for the same calls."""

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._position = out, 0
        self._directory: list[bytes] = []

    def add(self, name: bytes, mode: int, size: int, crc: int, content: Iterable[bytes]) -> tuple[int, str]:
        """Write an entry of this size and CRC-32, and return the size and SHA-256 in hex of what was written."""
        fields = (_VERSION, UTF8_NAME, STORED, _TIME, _DATE, crc, size, size, len(name), 0)
        row = CENTRAL.pack(CENTRAL_MARK, _UNIX | _VERSION, *fields, 0, 0, 0, mode << 16, self._position) + name
        self._directory.append(row)
        self._position += self._out.write(LOCAL.pack(LOCAL_MARK, *fields)) + self._out.write(name)
        begin, hasher = self._position, hashlib.sha256()
        for piece in content:
            hasher.update(piece)
            self._position += self._out.write(piece)
        return self._position - begin, hasher.hexdigest()

    def end(self) -> None:
        """Write the directory, after the last entry."""
        size, count = sum(map(self._out.write, self._directory)), len(self._directory)
        self._out.write(END.pack(END_MARK, 0, 0, count, count, size, self._position, 0))


def write_archive(folder: Path, out: BinaryIO, *, name: str | None = None) -> tuple[TreeFile, ...]:
    """Write the skill in *folder* to *out*, from its current place on, in pieces, below the root folder *name*.

    The name is the folder's own when omitted; with an empty one, the skill file lies at the top. Returns the files that were
    written. Raises FileRefused for what is no regular file, cannot be read, or changed meanwhile.
    """
    top, archive = "" if name == "" else f"{name or folder.name}/", StoredZip(out)
    files = read_tree(folder)
    for file in files:
        crc, mode = 0, stat.S_IFREG | (0o755 if file.executable else 0o644)
        with open_file(folder, file.path) as stream:
            for piece in iter(partial(stream.read, PIECE), b""):
                crc = zlib.crc32(piece, crc)
            stream.seek(0)
            content = iter(partial(stream.read, PIECE), b"")
            written = archive.add(f"{top}{file.path}".encode(), mode, file.size, crc, content)
        if written != (file.size, file.sha256):
            raise FileRefused(f"{file.path!r} changed while it was read", code="unreadable", path=file.path)
    archive.end()
    return files


MACOS = "__MACOSX"
FINDER = ".DS_Store"
EXECUTABLE = 0o111
NESTED = "it is an archive itself: put its files into the skill's folder"
ROOT_BYTES = 4 * MAX_NAME + 2
"""Most bytes of a root folder's name and the slashes around a path below it."""

_DRIVE = re.compile(r"[A-Za-z]:")
_ARCHIVES = (
    *(".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz"),
    *(".tar.zst", ".tbz2", ".txz", ".7z", ".rar", ".skill"),
)
_ENCRYPTIONS = ENCRYPTED | STRONGLY_ENCRYPTED | MASKED


@dataclass(frozen=True, slots=True)
class UnpackPlan:
    """What would be unpacked: entries by where they go below the skill's folder, and what was left out.

    `root` is the single root folder, None when the skill file lies at the top; `skill_file` is `SKILL.md` or
    `skill.md`.
    """

    root: str | None
    skill_file: str
    files: Mapping[str, ZipEntry]
    notes: tuple[Diagnostic, ...]


def plan(entries: Sequence[ZipEntry], limits: ArchiveLimits) -> UnpackPlan:
    """Return what of *entries* makes the skill. Raises ArchiveRefused for the first entry that breaks a rule."""
    files: list[tuple[tuple[str, ...], ZipEntry]] = []
    folders: list[tuple[tuple[str, ...], ZipEntry]] = []
    ignored: list[ZipEntry] = []
    for entry in entries:
        parts, folder = entry_path(entry, limits)
        if MACOS in parts[:2] or parts[-1] == FINDER:
            ignored.append(entry)
        else:
            (folders if folder else files).append((parts, entry))
    if len(files) > limits.files:
        raise ArchiveRefused("archive_too_many_files", f"it has {len(files)} files, more than {limits.files}")
    check_distinct([*files, *folders], {entry.offset for _, entry in folders})
    root = _root([parts for parts, _ in files])
    below = 0 if root is None else 1
    planned = {"/".join(parts[below:]): entry for parts, entry in files}
    _check_files(planned, limits)
    skill_file = next(name for name in SKILL_FILES if name in planned)
    notes: tuple[Diagnostic, ...] = ()
    if ignored:
        words = "1 entry that a Mac adds was" if len(ignored) == 1 else f"{len(ignored)} entries that a Mac adds were"
        first = ignored[0].label
        notes = (Diagnostic("archive_ignored", "info", f"{words} left out, such as {first}.", path=first),)
    return UnpackPlan(root, skill_file, dict(sorted(planned.items(), key=lambda item: item[0].encode())), notes)


def check_skill_name(name: str, *, entry: str | None) -> None:
    """Refuse a folder or skill whose name is not one by the grammar of names."""
    problem = name_problem(name)
    if problem is not None:
        raise ArchiveRefused("archive_name_invalid", problem, entry=entry)


def entry_path(entry: ZipEntry, limits: ArchiveLimits) -> tuple[tuple[str, ...], bool]:
    """Return an entry's path, and whether it is a folder's. Raises ArchiveRefused for what is no plain file or folder."""
    parts, folder = _parts(entry)
    _check_entry(entry, parts, folder, limits)
    return parts, folder


def _parts(entry: ZipEntry) -> tuple[tuple[str, ...], bool]:
    """Return an entry's path and whether it is a folder's.

    Refused is a name that could lead anywhere but below the skill's folder, or means different things to readers.
    """
    try:
        name = entry.raw.decode("utf-8")
    except UnicodeDecodeError:
        raise entry.refused("archive_name_not_utf8", "its name is not UTF-8") from None
    folder = name.endswith("/")
    parts = tuple((name[:-1] if folder else name).split("/"))
    control = any(unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"} for c in name)
    _refuse_first(
        entry,
        (not name, "archive_path_invalid", "it has no name"),
        ("\\" in name, "archive_path_backslash", "its name has a backslash"),
        (name.startswith("/"), "archive_path_absolute", "its path is absolute"),
        (_DRIVE.match(name) is not None, "archive_path_drive", "its path begins with a drive"),
        (".." in parts, "archive_path_parent", "its path leads upwards"),
        (not {"", "."}.isdisjoint(parts), "archive_path_invalid", "its path has an empty part"),
        (control, "archive_path_invalid", "its name has control characters"),
    )
    return parts, folder


def _check_entry(entry: ZipEntry, parts: tuple[str, ...], folder: bool, limits: ArchiveLimits) -> None:
    """Refuse a path that no root folder could excuse, what is no plain file or folder, and what cannot be unpacked."""
    kind = stat.S_IFMT(entry.mode)
    long = len(entry.raw) > limits.path_bytes + ROOT_BYTES
    foreign = entry.method not in {STORED, DEFLATED} or bool(entry.flags & PATCHED)
    method = f"it is packed by method {entry.method}; stored (0) and deflated (8) are read"
    torn = kind != 0 and (kind == stat.S_IFDIR) != folder
    lie = entry.method == STORED and entry.packed != entry.size
    _refuse_first(
        entry,
        (len(parts) > limits.depth + 1, "archive_too_deep", f"its path has more than {limits.depth} parts"),
        (long, "archive_path_too_long", f"its path has more than {limits.path_bytes} bytes"),
        (kind == stat.S_IFLNK or entry.reparse, "archive_link", "it is a link"),
        (kind not in {0, stat.S_IFREG, stat.S_IFDIR}, "archive_special_file", "it is no regular file"),
        (torn, "archive_special_file", "its name and its kind do not agree"),
        (folder and entry.size > 0, "archive_special_file", "it is a folder with content"),
        (bool(entry.flags & _ENCRYPTIONS), "archive_encrypted", "it is encrypted"),
        (foreign, "archive_method", method),
        (lie, "archive_size_lie", "it is stored, but its two sizes differ"),
    )


def _folded(path: str) -> str:
    """Return a path as file systems see it that know neither case nor Unicode forms."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())


def check_distinct(entries: Sequence[tuple[tuple[str, ...], ZipEntry]], folders: set[int]) -> None:
    """Refuse entries that would be one file, here or on a file system without case, and files used as folders.

    *folders* are the offsets of those that are folders.
    """
    paths: set[str] = set()
    files: set[str] = set()
    above: dict[str, ZipEntry] = {}
    spellings: dict[str, str] = {}
    for parts, entry in entries:
        path = "/".join(parts)
        if path in paths:
            raise entry.refused("archive_duplicate", "it is there twice")
        paths.add(path)
        if entry.offset not in folders:
            files.add(path)
        for depth in range(len(parts), 0, -1):
            prefix = "/".join(parts[:depth])
            first_spelling = spellings.setdefault(_folded(prefix), prefix)
            if first_spelling != prefix:
                message = f"it differs from {first_spelling!r} only by case or Unicode form"
                raise entry.refused("archive_case_collision", message)
            if depth < len(parts) and above.setdefault(prefix, entry) is not entry:
                break  # what lies above was looked at with its first entry
    used = sorted(files & above.keys())
    if used:
        raise ArchiveRefused("archive_duplicate", "its folder is also a file", entry=above[used[0]].label)


def _root(paths: Sequence[tuple[str, ...]]) -> str | None:
    """Return the single root folder; None when the skill file lies at the top."""
    if any(len(parts) == 1 and parts[0] in SKILL_FILES for parts in paths):
        return None
    tops = sorted({parts[0] for parts in paths})
    if not tops:
        raise ArchiveRefused("archive_no_skill", "it holds no file")
    if len(tops) > 1 or any(len(parts) == 1 for parts in paths):
        message = f"it has no SKILL.md at the top and more than a single root folder: {', '.join(tops[:4])}"
        raise ArchiveRefused("archive_wrong_root", message, entry=tops[0])
    if not any(len(parts) == 2 and parts[1] in SKILL_FILES for parts in paths):
        raise ArchiveRefused("archive_no_skill", "its root folder has no SKILL.md", entry=tops[0])
    check_skill_name(tops[0], entry=tops[0])
    return tops[0]


def _check_files(planned: Mapping[str, ZipEntry], limits: ArchiveLimits) -> None:
    """Refuse paths below the skill's folder, archives within the archive, and amounts that are too large."""
    for path, entry in planned.items():
        deep, long = path.count("/") >= limits.depth, len(path.encode()) > limits.path_bytes
        _refuse_first(
            entry,
            (deep, "archive_too_deep", f"its path has more than {limits.depth} parts"),
            (long, "archive_path_too_long", f"its path has more than {limits.path_bytes} bytes"),
            (path.lower().endswith(_ARCHIVES), "archive_nested", NESTED),
        )
    total = sum(entry.size for entry in planned.values())
    if total > limits.unpacked_bytes:
        message = f"it unpacks to {total} bytes, more than {limits.unpacked_bytes}"
        raise ArchiveRefused("archive_unpacked_too_large", message)
    for entry in planned.values():
        if entry.size > limits.ratio * entry.packed:
            message = f"it unpacks to more than {limits.ratio} times its packed size"
            raise entry.refused("archive_ratio", message)


FILE_MODE: Final = 0o400
PROGRAM_MODE: Final = 0o500
FOLDER_MODE: Final = 0o500
_ZIP = b"PK\x03\x04"
_DOCUMENTS: Final = (
    *(".docx", ".docm", ".dotx", ".xlsx", ".xlsm", ".xltx", ".pptx", ".pptm", ".potx", ".vsdx"),
    *(".odt", ".ods", ".odp", ".odg", ".epub", ".whl", ".jar", ".npz", ".kmz", ".3mf"),
)
"""Files that are zip archives inside and are used as they are."""


@dataclass(frozen=True, slots=True)
class UnpackedSkill:
    """A skill unpacked to `folder`, which is called as it is, and found good; `version` is the hash of its tree.

    `diagnostics` are all findings: what was left out, and what the skill's own files say.
    """

    name: str
    folder: Path
    version: str
    files: tuple[TreeFile, ...]
    skill: Skill
    diagnostics: tuple[Diagnostic, ...]


def unpack_skill(archive: Path, into: Path, *, limits: ArchiveLimits | None = None) -> UnpackedSkill:
    """Unpack the zip *archive* to `into/<name>`; files end up read-only, execute bits kept.

    *into* is a folder that is not there yet (else FileExistsError); it is made, and on any failure it is gone again.
    Bounds are those of `docs/reference/archives.md` when *limits* is omitted. Raises ArchiveRefused.
    """
    with archive.open("rb") as stream:
        bounds = limits or ArchiveLimits()
        return unpack_entries(stream, read_directory(stream, bounds), into, bounds)


def unpack_entries(stream: BinaryIO, entries: Sequence[ZipEntry], into: Path, limits: ArchiveLimits) -> UnpackedSkill:
    """Unpack the skill that *entries* of the open archive make, as `unpack_skill` does. Raises as it does."""
    unpack_plan = plan(entries, limits)
    name = _name(stream, unpack_plan)
    into.mkdir(mode=0o700)
    try:
        return _unpacked(stream, unpack_plan, name, into)
    except BaseException:  # raised again: nothing half-unpacked stays
        remove_tree(into)
        raise


def _name(stream: BinaryIO, unpack_plan: UnpackPlan) -> str:
    """Return the skill's name, from its file alone; a file that is no skill ends it before anything is written."""
    entry = unpack_plan.files[unpack_plan.skill_file]
    entry_name = entry.label
    if entry.size > MAX_SKILL_BYTES:
        raise ArchiveRefused("archive_skill_invalid", f"it has more than {MAX_SKILL_BYTES} bytes", entry=entry_name)
    data = b"".join(pieces(stream, entry))
    parsed = parse_skill_bytes(data, folder=unpack_plan.root or "", file_name=unpack_plan.skill_file)
    if parsed.skill is None:
        raise _invalid(entry_name, parsed.diagnostics)
    name = parsed.skill.name
    check_skill_name(name, entry=entry_name)
    if unpack_plan.root is not None and name != unpack_plan.root:
        message = f"the skill is called {name!r} and its folder {unpack_plan.root!r}"
        raise ArchiveRefused("archive_name_mismatch", message, entry=entry_name)
    return name


def _invalid(entry: str, findings: tuple[Diagnostic, ...]) -> ArchiveRefused:
    errors = [finding for finding in findings if finding.severity == "error"]
    reason = "; ".join(f"{finding.code}: {finding.message.rstrip('.')}" for finding in errors)
    return ArchiveRefused("archive_skill_invalid", reason, entry=entry, diagnostics=findings)


def _unpacked(stream: BinaryIO, unpack_plan: UnpackPlan, name: str, into: Path) -> UnpackedSkill:
    folder = into / name
    make_folder(folder)
    files = tuple(_write(stream, path, entry, folder) for path, entry in unpack_plan.files.items())
    parsed = parse_skill(folder)
    findings = (*unpack_plan.notes, *validate_skill(folder))
    if parsed.skill is None:
        raise _invalid(unpack_plan.files[unpack_plan.skill_file].label, findings)
    for directory, _, _ in os.walk(folder, topdown=False):
        Path(directory).chmod(FOLDER_MODE)
    return UnpackedSkill(name, folder, version_of(files), files, parsed.skill, findings)


def _write(stream: BinaryIO, path: str, entry: ZipEntry, folder: Path) -> TreeFile:
    """Write one file in pieces; every folder above it was made by us, in a folder only we may enter."""
    target = folder / path
    make_folder(target.parent)
    hasher = hashlib.sha256()
    size = 0
    executable = bool(entry.mode & EXECUTABLE)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        for piece in pieces(stream, entry):
            if size == 0 and piece.startswith(_ZIP) and not path.lower().endswith(_DOCUMENTS):
                raise entry.refused("archive_nested", NESTED)
            out.write(piece)
            hasher.update(piece)
            size += len(piece)
        out.flush()
        os.fchmod(out.fileno(), PROGRAM_MODE if executable else FILE_MODE)
        os.fsync(out.fileno())  # a version is renamed into place: its bytes must be there first
    return TreeFile(path, size, hasher.hexdigest(), executable)
