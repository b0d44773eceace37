"""`Projects`: show, upload, activate, enable, pin, delete and collect the skills of projects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdskills.errors import BadRequest, NotFound, OperatorMustAct
from kdskills.projects.folders import Presence, VersionFolders, spool, to_its_end
from kdskills.projects.model import (
    AuditRow,
    CollectReport,
    PinnedVersion,
    Project,
    SkillFile,
    SkillState,
    SkillVersion,
    UploadReport,
    check_project,
)
from kdskills.projects.records import ProjectRecords, ProjectTables, version_of_row
from kdskills.projects.views import Ingredients, ProjectViews, Uploaded, descriptor_mark
from kdskills.skills.archives import ArchiveLimits, UnpackedSkill, unpack_skill
from kdskills.storage.database import Database, micros, moment_of, utc_now

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.blobs import Blobs
    from kdskills.projects.views import ProjectSkills
    from kdskills.turn import SkillView


_LOG = logging.getLogger("kdskills.projects")


class ProjectReads:
    """What is asked of projects.

    Args:
        database: Where rows are kept; its tables must be there (`kdskills.storage.database`, part `service`).
        state_dir: Where versions are kept.
        views: Puts skills under policy.
        bundle_of: Folder of a project's bundle when its row names none.
        blobs: Storage shared with other machines that have the same database; None for one machine.
        limits: Bounds of an archive.
        clock: Gives the time of changes.
    """

    def __init__(
        self,
        database: Database,
        state_dir: Path,
        views: ProjectViews,
        *,
        bundle_of: Callable[[str], Path | None] = lambda project: None,
        blobs: Blobs | None = None,
        limits: ArchiveLimits | None = None,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._database = database
        self._folders = VersionFolders(state_dir)
        self._presence = Presence(self._folders, blobs)
        self._views = views
        self._bundle_of = bundle_of
        self._limits = limits or ArchiveLimits()
        self._tables = ProjectTables()
        self._records = ProjectRecords(self._tables, clock)

    async def projects(self) -> list[Project]:
        """Return all projects, sorted by name."""
        return await self._database.read(self._records.projects)

    async def exists(self, project: str) -> bool:
        """Whether the project has ever been made: by name, by a token or by an upload."""
        return bool(await self._database.read(lambda link: self._records.projects(link, project)))

    # ---- skills --------------------------------------------------------------------------------------------------

    async def list(self, project: str) -> list[SkillState]:
        """Return the uploaded skills of a project, sorted by name."""
        check_project(project)
        return await self._database.read(lambda link: self._records.skills(link, project))

    async def get(self, project: str, name: str) -> SkillState:
        """Return one uploaded skill. Raises NotFound."""
        check_project(project)

        def ask(link: sa.Connection) -> SkillState:
            self._records.skill_row(link, project, name)
            return self._records.skills(link, project, name)[0]

        return await self._database.read(ask)

    async def versions(self, project: str, name: str) -> Sequence[SkillVersion]:
        """Return the versions of a skill, the latest first. Raises NotFound."""
        check_project(project)
        return await self._database.read(lambda link: self._records.versions(link, project, name))

    async def version(self, project: str, name: str, version: str | None = None) -> SkillVersion:
        """Return one version of a skill, the active one unless *version* names another. Raises NotFound."""
        check_project(project)
        return await self._database.read(lambda link: self._version(link, project, name, version))

    async def archive(self, project: str, name: str, version: str | None = None) -> Path:
        """Return a zip of a version, the active one unless *version* names another; the same bytes everywhere.

        Raises:
            NotFound: There is no such skill or version.
        """
        row = await self.version(project, name, version)
        await self._presence.ensure(project, row)
        return await asyncio.to_thread(self._folders.archive, project, name, row.version)

    async def file(self, project: str, name: str, path: str, version: str | None = None) -> SkillFile:
        """Return one file of a version, which must be among the files the upload listed: no path leads anywhere else.

        Raises:
            NotFound: There is no such skill, version or file.
        """
        row = await self.version(project, name, version)
        for file in row.files:
            if file.path == path:
                return SkillFile(await self._presence.ensure(project, row) / path, file)
        raise NotFound(f"skill {name!r} has no file {path!r}", skill=name, version=row.version, path=path)

    async def audit(self, project: str, *, limit: int = 100) -> Sequence[AuditRow]:
        """Return the latest changes of a project, the latest first."""
        check_project(project)
        return await self._database.read(lambda link: self._records.audit(link, project, limit))

    def _version(self, link: sa.Connection, project: str, name: str, version: str | None) -> SkillVersion:
        active = self._records.skill_row(link, project, name)["active"]
        if version is None and active is None:
            raise NotFound(f"skill {name!r} of project {project!r} has no active version", skill=name, project=project)
        row = self._records.version_row(link, project, name, version or active)
        pins = self._records.pin_counts(link, project, name).get(row["version"], 0)
        return version_of_row(row, row["version"] == active, pins)

    # ---- policy --------------------------------------------------------------------------------------------------

    async def skills(self, project: str) -> ProjectSkills:
        """Return everything agents of a project may be granted: built-in, plugins', the bundle's and uploaded skills.

        Raises:
            BundleError: The project's bundle cannot be loaded.
        """
        check_project(project)
        skills = await self._skills(project, lambda link: self._ingredients(link, project, existing_only=False))
        assert skills is not None
        return skills

    async def known_skills(self, project: str) -> ProjectSkills | None:
        """Return what `skills` does, or None for a project that was never made; one look at the database tells both."""
        check_project(project)
        return await self._skills(project, lambda link: self._ingredients(link, project, existing_only=True))

    async def _skills(
        self, project: str, question: Callable[[sa.Connection], Ingredients | None]
    ) -> ProjectSkills | None:
        """Return the skills made of what *question* finds; in one thread, unless files must be fetched first."""

        def look() -> tuple[Ingredients | None, ProjectSkills | None]:
            ingredients = self._database.ask(question)
            if ingredients is None or not all(skill.root.exists() for skill in ingredients.uploaded):
                return ingredients, None
            return ingredients, self._views.skills(project, ingredients)

        ingredients, skills = await asyncio.to_thread(look)
        if ingredients is None or skills is not None:
            return skills
        missing = [skill.full_id for skill in ingredients.uploaded if not await self._on_this_machine(project, skill)]
        if missing:
            ingredients = replace(ingredients, missing=frozenset(missing))
        return await asyncio.to_thread(self._views.skills, project, ingredients)

    async def view(
        self, project: str, consumer: str | None, tools: Iterable[Any] | None = None, *, include_internal: bool = False
    ) -> SkillView:
        """Return what *consumer* may use now in a project. Raises BundleError."""
        skills = await self.skills(project)
        return await asyncio.to_thread(skills.subsystem.view, consumer, tools, include_internal=include_internal)

    async def _on_this_machine(self, project: str, skill: Uploaded) -> bool:
        """Whether the files of an active version are on this machine, fetched if need be; one that is not costs only itself."""
        if await asyncio.to_thread(skill.root.exists):
            return True
        try:
            version = await self.version(project, skill.name, f"sha256:{skill.root.name}")
            await self._presence.ensure(project, version)
        except (NotFound, OperatorMustAct) as error:
            _LOG.warning("project %s: %s", project, error)
            return False
        return True

    def _ingredients(self, link: sa.Connection, project: str, *, existing_only: bool) -> Ingredients | None:
        """Return what a project's skills are made of; with *existing_only* None for a project that was never made."""
        row = self._records.in_use(link, project)
        if existing_only and row is None:
            return None
        bundle_text, generation, skills = row or (None, 0, ())
        bundle = self._bundle_of(project) if bundle_text is None else Path(bundle_text)
        return Ingredients(
            generation=generation,
            bundle=bundle,
            descriptor=descriptor_mark(bundle),
            uploaded=tuple(
                Uploaded(name, full_id, self._folders.root(project, name, active))
                for name, full_id, active, _ in skills
                if active
            ),
            disabled=frozenset(full_id for _, full_id, _, enabled in skills if not enabled),
        )

    # ---- holding -------------------------------------------------------------------------------------------------

    async def pin(self, project: str, name: str, holder: str, *, version: str | None = None) -> PinnedVersion:
        """Hold a version, so that it stays although another becomes active or the skill is deleted.

        Args:
            project: Whose skill.
            name: The skill's name.
            holder: Id of the work; holding twice is holding once.
            version: The version; the active one when omitted.

        Raises:
            NotFound: There is no such skill or version.
            VersionMissing: Its files cannot be had.
        """
        check_project(project)

        def change(link: sa.Connection) -> SkillVersion:
            row = self._version(link, project, name, version)
            if not self._records.hold(link, project, name, row.version, holder):
                raise NotFound(f"skill {name!r} of project {project!r} has no version {row.version!r}", skill=name)
            return row

        pinned = await self._database.write(change)
        folder = await self._presence.ensure(project, pinned)
        return PinnedVersion(name, pinned.version, pinned.full_id, folder, pinned.tree_digest)

    def hold(self, link: sa.Connection, project: str, holder: str, versions: Mapping[str, str]) -> None:
        """As `pin`, for versions whose files are here, in the transaction of *link*, which may be another's.

        Args:
            link: A connection to this very database.
            project: Whose skills.
            holder: Id of the work.
            versions: What it uses, by the skill's name; one that is gone is logged, since retention keeps what was
                active lately anyway.
        """
        for name, version in sorted(
            versions.items()
        ):  # in one order: those who hold several must not wait for one another
            if not self._records.hold(link, project, name, version, holder):
                _LOG.warning("%s does not hold %s: there is no version %s", holder, name, version)

    async def unpin(self, project: str, holder: str) -> int:
        """Let go of everything *holder* holds; return how many versions that were."""
        return await self._database.write(lambda link: self._records.unpin(link, project, holder))

    async def holders(self) -> Sequence[tuple[str, str]]:
        """Return every (project, holder) that holds a version."""
        pins = ProjectTables().pins
        query = pins.select().with_only_columns(pins.c.project, pins.c.holder).distinct()
        return await self._database.read(lambda link: [(row.project, row.holder) for row in link.execute(query)])


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
        received = await asyncio.to_thread(self._folders.scratch, ".upload")
        try:
            await spool(source, received, self._limits.archive_bytes)
            return await self._take(project, received, activate, who, request_id)
        finally:
            await to_its_end(asyncio.to_thread(self._folders.discard, received))

    async def _take(self, project: str, archive: Path, activate: bool, author: str, request_id: str) -> UploadReport:
        scratch = await asyncio.to_thread(self._folders.scratch)
        written = scratch.with_suffix(".zip")
        try:
            unpacked = await to_its_end(asyncio.to_thread(unpack_skill, archive, scratch, limits=self._limits))
            await to_its_end(asyncio.to_thread(self._folders.write, unpacked.folder, written))
            version = self._version_of(unpacked, author)
            await self._presence.share(project, version, written)
            report, is_new = await to_its_end(
                self._database.write(
                    lambda link: self._keep(link, project, version, scratch, activate, author, request_id)
                )
            )
            if not is_new:
                await self._presence.forget(project, version)
            return report
        finally:
            await to_its_end(asyncio.to_thread(self._folders.discard, written))
            await to_its_end(asyncio.to_thread(self._folders.discard, scratch))

    def _version_of(self, unpacked: UnpackedSkill, author: str) -> SkillVersion:
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
            created_by=author[:200],
            diagnostics=unpacked.diagnostics,
        )

    def _keep(
        self,
        link: sa.Connection,
        project: str,
        upload: SkillVersion,
        scratch: Path,
        activate: bool,
        author: str,
        request_id: str,
    ) -> tuple[UploadReport, bool]:
        """Keep an unpacked skill: rows and folder in one transaction, which the project's row serialises.

        Returns:
            The report, and whether the version's row is the one of this upload.
        """
        records, name, version = self._records, upload.skill, upload.version
        records.ensure_project(link, project)
        row = records.claim_skill(link, project, name, upload.full_id)
        created = records.add_version(link, project, upload)
        is_new = records.version_row(link, project, name, version)["created_at"] == micros(upload.created_at)
        self._folders.install(scratch, project, name, version)
        before = row["active"]
        active = version if activate else before
        if active != before:
            records.set_skill(link, project, name, active=active, full_id=upload.full_id)
            records.changed(link, project)
        records.mark_unused(link, project, name, active)
        facts = {"version": version, "created": created, "before": before, "active": active}
        records.note(link, project, author, "skill.upload", name, request_id, **facts)
        report = UploadReport(name, version, upload.diagnostics, created, active == version, row["enabled"])
        return report, is_new

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
            row = self._records.version_row(link, project, name, version, hold=True)
            if before != version:
                self._records.claim_skill(link, project, name, row["full_id"])
                self._records.set_skill(link, project, name, active=version, full_id=row["full_id"])
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
        removed = []
        for project, name, version, deleted in await self._database.read(
            lambda link: self._records.unused(link, before)
        ):
            spare[project, name] = spare.get((project, name), 0) + 1
            spared = not deleted and spare[project, name] <= keep_versions
            if not spared and await self._forget(project, name, version, before):
                removed.append(f"{name}@{version}")
        rows = await self._database.read(self._records.all_versions)
        return CollectReport(tuple(removed), await asyncio.to_thread(self._folders.sweep, rows))

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
        removed, folder = done
        if folder is not None:
            await asyncio.to_thread(self._folders.discard, folder)
        await self._presence.forget(project, removed)
        return True
