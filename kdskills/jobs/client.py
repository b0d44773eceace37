"""The client of background work: writes heads and enqueues, reads, follows and cancels.

It never runs anything. A cancel is passed on by the worker that has the work; where none is alive, the client ends the program.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from kdskills.errors import Conflict, KdskillsError, NotFound
from kdskills.execution.streams import LogPiece
from kdskills.jobs.attempts import Attempt
from kdskills.jobs.model import TERMINAL, JobHead, JobSpec, OutputError, Scope, TaskHead, TaskSpec
from kdskills.jobs.opening import Work, open_work
from kdskills.jobs.plan import check_graph
from kdskills.jobs.records import (
    ListQuery,
    began,
    dump,
    ending,
    new_row,
    new_task,
    printed,
    readiness,
    submitted_job,
    submitted_task,
)
from kdskills.jobs.roster import Roster, slot_taken
from kdskills.jobs.settings import JobsSettings

if TYPE_CHECKING:
    import sqlalchemy as sa


Kind = Literal["task", "job"]


async def cancel(work: Work, kind: Kind, item: str, reason: str) -> bool:
    """Ask for the end of a task or job; False when it was over.

    What waits in a queue is canceled by the asking. What runs is left to its worker, if that lives; else its programs on
    this host are ended here, and its state after them. What had ended by itself keeps its result, for the next worker.
    """

    def change(link: sa.Connection) -> str | None:
        row_state = work.records.ask_cancel(link, kind, item, reason)
        if row_state is not None:  # whoever has it in hand ends it; what it kept waiting may begin
            work.queue.announce(link, "queue" if row_state == "canceled" else f"cancel {item}")
        return row_state

    outcome = await work.database.write(change)
    if outcome == "asked":
        await _cancel_orphan(work, kind, item, reason)
    return outcome is not None


async def unfinished(work: Work, kind: Kind, item: str) -> bool:
    """Whether a task or job is not over."""
    table = work.records.table(kind)
    status = table.select().with_only_columns(table.c.status).where(table.c.id == item)
    return await work.database.read(lambda link: link.execute(status).scalar()) not in (None, *TERMINAL)


async def _cancel_orphan(work: Work, kind: Kind, item: str, reason: str) -> None:
    """End what no live worker holds, a job with its steps; nothing when somebody alive does."""
    await asyncio.to_thread(Roster(work).bury)
    orphans = await work.database.write(lambda link: _orphans(work, link, kind, item, reason))
    if orphans is None:
        return
    ended = await asyncio.gather(*(_end_program(work, task, reason) for task in orphans))
    ends = [(task, values) for task, values in zip(orphans, ended, strict=True) if values is not None]
    await work.database.write(lambda link: _end_rows(work, link, kind, item, ends))


def _orphans(work: Work, link: sa.Connection, kind: Kind, item: str, reason: str) -> list[TaskHead] | None:
    """Return tasks nobody alive holds, canceling steps that were still queued; None when a live worker holds *item*."""
    records, live = work.records, {row.executor for row in Roster(work).live(link)}
    head = records.task(link, item) if kind == "task" else records.job(link, item)
    if head is None or head.terminal or head.executor in live:
        return None
    if isinstance(head, TaskHead):
        return [head]
    living = [step.task for step in head.steps if step.task is not None and not step.task.terminal]
    answers = {task.id: records.ask_cancel(link, "task", task.id, reason) for task in living}
    return [task for task in living if answers[task.id] == "asked" and task.executor not in live]


async def _end_program(work: Work, head: TaskHead, reason: str) -> dict[str, Any] | None:
    """End a task's program on this host and return the columns of its end; None for one that had ended by itself."""
    plain: dict[str, Any] = {"error_code": "canceled"}
    if head.host != work.host or not head.attempt:
        return plain
    attempt = await asyncio.to_thread(work.attempts.find, head.id, head.attempt)
    if attempt is None:
        return plain
    await asyncio.to_thread(attempt.cancel, reason)
    verdict = await attempt.wait()
    current_head = await work.database.read(
        partial(work.records.task, item=head.id)
    )  # with its cancel, and what a worker wrote
    status, values = ending(current_head or head, verdict)
    if status != "canceled":
        return None
    lost = [
        OutputError(path=artifact.path, code="not_kept", message="it was canceled while no worker lived to keep it")
        for artifact in verdict.artifacts
    ]
    values |= {"output_errors": dump([*verdict.output_errors, *lost])}
    return values | await asyncio.to_thread(_attempt_columns, work, head, attempt)


def _attempt_columns(work: Work, head: TaskHead, attempt: Attempt) -> dict[str, Any]:
    """Return the columns of what an attempt was and printed."""
    facts = attempt.facts()
    return began(head, facts) | readiness(facts) | printed(attempt, work.settings.result_bytes)


def _end_rows(
    work: Work, link: sa.Connection, kind: Kind, item: str, ends: list[tuple[TaskHead, dict[str, Any]]]
) -> None:
    """End the rows, a job's after all of its tasks; what somebody took meanwhile is left to them."""
    records = work.records
    for task, values in ends:
        records.force(link, "task", task.id, "canceled", executor=task.executor, **values)
    job = records.job(link, item) if kind == "job" else None
    if job is not None and all(step.task is None or step.task.terminal for step in job.steps):
        records.force(link, "job", item, "canceled", executor=job.executor, error_code="canceled")
    work.queue.announce(link)


Head = TypeVar("Head", TaskHead, JobHead)
Stream = Literal["stdout", "stderr"]
SubmissionHook = Callable[["sa.Connection", str], None]
"""Takes the connection of a submission's transaction and the id of what is submitted."""

_LOG: Final = logging.getLogger("kdskills.jobs")
_LOOK_S = 0.02
_LOOK_MAX_S = 0.25


class JobsClient:
    """Submits, reads and cancels tasks and jobs; the database is opened by the first call.

    Whoever submits work, or looks at work that is not over, gets a worker started where none runs.

    Args:
        url: `sqlite:///path` or `postgresql://…`.
        state_dir: Folder of this host's runs and session files.
        settings: Intervals and limits.
        spawn: Starts a worker on this host; called when there is work and no worker. None leaves that to others.
    """

    def __init__(
        self,
        url: str,
        state_dir: Path,
        settings: JobsSettings | None = None,
        *,
        spawn: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings or JobsSettings()
        self._location = (url, state_dir)
        self._spawn = spawn
        self._spawned_at = float("-inf")
        self._opening: asyncio.Task[Work] | None = None

    async def aclose(self) -> None:
        """Close the connections; what could not be opened has none."""
        if self._opening is not None:
            opening, self._opening = self._opening, None
            if not opening.done():  # one that is may be of an event loop that is gone
                await asyncio.wait([opening])
            if not opening.cancelled() and opening.exception() is None:
                await asyncio.to_thread(opening.result().close)

    async def work(self) -> Work:
        """Return the opened database and state folder. Raises MissingExtra, DatabaseUnavailable."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.get_running_loop().create_task(open_work(*self._location, self.settings))
        return await asyncio.shield(self._opening)

    async def submit_task(
        self, spec: TaskSpec, *, key: str | None = None, body_hash: str = "", hook: SubmissionHook | None = None
    ) -> TaskHead:
        """Write a task's head and enqueue it, in one transaction.

        Args:
            spec: What to run.
            key: Idempotency key: the same key with the same body is the same task.
            body_hash: What the bodies of one key are compared by.
            hook: Called in the transaction when the task is a new one; what it raises leaves nothing of the task.

        Raises:
            Conflict: The key was used with another body; or the session is busy and the spec refuses to wait.
        """
        work = await self.work()
        item = new_id("task", spec.scope, key)
        session_key = item if spec.session_id is None else spec.scope.session_key(spec.session_id)

        def change(link: sa.Connection) -> TaskHead:
            row = new_task(item, spec, session_key, body_hash=body_hash, home=_home(work))
            if spec.session_id is not None:
                _come_last(work, link, row)
            if work.records.add_task(link, row):
                if spec.on_busy == "refuse":
                    _refuse_busy(work, link, session_key, item)
                if hook is not None:
                    hook(link, item)
                work.queue.announce(link, f"queue {spec.mode}")
                return submitted_task(row, spec)
            _require_same(work.records.body_hash(link, "task", item), body_hash)
            head = work.records.task(link, item)
            assert head is not None
            return head

        head = await work.database.write(change)
        await self.ensure_worker()
        return head

    async def submit_job(
        self, spec: JobSpec, *, key: str | None = None, body_hash: str = "", hook: SubmissionHook | None = None
    ) -> JobHead:
        """Write a job's head and enqueue it, in one transaction; as `submit_task`.

        Raises:
            BadRequest: The steps do not make a graph.
            Conflict: The key was used with another body; or the session is busy and the spec refuses to wait.
        """
        check_graph(spec.steps)
        work = await self.work()
        item = new_id("job", spec.scope, key)
        session_key = spec.scope.session_key(spec.session_id)

        def change(link: sa.Connection) -> JobHead:
            row = new_row(item, spec, session_key, body_hash=body_hash, home=_home(work))
            _come_last(work, link, row)
            if work.records.add_job(link, row):
                if spec.on_busy == "refuse":
                    _refuse_busy(work, link, session_key, item)
                if hook is not None:
                    hook(link, item)
                work.queue.announce(link, "queue job")
                return submitted_job(row, spec)
            _require_same(work.records.body_hash(link, "job", item), body_hash)
            head = work.records.job(link, item)
            assert head is not None
            return head

        head = await work.database.write(change)
        await self.ensure_worker()
        return head

    async def task(self, scope: Scope, item: str, *, any_agent: bool = False) -> TaskHead:
        """Return a task of *scope*; *any_agent* reads those of the project's other agents too. Raises NotFound."""
        work = await self.work()
        stored_head = await work.database.read(lambda link: work.records.task(link, item))
        head = _require_owner(stored_head, scope, "task", item, any_agent=any_agent)
        await self._serve_unfinished(head)
        return head

    async def job(self, scope: Scope, item: str, *, any_agent: bool = False) -> JobHead:
        """Return a job of *scope*, as `task`. Raises NotFound."""
        work = await self.work()
        stored_head = await work.database.read(lambda link: work.records.job(link, item))
        head = _require_owner(stored_head, scope, "job", item, any_agent=any_agent)
        await self._serve_unfinished(head)
        return head

    async def list_tasks(
        self,
        scope: Scope,
        *,
        status: Sequence[str] = (),
        session_id: str | None = None,
        job_id: str | None = None,
        steps: bool = True,
        before: tuple[datetime, str] | None = None,
        limit: int = 100,
        any_agent: bool = False,
    ) -> list[TaskHead]:
        """Return tasks of *scope*, the newest first.

        Args:
            scope: Whose.
            status: States to show; none given shows all.
            session_id: Only those of this session.
            job_id: Only those of this job.
            steps: Whether tasks that are steps of jobs are shown.
            before: Time and id of the last head of the page before.
            limit: Most heads to return.
            any_agent: Whether tasks of the project's other agents are shown.
        """
        work = await self.work()
        query = ListQuery(scope, any_agent, tuple(status), job_id, before, limit, session_id, steps)
        heads = await work.database.read(lambda link: work.records.list_tasks(link, query))
        await self._serve_unfinished(*heads)
        return heads

    async def list_jobs(
        self,
        scope: Scope,
        *,
        status: Sequence[str] = (),
        session_id: str | None = None,
        before: tuple[datetime, str] | None = None,
        limit: int = 100,
        any_agent: bool = False,
    ) -> list[JobHead]:
        """Return jobs of *scope*, the newest first; as `list_tasks`."""
        work = await self.work()
        query = ListQuery(scope, any_agent, tuple(status), None, before, limit, session_id)
        heads = await work.database.read(lambda link: work.records.list_jobs(link, query))
        await self._serve_unfinished(*heads)
        return heads

    async def cancel_task(self, scope: Scope, item: str, reason: str = "", *, any_agent: bool = False) -> bool:
        """Ask for the end of a task; False, and nothing changed, when it is over.

        A worker sees it at once. Where no worker is alive to see it, the program is ended and the task canceled before
        this returns. A task that ends by itself first keeps its result, which the next worker writes: look at the head.

        Raises:
            NotFound: There is no such task of *scope*.
        """
        head = await self.task(scope, item, any_agent=any_agent)
        return not head.terminal and await self._cancel("task", item, reason)

    async def cancel_job(self, scope: Scope, item: str, reason: str = "", *, any_agent: bool = False) -> bool:
        """Ask for the end of a job and its steps; as `cancel_task`."""
        head = await self.job(scope, item, any_agent=any_agent)
        return not head.terminal and await self._cancel("job", item, reason)

    async def wait_task(
        self,
        scope: Scope,
        item: str,
        timeout: float | None = None,  # noqa: ASYNC109 - it returns what is known, it does not raise
        *,
        any_agent: bool = False,
    ) -> TaskHead:
        """Return the task once it is over, or as it is after *timeout* seconds. Raises NotFound."""
        return await self._wait(lambda: self.task(scope, item, any_agent=any_agent), timeout)

    async def wait_job(
        self,
        scope: Scope,
        item: str,
        timeout: float | None = None,  # noqa: ASYNC109 - it returns what is known, it does not raise
        *,
        any_agent: bool = False,
    ) -> JobHead:
        """Return the job once it is over, or as it is after *timeout* seconds. Raises NotFound."""
        return await self._wait(lambda: self.job(scope, item, any_agent=any_agent), timeout)

    async def logs(
        self,
        scope: Scope,
        item: str,
        stream: Stream = "stdout",
        offset: int = 0,
        limit: int = 65536,
        *,
        any_agent: bool = False,
    ) -> LogPiece:
        """Return up to *limit* bytes of a task's output from *offset*; a negative offset counts from the end.

        Read from the latest attempt's files, where this host has them; else from the tail the head keeps.

        Raises:
            NotFound: There is no such task of *scope*.
        """
        head = await self.task(scope, item, any_agent=any_agent)
        return await _piece(await self.work(), head, stream, offset, limit)

    async def ensure_worker(self) -> None:
        """Start a worker of this host when there is none and this client may; a call costs one look at a lock."""
        if self._spawn is None:
            return
        free = not slot_taken(self._location[1], 0)  # three calls of the system, none of which waits
        if free and time.monotonic() - self._spawned_at > self.settings.start_s:
            self._spawned_at = time.monotonic()
            await asyncio.to_thread(self._spawn)
        elif not free:
            self._spawned_at = float("-inf")  # it lives: should it die, the next call starts another at once

    async def _serve_unfinished(self, *heads: TaskHead | JobHead) -> None:
        """Start a worker for work of this host that is not over, should its own have died.

        That none can be started is logged, and hides nothing of the heads.
        """
        if self._spawn is None or all(head.terminal for head in heads):
            return
        host = (await self.work()).host
        if any(not head.terminal and head.home in (None, host) for head in heads):
            try:
                await self.ensure_worker()
            except KdskillsError as error:
                _LOG.warning("work waits for a worker: %s", error.message)

    async def _cancel(self, kind: Kind, item: str, reason: str) -> bool:
        work = await self.work()
        accepted = await cancel(work, kind, item, reason)
        if accepted and await unfinished(work, kind, item):
            await (
                self.ensure_worker()
            )  # one that lives sees it; where none does, the next writes what had ended by itself
        return accepted

    async def _wait(self, look: Callable[[], object], timeout: float | None) -> Head:  # noqa: ASYNC109
        end = float("inf") if timeout is None else time.monotonic() + timeout
        pause = _LOOK_S
        while True:
            head: Head = await look()  # type: ignore[misc]
            remaining_s = end - time.monotonic()
            if head.status in TERMINAL or remaining_s <= 0:
                return head
            await asyncio.sleep(min(pause, remaining_s))
            pause = min(pause * 1.3, _LOOK_MAX_S)


async def _piece(work: Work, head: TaskHead, stream: Stream, offset: int, limit: int) -> LogPiece:
    attempt = await asyncio.to_thread(work.attempts.find, head.id, head.attempt) if head.attempt else None
    if attempt is not None and head.host == work.host:
        return await asyncio.to_thread(attempt.logs, stream, offset, limit)
    return tail_piece(head, stream, offset, limit)


def _home(work: Work) -> str | None:
    """Return the host new work is pinned to; None for work of the pool."""
    return None if work.pooled else work.host


def _come_last(work: Work, link: sa.Connection, row: dict[str, Any]) -> None:
    """Give a row a later time than everything of its session that is not over: clocks may differ, or stand still."""
    row["created_at"] = max(row["created_at"], work.queue.last_of_session(link, row["session_key"]) + 1)


def _refuse_busy(work: Work, link: sa.Connection, session_key: str, item: str) -> None:
    if link.dialect.name == "postgresql":  # two that refuse to wait must not both find the session free
        link.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (session_key,))
    holder = work.records.holder(link, session_key, but=item)
    if holder is not None:
        raise Conflict(f"the session is held by {holder}", reason="session_busy", holder=holder)


def new_id(kind: Kind, scope: Scope, key: str | None) -> str:
    """Return an id nobody can guess; with a key, the id that key has in the project."""
    if key is None:
        bits = secrets.token_bytes(16)
    else:
        parts = (kind, scope.tenant, scope.project, key)
        text = b"".join(f"{len(part.encode())}:".encode() + part.encode() for part in parts)
        bits = hashlib.sha256(text).digest()[:16]
    return f"{kind}_{base64.b32encode(bits).decode().rstrip('=').lower()}"


def tail_piece(head: TaskHead, stream: Stream, offset: int, limit: int) -> LogPiece:
    """Return bytes of the tail a head keeps, by their offsets in the whole output."""
    tail, total = (head.stdout_tail, head.stdout_total) if stream == "stdout" else (head.stderr_tail, head.stderr_total)
    length = len(tail) if total is None else total
    first = length - len(tail)
    start = max(0, length + offset) if offset < 0 else min(offset, length)
    begin = max(start, first)
    return LogPiece(begin, tail[begin - first : begin - first + max(0, limit)], length, truncated=begin > start)


def _require_same(stored_hash: str | None, request_hash: str) -> None:
    if stored_hash != request_hash:
        raise Conflict("this idempotency key was used with another request", reason="idempotency_key")


def _require_owner(head: Head | None, scope: Scope, kind: Kind, item: str, *, any_agent: bool) -> Head:
    if head is not None:
        owner = head.scope
        in_project = (owner.tenant, owner.project) == (scope.tenant, scope.project)
        if in_project and (any_agent or owner.agent == scope.agent):
            return head
    raise NotFound(f"there is no {kind} {item[:200]!r}", id=item[:200])
