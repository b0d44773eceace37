"""Operations on everything an installation keeps: `backup.create`, `backup.restore`, and `db.check`, which looks for what does not fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import sqlalchemy as sa
from pydantic import Field

from kdskills.app.backup import check_backup, make_backup, restore_backup
from kdskills.app.operations.models import Input, Output
from kdskills.app.tokens import TOKENS
from kdskills.errors import BadRequest, NotFound
from kdskills.jobs.artifacts import ArtifactStore, open_blobs
from kdskills.jobs.attempts import Attempts
from kdskills.jobs.model import ACTIVE, OPEN, TERMINAL
from kdskills.jobs.records import WorkTables, in_states
from kdskills.projects.records import AUDIT, PINS, PROJECTS, SKILLS, VERSIONS
from kdskills.projects.service import VersionFolders
from kdskills.storage.database import HEADS, Database, current_revisions, sqlite_file, utc_now

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.app.settings import Settings
    from kdskills.storage.backup_file import Manifest

MAX_EXAMPLES: Final = 20
"""Rows that a finding names; all are counted."""


class BackupInput(Input):
    """Where the backup goes."""

    path: Path = Field(description="A new file, or a folder that gets one whose name tells the time.")


class RestoreInput(Input):
    """Which backup."""

    path: Path = Field(description="The backup's file.")
    check: bool = Field(default=False, description="Read every byte and write nothing.")
    state_only: bool = Field(
        default=False, description="Only the host's own files: its pool's rows and objects are there already."
    )


class BackupOutput(Output):
    """What a backup has.

    Attributes:
        path: The file, as an absolute path.
        size: Its bytes.
        rows: Rows of all tables.
        objects: Contents of artifacts, and `versions` those of uploaded skills, `files` of the state folder.
        missing: What the database speaks of and was nowhere, by name; the first thousand of `missing_count`.
        left_out: Links, sockets and the like in the state folder, which no backup has.
        complete: Whether nothing is missing.
        restored: Whether it was put in place just now.
    """

    YES: ClassVar[str] = "complete"
    path: str
    size: int
    version: str
    made_at: str
    revisions: tuple[str, ...]
    rows: int
    objects: int
    versions: int
    files: int
    missing: tuple[str, ...]
    missing_count: int
    left_out: int
    complete: bool
    restored: bool = False


def _answer(path: Path, manifest: Manifest, *, restored: bool = False) -> BackupOutput:
    kept_rows = manifest.databases.values()
    return BackupOutput.of(
        manifest,
        path=str(path.absolute()),
        size=path.stat().st_size,
        revisions=sorted({revision for database in kept_rows for revision in database.revisions}),
        rows=sum(table.rows for database in kept_rows for table in database.tables.values()),
        objects=manifest.parts["objects"].count,
        versions=manifest.parts["versions"].count,
        files=manifest.parts["state"].count,
        complete=not manifest.missing_count,
        restored=restored,
    )


async def create_backup(settings: Settings, version: str, arguments: BackupInput) -> BackupOutput:
    """Write a backup of everything; what runs meanwhile goes on."""
    path = arguments.path
    if path.is_dir():
        path /= f"kdskills-{utc_now():%Y-%m-%dT%H%M%SZ}.tar"
    if not path.parent.is_dir():
        raise BadRequest(f"{path.parent} is not a folder", code="path_missing", path=str(path.parent))
    return _answer(path, await make_backup(settings, version, path))


async def restore(host: Host, settings: Settings, arguments: RestoreInput) -> BackupOutput:
    """Put a backup in place where nothing is, or see that it could be."""
    if arguments.check:
        return _answer(arguments.path, await asyncio.to_thread(check_backup, arguments.path))

    async def make_sessions(url: str) -> None:
        store = await asyncio.to_thread(host.session_store, url)
        await store.get("restore")

    manifest = await restore_backup(
        settings, arguments.path, make_sessions=make_sessions, state_only=arguments.state_only
    )
    return _answer(arguments.path, manifest, restored=True)


class CheckDatabaseInput(Input):
    """How much to look at."""

    objects: bool = Field(default=True, description="Also ask the store for every object that artifacts name.")


class DatabaseFinding(Output):
    """What does not fit: the first of `count` rows or files it is about, and what mends it."""

    code: str
    message: str
    count: int
    examples: tuple[str, ...]
    cure: str


class CheckDatabaseOutput(Output):
    """`ok` means that everything fits; findings in the order they were looked for."""

    YES: ClassVar[str] = "ok"
    ok: bool
    revisions: tuple[str, ...]
    rows: int
    findings: tuple[DatabaseFinding, ...]


RULES: Final[dict[str, tuple[str, str]]] = {
    "revision_behind": ("tables are of an earlier version", "run `kdskills db upgrade`"),
    "revision_ahead": ("tables are of a newer version", "use the kdskills that made them, or a newer one"),
    "over_without_time": (
        "work that is over does not say when it ended, so retention never forgets it",
        "cancel nothing: restore a backup, or set finished_at to created_at",
    ),
    "open_with_time": ("work that is not over says when it ended", "stop the workers, and cancel it"),
    "step_without_job": (
        "steps are of jobs that are not there",
        "cancel what of them is open; retention removes none of them",
    ),
    "held_by_nobody": (
        "work is held by a worker that is not in the roster",
        "start `kdskills worker`; cancel what stays",
    ),
    "artifact_without_task": (
        "artifacts are of tasks that are not there",
        "delete these rows; their bytes are in no other list",
    ),
    "artifact_not_listed": ("tasks list artifacts that have no row", "restore a backup; the files cannot be read"),
    "artifact_bytes_missing": (
        "the store has not what artifacts name",
        "bring the store's files back, or restore a backup",
    ),
    "artifact_size_differs": (
        "the store has other bytes than artifacts name",
        "bring the store's files back, or restore a backup",
    ),
    "skill_without_project": (
        "uploaded skills are of projects that are not there",
        "run `kdskills projects create` for these",
    ),
    "version_without_skill": (
        "versions are of skills that are not there",
        "restore a backup, or upload the skill again",
    ),
    "active_version_missing": (
        "skills have an active version that is not there",
        "activate another version, or upload it again",
    ),
    "pin_without_version": ("running work holds versions that are not there", "cancel that work, and start it again"),
    "version_files_missing": (
        "files of versions are not on this machine",
        "upload the version again, or restore a backup",
    ),
    "token_without_project": ("tokens are of projects that are not there", "revoke them, or make the project"),
    "folder_without_task": (
        "run folders are of tasks that are not there",
        "leave them: retention removes them when they are as old as `jobs.keep_s`",
    ),
}
"""What is looked for, by its code: what it means, and its cure."""


@dataclass
class DatabaseCheck:
    """Looks at one installation and changes nothing; blocks, but for `objects`."""

    settings: Settings
    findings: list[DatabaseFinding] = field(default_factory=list)
    rows: int = 0

    def tell(self, code: str, examples: Iterator[str] | Sequence[str]) -> None:
        """Note a finding, if there is any example of it."""
        count, named_objects = 0, []
        for example in examples:
            count += 1
            named_objects += [example[:300]] if count <= MAX_EXAMPLES else []
        if count:
            message, cure = RULES[code]
            self.findings.append(
                DatabaseFinding(code=code, message=message, count=count, examples=tuple(named_objects), cure=cure)
            )

    def revisions(self, link: sa.Connection) -> tuple[tuple[str, ...], bool]:
        """Return the revisions, and whether tables can be looked at."""
        current = current_revisions(link)
        parts = {revision.partition("_")[0]: revision for revision in current}
        behind = [part for part, head in HEADS.items() if parts.get(part, "") < head]
        ahead = [revision for part, revision in sorted(parts.items()) if revision > HEADS.get(part, "")]
        self.tell("revision_behind", behind)
        self.tell("revision_ahead", ahead)
        return tuple(sorted(current)), not behind and not ahead

    def tables(self, link: sa.Connection) -> list[tuple[str, str, int]]:
        """Look at what tables say of one another; return the objects that artifacts name."""
        tables = WorkTables()
        tasks, jobs, artifacts = tables.tasks, tables.jobs, tables.artifacts
        for table in (*tables.metadata.tables.values(), PROJECTS, SKILLS, VERSIONS, PINS, AUDIT, TOKENS):
            self.rows += link.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()

        def rows_where(*columns: Any, where: Any) -> Iterator[str]:
            for row in link.execute(sa.select(*columns).where(where)):
                yield " ".join("" if part is None else str(part) for part in row)

        def absent(table: sa.Table, *pairs: tuple[Any, Any]) -> Any:
            return ~sa.exists(
                sa.select(1)
                .select_from(table)
                .where(*(own_column == other_column for own_column, other_column in pairs))
            )

        for work in (tasks, jobs):
            over = in_states(work, sorted(TERMINAL))
            self.tell("over_without_time", rows_where(work.c.id, where=sa.and_(over, work.c.finished_at.is_(None))))
            self.tell(
                "open_with_time",
                rows_where(work.c.id, where=sa.and_(in_states(work, sorted(OPEN)), work.c.finished_at.is_not(None))),
            )
            held_rows = sa.and_(
                in_states(work, sorted(ACTIVE)), absent(tables.workers, (tables.workers.c.executor, work.c.executor))
            )
            self.tell("held_by_nobody", rows_where(work.c.id, work.c.executor, where=held_rows))
        lost_step = sa.and_(tasks.c.job_id.is_not(None), absent(jobs, (jobs.c.id, tasks.c.job_id)))
        self.tell("step_without_job", rows_where(tasks.c.id, tasks.c.job_id, where=lost_step))
        lost_artifact = sa.and_(artifacts.c.task_id.is_not(None), absent(tasks, (tasks.c.id, artifacts.c.task_id)))
        self.tell("artifact_without_task", rows_where(artifacts.c.id, artifacts.c.task_id, where=lost_artifact))
        self.tell("artifact_not_listed", self._unlisted(link, tasks, artifacts))
        same_project = (PROJECTS.c.project, SKILLS.c.project)
        self.tell(
            "skill_without_project", rows_where(SKILLS.c.project, SKILLS.c.name, where=absent(PROJECTS, same_project))
        )
        same_skill = ((SKILLS.c.project, VERSIONS.c.project), (SKILLS.c.name, VERSIONS.c.name))
        key = (VERSIONS.c.project, VERSIONS.c.name, VERSIONS.c.version)
        self.tell("version_without_skill", rows_where(*key, where=absent(SKILLS, *same_skill)))
        used = sa.and_(
            SKILLS.c.active.is_not(None), absent(VERSIONS, *same_skill, (VERSIONS.c.version, SKILLS.c.active))
        )
        self.tell("active_version_missing", rows_where(SKILLS.c.project, SKILLS.c.name, SKILLS.c.active, where=used))
        pinned = [(VERSIONS.c[name], PINS.c[name]) for name in ("project", "name", "version")]
        self.tell(
            "pin_without_version",
            rows_where(PINS.c.holder, PINS.c.name, PINS.c.version, where=absent(VERSIONS, *pinned)),
        )
        owner = (PROJECTS.c.project, TOKENS.c.project)
        self.tell("token_without_project", rows_where(TOKENS.c.id, TOKENS.c.project, where=absent(PROJECTS, owner)))
        self._folders(link, tasks)
        objects = sa.select(artifacts.c.project, artifacts.c.sha256, artifacts.c.size).distinct()
        return [(project, sha256, size) for project, sha256, size in link.execute(objects)]

    def _unlisted(self, link: sa.Connection, tasks: sa.Table, artifacts: sa.Table) -> Iterator[str]:
        """Yield artifacts that heads list and no row has."""
        listing = sa.select(tasks.c.id, tasks.c.artifacts).where(
            tasks.c.artifacts.is_not(None), tasks.c.artifacts != "[]"
        )
        listed = {
            str(artifact["artifact_id"]): str(row.id)
            for row in link.execute(listing)
            for artifact in json.loads(row.artifacts)
        }
        present = set(link.execute(sa.select(artifacts.c.id)).scalars()) if listed else set()
        for artifact, task in listed.items():
            if artifact not in present:
                yield f"{task} {artifact}"

    def _folders(self, link: sa.Connection, tasks: sa.Table) -> None:
        """Compare rows with folders on this machine."""
        versions = link.execute(sa.select(VERSIONS.c.project, VERSIONS.c.name, VERSIONS.c.version))
        places = VersionFolders(self.settings.state_dir)
        if self.settings.artifacts is None:  # else another machine may have the files, and the shared storage has them
            self.tell("version_files_missing", (" ".join(row) for row in versions if not places.folder(*row).is_dir()))
        known_tasks = set(link.execute(sa.select(tasks.c.id)).scalars())
        runs = Attempts(self.settings.state_dir).tasks()
        self.tell("folder_without_task", [item for item in runs if item not in known_tasks])

    async def objects(self, named_objects: Sequence[tuple[str, str, int]]) -> None:
        """Ask the store for every object."""
        store = ArtifactStore(open_blobs(self.settings.artifacts or str(self.settings.state_dir)))
        sizes = [(row, await store.size(row[0], row[1])) for row in named_objects]
        await store.aclose()
        words = [(f"{project} {sha256}", told_size, size) for (project, sha256, told_size), size in sizes]
        self.tell("artifact_bytes_missing", [word for word, _, size in words if size is None])
        self.tell("artifact_size_differs", [word for word, told_size, size in words if size not in {None, told_size}])


async def check_database(settings: Settings, arguments: CheckDatabaseInput) -> CheckDatabaseOutput:
    """Look for what does not fit, at one moment of the database; changes nothing."""
    file = sqlite_file(settings.work_database)
    if file is not None and not file.exists():
        raise NotFound(f"there is no database {file}", code="path_missing", path=str(file))
    check = DatabaseCheck(settings)

    def look() -> tuple[tuple[str, ...], list[tuple[str, str, int]]]:
        def ask(link: sa.Connection) -> tuple[tuple[str, ...], list[tuple[str, str, int]]]:
            revisions, readable = check.revisions(link)
            return revisions, check.tables(link) if readable else []

        with closing(Database(settings.work_database, label="the service's database")) as database:
            return database.snapshot(ask)

    revisions, named_objects = await asyncio.to_thread(look)
    if arguments.objects:
        await check.objects(named_objects)
    return CheckDatabaseOutput(
        ok=not check.findings, revisions=revisions, rows=check.rows, findings=tuple(check.findings)
    )
