"""The folder that background work and SQLite databases lie in."""

from __future__ import annotations

from pathlib import Path

from kdskills.execution.dirs import private_dir
from kdskills.jobs.database import DatabaseUnavailable, sqlite_file
from kdskills.skills.private_files import make_folder


def state_folder(path: Path) -> Path:
    """Make *path* and its parents, for us alone to enter, and return it; a wider one of ours is closed to others.

    Raises:
        DatabaseUnavailable: The system refuses, as it does below a file or without rights.
        ExecRefused: The folder belongs to another user, is a link, or others may write to it.
    """
    try:
        return private_dir(path)
    except OSError as error:
        raise _refused(path, error) from error


def database_folder(url: str, state_dir: Path) -> None:
    """Make the folder a SQLite database lies in; any other than the state folder is the operator's, and keeps its mode.

    Raises:
        DatabaseUnavailable: The system refuses.
        ExecRefused: The folder belongs to another user, is a link, or others may write to it.
    """
    file = sqlite_file(url)
    if file is None:
        return
    if file.parent == state_dir:
        state_folder(state_dir)
        return
    try:
        private_dir(make_folder(file.parent), narrow=False)
    except OSError as error:
        raise _refused(file.parent, error) from error


def _refused(path: Path, error: OSError) -> DatabaseUnavailable:
    return DatabaseUnavailable(
        f"the database's folder {path} cannot be made: {error.strerror}; the setting state_dir names another",
        path=str(path),
    )
