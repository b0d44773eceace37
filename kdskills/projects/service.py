"""`Projects`: show, upload, activate, enable, hold, delete and collect the skills of projects; versions on disk."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar, cast

from kdskills.bundle.descriptor import SkillsDescriptor
from kdskills.errors import BadRequest, BundleError, Diagnostic, NotFound, OperatorMustAct
from kdskills.projects import records
from kdskills.projects.audit import AuditQuery, audit_rows, forget_audit
from kdskills.projects.records import (
    Author,
    CollectReport,
    Project,
    ProjectRows,
    SkillFile,
    SkillState,
    SkillVersion,
    UploadReport,
)
from kdskills.projects.views import Ingredients, ProjectSkills, ProjectViews, Uploaded, check_project, ingredients_of
from kdskills.skills.archives import ArchiveLimits, ArchiveRefused, unpack_skill, write_archive
from kdskills.skills.private_files import make_folder, open_private, private_folder, remove_tree
from kdskills.storage.database import Database, micros, utc_now

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.artifacts import Blobs
    from kdskills.turn import SkillView


SCRATCH: Final = ".scratch"
LEFTOVER_S: Final = 24 * 3600.0
"""Age at which something no row names counts as left by a process that died."""


T = TypeVar("T")

_LOG = logging.getLogger("kdskills.projects")


async def to_its_end(step: Coroutine[Any, Any, T]) -> T:
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

    Raises ArchiveRefused, `archive_too_large`, beyond *limit*; what was written stays for the caller to remove.
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
    """Versions on disk: made aside, renamed into place, read-only from then on. What is no coroutine blocks.

    With one machine the folder of versions is all there is. Where *blobs* are a storage several machines share, each
    version's archive is kept there too, and a machine that lacks a version makes it from the archive::

        <state>/projects/<project>/<skill>/<hex>/<skill>/...   a version's files
        <state>/projects/<project>/<skill>/<hex>.zip           its archive
        <state>/projects/.scratch/<random>                     uploads under way
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
        """Remove what processes that died have left: scratch, and versions that are in none of *rows*.

        What is younger than *older_than_s* may belong to an upload under way.
        """
        limit = time.time() - older_than_s
        version_roots = {self.root(*row) for row in rows}
        unnamed = [path for path in self._top.glob("[!.]*/*/*") if path.with_suffix("") not in version_roots]
        return sum(self._removed(path, limit) for path in (*self._top.glob(f"{SCRATCH}/*"), *unnamed))

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
        """Return a version's skill folder on this machine, fetched first if it is not here. Raises VersionMissing."""
        folder = self.folder(project, version.skill, version.version)
        if await asyncio.to_thread(folder.exists):
            return folder
        if self._blobs is None:
            raise _missing(project, version, "they are not on this machine")
        download = await asyncio.to_thread(self.scratch, ".fetched")
        try:
            await spool(self._blobs.read(key_of(project, version)), download, ArchiveLimits().archive_bytes)
            await to_its_end(asyncio.to_thread(self.take, project, version, download))
        except (NotFound, ArchiveRefused) as error:
            raise _missing(project, version, "the shared storage has none that can be used") from error
        finally:
            await to_its_end(asyncio.to_thread(self.discard, download))
        return folder

    def take(self, project: str, version: SkillVersion, archive: Path) -> None:
        """Put a version's files in place from its *archive*. Raises ArchiveRefused, and VersionMissing for another version."""
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


UploadGate = Callable[[SkillsDescriptor | None, Path], tuple[Diagnostic, ...]]
"""Judges an unpacked skill under the terms of its project's bundle, None for those of a bundle that cannot be loaded.

It returns findings of the report, and raises what refuses the upload.
"""


class Projects:
    """The projects of one installation.

    Versions lie in hash-addressed, read-only folders and never change; activation moves one pointer. A crash anywhere
    leaves either the old state or the new one. *who* and *request_id* are for audit rows. Whatever takes a project's
    name raises BadRequest, `project_invalid`, for what is none.

    The tables of *database* must be there (`kdskills.storage.database`, part `service`). `bundle_of` gives the folder
    of a project's bundle when its row names none; *blobs* are shared with other machines that have the same database.
    *gate* judges every upload.
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
        gate: UploadGate | None = None,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._database = database
        self._folders = VersionFolders(state_dir, blobs)
        self._views = views
        self._bundle_of = bundle_of
        self._limits = limits or ArchiveLimits()
        self._gate = gate
        self._clock = clock

    async def _read(self, project: str, question: Callable[[ProjectRows], T]) -> T:
        """Return what *question* finds in the rows of a project."""
        check_project(project)
        return await self._database.read(lambda link: question(ProjectRows(link, project, self._clock())))

    async def _change(self, project: str, change: Callable[[ProjectRows], T]) -> T:
        """Do *change* in one transaction, which the project's row serialises; it is made if it is not there."""
        check_project(project)

        def within(link: sa.Connection) -> T:
            rows = ProjectRows(link, project, self._clock())
            rows.ensure()
            return change(rows)

        return await self._database.write(within)

    async def projects(self) -> list[Project]:
        """Return all projects, sorted by name."""
        return await self._database.read(records.all_projects)

    async def create(self, project: str, *, bundle: Path | None = None, who: Author | str) -> Project:
        """Make a project, or set the bundle, an absolute path, of one that is there; None leaves it without."""
        if bundle is not None and not bundle.is_absolute():
            check_project(project)
            raise BadRequest(f"the bundle's path {str(bundle)!r} is not absolute", code="bundle_path_relative")
        text = None if bundle is None else str(bundle)

        def change(rows: ProjectRows) -> Project:
            rows.change(bundle=text)
            rows.note(who, "project.create", project, bundle=text)
            made = rows.get()
            assert made is not None  # as it was changed here
            return made

        return await self._change(project, change)

    async def list(self, project: str) -> list[SkillState]:
        """Return the uploaded skills of a project, sorted by name."""
        return await self._read(project, ProjectRows.skills)

    async def get(self, project: str, name: str) -> SkillState:
        """Return one uploaded skill. Raises NotFound."""

        def ask(rows: ProjectRows) -> SkillState:
            rows.skill(name)
            return rows.skills(name)[0]

        return await self._read(project, ask)

    async def versions(self, project: str, name: str) -> Sequence[SkillVersion]:
        """Return the versions of a skill, the latest first. Raises NotFound."""
        return await self._read(project, lambda rows: rows.versions(name))

    async def version(self, project: str, name: str, version: str | None = None) -> SkillVersion:
        """Return one version of a skill, the active one unless *version* names another. Raises NotFound."""
        return await self._read(project, lambda rows: rows.version(name, version))

    async def archive(self, project: str, name: str, version: str | None = None) -> Path:
        """Return a zip of a version, the active one by default; the same bytes everywhere. Raises NotFound."""
        row = await self.version(project, name, version)
        await self._folders.ensure(project, row)
        return await asyncio.to_thread(self._folders.archive, project, name, row.version)

    async def version_folder(self, project: str, name: str, version: str | None = None) -> tuple[SkillVersion, Path]:
        """Return a version, the active one by default, and its skill folder on this machine. Raises NotFound."""
        row = await self.version(project, name, version)
        return row, await self._folders.ensure(project, row)

    async def file(self, project: str, name: str, path: str, version: str | None = None) -> SkillFile:
        """Return one of the files the upload of a version listed: no path leads elsewhere. Raises NotFound."""
        row = await self.version(project, name, version)
        for file in row.files:
            if file.path == path:
                return SkillFile(await self._folders.ensure(project, row) / path, file)
        raise NotFound(f"skill {name!r} has no file {path!r}", skill=name, version=row.version, path=path)

    async def folder(self, project: str, name: str, version: str) -> Path:
        """Return the folder of a version, active or not, on this machine. Raises NotFound, VersionMissing."""
        return await self._folders.ensure(project, await self.version(project, name, version))

    async def skills(self, project: str) -> ProjectSkills:
        """Return all that agents may be granted: built-in, plugins', the bundle's, uploaded. Raises BundleError."""
        skills = await self._skills(project, existing_only=False)
        assert skills is not None
        return skills

    async def known_skills(self, project: str) -> ProjectSkills | None:
        """Return what `skills` does, or None for a project that was never made; one look at the database tells both."""
        return await self._skills(project, existing_only=True)

    async def _skills(self, project: str, *, existing_only: bool) -> ProjectSkills | None:
        """Return a project's skills in one thread, unless files must be fetched first."""
        check_project(project)

        def look() -> tuple[Ingredients | None, ProjectSkills | None]:
            rows = self._database.ask(lambda link: ProjectRows(link, project, self._clock()).in_use())
            if existing_only and not rows:
                return None, None
            bundle = Path(rows[0].bundle) if rows and rows[0].bundle is not None else self._bundle_of(project)
            ingredients = ingredients_of(rows, bundle, partial(self._folders.root, project))
            if not all(skill.root.exists() for skill in ingredients.uploaded):
                return ingredients, None
            return ingredients, self._views.skills(project, ingredients)

        ingredients, skills = await asyncio.to_thread(look)
        if ingredients is None or skills is not None:
            return skills
        missing = [skill.full_id for skill in ingredients.uploaded if not await self._on_this_machine(project, skill)]
        if missing:
            ingredients = replace(ingredients, missing=frozenset(missing))
        return await asyncio.to_thread(self._views.skills, project, ingredients)

    async def _on_this_machine(self, project: str, skill: Uploaded) -> bool:
        """Whether the files of an active version are on this machine, fetched if need be; one that is not costs only itself."""
        if await asyncio.to_thread(skill.root.exists):
            return True
        try:
            version = await self.version(project, skill.name, f"sha256:{skill.root.name}")
            await self._folders.ensure(project, version)
        except (NotFound, OperatorMustAct) as error:
            _LOG.warning("project %s: %s", project, error)
            return False
        return True

    async def view(
        self, project: str, consumer: str | None, tools: Iterable[Any] | None = None, *, include_internal: bool = False
    ) -> SkillView:
        """Return what *consumer* may use now in a project. Raises BundleError."""
        skills = await self.skills(project)
        return await asyncio.to_thread(skills.subsystem.view, consumer, tools, include_internal=include_internal)

    def hold(self, link: sa.Connection, project: str, holder: str, versions: Mapping[str, str]) -> None:
        """Let work hold the versions it uses, by skill, in the transaction of *link*, which may be another's.

        They stay although others become active or the skill is deleted. One that is gone is logged: retention keeps
        what was active lately anyway.
        """
        rows = ProjectRows(link, project, self._clock())
        for name, version in sorted(versions.items()):  # in one order: holders of several must not wait for each other
            if not rows.hold(name, version, holder):
                _LOG.warning("%s does not hold %s: there is no version %s", holder, name, version)

    def note(self, link: sa.Connection, project: str, author: Author, action: str, subject: str, **facts: Any) -> None:
        """Write an audit row in the transaction of *link*, which may be another's; *facts* as `ProjectRows.note` has them."""
        ProjectRows(link, project, self._clock()).note(author, action, subject, **facts)

    async def audit_rows(self, query: AuditQuery) -> Sequence[dict[str, Any]]:
        """Return what was changed, and by whom, the latest first."""
        return await self._database.read(lambda link: audit_rows(link, query))

    async def forget_audit(self, *, keep_days: float) -> int:
        """Remove audit rows that are older; return how many those were. Nothing else ever removes one."""
        before = self._clock() - timedelta(days=keep_days)
        return await self._database.write(lambda link: forget_audit(link, before))

    async def unpin(self, project: str, holder: str) -> int:
        """Let go of everything *holder* holds; return how many versions that were."""
        return await self._database.write(lambda link: ProjectRows(link, project, self._clock()).unpin(holder))

    async def holders(self) -> Sequence[tuple[str, str]]:
        """Return every (project, holder) that holds a version."""
        return await self._database.read(records.all_holders)

    async def upload(
        self,
        project: str,
        source: Path | AsyncIterable[bytes],
        *,
        activate: bool = True,
        who: Author | str,
    ) -> UploadReport:
        """Take a skill from a zip archive, a file or its bytes as they come; what is refused leaves nothing behind.

        The project is made if it is not there; an upload never changes `enabled`. Raises ArchiveRefused, BadRequest,
        and Conflict, `id_taken`, when another skill of the project has its id.
        """
        check_project(project)
        if isinstance(source, Path):
            return await self._take(project, source, activate, Author.bounded(who))
        received = await asyncio.to_thread(self._folders.scratch, ".upload")
        try:
            await spool(source, received, self._limits.archive_bytes)
            return await self._take(project, received, activate, Author.bounded(who))
        finally:
            await to_its_end(asyncio.to_thread(self._folders.discard, received))

    async def _take(self, project: str, archive: Path, activate: bool, author: Author) -> UploadReport:
        """Keep the skill of an archive: rows and folder in one transaction, which the project's row serialises."""
        folders = self._folders
        scratch = await asyncio.to_thread(folders.scratch)
        written = scratch.with_suffix(".zip")
        try:
            unpacked = await to_its_end(asyncio.to_thread(unpack_skill, archive, scratch, limits=self._limits))
            judged = await to_its_end(asyncio.to_thread(self._judged, project, unpacked.folder))
            await to_its_end(asyncio.to_thread(folders.write, unpacked.folder, written))
            upload = SkillVersion(
                skill=unpacked.name,
                version=unpacked.version,
                full_id=f"public.{unpacked.skill.id}",
                description=unpacked.skill.description,
                files=unpacked.files,
                tree_digest=unpacked.skill.tree_digest(),
                active=False,
                pins=0,
                created_at=self._clock(),
                created_by=author.who,
                diagnostics=(*unpacked.diagnostics, *judged),
            )
            await folders.share(project, upload, written)

            def change(rows: ProjectRows) -> tuple[UploadReport, bool]:
                return self._keep(rows, project, upload, scratch, activate, author)

            report, is_new = await to_its_end(self._change(project, change))
            if not is_new:
                await folders.forget(project, upload)
            return report
        finally:
            await to_its_end(asyncio.to_thread(folders.discard, written))
            await to_its_end(asyncio.to_thread(folders.discard, scratch))

    def _judged(self, project: str, folder: Path) -> tuple[Diagnostic, ...]:
        """Return what the gate tells of an unpacked skill. Raises as the gate."""
        if self._gate is None:
            return ()
        rows = self._database.ask(lambda link: ProjectRows(link, project, self._clock()).in_use())
        bundle = Path(rows[0].bundle) if rows and rows[0].bundle is not None else self._bundle_of(project)
        try:
            descriptor = SkillsDescriptor() if bundle is None else self._views.load(bundle).descriptor
        except BundleError:  # what it asks for cannot be told
            descriptor = None
        return self._gate(descriptor, folder)

    def _keep(
        self, rows: ProjectRows, project: str, upload: SkillVersion, scratch: Path, activate: bool, author: Author
    ) -> tuple[UploadReport, bool]:
        """Keep an unpacked skill; return the report, and whether the version's row is the one of this upload."""
        name, version = upload.skill, upload.version
        row = rows.claim_skill(name, upload.full_id)
        created = rows.add_version(upload)
        is_new = rows.version_row(name, version).created_at == micros(upload.created_at)
        self._folders.install(scratch, project, name, version)
        before = row.active
        active = version if activate else before
        if active == before:
            rows.mark_unused(name, active)
        else:
            rows.use(name, active, full_id=upload.full_id)
        facts = {"version": version, "created": created, "before": before, "active": active}
        rows.note(author, "skill.upload", name, skill=upload.full_id, **facts)
        return UploadReport(name, version, upload.diagnostics, created, active == version, row.enabled), is_new

    async def patch(self, project: str, name: str, *, enabled: bool, who: Author | str) -> SkillState:
        """Enable or disable a skill: the gate refuses a disabled one. Raises NotFound."""

        def change(rows: ProjectRows) -> SkillState:
            row = rows.skill(name)
            before = row.enabled
            if before != enabled:
                rows.set_skill(name, enabled=enabled)
                rows.change()
                rows.note(who, "skill.patch", name, skill=row.full_id, before=before, enabled=enabled)
            return rows.skills(name)[0]

        return await self._change(project, change)

    async def activate(self, project: str, name: str, version: str, *, who: Author | str) -> SkillState:
        """Make *version* the one in use; work keeps what it holds. Raises NotFound, and Conflict as `upload`."""

        def change(rows: ProjectRows) -> SkillState:
            before = rows.skill(name).active
            row = rows.version_row(name, version, hold=True)
            if before != version:
                rows.claim_skill(name, row.full_id)
                rows.use(name, version, full_id=row.full_id)
                rows.note(who, "skill.activate", name, skill=row.full_id, before=before, active=version)
            return rows.skills(name)[0]

        return await self._change(project, change)

    async def delete(self, project: str, name: str, *, who: Author | str) -> None:
        """Delete a skill; versions in use stay until their work ends, as does `enabled`. Raises NotFound."""

        def change(rows: ProjectRows) -> None:
            row = rows.skill(name)
            rows.use(name, None, deleted_at=rows.now)
            rows.note(who, "skill.delete", name, skill=row.full_id, before=row.active)

        await self._change(project, change)

    async def collect(self, *, keep_days: float = 30.0, keep_versions: int = 10) -> CollectReport:
        """Remove versions nobody uses or pins any longer, and what processes that died have left.

        Args:
            keep_days: Days a version stays after it was last the active one.
            keep_versions: Unused versions that stay, however old, of a skill that was not deleted.
        """
        before = micros(self._clock() - timedelta(days=keep_days))
        spare: dict[tuple[str, str], int] = {}
        removed = []
        for project, name, version, deleted in await self._database.read(lambda link: records.unused(link, before)):
            spare[project, name] = spare.get((project, name), 0) + 1
            spared = not deleted and spare[project, name] <= keep_versions
            if not spared and await self._forget(project, name, version, before):
                removed.append(f"{name}@{version}")
        rows = await self._database.read(records.all_versions)
        return CollectReport(tuple(removed), await asyncio.to_thread(self._folders.sweep, rows))

    async def _forget(self, project: str, name: str, version: str, before: int) -> bool:
        """Remove one version, if it is still unused and unpinned now that nobody else can change it."""

        def change(rows: ProjectRows) -> tuple[SkillVersion, Path | None] | None:
            row = rows.version_row(name, version, hold=True)
            if row.unused_since is None or row.unused_since >= before or rows.pin_counts(name).get(version):
                return None
            rows.forget_version(name, version)
            rows.note("retention", "version.collect", name, skill=row.full_id, version=version)
            return records.version_of_row(row, False, 0), self._folders.put_away(project, name, version)

        try:
            done = await self._change(project, change)
        except NotFound:  # another process was faster
            return False
        if done is None:
            return False
        removed, folder = done
        if folder is not None:
            await asyncio.to_thread(self._folders.discard, folder)
        await self._folders.forget(project, removed)
        return True
