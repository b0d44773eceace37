"""Open files below a root without following links, however the tree changes meanwhile.

A relative path is walked part by part: every folder is opened with `O_NOFOLLOW` relative to the folder before it, so
no part can be a link, and nothing outside the root is ever reached. The root itself may be a link: it is resolved when
it is opened. Only regular files are read; a FIFO, device or socket is refused before it could block.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
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
    """One file of a tree, found without following links.

    `path` is posix and relative to the tree's root. `size` is 0 unless `kind` is `file`; `target` is the text of a
    link, else "". `mode` holds the permission bits.
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

    Raises:
        FileRefused: `path_unsafe` when it is empty, absolute, holds a NUL, or has an empty part, `.` or `..`.
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

    Raises:
        FileRefused: `file_missing`, `symlink`, `not_a_directory` or `unreadable`.
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

    With *listed* a listing just said that it is a regular file, so that it need not be looked at first.

    Raises:
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

    Raises:
        FileRefused: `not_regular`, `too_large` beyond *limit* bytes, `unreadable` when the system fails.
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

    Raises:
        FileRefused: `path_unsafe`, `file_missing`, `symlink`, `not_a_directory`, `not_regular`, `too_large` or
            `unreadable`, with the path in `details`.
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


def walk_tree(root: str | Path, below: str = "") -> list[TreeEntry]:
    """List every file of the folder *below* a root, dot files too, ordered by the bytes of the path relative to that folder.

    Folders appear only through their files; links are named, not followed, and lead to no folder but the root.

    Raises:
        FileRefused: A folder cannot be opened, or the tree is deeper than 64 folders (`too_deep`).
    """
    entries: list[TreeEntry] = []
    parts = split_relative(below) if below else ()
    with _folder(root, parts, below or ".", "the tree's root cannot be opened") as folder:
        _walk(folder, "", 0, entries)
    return sorted(entries, key=lambda entry: os.fsencode(entry.path))


def _walk(folder: int, prefix: str, depth: int, tree_entries: list[TreeEntry]) -> None:
    if depth > MAX_DEPTH:
        raise FileRefused(f"{prefix!r} is deeper than {MAX_DEPTH} folders", code="too_deep", path=prefix.rstrip("/"))
    with os.scandir(folder) as entries:
        for entry in entries:
            path = prefix + entry.name
            try:
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    deeper = open_folder_at(folder, entry.name, path)
                    try:
                        _walk(deeper, path + "/", depth + 1, tree_entries)
                    finally:
                        os.close(deeper)
                    continue
                target = os.readlink(entry.name, dir_fd=folder) if stat.S_ISLNK(facts.st_mode) else ""
            except OSError as error:
                raise refused(error, path) from error
            mode, regular = stat.S_IMODE(facts.st_mode), stat.S_ISREG(facts.st_mode)
            kind: EntryKind = "file" if regular else "link" if stat.S_ISLNK(facts.st_mode) else "other"
            tree_entries.append(TreeEntry(path, kind, facts.st_size if regular else 0, mode, target))
