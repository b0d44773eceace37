"""`project_skills.archive` and `.file`: what a version holds, in pieces that fit through every door."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field

from kdskills.app.operations.models import Output
from kdskills.app.operations.projects import INLINE, READ, SkillInput
from kdskills.app.operations.scoped import readable_skill
from kdskills.app.operations.table import Context, Implementation
from kdskills.app.projects.folders import file_digest

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.app.projects import SkillFile

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


async def archive_of(host: Host, given: VersionInput, context: Context) -> tuple[str, Path]:
    """Return a version and its zip on this machine, for doors that stream files.

    Raises:
        NotFound: There is none, or the caller may not read it.
    """
    project = given.of(context)
    await readable_skill(host, context, project, given.skill)
    version = (await host.projects.version(project, given.skill, given.version)).version
    return version, await host.projects.archive(project, given.skill, version)


async def file_of(host: Host, given: FileInput, context: Context) -> tuple[str, SkillFile]:
    """Return a version and one of its files on this machine, for doors that stream files.

    Raises:
        NotFound: There is none, or the caller may not read it.
    """
    project = given.of(context)
    await readable_skill(host, context, project, given.skill)
    version = (await host.projects.version(project, given.skill, given.version)).version
    return version, await host.projects.file(project, given.skill, given.path, version)


def _read(place: Path, offset: int, limit: int) -> bytes:
    with place.open("rb") as stream:
        stream.seek(offset)
        return stream.read(limit)


async def _piece(given: PieceInput, version: str, path: str | None, place: Path, size: int, sha256: str) -> PieceOut:
    data = await asyncio.to_thread(_read, place, given.offset, given.limit)
    after = given.offset + len(data)
    return PieceOut(
        skill=given.skill,
        version=version,
        path=path,
        size=size,
        sha256=sha256,
        offset=given.offset,
        next_offset=after if after < size else None,
        data=base64.b64encode(data).decode("ascii"),
    )


async def archive(host: Host, given: PieceInput, context: Context) -> PieceOut:
    """Give a piece of a version as a zip archive, the same bytes everywhere."""
    version, place = await archive_of(host, given, context)
    size = (await asyncio.to_thread(place.stat)).st_size
    sha256 = await asyncio.to_thread(file_digest, place)
    return await _piece(given, version, None, place, size, sha256)


async def file(host: Host, given: FileInput, context: Context) -> PieceOut:
    """Give a piece of one file of a version."""
    version, found = await file_of(host, given, context)
    return await _piece(given, version, given.path, found.place, found.file.size, found.file.sha256)


ARCHIVE = Implementation(PieceInput, PieceOut, READ, archive)
FILE = Implementation(FileInput, PieceOut, READ, file)
