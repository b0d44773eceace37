"""The folder that background work and SQLite databases lie in."""

from __future__ import annotations

from pathlib import Path

from kdskills.execution.dirs import private_dir
from kdskills.jobs.database import DatabaseUnavailable


def state_folder(path: Path) -> Path:
    """Make *path* and its parents, for us alone to write to, and return it.

    Raises:
        DatabaseUnavailable: The system refuses, as it does below a file or without rights.
        ExecRefused: The folder belongs to another user, is a link, or others may write to it.
    """
    try:
        return private_dir(path)
    except OSError as error:
        raise DatabaseUnavailable(
            f"the database's folder {path} cannot be made: {error.strerror}; the setting state_dir names another",
            path=str(path),
        ) from error
