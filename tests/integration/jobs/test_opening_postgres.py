"""Opening a new PostgreSQL from several processes at once: whoever waits must not hold up the one that makes the tables."""

import asyncio
import time

import pytest
import sqlalchemy as sa

from kdskills.jobs.opening import QUEUE_LOCK, Work

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.xdist_group("pool"), pytest.mark.timeout(300)]

WAITING = sa.text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND query LIKE :words"
)


async def test_one_that_waits_for_the_tables_holds_nothing_up(cluster, tmp_path):
    """While one process waits for another's tables, that one can build an index concurrently, which waits for all others."""
    url = await asyncio.to_thread(cluster.create, "opening")
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT")
    with engine.connect() as link:
        link.exec_driver_sql("SET statement_timeout = '60s'")
        link.exec_driver_sql("CREATE TABLE grows (x int)")
        link.exec_driver_sql(f"SELECT pg_advisory_lock({QUEUE_LOCK})")
        opening = asyncio.create_task(asyncio.to_thread(Work, url, tmp_path / "state"))
        try:
            end = time.monotonic() + 60
            while not link.execute(WAITING, {"words": f"%advisory_lock({QUEUE_LOCK})"}).scalar():
                assert time.monotonic() < end
                await asyncio.sleep(0.02)
            await asyncio.to_thread(link.exec_driver_sql, "CREATE INDEX CONCURRENTLY ON grows (x)")
        finally:  # whoever waits gets the lock, whatever came of it, and leaves no connection open
            link.exec_driver_sql(f"SELECT pg_advisory_unlock({QUEUE_LOCK})")
            work = await opening
            held = work.queues.pending()
            work.close()
    engine.dispose()
    assert held == []
