"""`projects.*` and `project_skills.*`: the projects of the service and what is uploaded to them."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field

from kdskills.app.operations.models import Finding, Input, Output
from kdskills.app.operations.paging import PageInput, PageOutput, page_by_name, page_by_time
from kdskills.app.operations.scoped import ProjectInput, readable, readable_skill, who
from kdskills.app.operations.table import Context, Implementation
from kdskills.errors import BadRequest
from kdskills.skills.archives.zip_format import RULES

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from kdskills.app.host import Host
    from kdskills.app.projects import Project, SkillState, SkillVersion

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
    def of(cls, found: SkillVersion) -> VersionOut:
        """Return *found* as an answer."""
        return cls(
            version=found.version,
            full_id=found.full_id,
            description=found.description,
            active=found.active,
            pins=found.pins,
            size=found.size,
            files=tuple(FileRow.model_validate(file._asdict()) for file in found.files),
            tree_digest=found.tree_digest,
            created_at=found.created_at,
            created_by=found.created_by,
            diagnostics=tuple(Finding.of(each) for each in found.diagnostics),
        )


class VersionsOut(PageOutput):
    """A skill's versions, the latest first."""

    skill: str
    versions: tuple[VersionOut, ...]


class DeletedOut(Output):
    """What was deleted."""

    skill: str
    deleted: bool = True


def _project(found: Project, *, local: bool) -> ProjectOut:
    bundle = found.bundle if local else None
    return ProjectOut(project=found.name, generation=found.generation, created_at=found.created_at, bundle=bundle)


async def list_projects(host: Host, given: PageInput, context: Context) -> ProjectsOut:
    """List all projects; for callers elsewhere their own."""
    identity = context.identity
    found = await host.projects.projects()
    mine = [each for each in found if identity.account or each.name == identity.project]
    page, following = page_by_name(mine, given, lambda each: each.name)
    rows = tuple(_project(each, local=identity.local) for each in page)
    return ProjectsOut(projects=rows, next_cursor=following)


async def create_project(host: Host, given: CreateProject, context: Context) -> ProjectOut:
    """Make a project, or change the bundle of one."""
    request = context.request_id
    made = await host.projects.create(given.project, bundle=given.bundle, who=who(context), request_id=request)
    return _project(made, local=True)


async def upload(host: Host, given: UploadInput, context: Context) -> UploadOut:
    """Take a skill from an archive on this machine or within the arguments."""
    if (given.path is None) == (given.data is None):
        raise BadRequest("give either path or data", errors=[{"path": "/path", "problem": "one of path and data"}])
    if given.path is not None:
        if not given.path.is_file():
            raise BadRequest(f"there is no file at {given.path}", errors=[{"path": "/path", "problem": "no file"}])
        return await upload_from(host, given.path, context, project=given.of(context), activate=given.activate)
    try:
        data = base64.b64decode(given.data or "", validate=True)
    except ValueError:  # of base64's own kind for wrong letters, of the plain kind for letters beyond ASCII
        raise BadRequest("data is not base64", errors=[{"path": "/data", "problem": "not base64"}]) from None
    return await upload_from(host, _once(data), context, project=given.of(context), activate=given.activate)


async def upload_from(
    host: Host, source: Path | AsyncIterable[bytes], context: Context, *, project: str, activate: bool
) -> UploadOut:
    """Take a skill from an archive as a door has it: a file, or bytes as they come; the door checks who may.

    Raises:
        ArchiveRefused: The archive breaks a rule; nothing is kept.
    """
    request = context.request_id
    done = await host.projects.upload(project, source, activate=activate, who=who(context), request_id=request)
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


async def list_skills(host: Host, given: SkillListInput, context: Context) -> SkillsOut:
    """List the uploaded skills the caller may read."""
    project = given.of(context)
    found = await readable(host, context, project, await host.projects.list(project))
    page, following = page_by_name(found, given, lambda each: each.name)
    return SkillsOut(project=project, skills=tuple(SkillOut.of(each) for each in page), next_cursor=following)


async def get_skill(host: Host, given: SkillInput, context: Context) -> SkillOut:
    """Show one uploaded skill."""
    return SkillOut.of(await readable_skill(host, context, given.of(context), given.skill))


async def patch_skill(host: Host, given: PatchInput, context: Context) -> SkillOut:
    """Enable or disable a skill."""
    project, request = given.of(context), context.request_id
    done = await host.projects.patch(project, given.skill, enabled=given.enabled, who=who(context), request_id=request)
    return SkillOut.of(done)


async def delete_skill(host: Host, given: SkillInput, context: Context) -> DeletedOut:
    """Delete a skill; versions in use stay until their work ends."""
    await host.projects.delete(given.of(context), given.skill, who=who(context), request_id=context.request_id)
    return DeletedOut(skill=given.skill)


async def activate_version(host: Host, given: ActivateInput, context: Context) -> SkillOut:
    """Put a version in use."""
    project, request = given.of(context), context.request_id
    done = await host.projects.activate(project, given.skill, given.version_hash, who=who(context), request_id=request)
    return SkillOut.of(done)


async def list_versions(host: Host, given: VersionListInput, context: Context) -> VersionsOut:
    """List a skill's versions with their files."""
    project = given.of(context)
    await readable_skill(host, context, project, given.skill)
    found = await host.projects.versions(project, given.skill)
    page, following = page_by_time(found, given, lambda each: (each.created_at, each.version))
    versions = tuple(VersionOut.of(each) for each in page)
    return VersionsOut(skill=given.skill, versions=versions, next_cursor=following)


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
