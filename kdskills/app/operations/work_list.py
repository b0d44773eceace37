"""Operations that list work and read artifacts back."""

from __future__ import annotations

import base64
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field

from kdskills.app.operations.models import Output
from kdskills.app.operations.paging import decode_moment, encode_moment
from kdskills.app.operations.table import Context, Implementation
from kdskills.app.operations.work_inputs import MAX_LOG_PIECE, ListInput, TaskListInput
from kdskills.app.operations.work_outputs import JobList, TaskList
from kdskills.app.operations.work_parts import Arguments
from kdskills.app.operations.work_views import job_row, task_row
from kdskills.app.work import scope_of

if TYPE_CHECKING:
    from kdskills.app.host import Host
    from kdskills.jobs.heads import JobHead, TaskHead

Head = TypeVar("Head", "TaskHead", "JobHead")

MISSING = ("not_found", "database_unavailable", "missing_extra")


class ArtifactInput(Arguments):
    """Which artifact, and how much of it."""

    artifact_id: str = Field(min_length=1, max_length=128, description="The artifact's id.")
    offset: int = Field(0, ge=0, le=2**62, description="Byte to begin at.")
    limit: int = Field(0, ge=0, le=MAX_LOG_PIECE, description="Bytes to return; 0 tells about it only.")
    link_sec: int = Field(
        900, ge=1, le=7 * 86_400, description="Seconds a link stays good, where the store signs links."
    )


class ArtifactOutput(Output):
    """An artifact, where it came from, and a piece of it.

    Attributes:
        url: A link anybody may read it with until `expires_in_sec` are over; None where the store signs none.
        data_base64: The bytes `offset` to `next_offset`.
    """

    artifact_id: str
    path: str
    size: int
    sha256: str
    mime: str
    task_id: str | None
    job_id: str | None
    agent: str
    skill_name: str
    version_hash: str
    created_at: datetime
    url: str | None
    expires_in_sec: int | None
    offset: int
    next_offset: int
    data_base64: str


async def list_tasks(host: Host, arguments: TaskListInput, context: Context) -> TaskList:
    """List the caller's tasks; administrators see those of every agent."""
    heads = await host.work.client.list_tasks(
        scope_of(context.identity), job_id=arguments.job_id, steps=arguments.steps, **_filters(arguments, context)
    )
    page, following = _page(heads, arguments)
    return TaskList(tasks=tuple(map(task_row, page)), next_cursor=following)


async def list_jobs(host: Host, arguments: ListInput, context: Context) -> JobList:
    """List the caller's jobs; administrators see those of every agent."""
    heads = await host.work.client.list_jobs(scope_of(context.identity), **_filters(arguments, context))
    page, following = _page(heads, arguments)
    return JobList(jobs=tuple(map(job_row, page)), next_cursor=following)


def _filters(arguments: ListInput, context: Context) -> dict[str, Any]:
    """Return what tasks and jobs are listed by; one row more than asked for tells whether there is a next page."""
    return {
        "status": () if arguments.status is None else (arguments.status,),
        "session_id": arguments.session_id,
        "before": None if arguments.cursor is None else decode_moment(arguments.cursor),
        "limit": arguments.limit + 1,
        "any_agent": context.identity.may("admin"),
    }


def _page(heads: list[Head], arguments: ListInput) -> tuple[list[Head], str | None]:
    page = heads[: arguments.limit]
    return page, encode_moment(page[-1].created_at, page[-1].id) if len(heads) > arguments.limit else None


async def get_artifact(host: Host, arguments: ArtifactInput, context: Context) -> ArtifactOutput:
    """Read an artifact of the caller's project back."""
    keeper = await host.work.keeper()
    record = await keeper.find(scope_of(context.identity), arguments.artifact_id)
    url = await keeper.store.link(record.project, record.sha256, timedelta(seconds=arguments.link_sec))
    begin = min(arguments.offset, record.size)
    end = min(begin + arguments.limit, record.size)
    data = await keeper.store.piece(record.project, record.sha256, begin, end)
    return ArtifactOutput(
        artifact_id=record.id,
        path=record.path,
        size=record.size,
        sha256=record.sha256,
        mime=record.mime,
        task_id=record.task_id,
        job_id=record.job_id,
        agent=record.agent,
        skill_name=record.skill_name,
        version_hash=record.version_hash,
        created_at=record.created_at,
        url=url,
        expires_in_sec=None if url is None else arguments.link_sec,
        offset=begin,
        next_offset=end,
        data_base64=base64.b64encode(data).decode(),
    )


TASKS = Implementation(TaskListInput, TaskList, MISSING, list_tasks)
JOBS = Implementation(ListInput, JobList, MISSING, list_jobs)
ARTIFACT = Implementation(
    ArtifactInput,
    ArtifactOutput,
    (*MISSING, "artifact_missing", "artifact_corrupt", "artifact_store_unavailable"),
    get_artifact,
)
