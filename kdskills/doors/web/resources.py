"""A project's tasks, jobs and skills as resources.

Every route runs the operation that the other doors run; events, logs, uploads and downloads stream, and are checked by the
same gate.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any, BinaryIO, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Body, Depends, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from kdskills.app import Host
from kdskills.app.authentication import IDENTITY, Unauthenticated
from kdskills.app.identity import LOCAL, Identity
from kdskills.app.operations import Context, Input, Operation
from kdskills.app.operations.calling import misshapen, pointer, require_allowed, validated
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
from kdskills.app.operations.work_follow import JobList, JobSnapshot, LogsOutput, TaskList, TaskSnapshot
from kdskills.app.wire import json_text
from kdskills.app.work import scope_of
from kdskills.doors.web import events
from kdskills.doors.web.entrance import PROBLEMS, Caller, Cursor, Limit, response_of
from kdskills.errors import BadRequest, KdskillsError, NotFound, OperatorMustAct

_LOG = logging.getLogger("kdskills.http")

PROMETHEUS: Final = "text/plain; version=0.0.4"
KEY: Final = "Repeating a call gives its first answer."
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=200, description=KEY)]


@dataclass(frozen=True, slots=True)
class WebCall:
    """A request, and who sent it."""

    request: Request
    identity: Identity

    @property
    def host(self) -> Host:
        """What operations run on."""
        host: Host = self.request.app.state.host
        return host

    @property
    def context(self) -> Context:
        """The call as operations see it."""
        client = self.request.client
        address = "" if client is None else client.host
        return Context(identity=self.identity, request_id=self.request.state.request_id, address=address)

    @property
    def allowed(self) -> events.Allowed | None:
        """What asks whether the caller's token was revoked meanwhile; None for a caller without one."""
        token = self.identity.token
        if token is None:
            return None

        async def allowed() -> None:
            if not await self.host.tokens.going(token):
                raise Unauthenticated("this token is not known any more")

        return allowed

    def checked(self, name: str, arguments: Mapping[str, Any]) -> BaseModel:
        """Return the arguments of an operation that the caller may run, as its model."""
        operation = self.host.operations[name]
        require_allowed(operation, self.identity)
        return validated(operation, arguments)

    async def run(self, name: str, arguments: Mapping[str, Any], key: str | None = None) -> Response:
        """Run an operation and answer with its output."""
        output = await self.host.invoke(name, arguments, replace(self.context, idempotency_key=key))
        return Response(json_text(output), media_type="application/json")

    async def answer(self, name: str, **arguments: Any) -> Response:
        """As `run`."""
        return await self.run(name, arguments)


def _call(request: Request, identity: Caller) -> WebCall:
    return WebCall(request, identity)


Call = Annotated[WebCall, Depends(_call)]
"""The call, as an argument of a route."""


def tools_router(operations: Iterable[Operation]) -> APIRouter:
    """Return the routes of every one of *operations* that callers elsewhere may reach."""
    router = APIRouter()
    for operation in operations:
        if not operation.local:
            _add(router, operation)
    router.add_api_route(
        "/projects/{project}/tools/{operation}", _refused, methods=["POST"], include_in_schema=False, name="tools"
    )
    return router


async def _refused(call: Call, operation: str) -> Response:
    """Let the table itself say why an operation without a route cannot be called, in the words of every door."""
    return await call.answer(operation)


def _add(router: APIRouter, operation: Operation) -> None:
    input_model, output_model = operation.input, operation.output

    async def permitted(call: Call) -> WebCall:
        """Refuse who may not run it before anybody looks at the arguments, as every door does."""
        require_allowed(operation, call.identity)
        return call

    async def endpoint(call: WebCall, arguments: Any, idempotency_key: IdempotencyKey = None) -> Response:
        body = json.loads(await call.request.body() or b"{}")
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object", errors=[{"path": "/", "problem": "not an object"}])
        return await call.run(operation.name, body, idempotency_key)

    # FastAPI reads the body's model and the gate from annotations; they are known only here.
    endpoint.__annotations__["call"] = Annotated[WebCall, Depends(permitted)]
    endpoint.__annotations__["arguments"] = Annotated[input_model, Body(description=f"Arguments of {operation.name}.")]
    router.add_api_route(
        f"/projects/{{project}}/tools/{operation.name}",
        endpoint,
        methods=["POST"],
        name=operation.name,
        operation_id=operation.name,
        summary=operation.summary,
        response_model=output_model,
        responses=PROBLEMS,
        tags=[operation.name.partition(".")[0]],
    )


async def metrics(request: Request) -> Response:
    """Answer with what is measured, in the text format of Prometheus."""
    call = WebCall(request, request.scope[IDENTITY])
    answer: Any = await call.host.invoke("metrics.show", {}, call.context)
    return Response(answer.text, media_type=PROMETHEUS)


def shape_error(error: RequestValidationError, operation: Operation | None, route: str) -> KdskillsError:
    """Return what FastAPI found wrong in the form every door gives it; of a *route* that may run no *operation*."""
    problems = [(pointer(item["loc"][1:]), str(item["msg"])) for item in error.errors()]
    if operation is not None:
        return misshapen(operation, problems)
    words = "; ".join(f"{path}: {problem}" for path, problem in problems)
    return BadRequest(f"{route}: {words}", errors=[{"path": path, "problem": text} for path, text in problems])


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
OfSkill = Annotated[str | None, Query(min_length=1, max_length=255, description="Only of the skill of this full id.")]
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
    call: Call,
    status: Status | None = None,
    session_id: Session = None,
    job_id: Annotated[str | None, Query(min_length=1, max_length=128, description="Only steps of this job.")] = None,
    steps: Annotated[bool, Query(description="Whether tasks that are steps of jobs are listed.")] = True,
    skill_name: OfSkill = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    page = {"session_id": session_id, "skill_name": skill_name, "limit": limit, "cursor": cursor}
    return await call.answer("tasks.list", status=status, job_id=job_id, steps=steps, **page)


@work_routes.get("/jobs", response_model=JobList, summary="List jobs, the newest first.")
async def _jobs(
    call: Call,
    status: Status | None = None,
    session_id: Session = None,
    skill_name: OfSkill = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Response:
    page = {"session_id": session_id, "skill_name": skill_name, "limit": limit, "cursor": cursor}
    return await call.answer("jobs.list", status=status, **page)


@work_routes.get("/tasks/{item}", response_model=TaskSnapshot, summary="Show how a task stands.")
async def _task(call: Call, item: Item, tail_bytes: Tail = 8192) -> Response:
    return await call.answer("skills.task_status", task_id=item, tail_bytes=tail_bytes)


@work_routes.get("/jobs/{item}", response_model=JobSnapshot, summary="Show how a job stands.")
async def _job(call: Call, item: Item, tail_bytes: Tail = 8192) -> Response:
    return await call.answer("skills.job_status", job_id=item, tail_bytes=tail_bytes)


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
async def _task_logs(call: Call, item: Item, asked: Piece) -> Response:
    return await _logs(call, {"task_id": item, **asked})


@work_routes.get(
    "/tasks/{item}/events", response_class=Response, responses=STREAM, summary="Follow a task until it is over."
)
async def _task_events(call: Call, item: Item, after_seq: After = None) -> Response:
    return await _events(call, "task", item, after_seq)


@work_routes.get(
    "/turns/{item}/events", response_class=Response, responses=STREAM, summary="Follow a turn until it is over."
)
async def _turn_events(call: Call, item: Item, after_seq: After = None) -> Response:
    arguments = {"turn_id": item, "after_seq": events.last_seen(call.request.headers, after_seq)}
    call.checked("turns.watch", arguments)
    await call.host.invoke("turns.watch", {"turn_id": item, "timeout_sec": 0}, call.context)  # refused before it begins

    async def watch(emit: Emit) -> Any:
        return await call.host.invoke("turns.watch", arguments, replace(call.context, emit=emit))

    return events.stream_of(events.event_frames(watch, call.request.app.state.drain, call.allowed))


@work_routes.get("/jobs/{item}/logs", response_model=LogsOutput, responses=LOGS, summary="Read the output of a job.")
async def _job_logs(call: Call, item: Item, asked: Piece, step: Step = None) -> Response:
    """Read the output of one step: a job itself prints nothing."""
    job = await call.host.invoke("skills.job_status", {"job_id": item, "tail_bytes": 0}, call.context)
    assert isinstance(job, JobSnapshot)
    begun = {job_step.index: job_step.task_id for job_step in job.steps if job_step.task_id is not None}
    task = begun.get(max(begun, default=-1) if step is None else step)
    if task is None:
        subject = "no step" if step is None else f"no step {step}"
        raise NotFound(f"{subject} of job {item!r} has begun", job_id=item)
    return await _logs(call, {"task_id": task, **asked})


@work_routes.get(
    "/jobs/{item}/events", response_class=Response, responses=STREAM, summary="Follow a job until it is over."
)
async def _job_events(call: Call, item: Item, after_seq: After = None) -> Response:
    return await _events(call, "job", item, after_seq)


async def _events(call: WebCall, kind: Kind, item: str, after: int | None) -> Response:
    """Follow work; what can be refused is refused before the stream begins."""
    host, name = call.host, f"skills.{kind}_watch"
    arguments = {f"{kind}_id": item, "after_seq": events.last_seen(call.request.headers, after)}
    call.checked(name, arguments)
    await (host.work.task if kind == "task" else host.work.job)(call.identity, item)

    async def watch(emit: Emit) -> Any:
        return await host.invoke(name, arguments, replace(call.context, emit=emit))

    return events.stream_of(events.event_frames(watch, call.request.app.state.drain, call.allowed))


async def _logs(call: WebCall, arguments: dict[str, Any]) -> Response:
    if EVENTS not in call.request.headers.get("accept", ""):
        return await call.run("skills.task_logs", arguments)
    arguments |= {"limit": arguments["limit"] or 65_536, "follow": False}
    read = partial(call.host.invoke, "skills.task_logs", context=call.context)
    first = await read({**arguments, "offset": events.last_seen(call.request.headers, arguments["offset"])})
    assert isinstance(first, LogsOutput)
    return events.stream_of(_printed(read, arguments, first, call.request.app.state.drain, call.allowed))


async def _printed(
    read: Any, arguments: Mapping[str, Any], piece: LogsOutput, drain: events.Drain, allowed: events.Allowed | None
) -> AsyncIterator[bytes]:
    """Give pieces of output as they come, each under the number of the byte after it; `end` when there are no more."""
    yield events.RETRY
    clock = asyncio.get_running_loop().time
    checked = clock()
    with drain.stop_event() as stopping:
        while not stopping.is_set():
            if piece.next_offset > piece.offset:
                yield events.frame("output", json_text(piece), piece.next_offset)
            if piece.ended:
                yield events.frame("end", json_text(piece.model_copy(update={"data": ""})), piece.next_offset)
                return
            following = {**arguments, "offset": piece.next_offset, "follow": True, "timeout_sec": FOLLOW_S}
            try:
                if allowed is not None and clock() >= checked + events.CHECK_S:
                    checked = clock()
                    await allowed()
                next_piece = await events.unless(stopping, read(following))
            except KdskillsError as error:
                yield events.failed(error)
                return
            if next_piece is None:
                return
            assert isinstance(next_piece, LogsOutput)
            piece = next_piece
            if piece.next_offset == piece.offset and not piece.ended:
                yield events.WAITING_STILL


RANGE: Final = re.compile(r"bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", re.ASCII)
"""One range of bytes; several at once, and other units, are answered with everything, as anybody may."""
PARTS: Final = {**BYTES, 206: {"description": "The bytes of the range."}, 304: {"description": "Not changed."}}


@work_routes.get(
    "/artifacts/{item}/content", response_class=Response, responses=PARTS, summary="Give a file that work left."
)
@work_routes.head("/artifacts/{item}/content", response_class=Response, include_in_schema=False)
async def _artifact(call: Call, item: Item) -> Response:
    """Answer with an artifact, or a range of it, as a file to keep; its tag is its digest."""
    call.checked("artifacts.get", {"artifact_id": item})
    host, headers = call.host, call.request.headers
    with host.telling_operator():
        keeper = await host.work.keeper()
        record = await keeper.find(scope_of(call.identity), item)
        etag = f'"{record.sha256}"'
        name = PurePosixPath(record.path).name or item
        answer_headers = {
            **UNSEEN,
            "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
            "Accept-Ranges": "bytes",
            "ETag": etag,
            "Cache-Control": "private, no-cache",
        }
        if not _tags(headers.get("if-none-match", "")).isdisjoint({etag, "*"}):
            return Response(status_code=304, headers=answer_headers)
        begin, end, status = 0, record.size, 200
        span = byte_range(headers.get("range", ""), record.size)
        if span is not None and headers.get("if-range", etag) == etag:
            begin, end = span
            status = 206 if begin < end else 416
            answer_headers["Content-Range"] = (
                f"bytes {begin}-{end - 1}/{record.size}" if begin < end else f"bytes */{record.size}"
            )
        if status == 416:
            error = BadRequest(f"the artifact has {record.size} bytes", code="range_not_satisfiable", size=record.size)
            response = response_of(error, call.request)
            response.headers["Content-Range"] = answer_headers["Content-Range"]
            return response
        answer_headers["Content-Length"] = str(end - begin)
        if call.request.method == "HEAD":
            return Response(status_code=status, headers=answer_headers, media_type=record.mime)
        source = host.work.artifact_bytes(record, begin, end)
        first = await anext(source, b"")  # a file that is missing is told before the answer has begun
    return StreamingResponse(_later(first, source), status, headers=answer_headers, media_type=record.mime)


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """Return begin and end of the range a header asks for, the same number twice when it lies behind the end; None for no range."""
    match = RANGE.fullmatch(header.strip())
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    if last and int(last) < int(first):
        return None
    begin = min(int(first), size)
    return begin, min(int(last) + 1, size) if last else size


async def _later(piece: bytes, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Give pieces one after the other, the last when the source has checked everything: what is corrupt never looks whole."""
    async for following in source:
        yield piece
        piece = following
    yield piece


def _tags(header: str) -> set[str]:
    return {tag.strip().removeprefix("W/") for tag in header.split(",")}


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
    call: Call, activate: Annotated[bool | None, Query(description="As the form's field of that name.")] = None
) -> Response:
    host = call.host
    require_allowed(host.operations["project_skills.upload"], call.identity)
    with host.telling_operator():
        form = await _form(call.request)
        try:
            file, form_activation = _fields(form)
            activation = activate if activate is not None else form_activation
            who = call.context.author
            report = await host.projects.upload(call.identity.project, _pieces(file), activate=activation, who=who)
        finally:
            await form.close()
    return Response(json_text(UploadOut.of(report)), 201, media_type="application/json")


@skill_routes.get("/skills", response_model=SkillsOut, summary="List uploaded skills.")
async def _list(call: Call, limit: Limit = 100, cursor: Cursor = None) -> Response:
    return await call.answer("project_skills.list", limit=limit, cursor=cursor)


@skill_routes.post("/skills/{name}:activate", response_model=SkillOut, summary="Put a version in use.")
async def _activate(call: Call, name: Name, body: ActivateBody) -> Response:
    return await call.answer("project_skills.activate", skill=name, version_hash=body.version_hash)


@skill_routes.get("/skills/{name}", response_model=SkillOut, summary="Show one uploaded skill.")
async def _get(call: Call, name: Name) -> Response:
    return await call.answer("project_skills.get", skill=name)


@skill_routes.patch("/skills/{name}", response_model=SkillOut, summary="Enable or disable a skill.")
async def _patch(call: Call, name: Name, body: PatchBody) -> Response:
    return await call.answer("project_skills.patch", skill=name, enabled=body.enabled)


@skill_routes.delete("/skills/{name}", response_model=DeletedOut, summary="Delete a skill.")
async def _delete(call: Call, name: Name) -> Response:
    return await call.answer("project_skills.delete", skill=name)


@skill_routes.get("/skills/{name}/versions", response_model=VersionsOut, summary="List a skill's versions.")
async def _versions(call: Call, name: Name, limit: Limit = 100, cursor: Cursor = None) -> Response:
    return await call.answer("project_skills.versions", skill=name, limit=limit, cursor=cursor)


@skill_routes.get(
    "/skills/{name}/archive", response_class=Response, responses=ZIP, summary="Give a version as a zip archive."
)
async def _archive(call: Call, name: Name, version: Version = None) -> Response:
    arguments = call.checked("project_skills.archive", {"skill": name, "version": version})
    assert isinstance(arguments, VersionInput)
    version_hash, path = await archive_of(call.host.projects, arguments, call.context)
    return _download(path, f"{name}.zip", "application/zip", version_hash)


@skill_routes.get(
    "/skills/{name}/files/{path:path}",
    response_class=Response,
    responses=BYTES,
    summary="Give one file of a version.",
)
async def _file(call: Call, name: Name, path: str, version: Version = None) -> Response:
    arguments = call.checked("project_skills.file", {"skill": name, "version": version, "path": path})
    assert isinstance(arguments, FileInput)
    version_hash, file = await file_of(call.host.projects, arguments, call.context)
    return _download(file.path, PurePosixPath(path).name, "application/octet-stream", version_hash)


UNSEEN: Final = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'; sandbox"}
"""Headers of what others wrote: no browser shows it as a page of this service."""


def _download(path: Any, name: str, kind: str, version: str) -> Response:
    """Answer with a file as bytes to keep: what others wrote is never shown as a page of this service."""
    headers = {
        **UNSEEN,
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}",
        "X-Skill-Version": version,
    }
    return FileResponse(path, media_type=kind, headers=headers)


ARTIFACT_S: Final = 3600
INDEX_S: Final = 60
"""Seconds that anybody may use an artifact, whose name changes with its bytes, or an index without asking again."""


def site_routes() -> list[Route]:
    """Return the routes of what anybody may fetch of the service's own project, and of the others."""
    tail = "/.well-known/agent-skills/{file}"
    return [Route(path, _site, methods=["GET"], include_in_schema=False) for path in (tail, "/p/{project}" + tail)]


async def _site(request: Request) -> Response:
    """Answer with an index or artifact; a project that is not there reads like one that publishes nothing."""
    host, file = request.app.state.host, None
    project, name = request.path_params.get("project", LOCAL.project), request.path_params["file"]
    try:
        async with request.app.state.site_turn:  # whoever asks without a token never has more than one thread together
            with host.telling_operator():
                file = await host.public_file(project, name)
    except KdskillsError as error:
        if error.code == "database_unavailable":  # which says nothing about the project
            raise OperatorMustAct("what is published cannot be looked up now", code=error.code) from None
        _LOG.info("nothing of project %s is published: %s", project, error.code)
    if file is None:
        raise NotFound(f"there is nothing at {request.url.path}")
    etag = f'"{file.digest}"'
    headers = {
        "ETag": etag,
        "Cache-Control": f"public, max-age={ARTIFACT_S if file.lasting else INDEX_S}",
        "Access-Control-Allow-Origin": "*",
        "Content-Length": str(file.size),
        **UNSEEN,
    }
    unchanged = not _tags(request.headers.get("if-none-match", "")).isdisjoint({etag, "*"})
    if unchanged or request.method == "HEAD":
        file.stream.close()
        if unchanged:
            del headers["Content-Length"]
        return Response(status_code=304 if unchanged else 200, headers=headers, media_type=file.media_type)
    return StreamingResponse(_file_pieces(file.stream), headers=headers, media_type=file.media_type)


async def _file_pieces(stream: BinaryIO) -> AsyncIterator[bytes]:
    with stream:
        while piece := await asyncio.to_thread(stream.read, PIECE):
            yield piece


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
