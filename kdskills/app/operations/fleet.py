"""Operations about all hosts that do background work: how they stand, what they measure, who takes nothing new, what projects use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from kdskills.app.identity import LOCAL
from kdskills.app.operations.models import Input, Output, ProjectInput
from kdskills.app.work import scope_of
from kdskills.errors import BadRequest, CallRefused, Conflict, NotFound
from kdskills.jobs.client import MAX_COUNTED, Fleet, FleetState
from kdskills.jobs.queue import slot_taken
from kdskills.jobs.quotas import DAY_US
from kdskills.jobs.settings import QuotaLimits
from kdskills.storage.database import micros, moment_of, utc_now

if TYPE_CHECKING:
    from kdskills.app.operations.table import Context
    from kdskills.app.telemetry import Telemetry
    from kdskills.app.upkeep import Upkeep
    from kdskills.app.work import WorkService
    from kdskills.jobs.queue import Work

SECOND_US = 1_000_000
_LOG = logging.getLogger("kdskills.jobs")


class FleetInput(Input):
    """Nothing to say."""


class DrainInput(Input):
    """Which host."""

    host: str = Field(min_length=1, max_length=255, description="The host's id, or its name where only one has it.")


class EvictInput(DrainInput):
    """Which host, and whether it may be alive."""

    force: bool = Field(False, description="Also while its lease holds: what it still runs may run twice for a while.")


class EvictOutput(Output):
    """How many tasks and jobs the host had in hand; each goes on elsewhere if it may be repeated, and is lost otherwise."""

    host: str
    name: str
    tasks: int
    jobs: int


class MetricsOutput(Output):
    """Every metric of this process and of its database, in the text format of Prometheus."""

    text: str


class FleetWorker(Output):
    """One worker of a host.

    Attributes:
        state: `live`; `silent` when it was not buried yet and its lock or lease is gone; `ended`.
        beat_age_s: Seconds since its last heartbeat, by the database's clock.
        lease_left_s: Seconds the host keeps its work without another heartbeat; null where there are no leases.
        version: Of kdskills; null, as its places, for a worker of a version that did not tell.
        slots: Commands it runs at the same time, and `services` those that stay up.
        address: Where it serves what its host has to the doors of other hosts; null where it does not.
        full_since: From when on it takes nothing new because the disk of its state folder is full; null while it has room.
        commands: How many it has in hand, and `running_services`, `jobs`, likewise.
    """

    executor: str
    slot: int
    pid: int
    state: Literal["live", "silent", "ended"]
    version: str | None
    started_at: datetime
    beat_at: datetime
    beat_age_s: float
    lease_left_s: float | None
    slots: int | None
    services: int | None
    address: str | None
    full_since: datetime | None
    commands: int
    running_services: int
    jobs: int


class FleetHost(Output):
    """One host, which is one state folder; `drained_at` and `drained_by` tell that it takes nothing new, and who said so."""

    host: str
    name: str
    here: bool
    state: Literal["live", "silent", "ended"]
    drained_at: datetime | None
    drained_by: str | None
    workers: tuple[FleetWorker, ...]


class ProjectQueue(Output):
    """What waits of one project, and since when the oldest of it does."""

    project: str
    waiting: int
    oldest_at: datetime
    oldest_age_s: float


class FleetOutput(Output):
    """How the fleet stands.

    Attributes:
        pooled: Whether any host may take the work of any other.
        hosts: Those with a worker, and those whose last worker is still remembered.
        queue: By project, what waits longest first; callers elsewhere are told of their own project.
        waiting: Tasks and jobs that wait, of all projects.
        tasks: Tasks by state: those that are not over, and those that ended within the last hour.
        counted_to: Where counting ends: a number of `queue`, `waiting` or `tasks` that is as large may be larger.
    """

    version: str
    pooled: bool
    counted_at: datetime
    hosts: tuple[FleetHost, ...]
    queue: tuple[ProjectQueue, ...]
    waiting: int
    tasks: dict[str, int]
    counted_to: int = MAX_COUNTED


class DrainOutput(Output):
    """Whether the host is drained, and whether that changed just now."""

    host: str
    name: str
    drained: bool
    changed: bool


class QuotaUse(Output):
    """One quota of a project: its name, the limit, which is null for any number, and what of it is used."""

    quota: str
    limit: float | None
    used: float


class QuotaOutput(Output):
    """What a project has of background work; `day_ends_at` is when the quotas per day begin at nothing again."""

    project: str
    quotas: tuple[QuotaUse, ...]
    day_ends_at: datetime
    counted_to: int = MAX_COUNTED


async def show_quota(work: WorkService, arguments: ProjectInput, context: Context) -> QuotaOutput:
    """Tell what a project may have of background work, and has."""
    project = arguments.project_of(context)
    opened, scope = await work.client.work(), scope_of(context.identity).model_copy(update={"project": project})
    now = micros(utc_now())
    usage = await opened.database.read(lambda link: opened.quotas.usage(link, scope, now, MAX_COUNTED))
    limits = opened.quotas.limits.of(project)
    rows = [
        QuotaUse(quota=name, limit=getattr(limits, name), used=getattr(usage, name))
        for name in QuotaLimits.model_fields
    ]
    return QuotaOutput(project=project, quotas=tuple(rows), day_ends_at=moment_of((now // DAY_US + 1) * DAY_US))


async def show_fleet(work: WorkService, version: str, arguments: FleetInput, context: Context) -> FleetOutput:
    """Tell how hosts, workers and the queue stand, at a cost that does not grow with what is kept."""
    opened, identity = await work.client.work(), context.identity
    state, hosts = await opened.database.read(lambda link: _by_host(opened, Fleet(opened).state(link)))
    mine = [row for row in state.waiting if identity.account or row.project == identity.project]
    return FleetOutput(
        version=version,
        pooled=opened.pooled,
        counted_at=moment_of(state.now),
        hosts=hosts,
        queue=tuple(
            ProjectQueue.of(row, oldest_at=moment_of(row.oldest), oldest_age_s=_seconds(state.now - row.oldest))
            for row in mine
        ),
        waiting=sum(row.waiting for row in state.waiting),
        tasks=dict(state.counts),
    )


async def show_metrics(telemetry: Telemetry, upkeep: Upkeep, arguments: FleetInput, context: Context) -> MetricsOutput:
    """Tell what is measured, looking at the database first; one that is away is told as a metric."""
    scraped = telemetry.scraped
    await upkeep.look()
    return MetricsOutput(text=scraped.text())


def _by_host(work: Work, state: FleetState) -> tuple[FleetState, tuple[FleetHost, ...]]:
    """Return the state, and its workers by host; a look at locks of this host blocks."""
    hosts = []
    for host, rows in groupby(state.workers, lambda row: row.host):
        workers = tuple(_worker(work, row, state) for row in rows)
        best = min((worker.state for worker in workers), key=("live", "silent", "ended").index)
        name = next(row.name for row in state.workers if row.host == host)
        drain = state.hosts.get(host)
        facts = {"drained_at": drain and moment_of(drain.drained_at), "drained_by": drain and drain.drained_by}
        hosts.append(FleetHost(host=host, name=name, here=host == work.host, state=best, workers=workers, **facts))
    return state, tuple(hosts)


def _worker(work: Work, row: Any, state: FleetState) -> FleetWorker:
    alive = row.lease_until is None or row.lease_until >= state.now
    if row.host == work.host:
        alive = slot_taken(work.state_dir, row.slot)
    lease_left_s = None if row.lease_until is None else _seconds(row.lease_until - state.now)
    modes = {"commands": "batch", "running_services": "service", "jobs": "job"}
    return FleetWorker.of(
        row,
        state=("live" if alive else "silent") if row.state == "live" else "ended",
        started_at=moment_of(row.started_at),
        beat_at=moment_of(row.beat_at),
        beat_age_s=_seconds(state.now - row.beat_at),
        lease_left_s=lease_left_s,
        full_since=row.full_since and moment_of(row.full_since),
        **{name: state.running.get((row.executor, mode), 0) for name, mode in modes.items()},
    )


def _seconds(microseconds: int) -> float:
    return round(max(0, microseconds) / SECOND_US, 1)


async def drain(work: WorkService, arguments: DrainInput, context: Context) -> DrainOutput:
    """Let a host take nothing new; what it runs goes on to its end."""
    return await _say_drained(work, arguments, context, drained=True)


async def undrain(work: WorkService, arguments: DrainInput, context: Context) -> DrainOutput:
    """Let a host take work again."""
    return await _say_drained(work, arguments, context, drained=False)


async def evict(work: WorkService, arguments: EvictInput, context: Context) -> EvictOutput:
    """Take a host's work for lost now. Raises Conflict: `host_alive` while its lease holds, `host_pinned` without a pool."""
    fleet, opened = await _administered(work, context)

    def change(link: Any) -> EvictOutput:
        opened.queue.hold_claims(link)  # what is claimed meanwhile would escape
        host, name = _meant_host(fleet.state(link).workers, arguments.host)
        left_us = fleet.lease_left_us(link, host)
        if left_us is None or not opened.pooled:
            raise Conflict(f"no other host may take the work of {host}", code="host_pinned", host=host)
        if left_us > 0 and not arguments.force:
            message = (
                f"host {host} keeps its work for {_seconds(left_us)} s: wait, or say force, and some may run twice"
            )
            raise Conflict(message, code="host_alive", host=host)
        tasks, jobs = fleet.evict(link, host)
        _LOG.warning("host %s is evicted by %s", host, context.author.who)
        return EvictOutput(host=host, name=name, tasks=tasks, jobs=jobs)

    return await opened.database.write(change)


async def _administered(work: WorkService, context: Context) -> tuple[Fleet, Work]:
    """Return the fleet, for who may say something of its hosts. Raises CallRefused."""
    identity = context.identity
    if not identity.account and identity.project != LOCAL.project:  # every project's work runs on these hosts
        message = f"hosts are for administrators of the project {LOCAL.project!r} to change, and for the account"
        raise CallRefused(message, code="not_yours_to_say", argument="host")
    opened = await work.client.work()
    return Fleet(opened), opened


async def _say_drained(work: WorkService, arguments: DrainInput, context: Context, *, drained: bool) -> DrainOutput:
    fleet, opened = await _administered(work, context)

    def change(link: Any) -> DrainOutput:
        host, name = _meant_host(fleet.state(link).workers, arguments.host)
        changed = fleet.drain(link, host, context.author.who) if drained else fleet.undrain(link, host)
        return DrainOutput(host=host, name=name, drained=drained, changed=changed)

    return await opened.database.write(change)


def _meant_host(workers: Sequence[Any], word: str) -> tuple[str, str]:
    """Return the id and name of the host that *word* means. Raises NotFound, and BadRequest when several have the name."""
    names = {row.host: row.name for row in workers if word in {row.host, row.name}}
    if word in names:
        return word, names[word]
    if not names:
        raise NotFound(f"there is no host {word!r}", host=word)
    if len(names) > 1:
        problem = f"is the name of several hosts: {', '.join(sorted(names))}"
        raise BadRequest(f"/host: {problem}", errors=[{"path": "/host", "problem": problem}])
    return next(iter(names.items()))
