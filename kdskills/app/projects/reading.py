"""Looking at projects and their skills, and holding versions while work runs; changes nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdskills.app.projects.folders import VersionFolders
from kdskills.app.projects.model import (
    AuditRow,
    PinnedVersion,
    Project,
    SkillFile,
    SkillState,
    SkillVersion,
    check_project,
)
from kdskills.app.projects.presence import Presence
from kdskills.app.projects.records import Records, version_of_row
from kdskills.app.projects.tables import ProjectTables
from kdskills.app.projects.views import Ingredients, ProjectViews, Uploaded, descriptor_mark
from kdskills.errors import NotFound, OperatorMustAct
from kdskills.jobs.database import Database, utc_now
from kdskills.skills.archives import ArchiveLimits

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.app.project_skills import ProjectSkills
    from kdskills.jobs.artifacts import Blobs
    from kdskills.turn import SkillView

_LOG = logging.getLogger("kdskills.projects")


class ProjectReads:
    """What is asked of projects.

    Args:
        database: Where rows are kept; its tables must be there (`kdskills.jobs.migrate`, part `service`).
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
        self._records = Records(self._tables, clock)

    async def projects(self) -> list[Project]:
        """Return all projects, sorted by name."""
        return await self._database.read(self._records.projects)

    async def known(self, project: str) -> bool:
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
        found = await self.version(project, name, version)
        await self._presence.ensure(project, found)
        return await asyncio.to_thread(self._folders.archive, project, name, found.version)

    async def file(self, project: str, name: str, path: str, version: str | None = None) -> SkillFile:
        """Return one file of a version, which must be among the files the upload listed: no path leads anywhere else.

        Raises:
            NotFound: There is no such skill, version or file.
        """
        found = await self.version(project, name, version)
        for file in found.files:
            if file.path == path:
                return SkillFile(await self._presence.ensure(project, found) / path, file)
        raise NotFound(f"skill {name!r} has no file {path!r}", skill=name, version=found.version, path=path)

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
        found = await self._skills(project, lambda link: self._ingredients(link, project, known=False))
        assert found is not None
        return found

    async def known_skills(self, project: str) -> ProjectSkills | None:
        """Return what `skills` does, or None for a project that was never made; one look at the database tells both."""
        check_project(project)
        return await self._skills(project, lambda link: self._ingredients(link, project, known=True))

    async def _skills(
        self, project: str, question: Callable[[sa.Connection], Ingredients | None]
    ) -> ProjectSkills | None:
        """Return the skills made of what *question* finds; in one thread, unless files must be fetched first."""

        def look() -> tuple[Ingredients | None, ProjectSkills | None]:
            made = self._database.ask(question)
            if made is None or not all(skill.root.exists() for skill in made.uploaded):
                return made, None
            return made, self._views.skills(project, made)

        made, found = await asyncio.to_thread(look)
        if made is None or found is not None:
            return found
        missing = [skill.full_id for skill in made.uploaded if not await self._here(project, skill)]
        if missing:
            made = replace(made, missing=frozenset(missing))
        return await asyncio.to_thread(self._views.skills, project, made)

    async def view(
        self, project: str, consumer: str | None, tools: Iterable[Any] | None = None, *, include_internal: bool = False
    ) -> SkillView:
        """Return what *consumer* may use now in a project. Raises BundleError."""
        found = await self.skills(project)
        return await asyncio.to_thread(found.subsystem.view, consumer, tools, include_internal=include_internal)

    async def _here(self, project: str, skill: Uploaded) -> bool:
        """Whether the files of an active version are on this machine, fetched if need be; one that is not costs only itself."""
        if await asyncio.to_thread(skill.root.exists):
            return True
        try:
            found = await self.version(project, skill.name, f"sha256:{skill.root.name}")
            await self._presence.ensure(project, found)
        except (NotFound, OperatorMustAct) as error:
            _LOG.warning("project %s: %s", project, error)
            return False
        return True

    def _ingredients(self, link: sa.Connection, project: str, *, known: bool) -> Ingredients | None:
        """Return what a project's skills are made of; with *known* None for a project that was never made."""
        found = self._records.in_use(link, project)
        if known and found is None:
            return None
        named, generation, skills = found or (None, 0, ())
        bundle = self._bundle_of(project) if named is None else Path(named)
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
            found = self._version(link, project, name, version)
            if not self._records.hold(link, project, name, found.version, holder):
                raise NotFound(f"skill {name!r} of project {project!r} has no version {found.version!r}", skill=name)
            return found

        found = await self._database.write(change)
        folder = await self._presence.ensure(project, found)
        return PinnedVersion(name, found.version, found.full_id, folder, found.tree_digest)

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
