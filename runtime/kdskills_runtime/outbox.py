"""Files of a run: inputs are placed from announced bytes, outputs sent as JSON lines and bytes.

The folder was filled by an untrusted program: it is walked by descriptors, no link is followed, nothing but regular
files is opened, and caps hold while reading. The host checks every output again.
"""

from __future__ import annotations

import fnmatch
import json
import os
import stat

TYPE_CHECKING = False  # the name type checkers know; importing typing costs 5 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

MAX_ENTRIES = 20_000
MAX_DEPTH = 32
MAX_PROBLEMS = 64
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def exactly(fd: int, size: int) -> bytes:
    """Read exactly *size* bytes from *fd*. Raises EOFError when it ends before."""
    pieces = bytearray()
    while len(pieces) < size:
        piece = os.read(fd, min(size - len(pieces), 1 << 20))
        if not piece:
            raise EOFError("the order ended too early")
        pieces += piece
    return bytes(pieces)


def place_inputs(
    take: Callable[[int], bytes | memoryview], inputs: list[tuple[str, int]], executable: list[str]
) -> None:
    """Write input files below /work from the announced bytes *take* gives; their paths were checked by the host. Those
    in *executable* may be executed.
    """
    programs = frozenset(executable)
    for path, size in inputs:
        target = os.path.join("/work", path)  # noqa: PTH118 - pathlib costs 3 ms to import
        os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120 - pathlib costs 3 ms to import
        target_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        if path in programs:
            os.fchmod(target_fd, 0o755)
        with open(target_fd, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(take(size))


def send_outputs(out: BinaryIO, folder: str, globs: list[str], max_files: int, max_bytes: int) -> None:
    """Write what *globs* name below *folder* to *out*, at most *max_files* and *max_bytes*."""
    if not globs:
        return
    outbox = _Outbox(out, [pattern.split("/") for pattern in globs], max_files, max_bytes)
    try:
        top = os.open(folder, _FOLDER)
    except OSError as error:
        outbox.problem([], "unreadable", error.strerror or "cannot be listed")
        return
    try:
        outbox.walk(top, [])
    finally:
        os.close(top)


def matches(pattern: list[str], path: list[str], *, below: bool = False) -> bool:
    """Whether *path* matches part by part, `**` standing for any number of folders; or, *below*, something in it may."""
    if not pattern:
        return not path
    if not path:
        return below or all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return matches(pattern[1:], path, below=below) or matches(pattern, path[1:], below=below)
    return fnmatch.fnmatchcase(path[0], pattern[0]) and matches(pattern[1:], path[1:], below=below)


class _Outbox:
    def __init__(self, out: BinaryIO, globs: list[list[str]], max_files: int, max_bytes: int) -> None:
        self._out, self._globs = out, globs
        self._files, self._bytes = max_files, max_bytes
        self._entries, self._problems = MAX_ENTRIES, MAX_PROBLEMS

    def walk(self, folder: int, prefix: list[str]) -> None:
        """Look at everything in *folder* that matches or may hold matches."""
        names = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    self._entries -= 1
                    if self._entries < 0:
                        self.problem(prefix, "too_many", f"more than {MAX_ENTRIES} entries to look at")
                        break
                    names.append(entry.name)
        except OSError as error:
            self.problem(prefix, "unreadable", error.strerror or "cannot be listed")
        for name in sorted(names):
            self._visit(folder, name, [*prefix, name])

    def _visit(self, folder: int, name: str, path: list[str]) -> None:
        matched = any(matches(glob, path) for glob in self._globs)
        enter = any(matches(glob, path, below=True) for glob in self._globs)
        if not (matched or enter):
            return
        try:
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                if enter and len(path) <= MAX_DEPTH:
                    deeper = os.open(name, _FOLDER, dir_fd=folder)
                    try:
                        self.walk(deeper, path)
                    finally:
                        os.close(deeper)
            elif stat.S_ISLNK(mode):
                self.problem(path, "link", "is a link")
            elif matched and not stat.S_ISREG(mode):
                self.problem(path, "not_regular", "is no regular file")
            elif matched:
                self._file(folder, name, path)
        except OSError as error:
            self.problem(path, "unreadable", error.strerror or "cannot be read")

    def _file(self, folder: int, name: str, path: list[str]) -> None:
        fd = os.open(name, _FILE, dir_fd=folder)
        try:
            facts = os.fstat(fd)
            if self._files <= 0:
                self.problem(path, "too_many", "more files match than may be collected")
            elif facts.st_size > self._bytes:
                self.problem(path, "too_large", f"only {self._bytes} bytes may still be collected")
            elif stat.S_ISREG(facts.st_mode):
                self._files -= 1
                self._bytes -= facts.st_size
                size, mode = facts.st_size, facts.st_mode & 0o777
                self._line({"kind": "file", "path": "/".join(path), "mode": mode, "size": size})
                while size > 0:  # exactly as many bytes: the program is dead, so the file does not change meanwhile
                    piece = os.read(fd, min(size, 1 << 20)) or bytes(min(size, 1 << 20))
                    self._out.write(piece)
                    size -= len(piece)
        finally:
            os.close(fd)

    def problem(self, path: list[str], code: str, message: str) -> None:
        """Report an output that is not sent; at most 64 are reported."""
        self._problems -= 1
        if self._problems >= 0:
            self._line({"kind": "problem", "path": "/".join(path) or ".", "code": code, "message": message})

    def _line(self, line: dict[str, Any]) -> None:
        self._out.write(json.dumps(line).encode("ascii") + b"\n")
