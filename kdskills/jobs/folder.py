"""The folder that background work and SQLite databases lie in."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kdskills.execution.dirs import private_dir
from kdskills.jobs.database import DatabaseUnavailable, sqlite_file
from kdskills.skills.private_files import close_to_others, close_tree, make_folder

CONTENTS: Final = (
    "artifacts", "host", "index", "inputs", "lease", "projects", "remote", "runs", "sessions", "*.db*", "*.lock", "worker*",
)  # fmt: skip
"""What lies in a state folder, by pattern: nothing else in a folder somebody chose for it is touched."""


def state_folder(path: Path) -> Path:
    """Make *path* and its parents, for us alone to enter, and return it; a wider one of ours is closed to others.

    Raises:
        DatabaseUnavailable: The system refuses, as it does below a file or without rights.
        ExecRefused: The folder belongs to another user, is a link, or others may write to it.
    """
    try:
        private_dir(path, narrow=False)
        close_state(path)
    except OSError as error:
        raise _refused(path, error) from error
    return path


def close_state(path: Path) -> None:
    """Close a state folder of ours that others may read to them, with everything older releases left open in it.

    Raises:
        OSError: The system refuses.
    """
    if close_to_others(path):
        for item in (item for pattern in CONTENTS for item in path.glob(pattern)):
            close_tree(item)


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
