"""The SQL store on a real PostgreSQL: the same promises, between processes, and through a restart of the server."""

from __future__ import annotations

import asyncio

import pytest

from kdskills.builtin.stores.sql import SqlStore
from kdskills.session import StoreUnavailable
from kdskills.testing.conversations import CONVERSATION_CHECKS
from kdskills.testing.stores import STORE_CHECKS, sample
from kdskills.testing.work import Cluster

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.xdist_group("postgres")]


def _emptied(url: str) -> None:
    """Drop every table, so that each test finds a new database."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as link:
        link.execute("DROP SCHEMA public CASCADE")
        link.execute("CREATE SCHEMA public")


@pytest.fixture
async def store(cluster: Cluster):
    """An empty store."""
    _emptied(cluster.url())
    made = SqlStore(cluster.url())
    yield made
    await made.aclose()


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.name)
async def test_promises_hold(check, store: SqlStore) -> None:
    """Every promise of the shipped suite holds on PostgreSQL."""
    await check.run(store)


@pytest.mark.parametrize("check", CONVERSATION_CHECKS, ids=lambda check: check.name)
async def test_promises_of_conversations_hold(check, store: SqlStore) -> None:
    """Every promise of a store of conversations holds on PostgreSQL."""
    await check.run(store.conversations)


async def test_opened_at_once(cluster: Cluster) -> None:
    """Eight openings of an empty database at once make its tables once, and none fails."""
    _emptied(cluster.url())
    stores = await asyncio.gather(*(asyncio.to_thread(SqlStore, cluster.url()) for _ in range(8)))
    await stores[0].put(sample("s"), expect=None)
    assert [await one.get("s") for one in stores] == [sample("s")] * 8
    for one in stores:
        await one.aclose()


async def test_pages_are_sorted_by_code_point(store: SqlStore) -> None:
    """The order of a listing is the same as on SQLite, whatever the server's language."""
    for session_id in ("b", "A", "a", "B", "_", "0"):
        await store.put(sample(session_id), expect=None)
    page = await store.page(consumer=None, after=None, limit=9)
    assert [head.session_id for head in page] == sorted(["b", "A", "a", "B", "_", "0"])


async def test_a_restart_is_survived(cluster: Cluster, store: SqlStore) -> None:
    """While the server is away calls are `store_unavailable`; when it is back they work and nothing is lost."""
    await store.put(sample("kept"), expect=None)
    await asyncio.to_thread(cluster.stop)
    try:
        with pytest.raises(StoreUnavailable) as caught:
            await store.get("kept")
        assert "127.0.0.1" not in caught.value.message
    finally:
        await asyncio.to_thread(cluster.start)
    assert await store.get("kept") == sample("kept")
