"""Undoes changes that a crash interrupted: restores first lines and settles the server's pointers.

The backup beside a file is written before anything is changed and goes last. So whatever moment a change died at, the backup is
there, and says that neither line 1 nor the server's index can be trusted: both are settled before it is dropped. Dropping rows of
the index is harmless at any moment, because the server builds them again from the file.
"""

from __future__ import annotations

import logging
from pathlib import Path

from kdskills.remote.catalog import index, rollout

_LOG = logging.getLogger("kdskills.remote")


def interrupted(home: Path) -> list[Path]:
    """Return the files below a codex home with a backup beside them, sorted."""
    return [
        backup.with_name(backup.name.removesuffix(rollout.BACKUP_SUFFIX))
        for folder in ("sessions", "archived_sessions")
        for backup in sorted((home / folder).rglob(f"*{rollout.BACKUP_SUFFIX}"))
    ]


def mend_home(home: Path) -> list[Path]:
    """Undo every interrupted change below the home of a server that does not run yet.

    A change that was not confirmed is undone even if line 1 can be read: the server may not understand it.

    Returns:
        The files whose first line was restored.
    """
    return [path for path in interrupted(home) if mend(home, path)]


def mend(home: Path, path: Path) -> bool:
    """Restore a file's first line and settle its pointers; return False if there was nothing to restore.

    A file another process changes now is left alone; where an index stays locked the backup stays, for the next time.
    """
    try:
        with rollout.locked(path, 0.0):
            owner = rollout.backup_owner(path)
            if owner is None or not path.is_file():
                return False
            rollout.restore(path)
            try:
                settle(home, path, owner)
            except rollout.UnknownFormat as problem:
                _LOG.warning("%s: the server's pointers could not be settled; the backup stays: %s", path, problem)
            return True
    except (rollout.LockBusy, OSError) as problem:
        _LOG.warning("%s: an interrupted change could not be undone now; its backup stays: %s", path, problem)
        return False


def settle(home: Path | None, path: Path, thread_id: str) -> None:
    """Drop the server's pointers into a file, then the backup that said they cannot be trusted.

    Raises:
        UnknownFormat: An index is not understood, or stays locked; the backup is still there then.
    """
    index.forget_file(home, path, thread_id)
    rollout.drop_backup(path)
