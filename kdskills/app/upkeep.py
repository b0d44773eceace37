"""The state of a service: whether it can take work, how its work stands, and what it does beside answering.

Upkeep measures the work, lets go of versions whose work ended, and collects unused ones.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kdskills.errors import KdskillsError, OperatorMustAct
from kdskills.jobs.model import OPEN, TERMINAL
from kdskills.jobs.records import in_states
from kdskills.session.core import store_errors
from kdskills.storage.database import micros, utc_now
from kdskills.storage.folder import StateUnwritable, check_writable

if TYPE_CHECKING:
    import sqlalchemy as sa

    from kdskills.app.operations.conversation import Conversations
    from kdskills.app.settings import Settings
    from kdskills.app.telemetry import Telemetry
    from kdskills.app.wiring import HostWiring, Storage
    from kdskills.app.work import WorkService
    from kdskills.jobs.records import WorkTables

LIVE: Final = ("queued", "starting", "running")
MOST: Final = 1000
"""Most ended runs that one measurement tells of; the next one tells of the others."""
LATE_S: Final = 600.0
"""Seconds by which the record of an end may come late: files are stored before it, and clocks of hosts differ."""
REMEMBERED: Final = 10_000
"""Most tasks that ended within that time and are known one by one; of more, those that ended last."""
WORK: Final = ("task_", "job_")
PATIENCE_S: Final = 10.0
"""Seconds a part may take to answer; one that takes longer is not ready."""
SLOW: Final = "no_answer_in_time"
_LOG = logging.getLogger("kdskills.service")


class Ran(NamedTuple):
    """A command that ended: `seconds` from its start, `delay_s` from its submit to that, and bytes it printed and left."""

    engine: str
    status: str
    seconds: float
    delay_s: float = 0.0
    output: int = 0
    artifacts: int = 0


class Pulse(NamedTuple):
    """One measurement: work by state, and what ended since the one before.

    `workers` are not known to be dead; the one that was silent longest was heard of `lease_age_s` ago, 0 without any. `jobs`
    are by state as `depth` is for tasks, the oldest of both that is queued has been for `oldest_s`, and `starts` are tasks
    that began since.
    """

    depth: Mapping[str, int]
    workers: int
    lease_age_s: float
    ran: tuple[Ran, ...] = ()
    jobs: Mapping[str, int] = MappingProxyType({})
    oldest_s: float = 0.0
    starts: int = 0


class Tally(NamedTuple):
    """Ids of tasks that were told of: those that `ended` lately, and those that `begun` and were not over, or not told of, then.

    A time would not do: a row says that it ended only some time after that, by the clock of another host.
    """

    ended: frozenset[str]
    begun: frozenset[str]


def measured(link: sa.Connection, tables: WorkTables) -> Pulse:
    """Return how the work of a database stands; reads what is open and no more."""
    import sqlalchemy as sa

    now, tasks, workers = utc_now(), tables.tasks, tables.workers
    depth, jobs = (_by_state(link, table) for table in (tasks, tables.jobs))
    queued = [
        link.execute(sa.select(sa.func.min(table.c.created_at)).where(in_states(table, ("queued",)))).scalar()
        for table in (tasks, tables.jobs)
    ]
    beats = [*map(int, link.execute(sa.select(workers.c.beat_at).where(workers.c.state != "dead")).scalars())]
    return Pulse(
        depth=depth,
        workers=len(beats),
        lease_age_s=max(0.0, (micros(now) - min(beats)) / 1e6) if beats else 0.0,
        jobs=jobs,
        oldest_s=max((max(0, micros(now) - at) / 1e6 for at in queued if at is not None), default=0.0),
    )


def told_since(link: sa.Connection, tables: WorkTables, before: Tally | None) -> tuple[tuple[Ran, ...], int, Tally]:
    """Return what ended since *before*, how many tasks began, and the tally to go on from; without one nothing did either.

    Reads what is open and what ended within LATE_S, and ids alone of what was told of.
    """
    import sqlalchemy as sa

    tasks = tables.tasks
    began = sa.select(tasks.c.id).where(in_states(tasks, LIVE), tasks.c.started_at.is_not(None))
    live = frozenset(link.execute(began).scalars())  # first: what ends meanwhile is in both, and not in none
    recent = (
        sa.select(tasks.c.id)
        .where(tasks.c.status.in_(sorted(TERMINAL)), tasks.c.started_at.is_not(None))
        .where(tasks.c.finished_at > micros(utc_now()) - int(LATE_S * 1e6))
        .order_by(tasks.c.finished_at.desc())
        .limit(REMEMBERED)
    )
    ended = list(link.execute(recent).scalars())
    if before is None:
        return (), 0, Tally(frozenset(ended), live)
    new = [item for item in reversed(ended) if item not in before.ended]
    later = frozenset(new[MOST:])
    names = (
        "id",
        "spec",
        "status",
        "created_at",
        "started_at",
        "finished_at",
        "artifacts",
        "stdout_total",
        "stderr_total",
    )
    rows = link.execute(sa.select(*(tasks.c[name] for name in names)).where(tasks.c.id.in_(new[:MOST]))).all()
    starts = (live | {row.id for row in rows}) - before.begun
    return tuple(map(_ran, rows)), len(starts), Tally(frozenset(ended) - later, live | (before.begun & later))


def _by_state(link: sa.Connection, table: sa.Table) -> dict[str, int]:
    import sqlalchemy as sa

    counted = sa.select(table.c.status, sa.func.count()).where(in_states(table, LIVE)).group_by(table.c.status)
    states = LIVE if "mode" in table.c else ("queued", "running")
    return dict.fromkeys(states, 0) | {str(state): int(count) for state, count in link.execute(counted)}


def _ran(row: Any) -> Ran:
    return Ran(
        json.loads(row.spec)["placement"]["engine"],
        row.status,
        max(0, row.finished_at - row.started_at) / 1e6,
        max(0, row.started_at - row.created_at) / 1e6,
        (row.stdout_total or 0) + (row.stderr_total or 0),
        sum(file["size"] for file in json.loads(row.artifacts or "[]")),
    )


class NoWorker(OperatorMustAct, code="no_worker"):
    """Work waits, and no worker is alive that would take it; it waits until one is."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """What each part says: `ok`, or the stable code of what is wrong; never words that could tell of this machine.

    `notices` do not keep new work from being taken, though somebody should know.
    """

    checks: Mapping[str, str]
    notices: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every part is in order."""
        return all(word == "ok" for word in self.checks.values())


@dataclass(frozen=True)
class Upkeep:
    """Keeps a service in order, and tells whether it can take work."""

    settings: Settings
    storage: Storage
    work: WorkService
    wiring: HostWiring
    telemetry: Telemetry
    conversations: Conversations
    notes: dict[str, Callable[[], Awaitable[object]]] = field(default_factory=dict)
    """Questions of other parts that run beside the service, such as its bus; what they say keeps no work away."""

    async def run(self) -> None:
        """Measure and collect until cancelled; whatever a round meets is logged and tried again, and ends no service."""
        tally, next_collect = None, time.monotonic()
        pulse_s, collect_s = self.settings.pulse_s, self.settings.collect_interval_s
        while True:
            try:
                tally = await self.measure(tally)
                if time.monotonic() >= next_collect:
                    next_collect = time.monotonic() + collect_s
                    await self.collect()
            except KdskillsError as error:
                _LOG.warning("upkeep: %s: %s", error.code, error.message)
            except Exception:  # noqa: BLE001 - also a disk's or driver's own error: the next round tries again
                _LOG.exception("a round of upkeep failed")
            await asyncio.sleep(min(pulse_s, collect_s))

    async def measure(self, before: Tally | None = None) -> Tally:
        """Record how the work stands and what came since *before*; return what to go on from. Raises DatabaseUnavailable."""
        work = await self.work.client.work()
        ran, starts, tally = await work.database.read(lambda link: told_since(link, work.tables, before))
        await self._stand(ran=ran, starts=starts)
        return tally

    async def _stand(self, **since: Any) -> None:
        work = await self.work.client.work()
        measurement = await work.database.read(lambda link: measured(link, work.tables))
        self.telemetry.pulse(measurement._replace(**since))

    async def look(self, *, patience_s: float = PATIENCE_S) -> None:
        """Record how everything stands now; a database that is away, or not there yet, is told as such and is no error."""
        if not self.storage.present:
            return
        word, databases = await _word(self._stand(), patience_s), {"service": self.storage.database}
        if word == "ok":
            databases["work"] = (await self.work.client.work()).database
        self.telemetry.databases(up=word == "ok", **databases)

    async def collect(self) -> None:
        """Let go of versions whose work is over, then remove those nobody uses, and forget what is old."""
        released = await self.release()
        self.telemetry.removed("hold", released)
        report = await self.storage.projects.collect(keep_days=self.settings.collect_keep_days)
        self.telemetry.removed("version", len(report.versions))
        if released or report.versions:
            _LOG.info("collected %d versions, let go of %d", len(report.versions), released)
        if self.settings.audit_keep_days:
            rows = await self.storage.projects.forget_audit(keep_days=self.settings.audit_keep_days)
            self.telemetry.removed("audit_row", rows)
        if self.settings.conversations_keep_days and self.settings.session_store is not None:
            store = await self.conversations.dialogues()
            with store_errors():
                purged = await store.purge(utc_now() - timedelta(days=self.settings.conversations_keep_days))
            self.telemetry.removed("conversation", purged)

    async def release(self) -> int:
        """Let go of the versions held by tasks and jobs that are over or gone; return how many that were."""
        projects = self.storage.projects
        pins = [(project, holder) for project, holder in await projects.holders() if holder.startswith(WORK)]
        if not pins:
            return 0
        import sqlalchemy as sa

        work, holders = await self.work.client.work(), {holder for _, holder in pins}

        def unfinished(link: sa.Connection) -> set[str]:
            tables = (work.tables.tasks, work.tables.jobs)
            queries = [sa.select(table.c.id).where(table.c.status.in_(OPEN)) for table in tables]
            return {str(item) for query in queries for item in link.execute(query).scalars() if item in holders}

        going = await work.database.read(unfinished)
        return sum([await projects.unpin(project, holder) for project, holder in pins if holder not in going])

    async def readiness(self, *, patience_s: float = PATIENCE_S) -> Readiness:
        """Ask database, engines, disk and store of artifacts at once; each has *patience_s* to answer."""
        checks = {
            "database": self.storage.database.read(lambda link: link.exec_driver_sql("SELECT 1").scalar()),
            "engine": self.wiring.executor(),
            "disk": asyncio.to_thread(check_writable, self.settings.state_dir),
            "artifacts": self._check_artifacts(),
            "workers": self.require_worker(),
            **{name: ask() for name, ask in self.notes.items()},
        }
        answers = await asyncio.gather(*(_word(each, patience_s) for each in checks.values()))
        words = dict(zip(checks, answers, strict=True))
        notices = {name: words.pop(name) for name in ("workers", *self.notes) if name in words}
        if notices["workers"] == NoWorker.code:
            _LOG.warning("work waits and no worker is alive: `kdskills worker` starts one")
        return Readiness(words, notices)

    async def require_worker(self) -> None:
        """Raises NoWorker when work waits that nobody alive would take; without waiting work nobody is missed."""
        if not self.storage.present:
            return
        work = await self.work.client.work()
        await asyncio.to_thread(work.roster.bury)  # one that was killed had nobody to say so
        if await work.database.read(work.queue.stranded):
            raise NoWorker("work waits and no worker is alive")

    async def _check_artifacts(self) -> None:
        if self.settings.artifacts is not None:  # else they are in the state folder, which is looked at already
            await self.work.artifacts().check()


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
