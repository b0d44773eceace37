"""Quotas by project: what is counted for each, and the refusal of whoever would have more than the operator allows.

A day is one of UTC. What a project used of it stands in a row of its own, which a submission and an end change in their
own transaction: counts are exact in every process, and submissions of one project wait for each other only that long.
Processor time is that of a command and of what watched it on this host; of an engine whose programs are elsewhere, and of
a command that took all that watched it along, the time it took counts instead.

Retention goes by the same: the bytes of each project's work, and what of it work that is not over needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from kdskills.errors import CallerMustAct
from kdskills.jobs.records import BEGUN, INDEXED, in_states
from kdskills.jobs.settings import DAY_S, Quotas
from kdskills.storage.database import LazyModule, upsert

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.jobs.attempts import Verdict
    from kdskills.jobs.model import Scope, TaskHead
    from kdskills.jobs.records import WorkRecords, WorkTables
else:
    sa = LazyModule("sqlalchemy")

DAY_US: Final = round(DAY_S * 1_000_000)
SOON_S: Final = 5
LATER_S: Final = 300
"""Seconds after which a refused submission may be worth another try: of what ends by itself, and of what retention removes."""
MEASURED: Final = frozenset({"bubblewrap", "landlock", "srt", "subprocess"})
"""Engines whose programs run below the process that watches them, so that the system counts their time."""


class QuotaExceeded(CallerMustAct, code="quota_exceeded"):
    """The project has as much as its quota allows; `details` tell `quota`, `limit`, `used` and `retry_after` in seconds."""


@dataclass(frozen=True, slots=True)
class ProjectUsage:
    """What one project has now: work that runs, work that waits, submissions and processor time of the day, bytes of artifacts."""

    running: int
    queued: int
    tasks_per_day: int
    cpu_s_per_day: float
    artifact_bytes: int


@dataclass(frozen=True, slots=True)
class FreePlaces:
    """How many more commands projects may have running, by what runs of each (tenant, project) that has any."""

    limits: Quotas
    running: dict[tuple[str, str], int]

    @property
    def busy(self) -> list[tuple[str, str]]:
        """Projects that may have no more, as (tenant, project)."""
        return [whose for whose in self.running if self._left(whose) <= 0]

    def take(self, tenant: str, project: str) -> bool:
        """Count one more command of a project; False when it may have no more."""
        whose = (tenant, project)
        if self._left(whose) <= 0:
            return False
        self.running[whose] = self.running.get(whose, 0) + 1
        return True

    def _left(self, whose: tuple[str, str]) -> float:
        limit = self.limits.of(whose[1]).running
        return math.inf if limit is None else limit - self.running.get(whose, 0)


@dataclass(eq=False)
class ProjectQuotas:
    """Counts and bounds what the projects of one database have."""

    records: WorkRecords
    limits: Quotas

    @property
    def bounds_running(self) -> bool:
        """Whether any project may have only so many commands running."""
        every = (self.limits, *self.limits.projects.values())
        return any(limits.running is not None for limits in every)

    def free_places(self, link: sa.Connection) -> FreePlaces:
        """Return how many more commands each project may have running, inside a claim exactly."""
        table = self.records.table("task")
        owner = (table.c.tenant, table.c.project)
        active = (in_states(table, BEGUN), table.c.mode == "batch")
        query = sa.select(*owner, sa.func.count()).where(*active).group_by(*owner)
        return FreePlaces(self.limits, {(tenant, project): count for tenant, project, count in link.execute(query)})

    def admit(self, link: sa.Connection, scope: Scope, tasks: int, now: int) -> None:
        """Count *tasks* more of a project at *now*, in microseconds. Raises QuotaExceeded, and nothing is counted then.

        To be called in the transaction that has added them.
        """
        of_day, cpu_ms = self._count(link, scope, now, tasks=tasks)
        self._require(link, scope, now, tasks=of_day, cpu_ms=cpu_ms)

    def require_room(self, link: sa.Connection, scope: Scope, additional_bytes: int, now: int) -> None:
        """Refuse, before its inputs are kept, what `admit` would refuse; nothing is counted. Raises QuotaExceeded."""
        of_day, cpu_ms = self._of_day(link, scope, now)
        self._require(link, scope, now, tasks=of_day + 1, cpu_ms=cpu_ms, waiting=1, additional_bytes=additional_bytes)

    def _require(
        self,
        link: sa.Connection,
        scope: Scope,
        now: int,
        *,
        tasks: int,
        cpu_ms: int,
        waiting: int = 0,
        additional_bytes: int = 0,
    ) -> None:
        limits = self.limits.of(scope.project)
        until_midnight = math.ceil((DAY_US - now % DAY_US) / 1_000_000)
        _require("tasks_per_day", limits.tasks_per_day, tasks, until_midnight)
        if limits.cpu_s_per_day is not None and cpu_ms >= 1000 * limits.cpu_s_per_day:
            _require("cpu_s_per_day", limits.cpu_s_per_day, cpu_ms / 1000, until_midnight, reached=True)
        if limits.queued is not None:
            _require("queued", limits.queued, self._queued(link, scope, limits.queued + 1) + waiting, SOON_S)
        if limits.artifact_bytes is not None:
            _require("artifact_bytes", limits.artifact_bytes, self._bytes(link, scope) + additional_bytes, LATER_S)

    def charge(self, link: sa.Connection, head: TaskHead, verdict: Verdict, now: int) -> None:
        """Count the processor time of an attempt that ended."""
        spent_ms = verdict.cpu_ms
        if spent_ms is None or head.spec.placement.engine not in MEASURED:
            spent_ms = max(spent_ms or 0, verdict.duration_ms)
        if spent_ms:
            self._count(link, head.scope, now, cpu_ms=spent_ms)

    def usage(self, link: sa.Connection, scope: Scope, now: int, most: int) -> ProjectUsage:
        """Return what a project has; work is counted to *most*."""
        tasks, cpu_ms = self._of_day(link, scope, now)
        return ProjectUsage(
            running=self._open(link, "task", scope, BEGUN, most),
            queued=self._queued(link, scope, most),
            tasks_per_day=tasks,
            cpu_s_per_day=cpu_ms / 1000,
            artifact_bytes=self._bytes(link, scope),
        )

    def forget(self, link: sa.Connection, before: int) -> None:
        """Forget days that were over *before*, in microseconds."""
        link.execute(self._table.delete().where(self._table.c.day < before // DAY_US))

    @property
    def _table(self) -> sa.Table:
        return self.records.tables.usage

    def _row(self, scope: Scope, now: int) -> Sequence[sa.ColumnElement[bool]]:
        table = self._table
        return (table.c.tenant == scope.tenant, table.c.project == scope.project, table.c.day == now // DAY_US)

    @cached_property
    def _counting(self) -> Any:
        new, table = upsert(self.records.dialect, self._table), self._table
        more = {"tasks": table.c.tasks + new.excluded.tasks, "cpu_ms": table.c.cpu_ms + new.excluded.cpu_ms}
        change = new.on_conflict_do_update(index_elements=["tenant", "project", "day"], set_=more)
        return change.returning(table.c.tasks, table.c.cpu_ms)

    def _count(self, link: sa.Connection, scope: Scope, now: int, **more: int) -> tuple[int, int]:
        row = {"tenant": scope.tenant, "project": scope.project, "day": now // DAY_US, "tasks": 0, "cpu_ms": 0} | more
        tasks, cpu_ms = link.execute(self._counting, row).one()
        return tasks, cpu_ms

    def _of_day(self, link: sa.Connection, scope: Scope, now: int) -> tuple[int, int]:
        table = self._table
        row = link.execute(sa.select(table.c.tasks, table.c.cpu_ms).where(*self._row(scope, now))).one_or_none()
        return (0, 0) if row is None else (row.tasks, row.cpu_ms)

    def _queued(self, link: sa.Connection, scope: Scope, most: int) -> int:
        """Return how many tasks, steps included, and jobs wait, counting to *most*."""
        return min(most, sum(self._open(link, kind, scope, ("queued",), most) for kind in ("task", "job")))

    def _open(self, link: sa.Connection, kind: str, scope: Scope, states: Sequence[str], most: int) -> int:
        """Return how many of a kind, steps of jobs included, are in one of *states*, counting to *most*."""
        table = self.records.table(kind)
        whose = (table.c.tenant == scope.tenant, table.c.project == scope.project, in_states(table, states))
        some = sa.select(table.c.id).where(*whose).limit(most).subquery()
        return link.execute(sa.select(sa.func.count()).select_from(some)).scalar_one()

    def _bytes(self, link: sa.Connection, scope: Scope) -> int:
        table = self.records.tables.artifacts
        whose = (table.c.tenant == scope.tenant, table.c.project == scope.project)
        return int(link.execute(sa.select(sa.func.coalesce(sa.func.sum(table.c.size), 0)).where(*whose)).scalar_one())


def _require(quota: str, limit: float | None, used: float, retry_after: int, *, reached: bool = False) -> None:
    """Raise QuotaExceeded when *used* is more than *limit*, or *reached* tells that there is nothing left."""
    if limit is None or (used <= limit and not reached):
        return
    message = f"this project may have {limit:g} by its quota {quota}, and has {used:g}: try again in {retry_after} s"
    raise QuotaExceeded(message, quota=quota, limit=limit, used=used, retry_after=retry_after)


def printed_bytes(tasks: sa.Table, most: int) -> sa.ColumnElement[int]:
    """Return the bytes of its streams that are kept of a task's latest attempt, of which each has *most* at most."""
    totals = [sa.func.coalesce(tasks.c[f"{stream}_total"], 0) for stream in ("stdout", "stderr")]
    first, second = (sa.case((total > most, most), else_=total) for total in totals)
    return first + second


def project_bytes(link: sa.Connection, tables: WorkTables, log_bytes: int) -> dict[tuple[str, str], int]:
    """Return the bytes of each tenant's and project's work: artifacts of tasks, each content once, and what tasks printed."""
    tasks, columns = tables.tasks, tables.artifacts.c
    logs = sa.select(tasks.c.tenant, tasks.c.project, sa.func.sum(printed_bytes(tasks, log_bytes)))
    of_tasks = columns.task_id.is_not(None)
    once = (
        sa.select(columns.tenant, columns.project, columns.sha256, columns.size).where(of_tasks).distinct().subquery()
    )
    contents = sa.select(once.c.tenant, once.c.project, sa.func.sum(once.c.size)).group_by(
        once.c.tenant, once.c.project
    )
    used: dict[tuple[str, str], int] = {}
    for query in (logs.group_by(tasks.c.tenant, tasks.c.project), contents):
        for tenant, project, size in link.execute(query):
            used[tenant, project] = used.get((tenant, project), 0) + int(size)
    return used


_INPUT: Final = re.compile(r'"artifact_id":\s*"((?:art|inp)_[A-Za-z0-9]+)"')
"""An artifact that the text of a specification takes as an input."""
_PARAMETERS: Final = 500
"""Ids one statement asks for at most."""


def inputs_of_open(link: sa.Connection, tables: WorkTables) -> set[str]:
    """Return ids of artifacts that tasks and jobs take as inputs that are not over."""
    inputs = set[str]()
    for table in (tables.tasks, tables.jobs):
        query = sa.select(table.c.spec).where(in_states(table, INDEXED), table.c.spec.contains('"artifact_id"'))
        for spec in link.execute(query).scalars():
            inputs.update(_INPUT.findall(spec))
    return inputs


def needed_work(link: sa.Connection, tables: WorkTables) -> frozenset[str]:
    """Return ids of tasks, and of their jobs, whose artifacts are inputs of what is not over."""
    inputs, artifacts, owners = sorted(inputs_of_open(link, tables)), tables.artifacts.c, set[str]()
    for first in range(0, len(inputs), _PARAMETERS):
        some = artifacts.id.in_(inputs[first : first + _PARAMETERS])
        for row in link.execute(sa.select(artifacts.task_id, artifacts.job_id).where(some)):
            owners.update(item for item in row if item is not None)
    return frozenset(owners)
