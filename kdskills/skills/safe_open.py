"""Open files below a root without following links, however the tree changes meanwhile; their stamps and digests.

A relative path is walked part by part: every folder is opened with `O_NOFOLLOW` relative to the folder before it, so
no part can be a link, and nothing outside the root is ever reached. The root itself may be a link: it is resolved when
it is opened. Only regular files are read; a FIFO, device or socket is refused before it could block.

A stamp packs what the file system says about a file or folder, so that a change is seen without reading it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Literal, NamedTuple

from kdskills.errors import FileRefused

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
ROOT_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
MAX_DEPTH = 64

EntryKind = Literal["file", "link", "other"]


class FileRead(NamedTuple):
    """Bytes of one regular file and what the system said about that very file."""

    data: bytes
    stat: os.stat_result


class TreeEntry(NamedTuple):
    """One file of a tree, found without following links; `path` is posix and relative to the tree's root.

    `size` is 0 unless `kind` is `file`; `target` is the text of a link, else "". `mode` holds the permission bits.
    """

    path: str
    kind: EntryKind
    size: int
    mode: int
    target: str = ""


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether *path*, links followed, is a folder this user can see; no text and no file-system state raises."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def split_relative(relative: str) -> tuple[str, ...]:
    """Return the parts of a relative posix path.

    Refused (`path_unsafe`) is one that is empty, absolute, holds a NUL, or has an empty part, `.` or `..`.
    """
    parts = tuple(relative.split("/"))
    if "\0" in relative or len(parts) > 2 * MAX_DEPTH or any(part in {"", ".", ".."} for part in parts):
        raise FileRefused(f"{relative!r} is not a plain path below its root", code="path_unsafe", path=relative)
    return parts


def refused(error: OSError, relative: str) -> FileRefused:
    """Say in one sentence why the system did not open *relative*."""
    if error.errno == errno.ENOENT:
        return FileRefused(f"{relative!r} is not there", code="file_missing", path=relative)
    if error.errno in {errno.ELOOP, errno.EMLINK}:
        return FileRefused(f"{relative!r} leads through a link", code="symlink", path=relative)
    reason = error.strerror or "the system refused"
    return FileRefused(f"{relative!r} cannot be read: {reason}", code="unreadable", path=relative)


def open_folder_at(parent: int, name: str, relative: str) -> int:
    """Open folder *name* inside the open folder *parent*, never through a link; the caller closes it.

    Raises FileRefused: `file_missing`, `symlink`, `not_a_directory` or `unreadable`.
    """
    try:
        return os.open(name, FOLDER_FLAGS, dir_fd=parent)
    except OSError as error:
        if error.errno != errno.ENOTDIR:
            raise refused(error, relative) from error
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError as error:
        raise refused(error, relative) from error
    if stat.S_ISLNK(status.st_mode):
        raise FileRefused(f"{relative!r} leads through a link", code="symlink", path=relative)
    raise FileRefused(f"{relative!r} is not a folder", code="not_a_directory", path=relative)


def open_file_at(parent: int, name: str, relative: str, *, listed: bool = False) -> int:
    """Open the regular file *name* inside the open folder *parent*, never through a link; the caller closes it.

    With *listed* a listing just said that it is a regular file, so that it need not be looked at first. Raises
    FileRefused: `file_missing`, `symlink`, `not_regular` or `unreadable`.
    """
    try:
        if not listed:
            # Looked at first, because merely opening a device may already do something.
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                raise FileRefused(f"{relative!r} is a link", code="symlink", path=relative)
            if not stat.S_ISREG(status.st_mode):
                raise FileRefused(f"{relative!r} is not a regular file", code="not_regular", path=relative)
        return os.open(name, FILE_FLAGS, dir_fd=parent)
    except OSError as error:
        raise refused(error, relative) from error


def read_descriptor(descriptor: int, relative: str, limit: int) -> FileRead:
    """Read an open file to its end.

    Raises FileRefused: `not_regular`, `too_large` beyond *limit* bytes, `unreadable` when the system fails.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise FileRefused(f"{relative!r} is not a regular file", code="not_regular", path=relative)
    if status.st_size <= limit:
        try:
            data = os.read(descriptor, status.st_size + 1)
            if len(data) != status.st_size:  # it grew, or came in pieces: go on to the end, within the limit
                while len(data) <= limit and (piece := os.read(descriptor, limit + 1 - len(data))):
                    data += piece
        except OSError as error:
            raise refused(error, relative) from error
        if len(data) <= limit:
            return FileRead(data, status)
    raise FileRefused(f"{relative!r} has more than {limit} bytes", code="too_large", path=relative, limit=limit)


@contextmanager
def _folder(root: str | Path, parts: tuple[str, ...], relative: str, message: str) -> Iterator[int]:
    """Open the folder *parts* below *root*, part by part; *message* says that the root itself cannot be opened."""
    try:
        current = os.open(root, ROOT_FLAGS)
    except OSError as error:
        raise FileRefused(message, code="file_missing", path=relative) from error
    try:
        for part in parts:
            deeper = open_folder_at(current, part, relative)
            os.close(current)
            current = deeper
        yield current
    finally:
        os.close(current)


@contextmanager
def _opened(root: str | Path, relative: str) -> Iterator[int]:
    parts = split_relative(relative)
    with _folder(root, parts[:-1], relative, f"the root of {relative!r} cannot be opened") as folder:
        descriptor = open_file_at(folder, parts[-1], relative)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_file(root: str | Path, relative: str, *, limit: int) -> FileRead:
    """Read the regular file at a posix path below *root*, of at most *limit* bytes; only the root may be a link.

    Raises FileRefused, with the path in `details`: the codes of `split_relative`, `open_folder_at`, `open_file_at` and
    `read_descriptor`.
    """
    with _opened(root, relative) as descriptor:
        return read_descriptor(descriptor, relative, limit)


@contextmanager
def open_file(root: str | Path, relative: str) -> Iterator[BufferedReader]:
    """Open the regular file *relative* below *root* for reading in pieces. Raises as `read_file`."""
    with _opened(root, relative) as descriptor, os.fdopen(os.dup(descriptor), "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileRefused(f"{relative!r} is not a regular file", code="not_regular", path=relative)
        yield stream


def walk_tree(root: str | Path, below: str = "", *, most: int | None = None) -> list[TreeEntry]:
    """List every file of the folder *below* a root, dot files too, ordered by the bytes of the path in that folder.

    Folders appear only through their files; links are named, not followed, and lead to no folder but the root. What
    goes while it is listed is not listed. Of more than *most* the rest is not looked at, whichever it is. Raises FileRefused when a folder cannot be opened, or lies deeper than 64
    folders (`too_deep`).
    """
    entries: list[TreeEntry] = []
    parts = split_relative(below) if below else ()
    with _folder(root, parts, below or ".", "the tree's root cannot be opened") as folder:
        _walk(folder, "", 0, entries, most)
    return sorted(entries, key=lambda entry: os.fsencode(entry.path))


EVALS = "evals"


def is_withheld(path: str) -> bool:
    """Whether no model and no program sees a skill's file *path*, relative to its folder: evaluations hold the right answers."""
    return path.partition("/")[0].casefold() == EVALS  # some file systems do not tell `Evals` from `evals`


def walk_shown(root: str | Path, below: str = "") -> list[TreeEntry]:
    """List the files of a skill's folder that models and programs may see, as `walk_tree` does all."""
    return [entry for entry in walk_tree(root, below) if not is_withheld(entry.path)]


def _walk(folder: int, prefix: str, depth: int, tree_entries: list[TreeEntry], most: int | None) -> None:
    if depth > MAX_DEPTH:
        raise FileRefused(f"{prefix!r} is deeper than {MAX_DEPTH} folders", code="too_deep", path=prefix.rstrip("/"))
    with os.scandir(folder) as entries:
        for entry in entries:
            if most is not None and len(tree_entries) >= most:
                return
            path = prefix + entry.name
            try:
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    deeper = open_folder_at(folder, entry.name, path)
                    try:
                        _walk(deeper, path + "/", depth + 1, tree_entries, most)
                    finally:
                        os.close(deeper)
                    continue
                target = os.readlink(entry.name, dir_fd=folder) if stat.S_ISLNK(facts.st_mode) else ""
            except OSError as error:
                if (
                    error.errno == errno.ENOENT
                ):  # gone since it was listed, like what is written aside to replace a file
                    continue
                raise refused(error, path) from error
            except FileRefused as error:
                if error.code == "file_missing":
                    continue
                raise
            mode, regular = stat.S_IMODE(facts.st_mode), stat.S_ISREG(facts.st_mode)
            kind: EntryKind = "file" if regular else "link" if stat.S_ISLNK(facts.st_mode) else "other"
            tree_entries.append(TreeEntry(path, kind, facts.st_size if regular else 0, mode, target))


RACY_NS = 2_000_000_000

STAMP = struct.Struct("<qqQq")
STAMP_BYTES = STAMP.size
NO_STAMP = STAMP.pack(-1, -1, 0, -1)
"""What no file has, so that the next walk looks again."""


def stamp_of(status: os.stat_result) -> bytes:
    """Return size, modification time, inode and change time, packed: ten thousand skills have twenty thousand stamps.

    The change time tells of an edit by a tool that put the modification time back.
    """
    return STAMP.pack(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def stamps_of(root: int | None, paths: Iterable[str]) -> bytes:
    """Return the stamps of files or folders below an open folder, or by their whole paths where *root* is None, packed one
    after the other. Raises `OSError`.
    """
    look, pack = os.stat, STAMP.pack  # asked relative to the folder, the system has shorter ways to go
    return b"".join(
        [
            pack(facts.st_size, facts.st_mtime_ns, facts.st_ino, facts.st_ctime_ns)
            for path in paths
            for facts in (look(path, dir_fd=root, follow_symlinks=False),)
        ]
    )


def newest_of(stamps: bytes) -> int:
    """Return the latest modification time among packed stamps."""
    newest: int = max([stamp[1] for stamp in STAMP.iter_unpack(stamps)])
    return newest


def join(folder: str, name: str) -> str:
    """Return the posix path of *name* in *folder*; "" is the root."""
    return f"{folder}/{name}" if folder else name


def printable_path(path: str) -> str:
    """Return *path* as text that can be printed; bytes that are no UTF-8 become U+FFFD."""
    return path if path.isascii() else path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


PREFIX = "sha256:"


def bytes_digest(data: bytes) -> str:
    """Return `sha256:` and 64 hex digits over *data*."""
    return PREFIX + hashlib.sha256(data).hexdigest()


def rows_digest(rows: Iterable[Iterable[str | int]]) -> str:
    """Return the digest over compact UTF-8 JSON of *rows*; bytes of names that are no UTF-8 count as they are."""
    plain = [row if isinstance(row, tuple | list) else list(row) for row in rows]
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
    return bytes_digest(text.encode("utf-8", "surrogateescape"))


TreeRow = tuple[str, int, str]
"""What a file counts as in its tree's digest: path, size, and SHA-256 in hex or what it is instead of a file."""


def tree_rows(root: str | Path, below: str = "", *, shown: bool = False) -> list[TreeRow]:
    """Return a row for every file of a skill's folder, in the order of path bytes; with *shown* for those that models see.

    The folder lies at the posix path *below* a root and is reached without links. A link counts as `(path, 0, "link:" +
    target)`, anything else that is no regular file as `(path, 0, "other")`. Raises FileRefused when a file vanished, turned
    into something else, or cannot be read.
    """
    prefix = f"{below}/" if below else ""
    rows: list[TreeRow] = []
    for entry in walk_shown(root, below) if shown else walk_tree(root, below):
        if entry.kind == "file":
            rows.append((entry.path, *file_digest(root, prefix + entry.path)))
        else:
            rows.append((entry.path, 0, f"link:{entry.target}" if entry.kind == "link" else "other"))
    return rows


def tree_digest(root: str | Path, below: str = "", *, shown: bool = False) -> str:
    """Return the digest over the rows of a folder as `tree_rows` gives them. Raises as it does."""
    return rows_digest(tree_rows(root, below, shown=shown))


def file_digest(folder: str | Path, path: str) -> tuple[int, str]:
    """Return size and SHA-256 in hex of a file below a folder. Raises FileRefused."""
    with open_file(folder, path) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return stream.tell(), digest


class TreeFile(NamedTuple):
    """One file of a skill: posix path below its folder, size, SHA-256 in hex, and whether it may be run."""

    path: str
    size: int
    sha256: str
    executable: bool

    @property
    def line(self) -> str:
        """All of it as text, the path last: digest, size, `x` or `-`, path."""
        return f"{self.sha256} {self.size} {'x' if self.executable else '-'} {self.path}"


def version_of(files: Iterable[TreeFile]) -> str:
    """Return the version: a digest over `[[path, size, hex], ...]` by path bytes, `"x"` added to files that may be run.

    A skill without such files has its tree digest as version. Times, owners, other modes, empty
    folders, the order and packing of an archive do not count.
    """
    ordered = sorted(files, key=lambda each: os.fsencode(each.path))
    return rows_digest([file.path, file.size, file.sha256, *(["x"] if file.executable else [])] for file in ordered)


def tree_digest_of(files: Iterable[TreeFile]) -> str:
    """Return the tree digest of a folder that has just these files, sorted by path bytes."""
    return rows_digest((file.path, file.size, file.sha256) for file in files)


def read_tree(root: str | Path, below: str = "") -> tuple[TreeFile, ...]:
    """Return the files of a skill's folder, sorted by path bytes; it is reached as by `tree_digest`.

    Raises FileRefused for what is no regular file.
    """
    files = []
    for entry in walk_tree(root, below):
        if entry.kind != "file":
            raise FileRefused(f"{entry.path!r} is not a regular file", code="not_regular", path=entry.path)
        size, digest = file_digest(root, join(below, entry.path))
        files.append(TreeFile(entry.path, size, digest, bool(entry.mode & 0o111)))
    return tuple(files)
