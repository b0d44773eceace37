"""`Projects`: upload, activate, enable, delete and collect the skills of projects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from kdskills.app.projects.model import (
    CollectReport,
    Project,
    SkillState,
    SkillVersion,
    UploadReport,
    check_project,
)
from kdskills.app.projects.reading import ProjectReads
from kdskills.app.projects.records import version_of_row
from kdskills.app.projects.spool import spool
from kdskills.app.projects.whole import whole
from kdskills.errors import BadRequest, NotFound
from kdskills.jobs.database import micros, moment_of
from kdskills.skills.archives import UnpackedSkill, unpack_skill

if TYPE_CHECKING:
    import sqlalchemy as sa


class Projects(ProjectReads):
    """The projects of one installation.

    Versions lie in hash-addressed, read-only folders and never change; activation moves one pointer. A crash anywhere
    leaves either the old state or the new one. Arguments as `ProjectReads`.
    """

    async def create(self, project: str, *, bundle: Path | None = None, who: str, request_id: str = "") -> Project:
        """Make a project, or set the bundle of one that is there; None leaves it without a bundle of its own.

        Raises:
            BadRequest: `project_invalid`, or `bundle_path_relative`.
        """
        check_project(project)
        if bundle is not None and not bundle.is_absolute():
            raise BadRequest(f"the bundle's path {str(bundle)!r} is not absolute", code="bundle_path_relative")

        def change(link: sa.Connection) -> Project:
            self._records.ensure_project(link, project)
            self._records.set_bundle(link, project, None if bundle is None else str(bundle))
            self._records.changed(link, project)
            facts = {"bundle": None if bundle is None else str(bundle)}
            self._records.note(link, project, who, "project.create", project, request_id, **facts)
            return self._records.projects(link, project)[0]

        return await self._database.write(change)

    # ---- changing skills -----------------------------------------------------------------------------------------

    async def upload(
        self,
        project: str,
        source: Path | AsyncIterable[bytes],
        *,
        activate: bool = True,
        who: str,
        request_id: str = "",
    ) -> UploadReport:
        """Take a skill from a zip archive; what is refused leaves nothing behind.

        Args:
            project: Whose it becomes; made if it is not there.
            source: The archive: a file, or its bytes as they come, which are written to disk and never held.
            activate: Whether the version becomes the one in use. `enabled` is never changed by an upload.
            who: For the audit row.
            request_id: For the audit row.

        Raises:
            ArchiveRefused: The archive breaks a rule.
            BadRequest: `project_invalid`.
            Conflict: `id_taken`; another skill of the project has its id.
        """
        check_project(project)
        if isinstance(source, Path):
            return await self._take(project, source, activate, who, request_id)
        place = await asyncio.to_thread(self._folders.scratch, ".upload")
        try:
            await spool(source, place, self._limits.archive_bytes)
            return await self._take(project, place, activate, who, request_id)
        finally:
            await whole(asyncio.to_thread(self._folders.discard, place))

    async def _take(self, project: str, archive: Path, activate: bool, who: str, request_id: str) -> UploadReport:
        scratch = await asyncio.to_thread(self._folders.scratch)
        written = scratch.with_suffix(".zip")
        try:
            unpacked = await whole(asyncio.to_thread(unpack_skill, archive, scratch, limits=self._limits))
            await whole(asyncio.to_thread(self._folders.write, unpacked.folder, written))
            given = self._given(unpacked, who)
            await self._presence.share(project, given, written)
            report, kept = await whole(
                self._database.write(lambda link: self._keep(link, project, given, scratch, activate, who, request_id))
            )
            if not kept:
                await self._presence.forget(project, given)
            return report
        finally:
            await whole(asyncio.to_thread(self._folders.discard, written))
            await whole(asyncio.to_thread(self._folders.discard, scratch))

    def _given(self, unpacked: UnpackedSkill, who: str) -> SkillVersion:
        return SkillVersion(
            skill=unpacked.name,
            version=unpacked.version,
            full_id=f"public.{unpacked.skill.id}",
            description=unpacked.skill.description,
            files=unpacked.files,
            tree_digest=unpacked.skill.tree_digest(),
            active=False,
            pins=0,
            created_at=moment_of(self._records.now()),
            created_by=who[:200],
            diagnostics=unpacked.diagnostics,
        )

    def _keep(
        self,
        link: sa.Connection,
        project: str,
        given: SkillVersion,
        scratch: Path,
        activate: bool,
        who: str,
        request_id: str,
    ) -> tuple[UploadReport, bool]:
        """Keep an unpacked skill: rows and folder in one transaction, which the project's row serialises.

        Returns:
            The report, and whether the version's row is the one of this upload.
        """
        records, name, version = self._records, given.skill, given.version
        records.ensure_project(link, project)
        row = records.claim_skill(link, project, name, given.full_id)
        created = records.add_version(link, project, given)
        kept = records.version_row(link, project, name, version)["created_at"] == micros(given.created_at)
        self._folders.place(scratch, project, name, version)
        before = row["active"]
        active = version if activate else before
        if active != before:
            records.set_skill(link, project, name, active=active, full_id=given.full_id)
            records.changed(link, project)
        records.mark_unused(link, project, name, active)
        facts = {"version": version, "created": created, "before": before, "active": active}
        records.note(link, project, who, "skill.upload", name, request_id, **facts)
        report = UploadReport(name, version, given.diagnostics, created, active == version, row["enabled"])
        return report, kept

    async def patch(self, project: str, name: str, *, enabled: bool, who: str, request_id: str = "") -> SkillState:
        """Enable or disable a skill: the gate refuses a disabled one. Raises NotFound."""
        check_project(project)

        def change(link: sa.Connection) -> SkillState:
            self._records.ensure_project(link, project)
            before = self._records.skill_row(link, project, name)["enabled"]
            if before != enabled:
                self._records.set_skill(link, project, name, enabled=enabled)
                self._records.changed(link, project)
                facts = {"before": before, "enabled": enabled}
                self._records.note(link, project, who, "skill.patch", name, request_id, **facts)
            return self._records.skills(link, project, name)[0]

        return await self._database.write(change)

    async def activate(self, project: str, name: str, version: str, *, who: str, request_id: str = "") -> SkillState:
        """Make *version* the one in use; running work keeps what it pinned.

        Raises:
            NotFound: There is no such skill or version.
            Conflict: `id_taken`; another skill of the project has the id this version asks for.
        """
        check_project(project)

        def change(link: sa.Connection) -> SkillState:
            self._records.ensure_project(link, project)
            before = self._records.skill_row(link, project, name)["active"]
            found = self._records.version_row(link, project, name, version, hold=True)
            if before != version:
                self._records.claim_skill(link, project, name, found["full_id"])
                self._records.set_skill(link, project, name, active=version, full_id=found["full_id"])
                self._records.mark_unused(link, project, name, version)
                self._records.changed(link, project)
                facts = {"before": before, "active": version}
                self._records.note(link, project, who, "skill.activate", name, request_id, **facts)
            return self._records.skills(link, project, name)[0]

        return await self._database.write(change)

    async def delete(self, project: str, name: str, *, who: str, request_id: str = "") -> None:
        """Delete a skill. Versions in use stay until their work ends, and whether it was enabled stays known.

        Raises:
            NotFound: There is none.
        """
        check_project(project)

        def change(link: sa.Connection) -> None:
            self._records.ensure_project(link, project)
            before = self._records.skill_row(link, project, name)["active"]
            self._records.set_skill(link, project, name, active=None, deleted_at=self._records.now())
            self._records.mark_unused(link, project, name, None)
            self._records.changed(link, project)
            self._records.note(link, project, who, "skill.delete", name, request_id, before=before)

        await self._database.write(change)

    async def collect(self, *, keep_days: float = 30.0, keep_versions: int = 10) -> CollectReport:
        """Remove versions nobody uses or pins any longer, and what processes that died have left.

        Args:
            keep_days: Days a version stays after it was last the active one.
            keep_versions: Unused versions that stay, however old, of a skill that was not deleted.
        """
        before = micros(moment_of(self._records.now()) - timedelta(days=keep_days))
        spare: dict[tuple[str, str], int] = {}
        gone = []
        for project, name, version, deleted in await self._database.read(
            lambda link: self._records.unused(link, before)
        ):
            spare[project, name] = spare.get((project, name), 0) + 1
            kept = not deleted and spare[project, name] <= keep_versions
            if not kept and await self._forget(project, name, version, before):
                gone.append(f"{name}@{version}")
        known = await self._database.read(self._records.all_versions)
        return CollectReport(tuple(gone), await asyncio.to_thread(self._folders.sweep, known))

    async def _forget(self, project: str, name: str, version: str, before: int) -> bool:
        """Remove one version, if it is still unused and unpinned now that nobody else can change it."""

        def change(link: sa.Connection) -> tuple[SkillVersion, Path | None] | None:
            self._records.ensure_project(link, project)
            row = self._records.version_row(link, project, name, version, hold=True)
            since = row["unused_since"]
            if since is None or since >= before or self._records.pin_counts(link, project, name).get(version):
                return None
            self._records.forget_version(link, project, name, version)
            self._records.note(link, project, "retention", "version.collect", name, "", version=version)
            return version_of_row(row, False, 0), self._folders.put_away(project, name, version)

        try:
            done = await self._database.write(change)
        except NotFound:  # another process was faster
            return False
        if done is None:
            return False
        found, folder = done
        if folder is not None:
            await asyncio.to_thread(self._folders.discard, folder)
        await self._presence.forget(project, found)
        return True
