"""Where execution keeps its files: prepared trees in the cache, run records in the state folder (spec execution §4).

As root both live below `/var`, because a payload's uid must be able to read what is mounted for it and root's own home
is closed; an ordinary user gets the XDG folders.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kdskills.errors import ExecRefused


def cache_dir() -> Path:
    """Return the folder of trees that can be rebuilt: `/var/cache/kdskills` as root, else XDG cache."""
    if os.geteuid() == 0:
        return Path("/var/cache/kdskills")
    return _xdg("XDG_CACHE_HOME", ".cache") / "kdskills"


def state_dir() -> Path:
    """Return the folder of run records: `/var/lib/kdskills` as root, else XDG state."""
    if os.geteuid() == 0:
        return Path("/var/lib/kdskills")
    return _xdg("XDG_STATE_HOME", ".local/state") / "kdskills"


def private_dir(path: Path) -> Path:
    """Make *path* (0755) and its parents, and return it; nobody but us may write there.

    Raises:
        ExecRefused: The folder belongs to another user, is a link, or others may write to it.
    """
    if not path.is_dir():
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        path.chmod(0o755)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise ExecRefused(
            f"{path} must be a folder of uid {os.geteuid()} that nobody else may write to", path=str(path)
        )
    return path


def _xdg(variable: str, fallback: str) -> Path:
    given = os.environ.get(variable, "")
    base = Path(given) if given.startswith("/") else Path(os.path.expanduser("~")) / fallback  # noqa: PTH111 - no raise
    if not base.is_absolute():
        raise ExecRefused(f"this user has no home: set {variable} to a folder of its own", variable=variable)
    return base
