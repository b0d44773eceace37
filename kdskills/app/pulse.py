"""How the work of a database stands, in numbers, for metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from kdskills.jobs.database import micros, utc_now
from kdskills.jobs.states import TERMINAL

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
        at: When it was taken.
        depth: Tasks that wait or run, by state.
        workers: Workers that are not known to be dead.
        lease_age_s: Seconds since the one of them was heard of that was silent longest; 0 without any.
        ran: What ended since the measurement before.
    """

    at: datetime
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
        at=now,
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
