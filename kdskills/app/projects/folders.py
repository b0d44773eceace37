"""Versions on disk: made aside, renamed into place, read-only from then on.

::

    <state>/projects/<project>/<skill>/<hex>/<skill>/...   a version's files
    <state>/projects/<project>/<skill>/<hex>.zip           its archive
    <state>/projects/.scratch/<random>                     uploads under way
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, Final, cast

from kdskills.skills.archives import write_archive
from kdskills.skills.archives.unpack import remove_tree
from kdskills.skills.private_files import make_folder, open_private, private_folder

SCRATCH: Final = ".scratch"
LEFTOVER_S: Final = 24 * 3600.0
"""Age at which something no row names counts as left by a process that died."""


class VersionFolders:
    """The folder of all projects below *state_dir*; every method blocks."""

    def __init__(self, state_dir: Path) -> None:
        self._top = state_dir / "projects"

    def scratch(self, suffix: str = "") -> Path:
        """Return a path nobody else uses, on the same file system as the versions; nothing is there yet."""
        folder = self._top / SCRATCH
        private_folder(self._top, contents=True)
        make_folder(folder)
        return folder / (secrets.token_hex(16) + suffix)

    def root(self, project: str, name: str, version: str) -> Path:
        """Return the folder that holds nothing but a version's skill folder; it can be a root of skills."""
        return self._top / project / name / version.partition(":")[2]

    @staticmethod
    def version_in(folder: Path) -> str:
        """Return the version whose skill folder *folder* is: what `folder` is given."""
        return f"sha256:{folder.parent.name}"

    def folder(self, project: str, name: str, version: str) -> Path:
        """Return a version's skill folder."""
        return self.root(project, name, version) / name

    def archive(self, project: str, name: str, version: str) -> Path:
        """Return a version's archive, written from its files if it is not there."""
        place = self.root(project, name, version).with_suffix(".zip")
        if not place.exists():
            self.write(self.folder(project, name, version), place)
        return place

    def write(self, folder: Path, place: Path) -> None:
        """Write the archive of a skill's folder to *place*: aside first, then renamed."""
        aside = self.scratch(".zip")
        try:
            with open_private(aside, "xb") as out:
                write_archive(folder, cast(BinaryIO, out))
                out.flush()
                os.fsync(out.fileno())
            make_folder(place.parent)
            aside.replace(place)
        finally:
            aside.unlink(missing_ok=True)

    def place(self, scratch: Path, project: str, name: str, version: str) -> None:
        """Rename an unpacked version into its place, unless it is there: a version's files never change."""
        root = self.root(project, name, version)
        if root.exists():
            return
        make_folder(root.parent)
        try:
            scratch.rename(root)
        except OSError:
            if not root.exists():
                raise
            return
        _sync(root.parent)

    def put_away(self, project: str, name: str, version: str) -> Path | None:
        """Rename a version out of its place and return where it is now, for `discard`; None when it is not there."""
        root, aside = self.root(project, name, version), self.scratch()
        root.with_suffix(".zip").unlink(missing_ok=True)
        try:
            root.rename(aside)
        except FileNotFoundError:
            return None
        return aside

    def discard(self, scratch: Path) -> None:
        """Remove what lies at a scratch path, if anything does."""
        if scratch.is_dir():
            remove_tree(scratch)
        else:
            scratch.unlink(missing_ok=True)

    def sweep(self, known: Collection[tuple[str, str, str]], *, older_than_s: float = LEFTOVER_S) -> int:
        """Remove what processes that died have left: old scratch, and old versions no row names.

        Args:
            known: `(project, name, version)` of all rows.
            older_than_s: Younger things may belong to an upload under way.
        """
        limit = time.time() - older_than_s
        kept = {self.root(*row) for row in known}
        places = [
            *self._top.glob(f"{SCRATCH}/*"),
            *(place for place in self._top.glob("[!.]*/*/*") if place.with_suffix("") not in kept),
        ]
        return sum(self._removed(place, limit) for place in places)

    def _removed(self, place: Path, limit: float) -> bool:
        """Remove what is older than *limit*; False for what is not, or what another process removed."""
        try:
            if place.lstat().st_ctime >= limit:
                return False
            self.discard(place)
        except FileNotFoundError:
            return False
        return True


def file_digest(place: Path) -> str:
    """Return SHA-256 in hex over a file's bytes."""
    with place.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Make a rename in *folder* last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
