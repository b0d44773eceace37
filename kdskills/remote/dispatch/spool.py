"""Stores the full text of answers that were cut."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Final

from kdskills.skills.private_files import private_folder

KEPT_S: Final = 7 * 86_400.0
"""Files older than this are deleted when another one is written."""


class Spool:
    """Keeps whole texts in files only this user may read.

    Args:
        folder: `<state>/remote/spool`; made when the first text is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, text: str) -> str:
        """Write *text* whole and return the file's path.

        Raises:
            OSError: The folder or disk does not take it.
        """
        private_folder(self.folder)
        self._sweep()
        path = self.folder / f"{int(time.time())}-{secrets.token_hex(8)}.txt"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode("utf-8", "replace"))
        except OSError:
            path.unlink(missing_ok=True)  # half a text would be taken for the whole
            raise
        return str(path)

    def _sweep(self) -> None:
        before = time.time() - KEPT_S
        for path in self.folder.glob("*.txt"):
            try:
                if path.stat().st_mtime < before:
                    path.unlink()
            except FileNotFoundError:  # another worker swept it
                continue
