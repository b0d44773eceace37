"""Versions on disk: made aside, renamed into place, read-only from then on.

With one machine the folder of versions is all there is. Where the setting `artifacts` names a storage several machines
share, each version's archive is kept there too, and a machine that lacks a version makes it from the archive.

::

    <state>/projects/<project>/<skill>/<hex>/<skill>/...   a version's files
    <state>/projects/<project>/<skill>/<hex>.zip           its archive
    <state>/projects/.scratch/<random>                     uploads under way
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterable, Collection, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar, cast

from kdskills.errors import NotFound, OperatorMustAct
from kdskills.skills.archives import ArchiveLimits, ArchiveRefused, remove_tree, unpack_skill, write_archive
from kdskills.skills.private_files import make_folder, open_private, private_folder
from kdskills.storage.database import micros

if TYPE_CHECKING:
    from kdskills.jobs.blobs import Blobs
    from kdskills.projects.records import SkillVersion


SCRATCH: Final = ".scratch"
LEFTOVER_S: Final = 24 * 3600.0
"""Age at which something no row names counts as left by a process that died."""


Value = TypeVar("Value")


async def to_its_end(step: Coroutine[Any, Any, Value]) -> Value:
    """Return what *step* returns; a cancellation takes effect when it is over.

    A thread cannot be interrupted: cleaning up while it still works would take away what it has just put in place.
    """
    task = asyncio.ensure_future(step)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen, and of no use to who went away
        raise cancelled
    return task.result()


async def spool(source: AsyncIterable[bytes], path: Path, limit: int) -> int:
    """Write *source* to the new file *path*, and return how many bytes it has.

    Args:
        source: The bytes as they come.
        path: Where to; nothing is there yet.
        limit: Most bytes to accept; the rest is not asked for.

    Raises:
        ArchiveRefused: `archive_too_large`; what was written stays for the caller to remove.
    """
    size = 0
    with await to_its_end(asyncio.to_thread(path.open, "xb")) as out:
        async for piece in source:
            size += len(piece)
            if size > limit:
                raise ArchiveRefused("archive_too_large", f"it has more than {limit} bytes")
            await to_its_end(asyncio.to_thread(out.write, piece))
    return size


class VersionMissing(OperatorMustAct, code="version_missing"):
    """A version's files are not on this machine, and the shared storage has none that fit."""


class VersionFolders:
    """The folder of all projects below a state folder. What is no coroutine blocks.

    Args:
        state_dir: The state folder.
        blobs: The storage shared with other machines; None for one machine.
    """

    def __init__(self, state_dir: Path, blobs: Blobs | None = None) -> None:
        self._top = state_dir / "projects"
        self._blobs = blobs

    def scratch(self, suffix: str = "") -> Path:
        """Return a path nobody else uses, on the same file system as the versions; nothing is there yet."""
        folder = self._top / SCRATCH
        private_folder(self._top, contents=True)
        make_folder(folder)
        return folder / (secrets.token_hex(16) + suffix)

    def root(self, project: str, name: str, version: str) -> Path:
        """Return the folder that holds nothing but a version's skill folder; it can be a root of skills."""
        return self._top / project / name / version.partition(":")[2]

    def folder(self, project: str, name: str, version: str) -> Path:
        """Return a version's skill folder."""
        return self.root(project, name, version) / name

    def archive(self, project: str, name: str, version: str) -> Path:
        """Return a version's archive, written from its files if it is not there."""
        archive = self.root(project, name, version).with_suffix(".zip")
        if not archive.exists():
            self.write(self.folder(project, name, version), archive)
        return archive

    def write(self, folder: Path, target: Path) -> None:
        """Write the archive of a skill's folder to *target*: aside first, then renamed."""
        aside = self.scratch(".zip")
        try:
            with open_private(aside, "xb") as out:
                write_archive(folder, cast(BinaryIO, out))
                out.flush()
                os.fsync(out.fileno())
            make_folder(target.parent)
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)

    def install(self, scratch: Path, project: str, name: str, version: str) -> None:
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
        descriptor = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)  # the rename lasts
        finally:
            os.close(descriptor)

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

    def sweep(self, rows: Collection[tuple[str, str, str]], *, older_than_s: float = LEFTOVER_S) -> int:
        """Remove what processes that died have left: old scratch, and old versions no row names.

        Args:
            rows: `(project, name, version)` of all rows.
            older_than_s: Younger things may belong to an upload under way.
        """
        limit = time.time() - older_than_s
        version_roots = {self.root(*row) for row in rows}
        paths = [
            *self._top.glob(f"{SCRATCH}/*"),
            *(path for path in self._top.glob("[!.]*/*/*") if path.with_suffix("") not in version_roots),
        ]
        return sum(self._removed(path, limit) for path in paths)

    def _removed(self, path: Path, limit: float) -> bool:
        """Remove what is older than *limit*; False for what is not, or what another process removed."""
        try:
            if path.lstat().st_ctime >= limit:
                return False
            self.discard(path)
        except FileNotFoundError:
            return False
        return True

    async def share(self, project: str, version: SkillVersion, archive: Path) -> None:
        """Keep a version's archive where other machines find it."""
        if self._blobs is not None:
            await self._blobs.save(key_of(project, version), archive)

    async def forget(self, project: str, version: SkillVersion) -> None:
        """Remove a version's archive from where other machines find it."""
        if self._blobs is not None:
            await self._blobs.delete(key_of(project, version))

    async def ensure(self, project: str, version: SkillVersion) -> Path:
        """Return a version's skill folder on this machine, fetched first if it is not here.

        Raises:
            VersionMissing: It is not here, and cannot be had or is not what it was.
        """
        folder = self.folder(project, version.skill, version.version)
        if await asyncio.to_thread(folder.exists):
            return folder
        if self._blobs is None:
            raise _missing(project, version, "they are not on this machine")
        download = await asyncio.to_thread(self.scratch, ".fetched")
        try:
            await spool(self._blobs.read(key_of(project, version)), download, ArchiveLimits().archive_bytes)
            await to_its_end(asyncio.to_thread(self._take, project, version, download))
        except (NotFound, ArchiveRefused) as error:
            raise _missing(project, version, "the shared storage has none that can be used") from error
        finally:
            await to_its_end(asyncio.to_thread(self.discard, download))
        return folder

    def _take(self, project: str, version: SkillVersion, archive: Path) -> None:
        scratch = self.scratch()
        try:
            unpacked = unpack_skill(archive, scratch)
            if (unpacked.name, unpacked.version) != (version.skill, version.version):
                raise _missing(project, version, "what the shared storage has is another version")
            self.install(scratch, project, version.skill, version.version)
        finally:
            self.discard(scratch)


def key_of(project: str, version: SkillVersion) -> str:
    """Return the key of a version's archive; one taken again after it was collected has another."""
    digest = version.version.partition(":")[2]
    return f"skills/{project}/{version.skill}/{digest}-{micros(version.created_at)}.zip"


def _missing(project: str, version: SkillVersion, why: str) -> VersionMissing:
    message = f"the files of skill {version.skill!r}, version {version.version}, are missing: {why}"
    return VersionMissing(message, project=project, skill=version.skill, version=version.version)
