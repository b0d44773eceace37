"""The state folder and the folders of SQLite databases: their modes, the id of their host, and a disk without room."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kdskills.errors import OperatorMustAct
from kdskills.execution.dirs import private_dir
from kdskills.skills.private_files import close_to_others, close_tree, make_folder, write_private
from kdskills.storage.database import DatabaseUnavailable, sqlite_file

CONTENTS: Final = (
    "artifacts", "host", "index", "inputs", "lease", "projects", "remote", "runs", "sessions", "turns", "*.db*", "*.lock", "worker*",
)  # fmt: skip
"""What lies in a state folder, by pattern: nothing else in a folder somebody chose for it is touched."""


RESTORING: Final = ".restore"
"""What a restore puts aside in a state folder, and its mark until it is done."""


class RestoreUnfinished(OperatorMustAct, code="restore_unfinished"):
    """A restore into this state folder was killed; what is there now would be removed when it is done again."""


def require_restored(path: Path) -> None:
    """Raise RestoreUnfinished if *path* is the state folder of a restore that was killed, or is at work."""
    mark = path / RESTORING
    if mark.exists():
        raise RestoreUnfinished(
            f"a restore into {path} is not done: do it again with the same file and settings; if that is refused with "
            f"restore_not_empty, all of it is there, and {mark} may be removed",
            path=str(path),
        )


def state_folder(path: Path, *, restoring: bool = False) -> Path:
    """Make *path* and its parents, for us alone to enter, and return it; a wider one of ours is closed to others.

    Raises DatabaseUnavailable where the system refuses, as it does below a file or without rights, ExecRefused for
    a folder of another user, a link, or one that others may write to, and RestoreUnfinished unless we are *restoring*.
    """
    if not restoring:
        require_restored(path)
    try:
        private_dir(path, narrow=False)
        close_state(path)
    except OSError as error:
        raise _refused(path, error) from error
    return path


def close_state(path: Path) -> None:
    """Close a state folder of ours to others, with everything older releases left open in it. Raises OSError."""
    if close_to_others(path):
        for item in (item for pattern in CONTENTS for item in path.glob(pattern)):
            close_tree(item)


def database_folder(url: str, state_dir: Path) -> None:
    """Make the folder a SQLite database lies in; any other than the state folder is the operator's, and keeps its mode.

    Raises as `state_folder` of a restore.
    """
    file = sqlite_file(url)
    if file is None:
        return
    if file.parent == state_dir:
        state_folder(state_dir, restoring=True)
        return
    try:
        private_dir(make_folder(file.parent), narrow=False)
    except OSError as error:
        raise _refused(file.parent, error) from error


def host_id(state_dir: Path) -> str:
    """Return the id of the host whose disk *state_dir* is on: random, made once. Raises StorageFull."""
    path = state_dir / "host"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    part = state_dir / f".host.{os.getpid()}.{threading.get_ident()}"
    try:
        with telling_full_disk():
            write_private(part, secrets.token_hex(8) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(part, path)  # the first of several at once wins
    finally:
        part.unlink(missing_ok=True)
    return path.read_text().strip()


def _refused(path: Path, error: OSError) -> DatabaseUnavailable:
    return DatabaseUnavailable(
        f"the database's folder {path} cannot be made: {error.strerror}; the setting state_dir names another",
        path=str(path),
    )


FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the system says when there is no room: on the disk, in the account's quota, or within a process's own limit."""
PROBE_BYTES: Final = 64 * 1024


class StorageFull(OperatorMustAct, code="storage_full"):
    """There is no room left where the service keeps its files; nothing of what was asked is kept."""


class StateUnwritable(OperatorMustAct, code="state_unwritable"):
    """The service cannot write where it keeps its files."""


@contextlib.contextmanager
def telling_full_disk() -> Iterator[None]:
    """Turn the system's word for a full disk into `StorageFull` inside the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StorageFull(f"there is no room left to keep this: {os.strerror(error.errno or 0)}") from error


def check_writable(folder: Path) -> None:
    """Write and remove a small file in *folder*, if it is there. Blocks. Raises StorageFull, StateUnwritable."""
    if not folder.is_dir():
        return  # nothing was kept yet; whoever keeps the first thing makes it
    probe = folder / f".ready.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        with telling_full_disk():
            try:
                probe.write_bytes(bytes(PROBE_BYTES))
            finally:
                probe.unlink(missing_ok=True)
    except OSError as error:
        raise StateUnwritable(f"{folder} cannot be written to: {error.strerror}", path=str(folder)) from error
