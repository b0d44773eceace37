"""`projects.*` and `project_skills.*`: the projects of the service and what is uploaded to them.

Archives and files are answered in pieces, which fit through every door.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterable, AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field

from kdskills.app.operations.bundles import visible_skills
from kdskills.app.operations.models import (
    Finding,
    Input,
    Output,
    PageInput,
    PageOutput,
    ProjectInput,
    page_by_name,
    page_by_time,
)
from kdskills.errors import BadRequest, NotFound
from kdskills.skills.safe_open import file_digest

if TYPE_CHECKING:
    from kdskills.app.operations.table import Context
    from kdskills.projects.records import Project, SkillFile, SkillState
    from kdskills.projects.service import Projects


INLINE: Final = 1024 * 1024
"""Most bytes of an archive given within arguments; larger ones go by file or by HTTP's own upload."""


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


class VersionsOut(PageOutput):
    """A skill's versions, the latest first."""

    skill: str
    versions: tuple[VersionOut, ...]


class DeletedOut(Output):
    """What was deleted."""

    skill: str
    deleted: bool = True


def _project(project: Project, *, local: bool) -> ProjectOut:
    return ProjectOut.of(project, project=project.name, bundle=project.bundle if local else None)


async def list_projects(projects: Projects, arguments: PageInput, context: Context) -> ProjectsOut:
    """List all projects; for callers elsewhere their own."""
    identity = context.identity
    mine = [each for each in await projects.projects() if identity.account or each.name == identity.project]
    page, following = page_by_name(mine, arguments, lambda each: each.name)
    return ProjectsOut(projects=tuple(_project(each, local=identity.local) for each in page), next_cursor=following)


async def create_project(projects: Projects, arguments: CreateProject, context: Context) -> ProjectOut:
    """Make a project, or change the bundle of one."""
    return _project(await projects.create(arguments.project, bundle=arguments.bundle, who=context.author), local=True)


async def upload(projects: Projects, arguments: UploadInput, context: Context) -> UploadOut:
    """Take a skill from an archive on this machine or within the arguments."""
    if (arguments.path is None) == (arguments.data is None):
        raise BadRequest("give either path or data", errors=[{"path": "/path", "problem": "one of path and data"}])
    source: Path | AsyncIterable[bytes]
    if arguments.path is not None:
        source = arguments.path
        if not source.is_file():
            raise BadRequest(f"there is no file at {source}", errors=[{"path": "/path", "problem": "no file"}])
    else:
        try:
            source = _once(base64.b64decode(arguments.data or "", validate=True))
        except ValueError:  # of base64's own kind for wrong letters, of the plain kind for letters beyond ASCII
            raise BadRequest("data is not base64", errors=[{"path": "/data", "problem": "not base64"}]) from None
    project = arguments.project_of(context)
    return UploadOut.of(await projects.upload(project, source, activate=arguments.activate, who=context.author))


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _readable(projects: Projects, context: Context, project: str, states: list[SkillState]) -> list[SkillState]:
    """Return those of *states* the caller may read: all for who may change them, else what the policy grants."""
    identity = context.identity
    if identity.may("skills:write") or not states:
        return states
    visible = visible_skills(await projects.view(project, identity.consumer, identity.held_tools), identity)
    return [state for state in states if state.full_id in visible and visible[state.full_id].layer == "project"]


async def readable_skill(projects: Projects, arguments: SkillInput, context: Context) -> tuple[str, SkillState]:
    """Return the project, and one skill of it. Raises NotFound, the same for what the caller may not read."""
    project, name = arguments.project_of(context), arguments.skill
    state = await projects.get(project, name)
    if not await _readable(projects, context, project, [state]):
        raise NotFound(f"there is no skill {name!r} in project {project!r}", skill=name, project=project)
    return project, state


async def list_skills(projects: Projects, arguments: SkillListInput, context: Context) -> SkillsOut:
    """List the uploaded skills the caller may read."""
    project = arguments.project_of(context)
    states = await _readable(projects, context, project, await projects.list(project))
    page, following = page_by_name(states, arguments, lambda each: each.name)
    return SkillsOut(
        project=project, skills=tuple(SkillOut.of(state, skill=state.name) for state in page), next_cursor=following
    )


async def get_skill(projects: Projects, arguments: SkillInput, context: Context) -> SkillOut:
    """Show one uploaded skill."""
    return SkillOut.of((await readable_skill(projects, arguments, context))[1], skill=arguments.skill)


async def patch_skill(projects: Projects, arguments: PatchInput, context: Context) -> SkillOut:
    """Enable or disable a skill."""
    project = arguments.project_of(context)
    state = await projects.patch(project, arguments.skill, enabled=arguments.enabled, who=context.author)
    return SkillOut.of(state, skill=arguments.skill)


async def delete_skill(projects: Projects, arguments: SkillInput, context: Context) -> DeletedOut:
    """Delete a skill; versions in use stay until their work ends."""
    await projects.delete(arguments.project_of(context), arguments.skill, who=context.author)
    return DeletedOut(skill=arguments.skill)


async def activate_version(projects: Projects, arguments: ActivateInput, context: Context) -> SkillOut:
    """Put a version in use."""
    project = arguments.project_of(context)
    state = await projects.activate(project, arguments.skill, arguments.version_hash, who=context.author)
    return SkillOut.of(state, skill=arguments.skill)


async def list_versions(projects: Projects, arguments: VersionListInput, context: Context) -> VersionsOut:
    """List a skill's versions with their files."""
    project, _ = await readable_skill(projects, arguments, context)
    versions = await projects.versions(project, arguments.skill)
    page, following = page_by_time(versions, arguments, lambda each: (each.created_at, each.version))
    return VersionsOut(skill=arguments.skill, versions=tuple(map(VersionOut.of, page)), next_cursor=following)


class VersionInput(SkillInput):
    """A version of a skill."""

    version: str | None = Field(None, max_length=80, description="Hash of a version; none means the active one.")


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


async def archive_of(projects: Projects, arguments: VersionInput, context: Context) -> tuple[str, Path]:
    """Return a version and its zip on this machine, for doors that stream files. Raises NotFound as `readable_skill`."""
    project, _ = await readable_skill(projects, arguments, context)
    version = (await projects.version(project, arguments.skill, arguments.version)).version
    return version, await projects.archive(project, arguments.skill, version)


async def file_of(projects: Projects, arguments: FileInput, context: Context) -> tuple[str, SkillFile]:
    """Return a version and one of its files on this machine, for doors that stream files. Raises as `archive_of`."""
    project, _ = await readable_skill(projects, arguments, context)
    version = (await projects.version(project, arguments.skill, arguments.version)).version
    return version, await projects.file(project, arguments.skill, arguments.path, version)


async def archive(projects: Projects, arguments: PieceInput, context: Context) -> PieceOut:
    """Give a piece of a version as a zip archive, the same bytes everywhere."""
    version, path = await archive_of(projects, arguments, context)
    size, sha256 = await asyncio.to_thread(file_digest, path.parent, path.name)
    return await asyncio.to_thread(_piece, arguments, version, None, path, size, sha256)


async def file(projects: Projects, arguments: FileInput, context: Context) -> PieceOut:
    """Give a piece of one file of a version."""
    version, skill_file = await file_of(projects, arguments, context)
    size, sha256 = skill_file.file.size, skill_file.file.sha256
    return await asyncio.to_thread(_piece, arguments, version, arguments.path, skill_file.path, size, sha256)


def _piece(arguments: PieceInput, version: str, path: str | None, source: Path, size: int, sha256: str) -> PieceOut:
    with source.open("rb") as stream:
        stream.seek(arguments.offset)
        data = stream.read(arguments.limit)
    after = arguments.offset + len(data)
    return PieceOut.of(
        arguments,
        version=version,
        path=path,
        size=size,
        sha256=sha256,
        next_offset=after if after < size else None,
        data=base64.b64encode(data).decode("ascii"),
    )
