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

from kdskills.execution.check import OutputGlob, output_problem, shown_path
from kdskills.execution.request import Artifact, ArtifactError, Limits

MAX_ENTRIES = 20_000
MAX_DEPTH = 32
MAX_ERRORS = 64
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(slots=True)
class Collection:
    """The files and errors collected so far, and how much more may be collected."""

    globs: Sequence[OutputGlob]
    files_left: int
    bytes_left: int
    entries_left: int = MAX_ENTRIES
    artifacts: list[Artifact] = field(default_factory=list)
    errors: list[ArtifactError] = field(default_factory=list)

    def refuse(self, path: str, code: str, message: str) -> None:
        """Add an error for an output that was not collected, its name escaped; at most 64 are kept."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(ArtifactError(shown_path(path), code, message))

    def accept(self, path: str, data: bytes, mode: int) -> None:
        """Add one regular file, within the remaining caps; *mode* is masked.

        Every engine's files come through here, so their names are checked here: `bad_name` for one that is no clean path.
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


def collect(folder: int, globs: Sequence[OutputGlob], limits: Limits) -> Collection:
    """Collect what *globs* name below the open folder *folder*.

    Outputs that are links, special files, too large, too many, unreadable or missing become errors; nothing raises.
    """
    collection = Collection(globs, limits.output_files, limits.output_size)
    if globs:
        _walk(folder, (), collection)
        finish(collection)
    return collection


def finish(collection: Collection) -> None:
    """Sort the files, and add an error for every declared output that no file matches."""
    collection.artifacts.sort(key=lambda item: item.path)
    paths = [item.path for item in collection.artifacts] + [item.path for item in collection.errors]
    path_parts = [tuple(path.split("/")) for path in paths]
    for glob in collection.globs:
        if not any(glob.matches(path) for path in path_parts):
            collection.refuse(glob.pattern, "missing", "the program left no such file")


def _walk(folder: int, prefix: tuple[str, ...], collection: Collection) -> None:
    try:
        with os.scandir(folder) as entries:
            names = []
            for entry in entries:
                collection.entries_left -= 1
                if collection.entries_left < 0:
                    collection.refuse(
                        "/".join(prefix) or ".", "too_many", f"more than {MAX_ENTRIES} entries to look at"
                    )
                    break
                names.append(entry.name)
    except OSError as error:
        collection.refuse("/".join(prefix) or ".", "unreadable", error.strerror or "cannot be listed")
        return
    for name in sorted(names):
        _visit(folder, name, (*prefix, name), collection)


def _visit(folder: int, name: str, path: tuple[str, ...], collection: Collection) -> None:
    matched = any(glob.matches(path) for glob in collection.globs)
    file_path = "/".join(path)
    try:
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(facts.st_mode):
            if any(glob.may_lie_below(path) for glob in collection.globs):
                _descend(folder, name, path, collection)
            return
        if not matched:
            if stat.S_ISLNK(facts.st_mode):
                _link_on_the_way(path, file_path, collection)
            return
        if not stat.S_ISREG(facts.st_mode):
            kind = "link" if stat.S_ISLNK(facts.st_mode) else "not_regular"
            collection.refuse(file_path, kind, "is a link" if kind == "link" else "is no regular file")
            return
        _take(folder, name, file_path, collection)
    except OSError as error:
        if matched:
            collection.refuse(file_path, "unreadable", error.strerror or "cannot be read")


def _link_on_the_way(path: tuple[str, ...], link_path: str, collection: Collection) -> None:
    """A link standing where a literal output names a folder explains why that output is not there."""
    for glob in collection.globs:
        if glob.literal and glob.may_lie_below(path):
            collection.refuse(glob.pattern, "link", f"{shown_path(link_path)} is a link")


def _descend(folder: int, name: str, path: tuple[str, ...], collection: Collection) -> None:
    if len(path) > MAX_DEPTH:
        collection.refuse("/".join(path), "too_deep", f"more than {MAX_DEPTH} folders deep")
        return
    deeper = os.open(name, _FOLDER, dir_fd=folder)
    try:
        _walk(deeper, path, collection)
    finally:
        os.close(deeper)


def _take(folder: int, name: str, file_path: str, collection: Collection) -> None:
    with os.fdopen(os.open(name, _FILE, dir_fd=folder), "rb") as stream:
        facts = os.fstat(stream.fileno())
        if not stat.S_ISREG(facts.st_mode):
            collection.refuse(file_path, "not_regular", "is no regular file")
        elif collection.files_left <= 0:
            collection.refuse(file_path, "too_many", "more files match than may be collected")
        else:
            # One byte more than may be taken, and than there is, shows that there is more.
            content = stream.read(min(facts.st_size, collection.bytes_left) + 1)
            collection.accept(file_path, content, facts.st_mode)
