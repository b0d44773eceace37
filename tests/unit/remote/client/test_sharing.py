"""One worker's part in freeing threads, over a server in memory."""

import asyncio
from dataclasses import replace

import pytest

from kdskills.remote.catalog.backend import CatalogRecord, MemoryCatalogStore, Sharing
from kdskills.remote.client.base import AsyncAppServerClient
from kdskills.remote.client.server import AppServer, ClientOptions

THREAD = "thread-1"


class SharedStore(MemoryCatalogStore):
    """A store several workers of this test see."""

    shared = True


@pytest.fixture
async def worker(far, open_client):
    """Return a worker subscribed to the thread, with the store it shares."""
    client = await open_client(dispatch="manual")
    await client.sessions.create()
    store = SharedStore()
    return client, store, Sharing(client.server, store)


def ask(store, word, by="another"):
    """Let a worker say that it releases, or has released, the thread."""
    store.update(THREAD, lambda old: replace(old, release=word, release_by=by))


async def test_an_idle_worker_lets_go_and_comes_back(far, worker):
    """Asked, it unsubscribes once; when the change is made, it resumes."""
    client, store, sharing = worker
    ask(store, "releasing")
    await sharing._look()
    await sharing._look()
    assert far.methods().count("thread/unsubscribe") == 1
    assert not client.server.threads.get(THREAD).subscribed
    waiting = asyncio.ensure_future(sharing.free(THREAD))
    await asyncio.sleep(0)
    assert not waiting.done()
    ask(store, "applied")
    await sharing._look()
    await waiting
    assert far.methods()[-1] == "thread/resume"
    assert client.server.threads.get(THREAD).subscribed


async def test_a_worker_that_died_in_its_change_holds_nobody_up(far, worker, monkeypatch):
    """A mark nobody takes back is ignored after a while: the thread is taken up again, until somebody asks anew."""
    from kdskills.remote.catalog import backend as module

    client, store, sharing = worker
    ask(store, "releasing")
    await sharing._look()
    assert not client.server.threads.get(THREAD).subscribed
    monkeypatch.setattr(module, "FREE_SECONDS", 0.0)
    await sharing._look()
    assert client.server.threads.get(THREAD).subscribed
    monkeypatch.undo()
    ask(store, "releasing", by="a third")
    await sharing._look()
    assert not client.server.threads.get(THREAD).subscribed


async def test_a_busy_worker_keeps_its_thread(far, worker):
    """During a turn nobody lets go."""
    client, store, sharing = worker
    await client.sessions.send_message(THREAD, "hi")
    ask(store, "releasing")
    await sharing._look()
    assert "thread/unsubscribe" not in far.methods()


async def test_a_worker_does_not_answer_itself(far, worker):
    """Its own asking is not for itself; in the end the mark says `applied`, whatever happened."""
    _, store, sharing = worker

    async def failing():
        async with sharing.releasing(THREAD):
            assert store.get(THREAD).release == "releasing"
            await sharing._look()
            raise LookupError

    with pytest.raises(LookupError):
        await failing()
    assert store.get(THREAD).release == "applied"
    assert "thread/unsubscribe" not in far.methods()


async def test_without_a_shared_store_nobody_is_asked(worker):
    """Records of memory carry no asking."""
    client, _, _ = worker
    store = MemoryCatalogStore()
    async with Sharing(client.server, store).releasing(THREAD):
        assert store.get(THREAD) == CatalogRecord(THREAD)


async def test_watching_survives_the_servers_refusals(far, worker, monkeypatch):
    """A refused unsubscribe does not end the watch."""
    from kdskills.remote.catalog import backend as module

    monkeypatch.setattr(module, "POLL_SECONDS", 0.001)
    client, store, sharing = worker
    far.answers["thread/unsubscribe"] = ValueError("not now")
    ask(store, "releasing")
    watching = asyncio.ensure_future(sharing.watch())
    await far.until(lambda: far.methods().count("thread/unsubscribe") >= 2)
    far.answers["thread/unsubscribe"] = {"status": "unsubscribed"}
    await far.until(lambda: not client.server.threads.get(THREAD).subscribed)
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_new_connection_does_not_watch_twice(far):
    """However often a client reconnects, one task looks after the shared threads, and closing ends it."""
    options = ClientOptions()
    server = AppServer(far.connect, options, local=True, owned=True)
    client = AsyncAppServerClient(server, options, SharedStore())
    await server.open()
    for _ in range(3):
        await client.reconnect()
    watching = [task for task in asyncio.all_tasks() if task.get_name() == "kdskills-catalog-watch"]
    assert len(watching) == 1
    await client.close()
    assert watching[0].done()
