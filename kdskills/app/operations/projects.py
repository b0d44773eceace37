"""`projects.*` and `project_skills.*`: the projects of the service and what is uploaded to them.

Archives and files are answered in pieces, which fit through every door.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field

from kdskills.app.operations.models import Finding, Input, Output
from kdskills.app.operations.paging import PageInput, PageOutput, page_by_name, page_by_time
from kdskills.app.operations.scoped import ProjectInput, audit_name, readable, readable_skill
from kdskills.app.operations.table import Context, Implementation
from kdskills.errors import BadRequest
from kdskills.projects.folders import file_digest
from kdskills.skills.zip_format import RULES

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from kdskills.app.host import Host
    from kdskills.projects.model import Project, SkillFile, SkillState, SkillVersion


INLINE: Final = 1024 * 1024
"""Most bytes of an archive given within arguments; larger ones go by file or by HTTP's own upload."""
READ: Final = ("not_found", "project_invalid", "database_unavailable")


class ProjectOut(Output):
    """One project; `bundle` is told to the account of the machine alone."""

    project: str
    generation: int
    created_at: datetime
    bundle: str | None = None


class ProjectsOut(PageOutput):
    """Projects, sorted by name."""

    projects: tuple[ProjectOut, ...]


class CreateProject(Input):
    """A project and, if it has one, its bundle."""

    project: str = Field(max_length=64, description="Its name: lower-case letters, digits, `-` and `_`.")
    bundle: Path | None = Field(None, description="Absolute path of its bundle on the service's machine.")


class SkillOut(Output):
    """An uploaded skill; `active` is the version in use."""

    skill: str
    full_id: str
    enabled: bool
    active: str | None
    description: str
    created_at: datetime
    changed_at: datetime

    @classmethod
    def of(cls, state: SkillState) -> SkillOut:
        """Return *state* as an answer."""
        return cls(
            skill=state.name,
            full_id=state.full_id,
            enabled=state.enabled,
            active=state.active,
            description=state.description,
            created_at=state.created_at,
            changed_at=state.changed_at,
        )


class SkillsOut(PageOutput):
    """Uploaded skills the caller may read, sorted by name."""

    project: str
    skills: tuple[SkillOut, ...]


class SkillListInput(ProjectInput, PageInput):
    """Which page of a project's uploaded skills."""


class UploadInput(ProjectInput):
    """An archive, given in one of two ways."""

    path: Path | None = Field(None, description="The zip on the machine kdskills runs on, for its own account.")
    data: str | None = Field(None, max_length=4 * INLINE // 3 + 4, description="The zip in base64, at most 1 MiB.")
    activate: bool = Field(default=True, description="Whether the version becomes the one in use.")


class UploadOut(Output):
    """What an upload came to; `enabled` is what it was before."""

    skill: str
    version: str
    created: bool
    active: bool
    enabled: bool
    diagnostics: tuple[Finding, ...]


class SkillInput(ProjectInput):
    """One uploaded skill."""

    skill: str = Field(min_length=1, max_length=256, description="The skill's name.")


class VersionListInput(SkillInput, PageInput):
    """Which page of a skill's versions."""


class ActivateInput(SkillInput):
    """Which version is to be in use."""

    version_hash: str = Field(max_length=80, description="Hash of the version.")


class PatchInput(SkillInput):
    """What is to change."""

    enabled: bool = Field(description="Whether the gate may grant the skill.")


class FileRow(Output):
    """One file of a version."""

    path: str
    size: int
    sha256: str
    executable: bool


class VersionOut(Output):
    """One version; `pins` counts the running work that holds it."""

    version: str
    full_id: str
    description: str
    active: bool
    pins: int
    size: int
    files: tuple[FileRow, ...]
    tree_digest: str
    created_at: datetime
    created_by: str
    diagnostics: tuple[Finding, ...]

    @classmethod
    def of(cls, version: SkillVersion) -> VersionOut:
        """Return *version* as an answer."""
        return cls(
            version=version.version,
            full_id=version.full_id,
            description=version.description,
            active=version.active,
            pins=version.pins,
            size=version.size,
            files=tuple(FileRow.model_validate(file._asdict()) for file in version.files),
            tree_digest=version.tree_digest,
            created_at=version.created_at,
            created_by=version.created_by,
            diagnostics=tuple(Finding.of(each) for each in version.diagnostics),
        )


class VersionsOut(PageOutput):
    """A skill's versions, the latest first."""

    skill: str
    versions: tuple[VersionOut, ...]


class DeletedOut(Output):
    """What was deleted."""

    skill: str
    deleted: bool = True


def _project(project: Project, *, local: bool) -> ProjectOut:
    bundle = project.bundle if local else None
    return ProjectOut(project=project.name, generation=project.generation, created_at=project.created_at, bundle=bundle)


async def list_projects(host: Host, arguments: PageInput, context: Context) -> ProjectsOut:
    """List all projects; for callers elsewhere their own."""
    identity = context.identity
    projects = await host.projects.projects()
    mine = [each for each in projects if identity.account or each.name == identity.project]
    page, following = page_by_name(mine, arguments, lambda each: each.name)
    rows = tuple(_project(each, local=identity.local) for each in page)
    return ProjectsOut(projects=rows, next_cursor=following)


async def create_project(host: Host, arguments: CreateProject, context: Context) -> ProjectOut:
    """Make a project, or change the bundle of one."""
    request = context.request_id
    project = await host.projects.create(
        arguments.project, bundle=arguments.bundle, who=audit_name(context), request_id=request
    )
    return _project(project, local=True)


async def upload(host: Host, arguments: UploadInput, context: Context) -> UploadOut:
    """Take a skill from an archive on this machine or within the arguments."""
    if (arguments.path is None) == (arguments.data is None):
        raise BadRequest("give either path or data", errors=[{"path": "/path", "problem": "one of path and data"}])
    if arguments.path is not None:
        if not arguments.path.is_file():
            raise BadRequest(f"there is no file at {arguments.path}", errors=[{"path": "/path", "problem": "no file"}])
        return await upload_from(
            host, arguments.path, context, project=arguments.project_of(context), activate=arguments.activate
        )
    try:
        data = base64.b64decode(arguments.data or "", validate=True)
    except ValueError:  # of base64's own kind for wrong letters, of the plain kind for letters beyond ASCII
        raise BadRequest("data is not base64", errors=[{"path": "/data", "problem": "not base64"}]) from None
    return await upload_from(
        host, _once(data), context, project=arguments.project_of(context), activate=arguments.activate
    )


async def upload_from(
    host: Host, source: Path | AsyncIterable[bytes], context: Context, *, project: str, activate: bool
) -> UploadOut:
    """Take a skill from an archive as a door has it: a file, or bytes as they come; the door checks who may.

    Raises:
        ArchiveRefused: The archive breaks a rule; nothing is kept.
    """
    request = context.request_id
    done = await host.projects.upload(project, source, activate=activate, who=audit_name(context), request_id=request)
    return UploadOut(
        skill=done.skill,
        version=done.version,
        created=done.created,
        active=done.active,
        enabled=done.enabled,
        diagnostics=tuple(Finding.of(each) for each in done.diagnostics),
    )


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def list_skills(host: Host, arguments: SkillListInput, context: Context) -> SkillsOut:
    """List the uploaded skills the caller may read."""
    project = arguments.project_of(context)
    states = await readable(host, context, project, await host.projects.list(project))
    page, following = page_by_name(states, arguments, lambda each: each.name)
    return SkillsOut(project=project, skills=tuple(SkillOut.of(each) for each in page), next_cursor=following)


async def get_skill(host: Host, arguments: SkillInput, context: Context) -> SkillOut:
    """Show one uploaded skill."""
    return SkillOut.of(await readable_skill(host, context, arguments.project_of(context), arguments.skill))


async def patch_skill(host: Host, arguments: PatchInput, context: Context) -> SkillOut:
    """Enable or disable a skill."""
    project, request = arguments.project_of(context), context.request_id
    done = await host.projects.patch(
        project, arguments.skill, enabled=arguments.enabled, who=audit_name(context), request_id=request
    )
    return SkillOut.of(done)


async def delete_skill(host: Host, arguments: SkillInput, context: Context) -> DeletedOut:
    """Delete a skill; versions in use stay until their work ends."""
    await host.projects.delete(
        arguments.project_of(context), arguments.skill, who=audit_name(context), request_id=context.request_id
    )
    return DeletedOut(skill=arguments.skill)


async def activate_version(host: Host, arguments: ActivateInput, context: Context) -> SkillOut:
    """Put a version in use."""
    project, request = arguments.project_of(context), context.request_id
    done = await host.projects.activate(
        project, arguments.skill, arguments.version_hash, who=audit_name(context), request_id=request
    )
    return SkillOut.of(done)


async def list_versions(host: Host, arguments: VersionListInput, context: Context) -> VersionsOut:
    """List a skill's versions with their files."""
    project = arguments.project_of(context)
    await readable_skill(host, context, project, arguments.skill)
    all_versions = await host.projects.versions(project, arguments.skill)
    page, following = page_by_time(all_versions, arguments, lambda each: (each.created_at, each.version))
    versions = tuple(VersionOut.of(each) for each in page)
    return VersionsOut(skill=arguments.skill, versions=versions, next_cursor=following)


LIST_PROJECTS = Implementation(PageInput, ProjectsOut, ("database_unavailable",), list_projects)
CREATE_PROJECT = Implementation(
    CreateProject, ProjectOut, ("project_invalid", "bundle_path_relative", "database_unavailable"), create_project
)
UPLOAD = Implementation(UploadInput, UploadOut, ("not_yours_to_say", "id_taken", *READ, *RULES), upload)
LIST_SKILLS = Implementation(SkillListInput, SkillsOut, READ, list_skills)
GET_SKILL = Implementation(SkillInput, SkillOut, READ, get_skill)
PATCH_SKILL = Implementation(PatchInput, SkillOut, READ, patch_skill)
DELETE_SKILL = Implementation(SkillInput, DeletedOut, READ, delete_skill)
LIST_VERSIONS = Implementation(VersionListInput, VersionsOut, READ, list_versions)
ACTIVATE = Implementation(ActivateInput, SkillOut, ("id_taken", *READ), activate_version)


VERSION: Final = "Hash of a version; none means the active one."


class VersionInput(SkillInput):
    """A version of a skill."""

    version: str | None = Field(None, max_length=80, description=VERSION)


class PieceInput(VersionInput):
    """A piece of a file, so that no answer is larger than asked for."""

    offset: int = Field(0, ge=0, description="Where to begin, in bytes.")
    limit: int = Field(256 * 1024, ge=0, le=INLINE, description="Most bytes of the piece.")


class FileInput(PieceInput):
    """A piece of one file of a skill."""

    path: str = Field(min_length=1, max_length=1024, description="Path below the skill's folder, as listed.")


class PieceOut(Output):
    """A piece in base64 of something with `size` bytes; `next_offset` is None at the end."""

    skill: str
    version: str
    path: str | None
    size: int
    sha256: str
    offset: int
    next_offset: int | None
    data: str


async def archive_of(host: Host, arguments: VersionInput, context: Context) -> tuple[str, Path]:
    """Return a version and its zip on this machine, for doors that stream files.

    Raises:
        NotFound: There is none, or the caller may not read it.
    """
    project = arguments.project_of(context)
    await readable_skill(host, context, project, arguments.skill)
    version = (await host.projects.version(project, arguments.skill, arguments.version)).version
    return version, await host.projects.archive(project, arguments.skill, version)


async def file_of(host: Host, arguments: FileInput, context: Context) -> tuple[str, SkillFile]:
    """Return a version and one of its files on this machine, for doors that stream files.

    Raises:
        NotFound: There is none, or the caller may not read it.
    """
    project = arguments.project_of(context)
    await readable_skill(host, context, project, arguments.skill)
    version = (await host.projects.version(project, arguments.skill, arguments.version)).version
    return version, await host.projects.file(project, arguments.skill, arguments.path, version)


def _read(path: Path, offset: int, limit: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(limit)


async def _piece(
    arguments: PieceInput, version: str, path: str | None, source: Path, size: int, sha256: str
) -> PieceOut:
    data = await asyncio.to_thread(_read, source, arguments.offset, arguments.limit)
    after = arguments.offset + len(data)
    return PieceOut(
        skill=arguments.skill,
        version=version,
        path=path,
        size=size,
        sha256=sha256,
        offset=arguments.offset,
        next_offset=after if after < size else None,
        data=base64.b64encode(data).decode("ascii"),
    )


async def archive(host: Host, arguments: PieceInput, context: Context) -> PieceOut:
    """Give a piece of a version as a zip archive, the same bytes everywhere."""
    version, zip_path = await archive_of(host, arguments, context)
    size = (await asyncio.to_thread(zip_path.stat)).st_size
    sha256 = await asyncio.to_thread(file_digest, zip_path)
    return await _piece(arguments, version, None, zip_path, size, sha256)


async def file(host: Host, arguments: FileInput, context: Context) -> PieceOut:
    """Give a piece of one file of a version."""
    version, skill_file = await file_of(host, arguments, context)
    return await _piece(
        arguments, version, arguments.path, skill_file.path, skill_file.file.size, skill_file.file.sha256
    )


ARCHIVE = Implementation(PieceInput, PieceOut, READ, archive)
FILE = Implementation(FileInput, PieceOut, READ, file)
