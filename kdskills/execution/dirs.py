"""Where execution keeps its files: prepared trees in the cache, run records in the state folder.

As root both live below `/var`, because a payload's uid must be able to read what is mounted for it and root's own home
is closed; an ordinary user gets the XDG folders.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Final

from kdskills.errors import ExecRefused
from kdskills.skills.private_files import FOLDER_MODE, close_to_others, make_folder

PASSABLE: Final = 0o711
_CWD: Final = -100
_EXCHANGE: Final = 2
"""Words of `renameat2`: names count from the working folder; both names stay and change places."""


def cache_dir() -> Path:
    """Return the folder of trees that can be rebuilt: `/var/cache/kdskills` as root, else XDG cache."""
    return (Path("/var/cache") if os.geteuid() == 0 else _xdg("XDG_CACHE_HOME", ".cache")) / "kdskills"


def state_dir() -> Path:
    """Return the folder of run records: `/var/lib/kdskills` as root, else XDG state."""
    return (Path("/var/lib") if os.geteuid() == 0 else _xdg("XDG_STATE_HOME", ".local/state")) / "kdskills"


def private_dir(path: Path, *, passable: bool = False, narrow: bool = True) -> Path:
    """Make *path* (0700) and its parents, and return it; nobody but us may read or write there.

    Programs under a uid of their own reach what lies in a *passable* one: others may pass it (0711), which shows them
    nothing but what they know by name. *narrow* closes an existing folder of ours that others may read to them. Raises
    ExecRefused: the folder belongs to another user, is a link, or others may write to it.
    """
    # root's tops lie below folders of the system, which others must pass for reasons of their own
    make_folder(path, parents=PASSABLE if os.geteuid() == 0 else FOLDER_MODE)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        words = f"{path} must be a folder of uid {os.geteuid()} that nobody else may write to"
        raise ExecRefused(words, path=str(path))
    if narrow:
        close_to_others(path)
    if passable and stat.S_IMODE(path.stat().st_mode) & PASSABLE != PASSABLE:
        path.chmod(PASSABLE)
    return path


def write_note(path: Path, content: str | bytes) -> None:
    """Write a file (0600) so that whoever looks meanwhile sees all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
        temporary.rename(path)
    except BaseException:  # raised again: nothing half-written stays
        temporary.unlink(missing_ok=True)
        raise


def file_locks() -> ModuleType:
    """Return the module of the system's locks on files. Raises ExecRefused where it has none."""
    try:
        return import_module("fcntl")
    except ModuleNotFoundError as error:
        raise ExecRefused("this system has no locks on files, which programs and their packages need") from error


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock file *path*, or a folder that is there, alone, over threads and processes. Raises ExecRefused where the
    system has no locks, and BlockingIOError where somebody else holds it and *wait* is not said.
    """
    fcntl = file_locks()
    flags = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough where another thread forked this process meanwhile
        os.close(fd)


@contextmanager
def new_tree(final: Path) -> Iterator[Path]:
    """Give an empty folder to fill, which becomes *final* when that succeeds, so that nobody sees half of it."""
    work = Path(tempfile.mkdtemp(prefix=".new-", dir=final.parent))
    try:
        yield work
        work.chmod(0o755)
        work.rename(final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def bring_to_disk(path: Path) -> None:
    """Bring everything of the file system that the folder *path* is on to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)


def swap(first: Path, second: Path) -> None:
    """Exchange two names of one file system in one step; where the system cannot, in three. Raises OSError."""
    names = (os.fsencode(first), os.fsencode(second))
    try:
        done = ctypes.CDLL(None, use_errno=True).renameat2(_CWD, names[0], _CWD, names[1], _EXCHANGE) == 0
    except AttributeError:  # an older C library, or another system
        done = False
    if not done:
        aside = first.with_name(f".old-{secrets.token_hex(8)}")
        second.rename(aside)
        first.rename(second)
        aside.rename(first)


def prune(top: Path, seconds: float, *keep: str) -> None:
    """Remove what nobody has used for *seconds* from *top*, but for locks and what is named *keep*."""
    oldest = time.time() - seconds
    for path in top.iterdir():
        if path.name not in keep and not path.name.endswith(".lock") and path.lstat().st_mtime < oldest:
            discard_tree(path)


def discard_tree(path: Path) -> None:
    """Remove a tree: it is renamed first, so that nobody takes a half-removed tree for a whole one."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    renamed_tree = path.with_name(f".old-{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):  # another process renamed it first
        path.rename(renamed_tree)
    shutil.rmtree(renamed_tree, ignore_errors=True)


def _xdg(variable: str, fallback: str) -> Path:
    configured = os.environ.get(variable, "")
    base = Path(configured) if configured.startswith("/") else Path(os.path.expanduser("~")) / fallback  # noqa: PTH111 - no raise
    if not base.is_absolute():
        raise ExecRefused(f"this user has no home: set {variable} to a folder of its own", variable=variable)
    return base
