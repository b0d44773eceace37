"""A connection that is lost: what is told meanwhile, what is taken up after, and when a client gives up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kdskills.errors import BadRequest
from kdskills.remote.client.server import ClientOptions
from kdskills.remote.ports import AppServerError, AppServerGone

THREAD = "thread-1"
PAYLOAD = {"contentItems": [{"type": "inputText", "text": "ok"}], "success": True}


def returning(client):
    """Return whether the client makes attempts to come back."""
    return client.server.reconnecting


def gave_up(client):
    """Return whether the client made attempts and makes no more."""
    return not client.connected and "given up" in client.server._failure


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_odd_budgets_are_refused(seconds):
    """A budget that is no number of seconds is refused when the client is made."""
    with pytest.raises(BadRequest):
        ClientOptions(reconnect_s=seconds)


async def test_without_the_option_a_lost_connection_stays_lost(far, open_client):
    """By itself a client connects once; who asks is told that the server is gone, and `reconnect` brings it back."""
    client = await open_client()
    await client.sessions.create()
    await far.close()
    await far.until(lambda: not client.connected)
    with pytest.raises(AppServerGone, match="was not sent") as told:
        await client.sessions.send_message(THREAD, "hi")
    assert (told.value.details["reconnecting"], far.connections) == (False, 1)
    await client.reconnect()
    assert (client.connected, far.connections) == (True, 2)


async def test_reconnecting_after_a_loss_subscribes_again(far, open_client):
    """Threads that were heard when the connection was lost are heard again, though nobody sent anything since."""
    client = await open_client()
    await client.sessions.create()
    await far.close()
    await far.until(lambda: not client.connected)
    assert not client.server.threads.get(THREAD).subscribed
    await client.reconnect()
    assert (far.methods()[-1], client.server.threads.get(THREAD).subscribed) == ("thread/resume", True)
    await client.reconnect()
    assert far.methods().count("thread/resume") == 2


async def test_a_thread_that_died_with_the_server_is_let_go(far, open_client):
    """A thread the server does not know any more stops nobody, and is not asked for again."""
    client = await open_client()
    await client.sessions.create()
    far.answers["thread/resume"] = ValueError("no rollout found for thread id thread-1")
    await far.close()
    await far.until(lambda: not client.connected)
    await client.reconnect()
    await client.reconnect()
    assert far.methods().count("thread/resume") == 1
    with pytest.raises(AppServerError, match="no rollout found"):
        await client.sessions.send_message(THREAD, "hi")


async def test_a_deleted_thread_is_not_taken_up(far, open_client):
    """What was deleted before the loss, or after it, is not subscribed to."""
    client = await open_client()
    await client.sessions.create()
    await far.close()
    await far.until(lambda: not client.connected)
    client.server.threads.drop(THREAD)
    await client.reconnect()
    assert "thread/resume" not in far.methods()


async def test_a_client_comes_back_by_itself(far, open_client):
    """With a budget the connection is replaced unasked, threads are heard again, and old handles answer nothing."""
    client = await open_client(dispatch="manual", reconnect_s=60.0)
    await client.sessions.create()
    far.call(0)
    await far.until(lambda: client.server.pending.rows(THREAD))
    old, epoch = client.server.pending.rows(THREAD)[0]["requestId"], client.connection
    await far.close()
    await far.until(lambda: client.connection != epoch and client.server.threads.get(THREAD).subscribed)
    assert (await client.tool_calls.respond(old, PAYLOAD))["status"] == "not_found"
    assert (await client.sessions.send_message(THREAD, "hi"))["status"] == "accepted"


async def test_who_asks_meanwhile_is_told(far, open_client):
    """While a client comes back, requests are refused at once, in words that say so; nothing is sent later unasked."""
    client = await open_client(reconnect_s=60.0)
    go = asyncio.Event()
    connect = far.connect

    async def slow():
        await go.wait()
        return await connect()

    client.server._connector = slow
    await far.close()
    await far.until(lambda: not client.connected)
    with pytest.raises(AppServerGone, match="reconnecting") as told:
        await client.sessions.send_message(THREAD, "hi")
    assert told.value.details["reconnecting"] is True
    go.set()
    await far.until(lambda: client.connected)
    assert "turn/start" not in far.methods()


async def test_nobody_speaks_before_the_hello(far, open_client):
    """Requests of others wait outside until the new connection is greeted."""
    client = await open_client(reconnect_s=60.0)
    hello = far.answers["initialize"]
    far.answers["initialize"] = None
    await far.close()
    await far.until(lambda: far.connections == 2 and len(far.asked) == 2)
    assert not client.connected
    with pytest.raises(AppServerGone):
        await client.request("thread/read", threadId=THREAD)
    far.answers["initialize"] = hello
    far.say({"id": 1, "result": hello})
    await far.until(lambda: client.connected)
    assert [method for method, _ in far.asked] == ["initialize", "initialize"]


async def test_a_client_that_finds_nobody_gives_up(far, nobody, open_client):
    """When the budget is over the client stays away and says why; `reconnect` still works."""
    client = await open_client(reconnect_s=1.0)
    client.server._connector = nobody
    await far.close()
    await far.until(lambda: gave_up(client))
    with pytest.raises(AppServerGone, match="given up after 1 s: nobody is there"):
        await client.request("x")
    client.server._connector = far.connect
    await client.reconnect()
    assert client.connected


async def test_a_server_that_dies_whenever_it_is_greeted(far, open_client):
    """The budget is for all attempts: a server that greets and dies is not started for ever."""
    client = await open_client(reconnect_s=2.0)
    far.answers["thread/resume"] = lambda params: far._incoming.put_nowait(None)
    await client.sessions.create()
    await far.close()
    await far.until(lambda: gave_up(client))
    assert 1 < far.connections < 50


async def test_closing_ends_the_coming_back(far, nobody, open_client):
    """A client that is closed while it comes back stays closed, and leaves no task."""
    client = await open_client(reconnect_s=600.0)
    client.server._connector = nobody
    await far.close()
    await far.until(lambda: not client.connected)
    await client.close()
    assert not returning(client)
    with pytest.raises(AppServerGone, match="closed"):
        await client.reconnect()


async def test_closed_while_it_connects(far, open_client):
    """A connection that is opened after the client was closed is closed at once."""
    client = await open_client()
    go, closed = asyncio.Event(), []
    connect = far.connect

    async def slow():
        await go.wait()
        return await connect()

    client.server._connector = slow
    again = asyncio.ensure_future(client.reconnect())
    await far.until(lambda: not client.connected)
    await client.close()
    far_close = far.close

    async def noted():
        closed.append(True)
        await far_close()

    far.close = noted
    go.set()
    with pytest.raises(AppServerGone, match="closed"):
        await again
    assert (closed, client.connected) == ([True], False)


async def test_many_reconnects_at_once(far, open_client):
    """Each replaces the connection in turn; at the end there is one, and it works."""
    client = await open_client(reconnect_s=60.0)
    await client.sessions.create()
    await asyncio.gather(*(client.reconnect() for _ in range(5)))
    assert (client.connected, far.connections) == (True, 6)
    assert (await client.sessions.send_message(THREAD, "hi"))["status"] == "accepted"


async def test_roots_are_given_to_the_next_process_of_ours(far, open_client):
    """Extra roots live in the server's process: an owned server that was started anew is given them again."""
    far.answers["skills/extraRoots/set"] = {}
    client = await open_client()
    await client.request("skills/extraRoots/set", extraRoots=["/one"])
    await client.request("skills/extraRoots/set", extraRoots=["/two"])
    await client.reconnect()
    assert [params for method, params in far.asked if method == "skills/extraRoots/set"][2:] == [
        {"extraRoots": ["/two"]}
    ]


async def test_roots_of_others_are_left_alone(far, open_client):
    """On a server of somebody else's a new connection sets nothing."""
    far.answers["skills/extraRoots/set"] = {}
    client = await open_client(owned=False)
    await client.request("skills/extraRoots/set", extraRoots=["/one"])
    await client.reconnect()
    assert far.methods().count("skills/extraRoots/set") == 1


async def test_a_loss_is_told_once(far, open_client):
    """Readers of the stream end with their connection, once, whether it was lost or replaced."""
    client = await open_client()
    first, ended = client.stream.signals(), []
    await far.close()
    while (signal := await first.next(60)) is not None:
        ended.append(signal.method)
    second = client.stream.signals()
    await client.reconnect()
    assert (ended, await second.next(0)) == (["connection/closed"], None)
    third = client.stream.signals()
    await client.reconnect()
    assert (await third.next(60)).method == "connection/closed"
    assert await third.next(60) is None


async def test_another_loop_is_refused(far, open_client):
    """An async client used from a second event loop says so, instead of waiting for an answer that wakes nobody."""
    client = await open_client()
    found = []

    def elsewhere():
        async def ask():
            await client.request("thread/read", threadId=THREAD)

        try:
            asyncio.run(ask())
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=elsewhere, daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, 60)
    assert ["another event loop" in one for one in found] == [True]
    assert "thread/read" not in far.methods()
    assert await client.request("thread/read", threadId=THREAD)
