"""Answers reach who asked, and nothing the other side does stops the connection."""

import asyncio
import json

import pytest

from kdskills.remote.client.wire import Peer
from kdskills.remote.ports import AppServerError, AppServerGone, WaitTimeoutError


class Pipe:
    """A transport in memory; the test plays the server."""

    def __init__(self):
        self.sent = asyncio.Queue()
        self.incoming = asyncio.Queue()
        self.closes = 0

    async def send(self, payload):
        self.sent.put_nowait(json.loads(payload))

    async def receive(self):
        return await self.incoming.get()

    async def close(self):
        self.closes += 1
        self.incoming.put_nowait(None)

    def why_closed(self):
        return "the test ended it"

    def say(self, *messages):
        for message in messages:
            self.incoming.put_nowait(message if isinstance(message, bytes) else json.dumps(message).encode())


class Seen:
    """A peer on such a pipe, with what it handed on."""

    def __init__(self):
        self.requests, self.notes, self.ends = [], [], 0
        self.pipe = Pipe()
        self.peer = Peer(
            self.pipe,
            on_message=lambda message: (self.requests if "id" in message else self.notes).append(message),
            on_closed=self._ended,
        )

    def _ended(self):
        self.ends += 1

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - the callbacks of a peer are plain functions
                await asyncio.sleep(0)

    async def asked(self):
        async with asyncio.timeout(60):
            return await self.pipe.sent.get()


@pytest.fixture
async def seen():
    """Return a started peer; it is closed afterwards."""
    one = Seen()
    yield one
    await one.peer.close()


async def test_answers_find_their_requests_in_any_order(seen):
    """Two requests answered the other way round each get their own result."""
    first = asyncio.ensure_future(seen.peer.request("a"))
    second = asyncio.ensure_future(seen.peer.request("b", {"x": 1}))
    ids = {message["method"]: message["id"] for message in [await seen.asked(), await seen.asked()]}
    seen.pipe.say({"id": ids["b"], "result": "B"}, {"id": ids["a"], "result": "A"})
    assert (await first, await second) == ("A", "B")
    assert set(ids.values()) == {1, 2}


async def test_an_answer_under_a_text_id_is_nobodys(seen):
    """`"1"` does not answer `1`; second, late and unknown answers are counted and ignored."""
    asked = asyncio.ensure_future(seen.peer.request("a"))
    raw = (await seen.asked())["id"]
    seen.pipe.say({"id": str(raw), "result": "no"}, {"id": 99, "result": "no"}, b"garbage", b'{"id":true,"result":1}')
    seen.pipe.say({"id": raw, "result": "yes"}, {"id": raw, "result": "twice"})
    assert await asked == "yes"
    again = asyncio.ensure_future(seen.peer.request("b"))
    seen.pipe.say({"id": (await seen.asked())["id"], "result": "still alive"})
    assert await again == "still alive"
    assert (seen.peer.unexpected_replies, seen.peer.malformed) == (3, 2)


async def test_an_error_carries_the_servers_words(seen):
    """An error answer is raised with method, code, message and data."""
    asked = asyncio.ensure_future(seen.peer.request("thread/start"))
    raw = (await seen.asked())["id"]
    seen.pipe.say({"id": raw, "error": {"code": -32600, "message": "bad tool", "data": {"at": 1}}})
    with pytest.raises(AppServerError, match="refused thread/start: bad tool") as caught:
        await asked
    assert caught.value.details == {
        "method": "thread/start",
        "rpc_code": -32600,
        "server_message": "bad tool",
        "data": {"at": 1},
    }


async def test_the_end_wakes_everybody_who_waits(seen):
    """When the connection ends every waiting request fails, once, and later ones fail at once."""
    asked = [asyncio.ensure_future(seen.peer.request("a")) for _ in range(3)]
    for _ in asked:
        await seen.asked()
    seen.pipe.incoming.put_nowait(None)
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(error) for error in found] == [AppServerGone] * 3
    with pytest.raises(AppServerGone, match="the test ended it"):
        await seen.peer.request("b")
    await seen.peer.close()
    assert seen.ends == 1


async def test_a_server_that_says_nothing_is_not_awaited_for_ever(seen):
    """A request without an answer ends by its timeout; the answer that comes later is ignored."""
    with pytest.raises(WaitTimeoutError, match="did not answer slow within"):
        await seen.peer.request("slow", timeout_s=0.01)
    seen.pipe.say({"id": (await seen.asked())["id"], "result": "late"})
    again = asyncio.ensure_future(seen.peer.request("b"))
    seen.pipe.say({"id": (await seen.asked())["id"], "result": 2})
    assert await again == 2
    assert seen.peer.unexpected_replies == 1


async def test_a_cancelled_request_leaves_nothing_behind(seen):
    """The caller's cancellation forgets the request; its answer is ignored."""
    asked = asyncio.ensure_future(seen.peer.request("a"))
    raw = (await seen.asked())["id"]
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert seen.peer._waiting == {}
    seen.pipe.say({"id": raw, "result": 1}, {"method": "after", "params": {}})
    await seen.until(lambda: seen.notes)
    assert seen.notes[0]["method"] == "after"


async def test_requests_of_the_server_keep_their_raw_id(seen):
    """The id of a request goes back exactly, text as text and 0 as 0."""
    seen.pipe.say({"id": 0, "method": "item/tool/call", "params": {}}, {"id": "0", "method": "other", "params": {}})
    await seen.until(lambda: len(seen.requests) == 2)
    await seen.peer.send({"id": seen.requests[0]["id"], "result": {"ok": True}})
    await seen.peer.send({"id": seen.requests[1]["id"], "error": {"code": -32601, "message": "not served"}})
    assert await seen.asked() == {"id": 0, "result": {"ok": True}}
    assert await seen.asked() == {"id": "0", "error": {"code": -32601, "message": "not served"}}
