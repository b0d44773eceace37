"""Tasks and jobs as resources: lists, snapshots, logs and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response

from kdskills.app import Host
from kdskills.app.authentication import Unauthenticated
from kdskills.app.identity import Identity
from kdskills.app.operations import Context
from kdskills.app.operations.calling import require_allowed, validated
from kdskills.app.operations.table import Emit
from kdskills.app.operations.work_outputs import JobList, JobSnapshot, LogsOutput, TaskList, TaskSnapshot
from kdskills.app.wire import json_text
from kdskills.doors.web.callers import Cursor, Limit, caller
from kdskills.doors.web.draining import Drain
from kdskills.doors.web.events import (
    CHECK_S,
    RETRY,
    WAITING_STILL,
    Allowed,
    event_frames,
    failed,
    frame,
    last_seen,
    stream_of,
    unless,
)
from kdskills.doors.web.problems import PROBLEMS
from kdskills.doors.web.tools import answer
from kdskills.errors import KdskillsError, NotFound

EVENTS: Final = "text/event-stream"
FOLLOW_S: Final = 10.0
Kind = Literal["task", "job"]
Status = Literal["queued", "starting", "running", "succeeded", "failed", "canceled"]

Caller = Annotated[Identity, Depends(caller)]
Item = Annotated[str, Path(min_length=1, max_length=128, description="Its id.")]
Stream = Annotated[Literal["stdout", "stderr"], Query(description="Which output.")]
Offset = Annotated[
    int, Query(ge=-(2**62), le=2**62, description="Byte to begin at; a negative one counts from the end.")
]
Size = Annotated[int, Query(ge=0, le=1_048_576, description="Bytes at most.")]
Tail = Annotated[int, Query(ge=0, le=65_536, description="Bytes of the ends of outputs to show.")]
Follow = Annotated[bool, Query(description="Wait for something new, or for the end.")]
After = Annotated[int | None, Query(ge=0, le=2**62, description="As the header Last-Event-ID.")]
Session = Annotated[str | None, Query(max_length=200, description="Only of this session.")]
Step = Annotated[int | None, Query(ge=0, le=100_000, description="Index of the step; the latest that began otherwise.")]

STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "Server-sent events.", "content": {EVENTS: {"schema": {"type": "string"}}}}
}
LOGS: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "A piece; or, asked for as `text/event-stream`, all pieces as they come.",
          "content": {EVENTS: {"schema": {"type": "string"}}}}
}  # fmt: skip


def work_router() -> APIRouter:
    """Return the routes of a project's tasks and jobs."""
    router = APIRouter(prefix="/projects/{project}", tags=["work"], responses=PROBLEMS)
    add = router.add_api_route
    add("/tasks", _tasks, methods=["GET"], response_model=TaskList, summary="List tasks, the newest first.")
    add("/jobs", _jobs, methods=["GET"], response_model=JobList, summary="List jobs, the newest first.")
    add("/tasks/{item}", _task, methods=["GET"], response_model=TaskSnapshot, summary="Show how a task stands.")
    add("/jobs/{item}", _job, methods=["GET"], response_model=JobSnapshot, summary="Show how a job stands.")
    for kind, logs, events in (("task", _task_logs, _task_events), ("job", _job_logs, _job_events)):
        item_path = f"/{kind}s/{{item}}"
        add(
            f"{item_path}/logs",
            logs,
            methods=["GET"],
            response_model=LogsOutput,
            responses=LOGS,
            summary=f"Read the output of a {kind}.",
        )
        add(
            f"{item_path}/events",
            events,
            methods=["GET"],
            response_class=Response,
            responses=STREAM,
            summary=f"Follow a {kind} until it is over.",
        )
    return router


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


async def _task(request: Request, identity: Caller, item: Item, tail_bytes: Tail = 8192) -> Response:
    return await answer(request, "skills.task_status", {"task_id": item, "tail_bytes": tail_bytes}, identity)


async def _job(request: Request, identity: Caller, item: Item, tail_bytes: Tail = 8192) -> Response:
    return await answer(request, "skills.job_status", {"job_id": item, "tail_bytes": tail_bytes}, identity)


# ---- events ------------------------------------------------------------------------------------------------------


async def _task_events(request: Request, identity: Caller, item: Item, after_seq: After = None) -> Response:
    return await _events(request, identity, "task", item, after_seq)


async def _job_events(request: Request, identity: Caller, item: Item, after_seq: After = None) -> Response:
    return await _events(request, identity, "job", item, after_seq)


async def _events(request: Request, identity: Identity, kind: Kind, item: str, after: int | None) -> Response:
    """Follow work; what can be refused is refused before the stream begins."""
    host: Host = request.app.state.host
    name = f"skills.{kind}_watch"
    arguments = {f"{kind}_id": item, "after_seq": last_seen(request.headers, after)}
    row = host.operations[name]
    require_allowed(row, identity)
    validated(row, arguments)
    await (host.work.task if kind == "task" else host.work.job)(identity, item)
    number = request.state.request_id

    async def watch(emit: Emit) -> Any:
        return await host.invoke(name, arguments, Context(identity=identity, emit=emit, request_id=number))

    return stream_of(event_frames(watch, _drain(request), _allowed(request, identity)))


# ---- logs --------------------------------------------------------------------------------------------------------


async def _task_logs(
    request: Request,
    identity: Caller,
    item: Item,
    stream: Stream = "stdout",
    offset: Offset = 0,
    limit: Size = 65_536,
    follow: Follow = False,
    encoding: Literal["text", "base64"] = "text",
) -> Response:
    arguments = {"task_id": item, "stream": stream, "offset": offset, "limit": limit, "encoding": encoding}
    return await _logs(request, identity, arguments, follow=follow)


async def _job_logs(
    request: Request,
    identity: Caller,
    item: Item,
    step: Step = None,
    stream: Stream = "stdout",
    offset: Offset = 0,
    limit: Size = 65_536,
    follow: Follow = False,
    encoding: Literal["text", "base64"] = "text",
) -> Response:
    """Read the output of one step: a job itself prints nothing."""
    host: Host = request.app.state.host
    context = Context(identity=identity, request_id=request.state.request_id)
    job = await host.invoke("skills.job_status", {"job_id": item, "tail_bytes": 0}, context)
    assert isinstance(job, JobSnapshot)
    begun = {job_step.index: job_step.task_id for job_step in job.steps if job_step.task_id is not None}
    task = begun.get(max(begun, default=-1) if step is None else step)
    if task is None:
        subject = "no step" if step is None else f"no step {step}"
        raise NotFound(f"{subject} of job {item!r} has begun", job_id=item)
    arguments = {"task_id": task, "stream": stream, "offset": offset, "limit": limit, "encoding": encoding}
    return await _logs(request, identity, arguments, follow=follow)


async def _logs(request: Request, identity: Identity, arguments: Mapping[str, Any], *, follow: bool) -> Response:
    if EVENTS not in request.headers.get("accept", ""):
        return await answer(request, "skills.task_logs", {**arguments, "follow": follow}, identity)
    host: Host = request.app.state.host
    begin = last_seen(request.headers, int(arguments["offset"]))
    context = Context(identity=identity, request_id=request.state.request_id)
    read = partial(host.invoke, "skills.task_logs", context=context)
    size = int(arguments["limit"]) or 65_536
    first = await read({**arguments, "offset": begin, "limit": size})
    assert isinstance(first, LogsOutput)
    allowed = _allowed(request, identity)
    return stream_of(_printed(read, {**arguments, "limit": size}, first, _drain(request), allowed))


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
    host: Host = request.app.state.host
    token = identity.token
    if token is None:
        return None

    async def allowed() -> None:
        if not await host.tokens.going(token):
            raise Unauthenticated("this token is not known any more")

    return allowed


def _drain(request: Request) -> Drain:
    drain: Drain = request.app.state.drain
    return drain
