"""Copies of what a program may see, skill trees by digest and inputs by value, and the outputs it leaves.

A skill's tree, without its evaluations, is copied once below `stage/<digest>`, and the copy is what is checked: what was
checked is what is seen.
Outputs are collected when the program is dead, by descriptors: no link is followed, no FIFO or device is opened.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kdskills.errors import ExecRefused, FileRefused, RootChanged, RootMissing
from kdskills.execution.check import OutputGlob, output_problem, shown_path
from kdskills.execution.dirs import discard_tree, locked, new_tree, private_dir, prune
from kdskills.execution.request import Artifact, ArtifactError, EnvironmentMount, InputFile, Limits, SkillMount
from kdskills.skills.safe_open import FILE_FLAGS, FOLDER_FLAGS, TreeEntry, open_file, read_file, tree_digest, walk_shown

MAX_TREE = 512 * 1024 * 1024
MAX_FILES = 20_000
KEEP_S = 7 * 24 * 3600.0
"""Copies no run has used for so long are removed."""
_CHUNK = 1024 * 1024


def stage_skill(mount: SkillMount, cache: Path, *, passable: bool = False) -> Path:
    """Return a read-only copy of what a program may see of the skill, whose digest is `mount.tree`; for *passable* see
    `private_dir`.

    Raises:
        RootMissing: The skill's folder is not there.
        RootChanged: Its tree has another digest, holds special files, or is too large to mount.
    """
    name = mount.tree.removeprefix("sha256:")
    if len(name) != 64 or not set(name) <= set("0123456789abcdef"):
        raise RootChanged(f"skill {mount.id} has no usable tree digest", id=mount.id, expected=mount.tree)
    top = private_dir(private_dir(cache, passable=passable) / "stage", passable=passable)
    final = top / name
    if not mount.root.is_dir():
        raise RootMissing(f"the folder of skill {mount.id} is not there", id=mount.id)
    try:
        if _used_lately(final) and _is_current(mount, final):
            return final
        # Another process may have staged the same tree while we waited for the lock, so the copy is checked again.
        with locked(top / ".lock"):
            if final.is_dir():
                if _is_current(mount, final):
                    return final
                discard_tree(final)
            entries = walk_shown(mount.root)
            if len(entries) > MAX_FILES or sum(entry.size for entry in entries) > MAX_TREE:
                raise RootChanged(f"skill {mount.id} is too large to mount", id=mount.id)
            with new_tree(final) as work:
                for entry in entries:
                    _copy_entry(mount, entry, work)
                _require_digest(mount, tree_digest(work))
            prune(top, KEEP_S)
    except FileRefused as error:
        raise RootChanged(f"skill {mount.id} cannot be read: {error.message}", id=mount.id) from error
    return final


def check_environment(mount: EnvironmentMount, *, passable: bool = False) -> Path:
    """Return the folder of *mount* and note that it is in use; *passable* when programs have a uid of their own and reach it
    by this path. Raises ExecRefused: `environment_missing` when it is not on this machine; `bad_request` unless it is a folder
    of ours that only we may write to and all may read.
    """
    root, problem = mount.root, ""
    try:
        status = root.lstat()
        if not stat.S_ISDIR(status.st_mode):
            problem = "is no folder"
        elif status.st_uid != os.geteuid() or status.st_mode & 0o022:
            problem = f"must be a folder of uid {os.geteuid()} that nobody else may write to"
        elif status.st_mode & 0o005 != 0o005:
            problem = "is closed to programs"
        elif passable and (closed := next((path for path in root.parents if not path.stat().st_mode & 0o001), None)):
            problem = f"is closed to programs: they cannot pass {closed}"
        else:
            with suppress(OSError):  # a cache that is only read from is not tidied from here
                os.utime(root)
    except FileNotFoundError:
        words = f"the packages {mount.digest} are not built on this machine: `kdskills env build` of the bundle, here"
        raise ExecRefused(words, code="environment_missing", digest=mount.digest) from None
    except OSError as error:
        problem = f"cannot be used: {error.strerror}"
    if problem:
        raise ExecRefused(f"the environment {root} {problem}", code="bad_request", who="caller", digest=mount.digest)
    return root


def read_inputs(inputs: tuple[InputFile, ...], limits: Limits) -> list[tuple[str, bytes]]:
    """Return (path, bytes) of every input; host files are read without following a link in any part. Raises
    ExecRefused: `bad_request`: a file is missing, no regular file, reached through a link, or all are too large.
    """
    result: list[tuple[str, bytes]] = []
    room = limits.work_size
    for item in inputs:
        data = item.content
        try:
            if isinstance(data, Path):
                data = read_file("/", str(data).lstrip("/"), limit=room).data
        except FileRefused as error:
            words = f"input {item.path!r} cannot be used: {error.message}"
            raise ExecRefused(words, code="bad_request", who="caller", path=item.path) from error
        room -= len(data)
        if room < 0:
            words = f"the inputs have more than {limits.work_size} bytes"
            raise ExecRefused(words, code="bad_request", who="caller", path=item.path)
        result.append((item.path, data))
    return result


def _used_lately(copy: Path) -> bool:
    """Whether *copy* is there and nobody will prune it soon, so that it can be used without the lock."""
    try:
        return stat.S_ISDIR((status := copy.lstat()).st_mode) and status.st_mtime > time.time() - KEEP_S / 2
    except FileNotFoundError:
        return False


def _is_current(mount: SkillMount, copy: Path) -> bool:
    """Whether *copy* can be used: the skill has not changed, by sizes and times or else by its digest. False when the
    skill is unchanged but the copy is incomplete: a removal of it was interrupted.
    """
    skill_facts = _facts(mount.root)
    if skill_facts != _facts(copy):
        _require_digest(mount, tree_digest(mount.root, shown=True))
        if [facts[:4] for facts in skill_facts] != [facts[:4] for facts in _facts(copy)]:
            return False
        # The times of the skill's own files: the next check compares times and hashes nothing.
        for path, kind, size, _, modified in skill_facts:
            if kind == "file" and size:
                os.utime(copy / path, ns=(modified, modified), follow_symlinks=False)
    os.utime(copy)
    return True


def _facts(root: Path) -> list[tuple[str, str, int, str, int]]:
    return [
        (entry.path, entry.kind, entry.size, entry.target, (root / entry.path).lstat().st_mtime_ns if entry.size else 0)
        for entry in walk_shown(root)
    ]


def _require_digest(mount: SkillMount, digest: str) -> None:
    if digest != mount.tree:
        words = f"the files of skill {mount.id} are not the ones that were checked"
        raise RootChanged(words, id=mount.id, expected=mount.tree, found=digest)


def _copy_entry(mount: SkillMount, entry: TreeEntry, target: Path) -> None:
    copy_path = target / entry.path
    for parent in reversed(copy_path.relative_to(target).parents[:-1]):
        folder = target / parent
        if not folder.is_dir():
            folder.mkdir()
            folder.chmod(0o755)
    if entry.kind == "link":
        copy_path.symlink_to(entry.target)  # leads nowhere but inside the sandbox, and counts in the digest
        return
    if entry.kind == "other":
        raise RootChanged(f"skill {mount.id} holds a special file, {entry.path!r}", id=mount.id)
    fd = os.open(copy_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as sink, open_file(mount.root, entry.path) as stream:
        times = os.fstat(stream.fileno())
        room = MAX_TREE
        while chunk := stream.read(_CHUNK):
            room -= len(chunk)
            if room < 0:
                raise RootChanged(f"skill {mount.id} grew while it was copied", id=mount.id)
            sink.write(chunk)
        sink.flush()
        os.fchmod(fd, 0o755 if entry.mode & 0o111 else 0o644)
        os.utime(fd, ns=(times.st_mtime_ns, times.st_mtime_ns))  # so that a later run sees at a glance what changed


MAX_ENTRIES = 20_000
MAX_DEPTH = 32
MAX_ERRORS = 64


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
        """Add one regular file, within the remaining caps; *mode* is masked. Every engine's files come through here, so
        their names are checked here: `bad_name` for one that is no clean path.
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
    """Collect what *globs* name below the open folder *folder*. Outputs that are links, special files, too large, too
    many, unreadable or missing become errors; nothing raises.
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
                    words = f"more than {MAX_ENTRIES} entries to look at"
                    collection.refuse("/".join(prefix) or ".", "too_many", words)
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
                if len(path) > MAX_DEPTH:
                    collection.refuse(file_path, "too_deep", f"more than {MAX_DEPTH} folders deep")
                    return
                deeper = os.open(name, FOLDER_FLAGS, dir_fd=folder)
                try:
                    _walk(deeper, path, collection)
                finally:
                    os.close(deeper)
            return
        if not matched:
            if stat.S_ISLNK(facts.st_mode):
                # Where a literal output names a folder, the link explains why that output is not there.
                for glob in collection.globs:
                    if glob.literal and glob.may_lie_below(path):
                        collection.refuse(glob.pattern, "link", f"{shown_path(file_path)} is a link")
            return
        if not stat.S_ISREG(facts.st_mode):
            kind = "link" if stat.S_ISLNK(facts.st_mode) else "not_regular"
            collection.refuse(file_path, kind, "is a link" if kind == "link" else "is no regular file")
            return
        _take(folder, name, file_path, collection)
    except OSError as error:
        if matched:
            collection.refuse(file_path, "unreadable", error.strerror or "cannot be read")


def _take(folder: int, name: str, file_path: str, collection: Collection) -> None:
    with os.fdopen(os.open(name, FILE_FLAGS, dir_fd=folder), "rb") as stream:
        facts = os.fstat(stream.fileno())
        if not stat.S_ISREG(facts.st_mode):
            collection.refuse(file_path, "not_regular", "is no regular file")
        elif collection.files_left <= 0:
            collection.refuse(file_path, "too_many", "more files match than may be collected")
        else:
            # One byte more than may be taken, and than there is, shows that there is more.
            content = stream.read(min(facts.st_size, collection.bytes_left) + 1)
            collection.accept(file_path, content, facts.st_mode)
