"""Collecting declared outputs from a folder an untrusted program has filled.

Called when the program is dead. The folder is walked by descriptors, never by path, and no link is followed. What is
not a regular file is named, not opened; a FIFO cannot hang us, a device is never touched.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

from kdskills.execution.check import output_problem, shown_path
from kdskills.execution.globs import OutputGlob
from kdskills.execution.request import Artifact, ArtifactError, Limits

MAX_ENTRIES = 20_000
MAX_DEPTH = 32
MAX_ERRORS = 64
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Collection:
    """What was collected so far, and what still may be."""

    globs: Sequence[OutputGlob]
    files_left: int
    bytes_left: int
    entries_left: int = MAX_ENTRIES
    artifacts: list[Artifact] = field(default_factory=list)
    errors: list[ArtifactError] = field(default_factory=list)

    def refuse(self, path: str, code: str, message: str) -> None:
        """Note an output that was not collected, its name escaped; a flood of them is cut."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(ArtifactError(shown_path(path), code, message))

    def accept(self, path: str, data: bytes, mode: int) -> None:
        """Take one regular file's bytes, within the caps that are left; *mode* is masked.

        Whatever engine reads the file, this is where its name is judged: `bad_name` for one that is no clean path.
        """
        problem = output_problem(path)
        if problem is not None:
            self.refuse(path, "bad_name", f"the path {problem}")
            return
        if self.files_left <= 0:
            self.refuse(path, "too_many", "more files match than may be collected")
            return
        if len(data) > self.bytes_left:
            self.refuse(path, "too_large", f"only {self.bytes_left} bytes may still be collected")
            return
        self.files_left -= 1
        self.bytes_left -= len(data)
        self.artifacts.append(Artifact(path, len(data), hashlib.sha256(data).hexdigest(), mode & 0o755, data))


def new_collection(globs: Sequence[OutputGlob], limits: Limits) -> Collection:
    """Return an empty collection with the caps of *limits*; for engines that read their outputs from a stream."""
    return Collection(globs, limits.output_files, limits.output_size)


def collect(folder: int, globs: Sequence[OutputGlob], limits: Limits) -> Collection:
    """Collect what *globs* name below the open folder *folder*.

    Outputs that are links, special files, too large, too many, unreadable or missing become errors; nothing raises.
    """
    found = new_collection(globs, limits)
    if globs:
        _walk(folder, (), found)
        finish(found)
    return found


def finish(found: Collection) -> None:
    """Sort what was found, and name every declared output nothing came for."""
    found.artifacts.sort(key=lambda item: item.path)
    paths = [item.path for item in found.artifacts] + [item.path for item in found.errors]
    seen = [tuple(path.split("/")) for path in paths]
    for glob in found.globs:
        if not any(glob.matches(path) for path in seen):
            found.refuse(glob.pattern, "missing", "the program left no such file")


def _walk(folder: int, prefix: tuple[str, ...], found: Collection) -> None:
    try:
        with os.scandir(folder) as entries:
            names = []
            for entry in entries:
                found.entries_left -= 1
                if found.entries_left < 0:
                    found.refuse("/".join(prefix) or ".", "too_many", f"more than {MAX_ENTRIES} entries to look at")
                    break
                names.append(entry.name)
    except OSError as error:
        found.refuse("/".join(prefix) or ".", "unreadable", error.strerror or "cannot be listed")
        return
    for name in sorted(names):
        _visit(folder, name, (*prefix, name), found)


def _visit(folder: int, name: str, path: tuple[str, ...], found: Collection) -> None:
    matched = any(glob.matches(path) for glob in found.globs)
    shown = "/".join(path)
    try:
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(facts.st_mode):
            if any(glob.may_lie_below(path) for glob in found.globs):
                _descend(folder, name, path, found)
            return
        if not matched:
            if stat.S_ISLNK(facts.st_mode):
                _link_on_the_way(path, shown, found)
            return
        if not stat.S_ISREG(facts.st_mode):
            kind = "link" if stat.S_ISLNK(facts.st_mode) else "not_regular"
            found.refuse(shown, kind, "is a link" if kind == "link" else "is no regular file")
            return
        _take(folder, name, shown, found)
    except OSError as error:
        if matched:
            found.refuse(shown, "unreadable", error.strerror or "cannot be read")


def _link_on_the_way(path: tuple[str, ...], shown: str, found: Collection) -> None:
    """A link standing where a literal output names a folder explains why that output is not there."""
    for glob in found.globs:
        if glob.literal and glob.may_lie_below(path):
            found.refuse(glob.pattern, "link", f"{shown_path(shown)} is a link")


def _descend(folder: int, name: str, path: tuple[str, ...], found: Collection) -> None:
    if len(path) > MAX_DEPTH:
        found.refuse("/".join(path), "too_deep", f"more than {MAX_DEPTH} folders deep")
        return
    deeper = os.open(name, _FOLDER, dir_fd=folder)
    try:
        _walk(deeper, path, found)
    finally:
        os.close(deeper)


def _take(folder: int, name: str, shown: str, found: Collection) -> None:
    fd = os.open(name, _FILE, dir_fd=folder)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            found.refuse(shown, "not_regular", "is no regular file")
        elif found.files_left <= 0:
            found.refuse(shown, "too_many", "more files match than may be collected")
        else:
            found.accept(shown, _read(fd, found.bytes_left + 1), facts.st_mode)
    finally:
        os.close(fd)


def _read(fd: int, most: int) -> bytes:
    pieces: list[bytes] = []
    while most > 0:
        piece = os.read(fd, min(most, 1024 * 1024))
        if not piece:
            break
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)
