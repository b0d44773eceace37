"""Versions on machines that did not take the upload: fetched from the shared storage and checked.

With one machine the folder of versions is all there is. Where the setting `artifacts` names a storage several machines
share, each version's archive is kept there too, and a machine that lacks a version makes it from the archive.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from kdskills.app.projects.folders import VersionFolders
from kdskills.app.projects.spool import spool
from kdskills.app.projects.whole import whole
from kdskills.errors import NotFound, OperatorMustAct
from kdskills.jobs.database import micros
from kdskills.skills.archives import ArchiveLimits, ArchiveRefused, unpack_skill

if TYPE_CHECKING:
    from kdskills.app.projects.model import SkillVersion
    from kdskills.jobs.artifacts import Blobs


class VersionMissing(OperatorMustAct):
    """A version's files are not on this machine, and the shared storage has none that fit."""

    code = "version_missing"


class Presence:
    """Sees to it that versions are here.

    Args:
        folders: Versions on this machine.
        blobs: The storage shared with other machines, or None.
    """

    def __init__(self, folders: VersionFolders, blobs: Blobs | None) -> None:
        self._folders = folders
        self._blobs = blobs

    async def share(self, project: str, found: SkillVersion, archive: Path) -> None:
        """Keep a version's archive where other machines find it."""
        if self._blobs is not None:
            await self._blobs.save(key_of(project, found), archive)

    async def forget(self, project: str, found: SkillVersion) -> None:
        """Remove a version's archive from where other machines find it."""
        if self._blobs is not None:
            await self._blobs.delete(key_of(project, found))

    async def ensure(self, project: str, found: SkillVersion) -> Path:
        """Return a version's skill folder on this machine, fetched first if it is not here.

        Raises:
            VersionMissing: It is not here, and cannot be had or is not what it was.
        """
        folder = self._folders.folder(project, found.skill, found.version)
        if await asyncio.to_thread(folder.exists):
            return folder
        if self._blobs is None:
            raise _missing(project, found, "they are not on this machine")
        place = await asyncio.to_thread(self._folders.scratch, ".fetched")
        try:
            await spool(self._blobs.read(key_of(project, found)), place, ArchiveLimits().archive_bytes)
            await whole(asyncio.to_thread(self._take, project, found, place))
        except (NotFound, ArchiveRefused) as error:
            raise _missing(project, found, "the shared storage has none that can be used") from error
        finally:
            await whole(asyncio.to_thread(self._folders.discard, place))
        return folder

    def _take(self, project: str, found: SkillVersion, archive: Path) -> None:
        scratch = self._folders.scratch()
        try:
            unpacked = unpack_skill(archive, scratch)
            if (unpacked.name, unpacked.version) != (found.skill, found.version):
                raise _missing(project, found, "what the shared storage has is another version")
            self._folders.place(scratch, project, found.skill, found.version)
        finally:
            self._folders.discard(scratch)


def key_of(project: str, found: SkillVersion) -> str:
    """Return the key of a version's archive; one taken again after it was collected has another."""
    digest = found.version.partition(":")[2]
    return f"skills/{project}/{found.skill}/{digest}-{micros(found.created_at)}.zip"


def _missing(project: str, found: SkillVersion, why: str) -> VersionMissing:
    message = f"the files of skill {found.skill!r}, version {found.version}, are missing: {why}"
    return VersionMissing(message, project=project, skill=found.skill, version=found.version)
