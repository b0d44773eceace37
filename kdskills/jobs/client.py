"""The client of background work: writes heads, reads, follows and cancels; it ends programs no living worker has."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, overload

from kdskills.errors import BadRequest, Conflict, KdskillsError, NotFound
from kdskills.execution.streams import LogPiece
from kdskills.jobs.model import (
    TASKS,
    TERMINAL,
    Head,
    JobHead,
    JobSpec,
    Kind,
    OutputError,
    Scope,
    TaskHead,
    TaskSpec,
    WorkHead,
    graph_problem,
)
from kdskills.jobs.queue import FENCE_US, Work, slot_taken
from kdskills.jobs.records import BEGUN, INDEXED, ListQuery, dump, ending, head_of, in_states, new_row, outcome
from kdskills.jobs.settings import FleetSettings, JobsSettings
from kdskills.jobs.stream import FarHosts, HostPiece, HostUnreachable
from kdskills.storage.database import LazyModule, micros, upsert, utc_now

if TYPE_CHECKING:
    import sqlalchemy as sa
else:
    sa = LazyModule("sqlalchemy")

Stream = Literal["stdout", "stderr"]
WriteHook = Callable[["sa.Connection", str], None]
"""Takes the connection of a submission's transaction and the id of what is submitted."""

_LOG: Final = logging.getLogger("kdskills.jobs")
_LOOK_S = 0.02
_LOOK_MAX_S = 0.25


async def cancel(work: Work, kind: Kind, item: str, reason: str, hook: WriteHook | None = None) -> bool:
    """Ask for the end of a task or job; False when it was over.

    What waits in a queue is canceled by the asking. What runs is left to its worker, if that lives; else its programs on
    this host are ended here, and its state after them. What had ended by itself keeps its result, for the next worker.
    """

    def change(link: sa.Connection) -> str | None:
        row_state = work.records.ask_cancel(link, kind, item, reason)
        if row_state is not None and hook is not None:
            hook(link, item)
        if row_state is not None:  # whoever has it in hand ends it; what it kept waiting may begin
            work.queue.announce(link, "queue" if row_state == "canceled" else f"cancel {item}")
        return row_state

    answer = await work.database.write(change)
    if answer == "asked":
        await asyncio.to_thread(work.roster.bury)
        orphans = await work.database.write(lambda link: _orphans(work, link, kind, item, reason))
        if orphans is not None:
            ended = await asyncio.gather(*(_end_program(work, task, reason) for task in orphans))
            ends = [(task, values) for task, values in zip(orphans, ended, strict=True) if values is not None]
            await work.database.write(lambda link: _end_rows(work, link, kind, item, ends))
    return answer is not None


def _orphans(work: Work, link: sa.Connection, kind: Kind, item: str, reason: str) -> list[TaskHead] | None:
    """Return tasks nobody alive holds, canceling steps that were still queued; None when a live worker holds *item*."""
    records, live = work.records, {row.executor for row in work.roster.live(link)}
    head = records.head(link, TaskHead, item) if kind == "task" else records.head(link, JobHead, item)
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
    # with its cancel, and what a worker wrote
    current_head = await work.database.read(lambda link: work.records.head(link, TaskHead, head.id))
    status, values = ending(current_head or head, verdict)
    if status != "canceled":
        return None
    lost = [
        OutputError(path=artifact.path, code="not_kept", message="it was canceled while no worker lived to keep it")
        for artifact in verdict.artifacts
    ]
    values |= {"output_errors": dump([*verdict.output_errors, *lost])}
    return values | await asyncio.to_thread(outcome, head, attempt, work.settings.result_bytes)


def _end_rows(
    work: Work, link: sa.Connection, kind: Kind, item: str, ends: list[tuple[TaskHead, dict[str, Any]]]
) -> None:
    """End the rows, a job's after all of its tasks; what somebody took meanwhile is left to them."""
    records = work.records
    for task, values in ends:
        records.force(link, "task", task.id, "canceled", executor=task.executor, **values)
    job = records.head(link, JobHead, item) if kind == "job" else None
    if job is not None and all(step.task is None or step.task.terminal for step in job.steps):
        records.force(link, "job", item, "canceled", executor=job.executor, error_code="canceled")
    work.queue.announce(link)


class JobsClient:
    """Submits, reads and cancels tasks and jobs; the database is opened by the first call.

    Whoever submits work, or looks at work that is not over, gets a worker started where none runs. What is asked of tasks
    and of jobs alike takes `TaskHead` or `JobHead` as its first argument; with *any_agent* it may be of the project's other
    agents too. *fleet* says how other hosts are asked. *spawn* starts a worker on this host where there is work and no worker; None leaves that to others.
    """

    def __init__(
        self,
        url: str,
        state_dir: Path,
        settings: JobsSettings | None = None,
        *,
        fleet: FleetSettings | None = None,
        spawn: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings or JobsSettings()
        self._fleet = fleet or FleetSettings()
        self._far_hosts: FarHosts | None = None
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
            opening = asyncio.to_thread(Work, *self._location, self.settings)
            self._opening = asyncio.get_running_loop().create_task(opening)
        return await asyncio.shield(self._opening)

    @overload
    async def submit(
        self,
        spec: TaskSpec,
        *,
        key: str | None = None,
        body_hash: str = "",
        hook: WriteHook | None = None,
        repeat_of: str | None = None,
    ) -> TaskHead: ...
    @overload
    async def submit(
        self,
        spec: JobSpec,
        *,
        key: str | None = None,
        body_hash: str = "",
        hook: WriteHook | None = None,
        repeat_of: str | None = None,
    ) -> JobHead: ...
    async def submit(
        self,
        spec: TaskSpec | JobSpec,
        *,
        key: str | None = None,
        body_hash: str = "",
        hook: WriteHook | None = None,
        repeat_of: str | None = None,
    ) -> TaskHead | JobHead:
        """Write the head of a task or job, which may be a repeat of another, and enqueue it, in one transaction.

        The same idempotency *key* with the same *body_hash* is the same work. *hook* is called in the transaction when
        the work is new; what it raises leaves nothing of it. Raises BadRequest for steps that do not make a graph,
        QuotaExceeded, Conflict for a key used with another body, or a busy session when the spec refuses to wait.
        """
        kind: type[TaskHead] | type[JobHead] = TaskHead
        if isinstance(spec, JobSpec):
            kind, problem = JobHead, graph_problem([(step.name, step.needs) for step in spec.steps])
            if problem is not None:
                raise BadRequest(problem, errors=[f"steps: {problem}"])
        work = await self.work()
        item = new_id(kind.KIND, spec.scope, key)
        session_key = item if spec.session_id is None else spec.scope.session_key(spec.session_id)

        def change(link: sa.Connection) -> TaskHead | JobHead:
            # results of evaluations lie in a folder of this host
            home = None if work.pooled and not spec.placement.evals else work.host
            row = new_row(item, spec, session_key, body_hash=body_hash, home=home, repeat_of=repeat_of)
            if spec.session_id is not None:
                # later than everything of its session that is not over: clocks may differ, or stand still
                row["created_at"] = max(row["created_at"], work.queue.last_of_session(link, session_key) + 1)
            if not work.records.add(link, kind.KIND, row):
                if work.records.body_hash(link, kind.KIND, item) != body_hash:
                    raise Conflict("this idempotency key was used with another request", reason="idempotency_key")
                head = work.records.head(link, kind, item)
                assert head is not None
                return head
            if spec.on_busy == "refuse":
                _refuse_busy(work, link, session_key, item)
            if hook is not None:
                hook(link, item)
            commands = len(spec.steps) if isinstance(spec, JobSpec) else 1
            work.quotas.admit(link, spec.scope, commands, micros(utc_now()))
            work.queue.announce(link, f"queue {row.get('mode', 'job')}")
            return head_of(kind, row, spec=spec)

        head = await work.database.write(change)
        await self.ensure_worker()
        return head

    async def head(self, kind: type[Head], scope: Scope, item: str, *, any_agent: bool = False) -> Head:
        """Return a task or job of *scope*. Raises NotFound."""
        work = await self.work()
        head = await work.database.read(lambda link: work.records.head(link, kind, item))
        whose = ("tenant", "project") if any_agent else ("tenant", "project", "agent")
        if head is None or any(getattr(head.scope, name) != getattr(scope, name) for name in whose):
            raise NotFound(f"there is no {kind.KIND} {item[:200]!r}", id=item[:200])
        await self._serve_unfinished(head)
        return head

    async def heads(self, kind: type[Head], scope: Scope, **listed: Any) -> list[Head]:
        """Return tasks or jobs of *scope*, the newest first; *listed* are further fields of `ListQuery`."""
        work, query = await self.work(), ListQuery(scope, **listed)
        heads: list[Head] = await work.database.read(lambda link: work.records.heads(link, kind, query))
        await self._serve_unfinished(*heads)
        return heads

    async def cancel(
        self,
        kind: type[Head],
        scope: Scope,
        item: str,
        reason: str = "",
        *,
        any_agent: bool = False,
        hook: WriteHook | None = None,
    ) -> bool:
        """Ask for the end of a task, or of a job and its steps; False, and nothing changed, when it is over.

        A worker sees it at once. Where no worker is alive to see it, the program is ended and the task canceled before
        this returns. A task that ends by itself first keeps its result, which the next worker writes: look at the head.
        *hook* is called in the transaction that asks, unless the work is over.
        Raises NotFound.
        """
        work, head = await self.work(), await self.head(kind, scope, item, any_agent=any_agent)
        if head.terminal or not await cancel(work, kind.KIND, item, reason, hook):
            return False
        table = work.records.table(kind.KIND)
        status = table.select().with_only_columns(table.c.status).where(table.c.id == item)
        if await work.database.read(lambda link: link.execute(status).scalar()) not in (None, *TERMINAL):
            await self.ensure_worker()  # one that lives sees it; else the next writes what had ended by itself
        return True

    async def wait(
        self,
        kind: type[Head],
        scope: Scope,
        item: str,
        timeout: float | None = None,  # noqa: ASYNC109 - it returns what is known, it does not raise
        *,
        any_agent: bool = False,
    ) -> Head:
        """Return the task or job once it is over, or as it is after *timeout* seconds. Raises NotFound."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        pause = _LOOK_S
        while True:
            head = await self.head(kind, scope, item, any_agent=any_agent)
            remaining_s = end - time.monotonic()
            if head.terminal or remaining_s <= 0:
                return head
            await asyncio.sleep(min(pause, remaining_s))
            pause = min(pause * 1.3, _LOOK_MAX_S)

    async def logs(
        self, scope: Scope, item: str, stream: Stream = "stdout", offset: int = 0, limit: int = 65536
    ) -> LogPiece:
        """Return up to *limit* bytes of a task's output from *offset*; a negative offset counts from the end.

        Read from the latest attempt's files, also of another host, else from the head's tail. Raises NotFound.
        """
        return (await self.piece(await self.head(TaskHead, scope, item), stream, offset, limit)).log

    async def piece(self, head: TaskHead, stream: Stream, offset: int, limit: int) -> HostPiece:
        """As `logs`, of a task as it was read; a host that has it and cannot be asked is named."""
        work, elsewhere, reason = await self.work(), None, None
        if head.attempt and head.host == work.host:
            piece = await asyncio.to_thread(work.attempts.log, head.id, head.attempt, stream, offset, limit)
            if piece is not None:
                return HostPiece(piece)
        elif head.attempt and head.host and not _is_whole(head, stream):
            try:
                return HostPiece(await (await self.far_hosts()).log(head, stream, offset, limit))
            except HostUnreachable as error:
                elsewhere, reason = head.host, str(error.details["reason"])
        return HostPiece(tail_piece(head, stream, offset, limit), elsewhere, reason)

    async def far_hosts(self) -> FarHosts:
        """Return what asks the other hosts."""
        work = await self.work()
        if self._far_hosts is None or self._far_hosts.work is not work:
            self._far_hosts = FarHosts(work, self._fleet)
        return self._far_hosts

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

    async def _serve_unfinished(self, *heads: WorkHead) -> None:
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


def _tail(head: TaskHead, stream: Stream) -> tuple[bytes, int | None]:
    if stream == "stdout":
        return head.stdout_tail, head.stdout_total
    return head.stderr_tail, head.stderr_total


def _is_whole(head: TaskHead, stream: Stream) -> bool:
    """Whether a head that does not change any more has all that was printed, of which its host may keep no file."""
    tail, total = _tail(head, stream)
    return head.terminal and total is not None and total <= len(tail)


def tail_piece(head: TaskHead, stream: Stream, offset: int, limit: int) -> LogPiece:
    """Return bytes of the tail a head keeps, by their offsets in the whole output."""
    tail, total = _tail(head, stream)
    length = len(tail) if total is None else total
    first = length - len(tail)
    start = max(0, length + offset) if offset < 0 else min(offset, length)
    begin = max(start, first)
    return LogPiece(begin, tail[begin - first : begin - first + max(0, limit)], length, truncated=begin > start)


EVICTED: Final = "-evicted"
MAX_COUNTED: Final = 10_000
"""Rows of one state that a look at the fleet counts at most: it costs the same however much there is."""
HOUR_US: Final = 3_600_000_000


@dataclass(frozen=True, slots=True)
class FleetState:
    """The workers and hosts of one database, what waits, and what is over; times are microseconds, by the clock `now`.

    Attributes:
        workers: Rows of the roster: those that live, and the last one of each host that has none.
        hosts: Rows of hosts that take nothing new, by host.
        running: How many tasks each executor has in hand, by executor and mode; jobs have the mode `job`.
        waiting: Rows with `project`, `waiting` and `oldest`, the creation of what waits longest, of the `MAX_COUNTED` oldest.
        counts: Tasks by state: those that are not over, and those that ended within the last hour; `MAX_COUNTED` at most.
    """

    now: int
    workers: Sequence[sa.Row[Any]]
    hosts: Mapping[str, sa.Row[Any]]
    running: Mapping[tuple[str, str], int]
    waiting: Sequence[sa.Row[Any]]
    counts: Mapping[str, int]


class Fleet:
    """What an operator sees of all hosts, and tells them."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._tables = work.tables

    def state(self, link: sa.Connection) -> FleetState:
        """Return how the fleet stands; only indexes of what is not over, and of the last hour, are read."""
        workers, hosts, tasks = self._tables.workers, self._tables.hosts, self._tables.tasks
        now = int(link.execute(sa.select(self._work.roster.clock())).scalar_one())
        running: dict[tuple[str, str], int] = {}
        for kind, table in (("task", tasks), ("job", self._tables.jobs)):
            mode = tasks.c.mode if kind == "task" else sa.literal("job")
            in_hand = sa.select(table.c.executor, mode, sa.func.count()).where(in_states(table, BEGUN))
            for executor, name, count in link.execute(in_hand.group_by(table.c.executor, mode)):
                running[executor or "", name] = count
        return FleetState(
            now=now,
            workers=link.execute(self._latest().order_by(workers.c.name, workers.c.host, workers.c.slot)).all(),
            hosts={row.host: row for row in link.execute(hosts.select())},
            running=running,
            waiting=link.execute(self._waiting()).all(),
            counts=self._counts(link, now - HOUR_US),
        )

    def _latest(self) -> sa.Select[Any]:
        workers, later = self._tables.workers, self._tables.workers.alias()
        newest = sa.select(sa.func.max(later.c.started_at)).where(later.c.host == workers.c.host).scalar_subquery()
        lives = sa.exists().where(later.c.host == workers.c.host, later.c.state == "live")
        return workers.select().where(sa.or_(workers.c.state == "live", (workers.c.started_at == newest) & ~lives))

    def _waiting(self) -> sa.Select[Any]:
        """Return the question for what waits by project, over the oldest of it; steps of jobs wait for their job's host."""
        parts = []
        for table in (self._tables.tasks, self._tables.jobs):
            oldest = sa.select(table.c.tenant, table.c.project, table.c.created_at).where(in_states(table, ("queued",)))
            parts.append(sa.select(oldest.order_by(table.c.created_at).limit(MAX_COUNTED).subquery()))
        every = sa.union_all(*parts).subquery()
        oldest_of = sa.func.min(every.c.created_at).label("oldest")
        counted = sa.select(every.c.tenant, every.c.project, sa.func.count().label("waiting"), oldest_of)
        return counted.group_by(every.c.tenant, every.c.project).order_by(oldest_of)

    def _counts(self, link: sa.Connection, since: int) -> dict[str, int]:
        table, counts = self._tables.tasks, dict[str, int]()
        for status in (*INDEXED, *sorted(TERMINAL & TASKS.keys())):
            rows = sa.select(table.c.status).where(in_states(table, (status,)))
            rows = rows if status in INDEXED else rows.where(table.c.finished_at >= since)
            few = rows.limit(MAX_COUNTED).subquery()
            counts[status] = link.execute(sa.select(sa.func.count()).select_from(few)).scalar_one()
        return counts

    def drain(self, link: sa.Connection, host: str, author: str) -> bool:
        """Let a host take nothing new, until `undrain`; False when it was so already."""
        row = {"host": host, "drained_at": micros(utc_now()), "drained_by": author[:400]}
        hosts = self._tables.hosts
        new = upsert(link.dialect.name, hosts).values(row).on_conflict_do_nothing().returning(hosts.c.host)
        return link.execute(new).first() is not None  # PostgreSQL's driver tells no count of rows here

    def lease_left_us(self, link: sa.Connection, host: str) -> int | None:
        """Return for how many microseconds a host keeps its work, its fence included; less than 0 for one that is given up.

        None is for ever. Until the transaction ends no worker of the host can renew its lease.
        """
        workers = self._tables.workers
        link.execute(sa.select(workers.c.executor).where(workers.c.host == host).with_for_update())
        endless = sa.func.count().filter(workers.c.lease_until.is_(None), workers.c.state == "live")
        left_us = sa.func.max(workers.c.lease_until) - self._work.roster.clock()
        row = link.execute(sa.select(endless, left_us).where(workers.c.host == host)).one()
        if row[0]:
            return None
        return -1 if row[1] is None else int(row[1]) + FENCE_US

    def evict(self, link: sa.Connection, host: str) -> tuple[int, int]:
        """Take the work of a host for lost; return how many tasks and jobs it had in hand, which others take over now.

        What its workers still say of them is refused from now on. One that lives finds out by its next beat, ends the
        programs of this work, and begins anew: it adopts nothing of it, as no host has the name that it gets here.
        """
        workers, counts = self._tables.workers, []
        for table in (self._tables.tasks, self._tables.jobs):
            mine = (in_states(table, BEGUN), table.c.host == host, table.c.home.is_(None))
            counts.append(link.execute(table.update().where(*mine).values(host=f"{host}{EVICTED}")).rowcount)
        burial = {"state": "dead", "lease_until": self._work.roster.clock() - FENCE_US - 1}
        link.execute(workers.update().where(workers.c.host == host).values(burial))
        self._work.queue.announce(link)
        return counts[0], counts[1]

    def undrain(self, link: sa.Connection, host: str) -> bool:
        """Let a host take work again; False when it was not drained."""
        hosts = self._tables.hosts
        changed = link.execute(hosts.delete().where(hosts.c.host == host)).rowcount > 0
        self._work.queue.announce(link)
        return changed
