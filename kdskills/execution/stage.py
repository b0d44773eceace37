"""Copies of what a program may see: skill trees by digest, inputs by value.

A skill is never mounted from where it lives. Its tree is copied once below `stage/<digest>`, file by file without
following links, and the copy is what is checked against the digest: what was checked is what is seen.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from kdskills.errors import ExecRefused, FileRefused, RootChanged, RootMissing
from kdskills.execution.dirs import discard_tree, locked, new_tree, private_dir, prune
from kdskills.execution.request import InputFile, Limits, SkillMount
from kdskills.skills.safe_open import TreeEntry, open_file, read_file, tree_digest, walk_tree

MAX_TREE = 512 * 1024 * 1024
MAX_FILES = 20_000
KEEP_S = 7 * 24 * 3600.0
"""Copies no run has used for so long are removed."""
_CHUNK = 1024 * 1024


def stage_skill(mount: SkillMount, cache: Path, *, passable: bool = False) -> Path:
    """Return a read-only copy of the skill's tree whose digest is `mount.tree`.

    Args:
        mount: The skill, where it lives, and the digest its tree must have.
        cache: Folder from `kdskills.execution.dirs.cache_dir`.
        passable: Whether programs reach the copy by its own path, under a uid of their own; see `private_dir`.

    Raises:
        RootMissing: The skill's folder is not there.
        RootChanged: Its tree has another digest, holds special files, or is too large to mount.
    """
    name = mount.tree.removeprefix("sha256:")
    if len(name) != 64 or not set(name) <= set("0123456789abcdef"):
        raise RootChanged(f"skill {mount.id} has no usable tree digest", id=mount.id, expected=mount.tree)
    top = private_dir(private_dir(cache, passable=passable) / "stage", passable=passable)
    final = top / name
    if _used_lately(final) and _is_current(mount, final):
        return final
    # Another process may have staged the same tree while we waited for the lock, so the copy is checked again.
    with locked(top / ".lock"):
        if final.is_dir():
            if _is_current(mount, final):
                return final
            discard_tree(final)
        with new_tree(final) as work:
            _copy_tree(mount, work)
            _require_digest(mount, tree_digest(work))
        prune(top, KEEP_S)
    return final


def read_inputs(inputs: tuple[InputFile, ...], limits: Limits) -> list[tuple[str, bytes]]:
    """Return (path, bytes) of every input; host files are read without following a link in any part.

    Raises:
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
    """Whether *copy* can be used: the skill has not changed, by sizes and times or else by its digest.

    False when the skill is unchanged but the copy is incomplete: a removal of it was interrupted.
    """
    if not mount.root.is_dir():
        raise RootMissing(f"the folder of skill {mount.id} is not there", id=mount.id)
    try:
        skill_facts = _facts(mount.root)
        if skill_facts != _facts(copy):
            _require_digest(mount, tree_digest(mount.root))
            if [facts[:4] for facts in skill_facts] != [facts[:4] for facts in _facts(copy)]:
                return False
            # The times of the skill's own files: the next check compares times and hashes nothing.
            for path, kind, size, _, modified in skill_facts:
                if kind == "file" and size:
                    os.utime(copy / path, ns=(modified, modified), follow_symlinks=False)
    except FileRefused as error:
        raise RootChanged(f"skill {mount.id} cannot be read: {error.message}", id=mount.id) from error
    os.utime(copy)
    return True


def _facts(root: Path) -> list[tuple[str, str, int, str, int]]:
    return [
        (entry.path, entry.kind, entry.size, entry.target, (root / entry.path).lstat().st_mtime_ns if entry.size else 0)
        for entry in walk_tree(root)
    ]


def _require_digest(mount: SkillMount, digest: str) -> None:
    if digest != mount.tree:
        words = f"the files of skill {mount.id} are not the ones that were checked"
        raise RootChanged(words, id=mount.id, expected=mount.tree, found=digest)


def _copy_tree(mount: SkillMount, target: Path) -> None:
    if not mount.root.is_dir():
        raise RootMissing(f"the folder of skill {mount.id} is not there", id=mount.id)
    try:
        entries = walk_tree(mount.root)
        if len(entries) > MAX_FILES or sum(entry.size for entry in entries) > MAX_TREE:
            raise RootChanged(f"skill {mount.id} is too large to mount", id=mount.id)
        for entry in entries:
            _copy_entry(mount, entry, target)
    except FileRefused as error:
        raise RootChanged(f"skill {mount.id} cannot be copied: {error.message}", id=mount.id) from error


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
