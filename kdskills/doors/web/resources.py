"""A project's tasks, jobs and skills as resources.

Every route runs the operation that the other doors run; events, logs, uploads and downloads stream, and are checked by the
same gate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, Field
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from kdskills.app.authentication import Unauthenticated
from kdskills.app.identity import Identity
from kdskills.app.operations import Context, Input
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
from kdskills.app.operations.table import Emit
from kdskills.app.operations.work_outputs import JobList, JobSnapshot, LogsOutput, TaskList, TaskSnapshot
from kdskills.app.wire import json_text
from kdskills.doors.web.entrance import Caller, Cursor, Limit
from kdskills.doors.web.events import (
    CHECK_S,
    RETRY,
    WAITING_STILL,
    Allowed,
    Drain,
    event_frames,
    failed,
    frame,
    last_seen,
    stream_of,
    unless,
)
from kdskills.doors.web.problems import PROBLEMS
from kdskills.doors.web.tools import answer, host_of
from kdskills.errors import BadRequest, KdskillsError, NotFound

EVENTS: Final = "text/event-stream"
FOLLOW_S: Final = 10.0
Kind = Literal["task", "job"]
Status = Literal["queued", "starting", "running", "succeeded", "failed", "canceled"]

Item = Annotated[str, Path(min_length=1, max_length=128, description="Its id.")]
Offset = Annotated[
    int, Query(ge=-(2**62), le=2**62, description="Byte to begin at; a negative one counts from the end.")
]
Tail = Annotated[int, Query(ge=0, le=65_536, description="Bytes of the ends of outputs to show.")]
After = Annotated[int | None, Query(ge=0, le=2**62, description="As the header Last-Event-ID.")]
Session = Annotated[str | None, Query(max_length=200, description="Only of this session.")]
Step = Annotated[int | None, Query(ge=0, le=100_000, description="Index of the step; the latest that began otherwise.")]


def _bodies(description: str, kind: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": description, "content": {kind: {"schema": {"type": "string"}}}}}


STREAM: Final = _bodies("Server-sent events.", EVENTS)
LOGS: Final = _bodies("A piece; or, asked for as `text/event-stream`, all pieces as they come.", EVENTS)
BYTES: Final = _bodies("The bytes.", "application/octet-stream")
ZIP: Final = _bodies("The zip.", "application/zip")

work_routes = APIRouter(prefix="/projects/{project}", tags=["work"], responses=PROBLEMS)
skill_routes = APIRouter(prefix="/projects/{project}", tags=["skills"], responses=PROBLEMS)


@work_routes.get("/tasks", response_model=TaskList, summary="List tasks, the newest first.")
async def _tasks(
    request: Request,
    identity: Caller,
    status: Status | None = None,
    session_id: Session = None,
    job_id: Annotated[str | None, Query(min_length=1, max_length=128, description="Only steps of this job.")] = None,
    steps: Annotated[bool, Query(description="Whether tasks that are steps of jobs are listed.")] = True,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    arguments = {"status": status, "session_id": session_id, "job_id": job_id, "steps": steps}
    return await answer(request, "tasks.list", {**arguments, "limit": limit, "cursor": cursor}, identity)


@work_routes.get("/jobs", response_model=JobList, summary="List jobs, the newest first.")
async def _jobs(
    request: Request,
    identity: Caller,
    status: Status | None = None,
    session_id: Session = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    arguments = {"status": status, "session_id": session_id, "limit": limit, "cursor": cursor}
    return await answer(request, "jobs.list", arguments, identity)


@work_routes.get("/tasks/{item}", response_model=TaskSnapshot, summary="Show how a task stands.")
async def _task(request: Request, identity: Caller, item: Item, tail_bytes: Tail = 8192) -> Response:
    return await answer(request, "skills.task_status", {"task_id": item, "tail_bytes": tail_bytes}, identity)


@work_routes.get("/jobs/{item}", response_model=JobSnapshot, summary="Show how a job stands.")
async def _job(request: Request, identity: Caller, item: Item, tail_bytes: Tail = 8192) -> Response:
    return await answer(request, "skills.job_status", {"job_id": item, "tail_bytes": tail_bytes}, identity)


def piece(
    stream: Annotated[Literal["stdout", "stderr"], Query(description="Which output.")] = "stdout",
    offset: Offset = 0,
    limit: Annotated[int, Query(ge=0, le=1_048_576, description="Bytes at most.")] = 65_536,
    follow: Annotated[bool, Query(description="Wait for something new, or for the end.")] = False,
    encoding: Literal["text", "base64"] = "text",
) -> dict[str, Any]:
    """Return which piece of an output is asked for."""
    return {"stream": stream, "offset": offset, "limit": limit, "follow": follow, "encoding": encoding}


Piece = Annotated[dict[str, Any], Depends(piece)]


@work_routes.get("/tasks/{item}/logs", response_model=LogsOutput, responses=LOGS, summary="Read the output of a task.")
async def _task_logs(request: Request, identity: Caller, item: Item, asked: Piece) -> Response:
    return await _logs(request, identity, {"task_id": item, **asked})


@work_routes.get(
    "/tasks/{item}/events", response_class=Response, responses=STREAM, summary="Follow a task until it is over."
)
async def _task_events(request: Request, identity: Caller, item: Item, after_seq: After = None) -> Response:
    return await _events(request, identity, "task", item, after_seq)


@work_routes.get("/jobs/{item}/logs", response_model=LogsOutput, responses=LOGS, summary="Read the output of a job.")
async def _job_logs(request: Request, identity: Caller, item: Item, asked: Piece, step: Step = None) -> Response:
    """Read the output of one step: a job itself prints nothing."""
    query = {"job_id": item, "tail_bytes": 0}
    job = await host_of(request).invoke("skills.job_status", query, _context(request, identity))
    assert isinstance(job, JobSnapshot)
    begun = {job_step.index: job_step.task_id for job_step in job.steps if job_step.task_id is not None}
    task = begun.get(max(begun, default=-1) if step is None else step)
    if task is None:
        subject = "no step" if step is None else f"no step {step}"
        raise NotFound(f"{subject} of job {item!r} has begun", job_id=item)
    return await _logs(request, identity, {"task_id": task, **asked})


@work_routes.get(
    "/jobs/{item}/events", response_class=Response, responses=STREAM, summary="Follow a job until it is over."
)
async def _job_events(request: Request, identity: Caller, item: Item, after_seq: After = None) -> Response:
    return await _events(request, identity, "job", item, after_seq)


async def _events(request: Request, identity: Identity, kind: Kind, item: str, after: int | None) -> Response:
    """Follow work; what can be refused is refused before the stream begins."""
    host, name = host_of(request), f"skills.{kind}_watch"
    arguments = {f"{kind}_id": item, "after_seq": last_seen(request.headers, after)}
    _checked(request, name, arguments, identity)
    await (host.work.task if kind == "task" else host.work.job)(identity, item)

    async def watch(emit: Emit) -> Any:
        return await host.invoke(name, arguments, replace(_context(request, identity), emit=emit))

    return stream_of(event_frames(watch, request.app.state.drain, _allowed(request, identity)))


async def _logs(request: Request, identity: Identity, arguments: dict[str, Any]) -> Response:
    if EVENTS not in request.headers.get("accept", ""):
        return await answer(request, "skills.task_logs", arguments, identity)
    arguments |= {"limit": arguments["limit"] or 65_536, "follow": False}
    read = partial(host_of(request).invoke, "skills.task_logs", context=_context(request, identity))
    first = await read({**arguments, "offset": last_seen(request.headers, arguments["offset"])})
    assert isinstance(first, LogsOutput)
    drain, allowed = request.app.state.drain, _allowed(request, identity)
    return stream_of(_printed(read, arguments, first, drain, allowed))


async def _printed(
    read: Any, arguments: Mapping[str, Any], piece: LogsOutput, drain: Drain, allowed: Allowed | None
) -> AsyncIterator[bytes]:
    """Give pieces of output as they come, each under the number of the byte after it; `end` when there are no more."""
    yield RETRY
    clock = asyncio.get_running_loop().time
    checked = clock()
    with drain.stop_event() as stopping:
        while not stopping.is_set():
            if piece.next_offset > piece.offset:
                yield frame("output", json_text(piece), piece.next_offset)
            if piece.ended:
                yield frame("end", json_text(piece.model_copy(update={"data": ""})), piece.next_offset)
                return
            following = {**arguments, "offset": piece.next_offset, "follow": True, "timeout_sec": FOLLOW_S}
            try:
                if allowed is not None and clock() >= checked + CHECK_S:
                    checked = clock()
                    await allowed()
                next_piece = await unless(stopping, read(following))
            except KdskillsError as error:
                yield failed(error)
                return
            if next_piece is None:
                return
            assert isinstance(next_piece, LogsOutput)
            piece = next_piece
            if piece.next_offset == piece.offset and not piece.ended:
                yield WAITING_STILL


def _allowed(request: Request, identity: Identity) -> Allowed | None:
    """Return what asks whether the caller's token was revoked meanwhile; None for a caller without one."""
    token = identity.token
    if token is None:
        return None

    async def allowed() -> None:
        if not await host_of(request).tokens.going(token):
            raise Unauthenticated("this token is not known any more")

    return allowed


PIECE: Final = 64 * 1024
FIELDS: Final = frozenset({"file", "activate"})
ACTIVATE: Final = {"true": True, "1": True, "false": False, "0": False}

Name = Annotated[str, Path(min_length=1, max_length=256, description="The skill's name.")]
Version = Annotated[str | None, Query(max_length=80, description="Hash of a version; the active one when omitted.")]


class PatchBody(Input):
    """What is to change."""

    enabled: bool = Field(description="Whether the gate may grant the skill.")


class ActivateBody(Input):
    """Which version is to be in use."""

    version_hash: str = Field(max_length=80, description="Hash of the version.")


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


@skill_routes.post(
    "/skills:upload",
    status_code=201,
    response_model=UploadOut,
    openapi_extra=FORM,
    name="project_skills.upload",
    summary="Take a skill from a zip archive.",
)
async def _upload(
    request: Request,
    identity: Caller,
    activate: Annotated[bool | None, Query(description="As the form's field of that name.")] = None,
) -> Response:
    host = host_of(request)
    require_allowed(host.operations["project_skills.upload"], identity)
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


@skill_routes.get("/skills", response_model=SkillsOut, summary="List uploaded skills.")
async def _list(request: Request, identity: Caller, limit: Limit = 100, cursor: Cursor = None) -> Response:
    return await answer(request, "project_skills.list", {"limit": limit, "cursor": cursor}, identity)


@skill_routes.post("/skills/{name}:activate", response_model=SkillOut, summary="Put a version in use.")
async def _activate(request: Request, identity: Caller, name: Name, body: ActivateBody) -> Response:
    arguments = {"skill": name, "version_hash": body.version_hash}
    return await answer(request, "project_skills.activate", arguments, identity)


@skill_routes.get("/skills/{name}", response_model=SkillOut, summary="Show one uploaded skill.")
async def _get(request: Request, identity: Caller, name: Name) -> Response:
    return await answer(request, "project_skills.get", {"skill": name}, identity)


@skill_routes.patch("/skills/{name}", response_model=SkillOut, summary="Enable or disable a skill.")
async def _patch(request: Request, identity: Caller, name: Name, body: PatchBody) -> Response:
    return await answer(request, "project_skills.patch", {"skill": name, "enabled": body.enabled}, identity)


@skill_routes.delete("/skills/{name}", response_model=DeletedOut, summary="Delete a skill.")
async def _delete(request: Request, identity: Caller, name: Name) -> Response:
    return await answer(request, "project_skills.delete", {"skill": name}, identity)


@skill_routes.get("/skills/{name}/versions", response_model=VersionsOut, summary="List a skill's versions.")
async def _versions(
    request: Request, identity: Caller, name: Name, limit: Limit = 100, cursor: Cursor = None
) -> Response:
    arguments = {"skill": name, "limit": limit, "cursor": cursor}
    return await answer(request, "project_skills.versions", arguments, identity)


@skill_routes.get(
    "/skills/{name}/archive", response_class=Response, responses=ZIP, summary="Give a version as a zip archive."
)
async def _archive(request: Request, identity: Caller, name: Name, version: Version = None) -> Response:
    arguments = _checked(request, "project_skills.archive", {"skill": name, "version": version}, identity)
    assert isinstance(arguments, VersionInput)
    version_hash, path = await archive_of(host_of(request).projects, arguments, _context(request, identity))
    return _download(path, f"{name}.zip", "application/zip", version_hash)


@skill_routes.get(
    "/skills/{name}/files/{path:path}",
    response_class=Response,
    responses=BYTES,
    summary="Give one file of a version.",
)
async def _file(request: Request, identity: Caller, name: Name, path: str, version: Version = None) -> Response:
    query = {"skill": name, "version": version, "path": path}
    arguments = _checked(request, "project_skills.file", query, identity)
    assert isinstance(arguments, FileInput)
    version_hash, file = await file_of(host_of(request).projects, arguments, _context(request, identity))
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
    finally:  # close files of parts that never ended: the parser forgets them unless it was the form that was wrong
        files = [value.file for value in form.values() if isinstance(value, UploadFile)] if form is not None else []
        for file in getattr(parser, "_files_to_close_on_error", ()):
            if not any(file is form_file for form_file in files):
                file.close()
    return form


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


def _context(request: Request, identity: Identity) -> Context:
    return Context(identity=identity, request_id=request.state.request_id)


def _checked(request: Request, name: str, arguments: dict[str, Any], identity: Identity) -> BaseModel:
    """Return the arguments of an operation that the caller may run, as its model."""
    operation = host_of(request).operations[name]
    require_allowed(operation, identity)
    return validated(operation, arguments)
