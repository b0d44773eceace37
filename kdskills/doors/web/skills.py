"""Skills of a project as resources: upload, look, enable, activate, delete, download.

Every route runs the operation that the other doors run; uploads and downloads stream, and are checked by the same gate.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Final
from urllib.parse import quote

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import FileResponse, Response
from pydantic import Field
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from kdskills.app import Host
from kdskills.app.identity import Identity
from kdskills.app.operations import Context, Input, Operation
from kdskills.app.operations.calling import require_allowed, validated
from kdskills.app.operations.projects import (
    DeletedOut,
    FileInput,
    SkillOut,
    SkillsOut,
    UploadOut,
    VersionInput,
    VersionsOut,
    archive_of,
    file_of,
)
from kdskills.app.wire import json_text
from kdskills.doors.web.callers import Cursor, Limit, caller
from kdskills.doors.web.problems import PROBLEMS
from kdskills.doors.web.tools import answer
from kdskills.errors import BadRequest

PIECE: Final = 64 * 1024
FIELDS: Final = frozenset({"file", "activate"})
ACTIVATE: Final = {"true": True, "1": True, "false": False, "0": False}

Caller = Annotated[Identity, Depends(caller)]
Name = Annotated[str, Path(min_length=1, max_length=256, description="The skill's name.")]
Version = Annotated[str | None, Query(max_length=80, description="Hash of a version; the active one when omitted.")]


class PatchBody(Input):
    """What is to change."""

    enabled: bool = Field(description="Whether the gate may grant the skill.")


class ActivateBody(Input):
    """Which version is to be in use."""

    version_hash: str = Field(max_length=80, description="Hash of the version.")


BYTES: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "The bytes.", "content": {"application/octet-stream": {"schema": {"type": "string"}}}}
}
ZIP: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "The zip.", "content": {"application/zip": {"schema": {"type": "string"}}}}
}
FORM: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "The zip archive."},
                        "activate": {"type": "boolean", "description": "Whether the version becomes the one in use."},
                    },
                }
            }
        },
    }
}


def skills_router() -> APIRouter:
    """Return the routes of a project's skills."""
    router = APIRouter(prefix="/projects/{project}", tags=["skills"], responses=PROBLEMS)
    add = router.add_api_route
    add(
        "/skills:upload",
        _upload,
        methods=["POST"],
        status_code=201,
        response_model=UploadOut,
        openapi_extra=FORM,
        name="project_skills.upload",
        summary="Take a skill from a zip archive.",
    )
    add("/skills", _list, methods=["GET"], response_model=SkillsOut, summary="List uploaded skills.")
    skill_path = "/skills/{name}"
    add(f"{skill_path}:activate", _activate, methods=["POST"], response_model=SkillOut, summary="Put a version in use.")
    add(skill_path, _get, methods=["GET"], response_model=SkillOut, summary="Show one uploaded skill.")
    add(skill_path, _patch, methods=["PATCH"], response_model=SkillOut, summary="Enable or disable a skill.")
    add(skill_path, _delete, methods=["DELETE"], response_model=DeletedOut, summary="Delete a skill.")
    add(
        f"{skill_path}/versions",
        _versions,
        methods=["GET"],
        response_model=VersionsOut,
        summary="List a skill's versions.",
    )
    add(
        f"{skill_path}/archive",
        _archive,
        methods=["GET"],
        response_class=Response,
        responses=ZIP,
        summary="Give a version as a zip archive.",
    )
    add(
        f"{skill_path}/files/{{path:path}}",
        _file,
        methods=["GET"],
        response_class=Response,
        responses=BYTES,
        summary="Give one file of a version.",
    )
    return router


async def _list(request: Request, identity: Caller, limit: Limit = 100, cursor: Cursor = None) -> Response:
    return await answer(request, "project_skills.list", {"limit": limit, "cursor": cursor}, identity)


async def _get(request: Request, identity: Caller, name: Name) -> Response:
    return await answer(request, "project_skills.get", {"skill": name}, identity)


async def _patch(request: Request, identity: Caller, name: Name, body: PatchBody) -> Response:
    return await answer(request, "project_skills.patch", {"skill": name, "enabled": body.enabled}, identity)


async def _delete(request: Request, identity: Caller, name: Name) -> Response:
    return await answer(request, "project_skills.delete", {"skill": name}, identity)


async def _activate(request: Request, identity: Caller, name: Name, body: ActivateBody) -> Response:
    arguments = {"skill": name, "version_hash": body.version_hash}
    return await answer(request, "project_skills.activate", arguments, identity)


async def _versions(
    request: Request, identity: Caller, name: Name, limit: Limit = 100, cursor: Cursor = None
) -> Response:
    arguments = {"skill": name, "limit": limit, "cursor": cursor}
    return await answer(request, "project_skills.versions", arguments, identity)


async def _archive(request: Request, identity: Caller, name: Name, version: Version = None) -> Response:
    host: Host = request.app.state.host
    row = _row(host, "project_skills.archive")
    require_allowed(row, identity)
    arguments = validated(row, {"skill": name, "version": version})
    assert isinstance(arguments, VersionInput)
    version_hash, path = await archive_of(host.projects, arguments, _context(request, identity))
    return _download(path, f"{name}.zip", "application/zip", version_hash)


async def _file(request: Request, identity: Caller, name: Name, path: str, version: Version = None) -> Response:
    host: Host = request.app.state.host
    row = _row(host, "project_skills.file")
    require_allowed(row, identity)
    arguments = validated(row, {"skill": name, "version": version, "path": path})
    assert isinstance(arguments, FileInput)
    version_hash, file = await file_of(host.projects, arguments, _context(request, identity))
    return _download(file.path, PurePosixPath(path).name, "application/octet-stream", version_hash)


def _download(path: Any, name: str, kind: str, version: str) -> Response:
    """Answer with a file as bytes to keep: what others wrote is never shown as a page of this service."""
    headers = {
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "X-Skill-Version": version,
    }
    return FileResponse(path, media_type=kind, headers=headers)


async def _upload(
    request: Request,
    identity: Caller,
    activate: Annotated[bool | None, Query(description="As the form's field of that name.")] = None,
) -> Response:
    host: Host = request.app.state.host
    require_allowed(_row(host, "project_skills.upload"), identity)
    with host.telling_operator():
        form = await _form(request)
        try:
            file, form_activation = _fields(form)
            activation = activate if activate is not None else form_activation
            author = _context(request, identity).author
            report = await host.projects.upload(identity.project, _pieces(file), activate=activation, **author)
        finally:
            await form.close()
    return Response(json_text(UploadOut.of(report)), 201, media_type="application/json")


async def _form(request: Request) -> FormData:
    """Read the form; its file goes to disk as it comes."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        raise BadRequest("send the archive as multipart/form-data", code="unsupported_media_type")
    parser = MultiPartParser(request.headers, request.stream(), max_files=1, max_fields=4, max_part_size=1024)
    form: FormData | None = None
    try:
        form = await parser.parse()
    except ClientDisconnect:
        raise BadRequest("the request ended before its body did") from None
    except (MultiPartException, UnicodeError, KeyError) as error:
        raise BadRequest(f"the form cannot be read: {getattr(error, 'message', 'it is broken')}") from None
    finally:
        _close_others(parser, form)
    return form


def _close_others(parser: MultiPartParser, form: FormData | None) -> None:
    """Close files of parts that never ended: the parser forgets them unless it was the form that was wrong."""
    form_files = [value.file for value in form.values() if isinstance(value, UploadFile)] if form is not None else []
    for file in getattr(parser, "_files_to_close_on_error", ()):
        if not any(file is form_file for form_file in form_files):
            file.close()


def _fields(form: FormData) -> tuple[UploadFile, bool]:
    """Return the archive and whether it is to be activated. Raises BadRequest."""
    file, activation = form.get("file"), form.get("activate", "true")
    unknown = sorted(set(form) - FIELDS)
    if unknown:
        raise BadRequest(
            "the form has a field `file`, and may have `activate`",
            errors=[{"path": f"/{name[:64]}", "problem": "unknown"} for name in unknown],
        )
    if not isinstance(file, UploadFile):
        raise BadRequest("the form has no file `file`", errors=[{"path": "/file", "problem": "missing"}])
    if not isinstance(activation, str) or activation.lower() not in ACTIVATE:
        raise BadRequest("activate is true or false", errors=[{"path": "/activate", "problem": "not true or false"}])
    return file, ACTIVATE[activation.lower()]


async def _pieces(file: UploadFile) -> AsyncIterator[bytes]:
    while piece := await file.read(PIECE):
        yield piece


def _row(host: Host, name: str) -> Operation:
    return host.operations[name]


def _context(request: Request, identity: Identity) -> Context:
    return Context(identity=identity, request_id=request.state.request_id)
