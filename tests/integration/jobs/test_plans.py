"""How the databases find rows: with many of them, no hot query reads a whole table, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from kdskills.app.upkeep import measured, told_since
from kdskills.jobs.client import JobsClient
from kdskills.jobs.model import Command, JobHead, JobSpec, Placement, Scope, StepSpec, TaskHead, TaskSpec
from kdskills.jobs.queue import Work
from kdskills.jobs.records import ListQuery
from kdskills.jobs.settings import JobsSettings
from kdskills.jobs.worker import Retention
from kdskills.storage.database import micros, utc_now

pytestmark = pytest.mark.timeout(300)

ROWS = 20_000
MINE = Scope(tenant="local", project="many", agent="a1")
TABLES = ("kd_tasks", "kd_jobs")
PLACEMENT = Placement(engine="wall", skill_name="x", version_hash="0")
COMMAND = Command(argv=("true",), timeout_s=10)
SETTINGS = JobsSettings(keep_s=599_000.0)


class NoArtifacts:
    """Artifacts that are never forgotten."""

    async def forget(self, task_ids: Any) -> None:
        """Forget none."""

    async def tend(self) -> None:
        """Have nothing left over."""


def fill(work: Work, kind: str, row: dict[str, Any]) -> None:
    """Add many rows that are over: of three agents, ten sessions each, a week old and younger."""
    now = micros(utc_now())

    def change(link: sa.Connection) -> None:
        rows = [
            {
                **row, "id": f"{kind}_{number:06}", "agent": f"a{number % 3}", "session_id": f"s{number % 10}",
                "session_key": f"k{number % 30}", "created_at": now - number * 30_000_000,
                "status": ("succeeded", "failed", "canceled")[number % 3], "finished_at": now - number * 30_000_000,
            }
            for number in range(ROWS)
        ]  # fmt: skip
        link.execute(work.records.table(kind).insert(), rows)

    work.database.change(change)


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgres"))])
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    """A database with many rows that are over."""
    state = tmp_path_factory.mktemp("plans") / "state"
    state.mkdir(mode=0o700)
    url = f"sqlite:///{state / 'work.db'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("cluster").create("plans")

    async def begin() -> None:
        client = JobsClient(url, state, SETTINGS)
        step = StepSpec(name="x", command=COMMAND)
        await client.submit(TaskSpec(scope=MINE, session_id="live", command=COMMAND, placement=PLACEMENT))
        await client.submit(JobSpec(scope=MINE, session_id="live", steps=(step,), placement=PLACEMENT))
        await client.aclose()

    asyncio.run(begin())
    made = Work(url, Path(state), SETTINGS)
    for kind in ("task", "job"):
        (row,) = made.database.ask(
            lambda link, kind=kind: link.execute(made.records.table(kind).select()).mappings().all()
        )
        fill(made, kind, dict(row))
    made.database.change(lambda link: link.exec_driver_sql("ANALYZE"))
    yield made
    made.close()


def whole_tables(work: Work, act: Callable[[sa.Connection], object]) -> list[str]:
    """Return the plans, of every statement *act* sends, that read a whole table of work."""
    found: list[str] = []

    def explain(link: sa.Connection, cursor: Any, statement: str, parameters: Any, *_: object) -> None:
        if not any(table in statement for table in TABLES) or statement.startswith("EXPLAIN"):
            return
        words = "EXPLAIN QUERY PLAN " if work.database.dialect == "sqlite" else "EXPLAIN "
        plan = link.connection.cursor()
        plan.execute(words + statement, parameters)
        lines = [str(row[-1]) for row in plan.fetchall()]
        plan.close()
        for line in lines:
            whole = "SCAN" in line and "INDEX" not in line and any(f"SCAN {table}" in line for table in TABLES)
            if whole or any(f"Seq Scan on {table}" in line for table in TABLES):
                found.append(f"{line}: {statement}")

    sa.event.listen(work.database.engine, "before_cursor_execute", explain)
    try:
        work.database.ask(act)
    finally:
        sa.event.remove(work.database.engine, "before_cursor_execute", explain)
    return found


def listing(**more: Any) -> ListQuery:
    """Return which rows a page shows."""
    return ListQuery(MINE, limit=51, **more)


PAST = (datetime.now(UTC) - timedelta(days=1), "task_1")
LISTINGS = {
    "mine": listing(),
    "everybody's": listing(any_agent=True),
    "a later page": listing(before=PAST),
    "failed": listing(status=("failed",)),
    "everybody's failed": listing(any_agent=True, status=("failed",)),
    "queued": listing(status=("queued",)),
    "of a session": listing(session_id="s1"),
    "everybody's of a session": listing(any_agent=True, session_id="s1"),
}


@pytest.mark.parametrize("wanted", LISTINGS.values(), ids=LISTINGS)
def test_lists(work: Work, wanted: ListQuery) -> None:
    """A page is found by an index, whatever it is filtered by."""
    assert whole_tables(work, lambda link: work.records.heads(link, TaskHead, wanted)) == []
    assert whole_tables(work, lambda link: work.records.heads(link, JobHead, wanted)) == []


def test_status(work: Work) -> None:
    """A task, a job and its steps are found by an index."""
    assert whole_tables(work, lambda link: work.records.head(link, TaskHead, "task_000007")) == []
    assert whole_tables(work, lambda link: work.records.head(link, JobHead, "job_000007")) == []


def test_submitting(work: Work) -> None:
    """What an agent has open, who holds a session and what a key was used for are found by an index."""
    assert whole_tables(work, lambda link: work.records.open_work(link, MINE, 1000)) == []
    assert whole_tables(work, lambda link: work.records.holder(link, "k1")) == []
    assert whole_tables(work, lambda link: work.records.body_hash(link, "task", "task_000007")) == []


def test_what_is_open_is_counted(work: Work) -> None:
    """One task and one job are open, however many are over; counting ends at the limit."""
    counted = [work.database.ask(lambda link, most=most: work.records.open_work(link, MINE, most)) for most in (1, 9)]
    assert counted == [1, 2]


@pytest.mark.parametrize("kind", ["task", "job"])
def test_retention(work: Work, kind: str) -> None:
    """What is old is found by an index."""
    retention = Retention(work, NoArtifacts())
    assert work.database.ask(lambda link: retention._due(link, kind=kind))
    assert whole_tables(work, lambda link: retention._due(link, kind=kind)) == []


def test_the_pulse(work: Work) -> None:
    """Measuring how the work stands reads what is open and what ended just now."""
    assert whole_tables(work, lambda link: measured(link, work.tables)) == []
    ran, starts, tally = work.database.ask(lambda link: told_since(link, work.tables, None))
    assert (ran, starts, tally.begun) == ((), 0, frozenset())
    assert whole_tables(work, lambda link: told_since(link, work.tables, tally)) == []
