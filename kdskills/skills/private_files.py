"""Files, folders and databases that nobody but this user may read (see `docs/explanation/durability.md`).

Modes are set when something is made, whatever the umask; what an older release or another program made wider is narrowed
when it is used, and a warning in the log says so.

A SQLite database is never opened here. Closing any descriptor of a file drops every POSIX lock this process holds on it, also
those of SQLite's own connections: another process would then take a live write-ahead log for a left one, and remove it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
DATABASE_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")
"""Names of the files of one SQLite database, after the name of the first; SQLite makes the others with its mode."""

_LOG = logging.getLogger("kdskills.files")
_OTHERS_BITS: Final = 0o077
_OTHERS_BITS_BEYOND_PASSING: Final = 0o066


def make_folder(path: Path, *, parents: int = FOLDER_MODE) -> Path:
    """Make *path* (0700), and missing parents with mode *parents*; what is there stays as it is.

    Raises OSError when the system refuses, or something else is in the way.
    """
    missing = []
    for folder in (path, *path.parents):
        if os.path.lexists(folder):
            break
        missing.append(folder)
    if not missing and not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=FOLDER_MODE)
        except FileExistsError:
            if not folder.is_dir():  # another process may have been quicker
                raise
            continue
        if folder != path:
            folder.chmod(parents)
    return path


def private_folder(path: Path, *, contents: bool = False) -> Path:
    """Make *path* as `make_folder` does; one of ours that others could read or write is closed to them, *contents* too.

    The folder belongs to this program, and is never one a caller may have for other things.
    """
    make_folder(path)
    if close_to_others(path) and contents:
        close_tree(path)
    return path


def close_to_others(path: Path) -> bool:
    """Take a file's or folder's mode bits from other users, by its path, and say so in the log; whether there were any.

    Links and what belongs to another user stay as they are, as does what is not there. A folder others may only pass
    (0711) stays so: programs under a uid of their own must reach what was put there for them.
    """
    before = _narrow(path)
    if before is None:
        return False
    _LOG.warning("%s was open to other users (mode %04o) and is closed to them now", path, before)
    return True


def close_tree(path: Path) -> None:
    """Take the mode bits of a file, or of a folder with everything below it, from other users; links are not followed."""
    _narrow(path)
    for top, folders, files in os.walk(path):
        for name in (*folders, *files):
            _narrow(Path(top, name))


def remove_tree(folder: Path) -> None:
    """Remove a folder whose folders may be read-only."""
    for directory, _, _ in os.walk(folder):
        Path(directory).chmod(0o700)
    shutil.rmtree(folder)


def open_private(path: Path, mode: str, **how: Any) -> IO[Any]:
    """Open a file as `open` does; a new one gets mode 0600, one of ours that is wider is closed to others first.

    Raises OSError when a link is in its place. Not for databases: see the module's own words.
    """
    close_to_others(path)
    return open(path, mode, opener=_opener, **how)


def write_private(path: Path, data: str | bytes) -> None:
    """Write a whole file of mode 0600; as `open_private`."""
    with open_private(path, "wb") as stream:
        stream.write(data.encode("utf-8", "replace") if isinstance(data, str) else data)


def replace_file(path: Path, data: bytes, *, mode: int = FILE_MODE, durable: bool = False) -> None:
    """Write a whole file in one step: readers see the old or the new one, when *durable* also after a power failure.

    Raises OSError when the system refuses; nothing half-written stays then.
    """
    aside = path.with_name(f".{path.name[:200]}.{os.getpid()}.{os.urandom(6).hex()}")
    try:
        with open(aside, "xb", opener=_opener) as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        aside.replace(path)
    except BaseException:  # raised again
        aside.unlink(missing_ok=True)
        raise


def private_database(path: Path) -> None:
    """Make the file of a SQLite database before its first connection, or close an older one and what is beside it to others."""
    with suppress(FileExistsError):
        os.mknod(path, stat.S_IFREG | FILE_MODE)  # makes the file without ever having it open
        return
    for suffix in DATABASE_SUFFIXES:
        close_to_others(path.with_name(path.name + suffix))


def _narrow(path: Path) -> int | None:
    """Take mode bits from others, and return the mode there was; None when nothing had to be done."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return None
    if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)) or info.st_uid != os.geteuid():
        return None
    mode = stat.S_IMODE(info.st_mode)
    if not mode & (_OTHERS_BITS_BEYOND_PASSING if stat.S_ISDIR(info.st_mode) else _OTHERS_BITS):
        return None
    with suppress(FileNotFoundError):  # a log of a database that was just closed
        path.chmod(mode & FOLDER_MODE)
    return mode


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, FILE_MODE)
