"""The state of a service: whether it can take work, how its work stands, and what it does beside answering.

Upkeep measures the work, lets go of versions whose work ended, and collects unused ones.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final

from kdskills.errors import KdskillsError, OperatorMustAct
from kdskills.jobs.model import OPEN, TERMINAL
from kdskills.storage.database import micros, utc_now
from kdskills.storage.folder import StateUnwritable, check_writable

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.app.host import Host
    from kdskills.jobs.tables import WorkTables


LIVE: Final = ("queued", "starting", "running")
MOST: Final = 1000
"""Most ended runs that one measurement tells of."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that ended; `seconds` from its start."""

    engine: str
    status: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Pulse:
    """One measurement.

    Attributes:
        measured_at: When it was taken.
        depth: Tasks that wait or run, by state.
        workers: Workers that are not known to be dead.
        lease_age_s: Seconds since the one of them was heard of that was silent longest; 0 without any.
        ran: What ended since the measurement before.
    """

    measured_at: datetime
    depth: Mapping[str, int]
    workers: int
    lease_age_s: float
    ran: tuple[Ran, ...]


async def pulse(host: Host, since: datetime) -> Pulse:
    """Measure.

    Args:
        host: Whose work.
        since: When the measurement before was taken.

    Raises:
        DatabaseUnavailable: The database does not answer.
    """
    work = await host.work.client.work()
    return await work.database.read(lambda link: _measured(link, work.tables, since))


def _measured(link: sa.Connection, tables: WorkTables, since: datetime) -> Pulse:
    import sqlalchemy as sa

    now, tasks, workers = utc_now(), tables.tasks, tables.workers
    counted = sa.select(tasks.c.status, sa.func.count()).where(tasks.c.status.in_(LIVE)).group_by(tasks.c.status)
    depth = dict.fromkeys(LIVE, 0) | {str(state): int(count) for state, count in link.execute(counted)}
    beats = [
        int(beat) for beat in link.execute(sa.select(workers.c.beat_at).where(workers.c.state != "dead")).scalars()
    ]
    ended = (
        sa.select(tasks.c.spec, tasks.c.status, tasks.c.started_at, tasks.c.finished_at)
        .where(tasks.c.status.in_(sorted(TERMINAL)))
        .where(tasks.c.finished_at > micros(since), tasks.c.finished_at <= micros(now), tasks.c.started_at.is_not(None))
        .order_by(tasks.c.finished_at)
        .limit(MOST)
    )
    return Pulse(
        measured_at=now,
        depth=depth,
        workers=len(beats),
        lease_age_s=max(0.0, (micros(now) - min(beats)) / 1e6) if beats else 0.0,
        ran=tuple(
            Ran(_engine(row.spec), row.status, max(0, row.finished_at - row.started_at) / 1e6)
            for row in link.execute(ended)
        ),
    )


def _engine(spec: str) -> str:
    return str(json.loads(spec)["placement"]["engine"])


WORK: Final = ("task_", "job_")
_LOG = logging.getLogger("kdskills.service")


async def upkeep(host: Host) -> None:
    """Do it until cancelled; what fails is logged and tried again."""
    since, next_collect = utc_now(), time.monotonic()
    while True:
        try:
            since = await measure(host, since)
            if time.monotonic() >= next_collect:
                next_collect = time.monotonic() + host.settings.collect_interval_s
                await collect(host)
        except KdskillsError as error:
            _LOG.warning("upkeep: %s: %s", error.code, error.message)
        await asyncio.sleep(min(host.settings.pulse_s, host.settings.collect_interval_s))


async def measure(host: Host, since: datetime) -> datetime:
    """Record how the work stands, and return when that was."""
    measurement = await pulse(host, since)
    host.telemetry.pulse(measurement)
    for run in measurement.ran:
        host.telemetry.ran(run.engine, run.status, run.seconds)
    return measurement.measured_at


async def collect(host: Host) -> int:
    """Let go of versions whose work is over, then remove those nobody uses; return how many were removed."""
    released = await release(host)
    report = await host.projects.collect(keep_days=host.settings.collect_keep_days)
    if released or report.versions:
        _LOG.info("collected %d versions, let go of %d", len(report.versions), released)
    return len(report.versions)


async def release(host: Host) -> int:
    """Let go of the versions held by work that is over or gone; return how many that were."""
    pins = [(project, holder) for project, holder in await host.projects.holders() if holder.startswith(WORK)]
    if not pins:
        return 0
    going = await _going(host, {holder for _, holder in pins})
    return sum([await host.projects.unpin(project, holder) for project, holder in pins if holder not in going])


async def _going(host: Host, holders: set[str]) -> set[str]:
    """Return those of *holders* that are tasks or jobs which are not over."""
    import sqlalchemy as sa

    work = await host.work.client.work()

    def look(link: sa.Connection) -> set[str]:
        open_ids: set[str] = set()
        for table in (work.tables.tasks, work.tables.jobs):
            query = sa.select(table.c.id).where(table.c.status.in_(OPEN))
            open_ids |= {str(item) for item in link.execute(query).scalars() if item in holders}
        return open_ids

    return await work.database.read(look)


PATIENCE_S: Final = 10.0
"""Seconds a part may take to answer; one that takes longer is not ready."""
SLOW: Final = "no_answer_in_time"


class NoWorker(OperatorMustAct):
    """Work waits, and no worker is alive that would take it; it waits until one is."""

    code = "no_worker"


@dataclass(frozen=True, slots=True)
class Readiness:
    """What each part says: `ok`, or the stable code of what is wrong; never words that could tell of this machine.

    Attributes:
        checks: The words of the parts.
        notices: What does not keep new work from being taken, though somebody should know.
    """

    checks: Mapping[str, str]
    notices: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every part is in order."""
        return all(word == "ok" for word in self.checks.values())


async def readiness(host: Host, *, patience_s: float = PATIENCE_S) -> Readiness:
    """Ask the database, the engines, the disk and the store of artifacts at one time; engines remember their own probes.

    Args:
        host: Who is asked.
        patience_s: Seconds each part may take.
    """
    checks = {
        "database": _database(host),
        "engine": host.wiring.executor(host.settings.executor),
        "disk": asyncio.to_thread(check_writable, host.settings.state_dir),
        "artifacts": _artifacts(host),
        "workers": _workers(host),
    }
    words = dict(zip(checks, await asyncio.gather(*(_word(each, patience_s) for each in checks.values())), strict=True))
    workers = words.pop("workers")
    if workers == NoWorker.code:
        _LOG.warning("work waits and no worker is alive: `kdskills worker` starts one")
    return Readiness(words, {} if workers == "ok" else {"workers": workers})


async def _word(check: Awaitable[object], patience_s: float) -> str:
    try:
        async with asyncio.timeout(patience_s):
            await check
    except KdskillsError as error:
        return error.code
    except TimeoutError:
        return SLOW
    except OSError:
        return StateUnwritable.code
    return "ok"


async def _workers(host: Host) -> None:
    """Raises NoWorker when work waits that nobody alive would take; without waiting work nobody is missed."""
    if not host.storage.present:
        return
    work = await host.work.client.work()
    await asyncio.to_thread(work.roster.bury)  # one that was killed had nobody to say so
    if await work.database.read(work.queue.stranded):
        raise NoWorker("work waits and no worker is alive")


async def _database(host: Host) -> None:
    await host.storage.database.read(lambda link: link.exec_driver_sql("SELECT 1").scalar())


async def _artifacts(host: Host) -> None:
    if host.settings.artifacts is not None:  # else they are in the state folder, which is looked at already
        await host.work.artifacts().check()
