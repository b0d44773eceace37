"""The turn's files: a host folder whose files a run sees and where produced files land.

Files are copied in and out, never bound. A path a model names is first checked as pure text, then walked part by part
without following links, so a link planted between two calls is refused, not followed.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from mimetypes import MimeTypes
from pathlib import Path
from typing import Final, Literal, Protocol

from kdskills.errors import FileRefused, StrPath, ToolCallRefused, path_argument
from kdskills.execution import Artifact, InputFile
from kdskills.execution.check import output_problem
from kdskills.session.codes import invalid, path_denied, refuse
from kdskills.session.config import MIB
from kdskills.session.receipts import ProducedFile, bytes_digest
from kdskills.skills.safe_open import ROOT_FLAGS, TreeEntry, open_file, open_folder_at, read_file, walk_tree

_DRIVE = re.compile(r"[A-Za-z]:")


def clean_path(path: str) -> str:
    """Return *path* without a leading `./`, doubled and trailing slashes; it is never URL-decoded.

    Raises `invalid_argument` for a blank path, `path_denied` for any form never followed, even where it stays inside.
    """
    if not path.strip():
        raise invalid("the path is blank", ("/path", "must not be blank"))
    if "\0" in path:
        raise path_denied(path, "nul")
    if not path.isprintable() and any("\ud800" <= char <= "\udfff" for char in path):
        raise invalid("the path is not valid text", ("/path", "holds half of a surrogate pair"))
    if "\\" in path:
        raise path_denied(path, "backslash")
    if path.startswith("/"):
        raise path_denied(path, "absolute")
    if _DRIVE.match(path):
        raise path_denied(path, "drive")
    parts = path.split("/")
    if ".." in parts:
        raise path_denied(path, "dotdot")
    names = [part for part in parts if part not in {"", "."}]
    if not names:
        raise path_denied(path, "root")
    return "/".join(names)


def script_path(path: str) -> str:
    """Return the clean path of a script below `scripts/`; raises as `clean_path`, then `outside_scripts`."""
    clean = clean_path(path)
    first, _, inner = clean.partition("/")
    if first != "scripts" or not inner:
        raise path_denied(path, "outside_scripts")
    return clean


def suffix_of(path: str) -> str:
    """Return the lower-cased suffix of the last part with its dot, or `""`."""
    name = path.rpartition("/")[2]
    stem, dot, suffix = name.rpartition(".")
    return f".{suffix.lower()}" if dot and stem else ""


MAX_FILE: Final = 8 * MIB
MAX_FILES: Final = 256
MAX_TOTAL: Final = 64 * MIB
MAX_DEPTH: Final = 32
"""Folders a path of a turn's file may lead through."""

WriteMode = Literal["create", "replace", "append"]


@dataclass(frozen=True, slots=True)
class Collected:
    """What came back from a run: files that are new or different, and those not kept with the reason."""

    files: tuple[ProducedFile, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()


class Workspace(Protocol):
    """The files of a turn, as runs need them."""

    def inputs(self) -> tuple[InputFile, ...]:
        """Return every file a run gets a copy of."""

    def collect(self, artifacts: Sequence[Artifact]) -> Collected:
        """Keep what a run produced."""

    def has_folder(self, path: str) -> bool:
        """Whether the clean relative *path* is a folder here."""


def media_type(path: str) -> str:
    """Return the media type meant by the suffix of *path*, the same on every host."""
    guessed, encoding = MimeTypes(filenames=()).guess_type(path)
    yaml = "application/yaml"
    text_types = {".md": "text/markdown", ".yaml": yaml, ".yml": yaml, ".toml": "application/toml"}
    if encoding is not None:
        return {"gzip": "application/gzip", "bzip2": "application/x-bzip2"}.get(encoding, "application/octet-stream")
    return text_types.get(Path(path).suffix.lower()) or guessed or "application/octet-stream"


class FolderWorkspace:
    """A turn folder on this host, for runs side by side: each call sees files whole and none that is being written.

    *root* is made when absent. *mounts* are read-only folders seen below a top name, such as `{"data": <bundle>/data}`,
    and *protected* paths of input files, which runs and writes never change.
    """

    def __init__(
        self, root: StrPath, *, mounts: Mapping[str, StrPath] | None = None, protected: Collection[str] = ()
    ) -> None:
        self.root = path_argument(root, "root")
        self.mounts = {name: path_argument(folder, f"the mount {name}") for name, folder in (mounts or {}).items()}
        self.protected = frozenset(protected)
        self._lock = threading.RLock()
        self._programs: set[str] = set()
        self.root.mkdir(parents=True, exist_ok=True)

    def inputs(self) -> tuple[InputFile, ...]:
        """Return copies to make, mounts first: at most 256 files and 64 MiB, else raises `too_large`."""
        copies: list[InputFile] = []
        total = 0
        for prefix, folder in [*sorted(self.mounts.items()), ("", self.root)]:
            for entry in self._entries(folder):
                if entry.kind != "file" or (not prefix and self._mounted(entry.path)):
                    continue  # links and pipes are never handed on
                total += entry.size
                path = f"{prefix}/{entry.path}" if prefix else entry.path
                copies.append(InputFile(path, (folder / entry.path).absolute(), path in self._programs))
        if len(copies) > MAX_FILES or total > MAX_TOTAL:
            message = f"the turn's files are more than {MAX_FILES} files or {MAX_TOTAL} bytes"
            raise refuse("too_large", message, size=total)
        return tuple(copies)

    def has_folder(self, path: str) -> bool:
        """Whether *path* is a folder of the turn, never through a link; a mount's folders count."""
        if path in {"", "."}:
            return True
        first, _, inner = path.partition("/")
        base, parts = (self.mounts[first], inner) if first in self.mounts else (self.root, path)
        try:
            with _folder(base, parts.split("/") if parts else [], make=False):
                return True
        except FileRefused:
            return False

    def read(self, path: str, *, limit: int = 16 * MIB) -> bytes:
        """Return the bytes of a file of the turn; raises `path_denied` for forms never followed, else FileRefused."""
        clean = clean_path(path)
        first, _, below = clean.partition("/")
        base, inner = (self.mounts[first], below) if first in self.mounts and below else (self.root, clean)
        return read_file(base, inner, limit=limit).data

    def files(self) -> list[TreeEntry]:
        """Return the regular files of the turn folder itself, without mounts, by path."""
        entries = self._entries(self.root)
        return [entry for entry in entries if entry.kind == "file" and not self._mounted(entry.path)]

    def names(self) -> frozenset[str]:
        """Return the paths of all files that can be read here: the turn's own, those handed in, those of mounts."""
        folders = [*((f"{prefix}/", folder) for prefix, folder in self.mounts.items()), ("", self.root)]
        return frozenset(
            f"{prefix}{entry.path}"
            for prefix, folder in folders
            for entry in self._entries(folder)
            if entry.kind == "file"
        )

    def write(self, path: str, data: bytes, mode: WriteMode = "create") -> ProducedFile:
        """Write a file of the turn, whole or not at all.

        Raises ToolCallRefused: `path_denied` for inputs, mounts, links and forms never followed; `too_large` beyond 8
        MiB a file, 256 files or 64 MiB a turn; `invalid_argument` when `create` finds a file.
        """
        clean = clean_path(path)
        problem = output_problem(clean)
        if problem is not None:
            raise invalid(f"the path {problem}", ("/path", problem))
        if clean.count("/") > MAX_DEPTH:
            problem = f"leads through more than {MAX_DEPTH} folders"
            raise invalid(f"a file lies below {MAX_DEPTH} folders at most", ("/path", problem))
        if clean in self.protected or self._mounted(clean):
            raise refuse("path_denied", f"{clean!r} is read-only", path=path, reason="root")
        with self._lock:
            return self._write(path, clean, data, mode)

    def _write(self, path: str, clean: str, data: bytes, mode: WriteMode) -> ProducedFile:
        old_content: bytes | None = None
        try:
            old_content = read_file(self.root, clean, limit=MAX_FILE).data
        except FileRefused as error:
            if error.code != "file_missing":
                raise _denied(error, path) from error
        if mode == "create" and old_content is not None:
            raise invalid(f"{clean!r} exists; use mode replace or append", ("/mode", "the file exists"))
        content = (old_content or b"") + data if mode == "append" else data
        try:
            size, other_files = len(content), [entry for entry in self.files() if entry.path != clean]
            for value, bound, unit in (
                (size, MAX_FILE, "bytes in one file"),
                (len(other_files) + 1, MAX_FILES, "files in a turn"),
                (size + sum(entry.size for entry in other_files), MAX_TOTAL, "bytes in a turn"),
            ):
                if value > bound:
                    raise refuse("too_large", f"{clean!r} would make {value} {unit}; {bound} are allowed", limit=bound)
            self._replace(clean, content)
        except FileRefused as error:
            raise _denied(error, path) from error
        return ProducedFile(clean, len(content), bytes_digest(content), media_type(clean))

    def collect(self, artifacts: Sequence[Artifact]) -> Collected:
        """Keep artifacts that are new or differ from what is here; inputs and mounts stay as they are."""
        produced_files: list[ProducedFile] = []
        dropped: list[tuple[str, str]] = []
        # For later runs: on this host nothing that a program made may be executed.
        programs = {item.path for item in artifacts if item.mode & 0o100}
        self._programs = (self._programs - {item.path for item in artifacts}) | programs
        for item in artifacts:
            if self._is_unchanged(item):
                continue
            if self._mounted(item.path) or item.path in self.protected:
                dropped.append((item.path, "is read-only; the change was not kept"))
                continue
            try:
                produced_files.append(self.write(item.path, item.content, "replace"))
            except ToolCallRefused as error:
                dropped.append((item.path, error.message))
        return Collected(tuple(produced_files), tuple(dropped))

    def remove(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Remove files of the turn and return the paths that were there; files handed in and mounts stay."""
        removed: list[str] = []
        for path in paths:
            clean = clean_path(path)
            if clean in self.protected or self._mounted(clean):
                continue
            *folders, name = clean.split("/")
            with self._lock, suppress(FileRefused, OSError), _folder(self.root, folders, make=False) as parent:
                os.unlink(name, dir_fd=parent)
                removed.append(clean)
        return tuple(removed)

    def _entries(self, folder: Path) -> list[TreeEntry]:
        with self._lock:  # a file that is being written lies beside its place under another name
            return walk_tree(folder)

    def _mounted(self, path: str) -> bool:
        return path.partition("/")[0] in self.mounts

    def _is_unchanged(self, artifact: Artifact) -> bool:
        first, _, below = artifact.path.partition("/")
        base, inner = (self.mounts[first], below) if first in self.mounts else (self.root, artifact.path)
        try:
            with open_file(base, inner) as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return digest == artifact.sha256.removeprefix("sha256:")
        except FileRefused:
            return False

    def _replace(self, clean: str, data: bytes) -> None:
        *folders, name = clean.split("/")
        with _folder(self.root, folders, make=True) as parent:
            spare = f".{name[:40]}.{os.getpid():x}{os.urandom(6).hex()}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(spare, flags, 0o644, dir_fd=parent), "wb") as stream:
                    stream.write(data)
                os.replace(spare, name, src_dir_fd=parent, dst_dir_fd=parent)
            except OSError as error:
                with suppress(OSError):
                    os.unlink(spare, dir_fd=parent)
                raise FileRefused(f"{clean!r} cannot be written: {error.strerror}", path=clean) from error


@contextmanager
def _folder(root: Path, parts: Sequence[str], *, make: bool) -> Iterator[int]:
    """Open a folder below *root* part by part, making missing ones when asked."""
    try:
        current = os.open(root, ROOT_FLAGS)
    except OSError as error:
        raise FileRefused("the folder cannot be opened", code="file_missing", path=".") from error
    try:
        for part in parts:
            try:
                if make:
                    os.mkdir(part, 0o755, dir_fd=current)
            except FileExistsError:
                pass
            except OSError as error:
                raise FileRefused(f"the folder {part!r} cannot be made: {error.strerror}", path=part) from error
            deeper = open_folder_at(current, part, "/".join(parts))
            os.close(current)
            current = deeper
        yield current
    finally:
        os.close(current)


def _denied(error: FileRefused, path: str) -> Exception:
    if error.code == "symlink":
        return path_denied(path, "symlink")
    if error.code == "too_large":
        return refuse("too_large", error.message, limit=MAX_FILE)
    return refuse("not_a_file", f"{path!r} cannot be written: {error.message}", path=path)
