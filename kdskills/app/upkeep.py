"""What a service does beside answering: measure the work, let go of versions whose work ended, collect unused ones."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import datetime
from typing import TYPE_CHECKING, Final

from kdskills.app.pulse import pulse
from kdskills.errors import KdskillsError
from kdskills.jobs.database import utc_now
from kdskills.jobs.states import OPEN

if TYPE_CHECKING:
    from kdskills.app.host import Host

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
    found = await pulse(host, since)
    host.telemetry.pulse(found)
    for run in found.ran:
        host.telemetry.ran(run.engine, run.status, run.seconds)
    return found.at


async def collect(host: Host) -> int:
    """Let go of versions whose work is over, then remove those nobody uses; return how many were removed."""
    released = await release(host)
    report = await host.projects.collect(keep_days=host.settings.collect_keep_days)
    if released or report.versions:
        _LOG.info("collected %d versions, let go of %d", len(report.versions), released)
    return len(report.versions)


async def release(host: Host) -> int:
    """Let go of the versions held by work that is over or gone; return how many that were."""
    held = [(project, holder) for project, holder in await host.projects.holders() if holder.startswith(WORK)]
    if not held:
        return 0
    going = await _going(host, {holder for _, holder in held})
    return sum([await host.projects.unpin(project, holder) for project, holder in held if holder not in going])


async def _going(host: Host, holders: set[str]) -> set[str]:
    """Return those of *holders* that are tasks or jobs which are not over."""
    import sqlalchemy as sa

    work = await host.work.client.work()

    def look(link: sa.Connection) -> set[str]:
        found: set[str] = set()
        for table in (work.tables.tasks, work.tables.jobs):
            query = sa.select(table.c.id).where(table.c.status.in_(OPEN))
            found |= {str(item) for item in link.execute(query).scalars() if item in holders}
        return found

    return await work.database.read(look)
