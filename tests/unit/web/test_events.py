"""Server-sent events: every event once and in order, and an end whatever happens."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from kdskills.doors.web.events import RETRY, WAITING, Drain, event_frames, frame, last_seen, unless
from kdskills.errors import BadRequest, NotFound


class Told(BaseModel):
    """An event, or an answer."""

    seq: int
    kind: str = "state"


async def read(watch, drain=None):
    """Return all pieces of a stream."""
    return [piece async for piece in event_frames(watch, drain or Drain())]


@given(st.integers(0, 50))
def test_every_event_comes_before_the_end(count):
    """What was told comes in order, then the answer, although both were ready at once."""

    async def watch(emit):
        for seq in range(count):
            emit(Told(seq=seq))
        return Told(seq=-1)

    pieces = asyncio.run(read(watch))
    expected = [frame("state", Told(seq=seq).model_dump_json(), seq) for seq in range(count)]
    assert pieces == [RETRY, *expected, frame("end", Told(seq=-1).model_dump_json())]


async def test_errors_are_events():
    """What goes wrong later is told in the words of every door."""

    async def watch(emit):
        emit(Told(seq=1))
        raise NotFound("it went away", id="x")

    pieces = await read(watch)
    assert pieces[-1].startswith(b'event: error\ndata: {"error": {"code": "not_found"')


async def test_a_slow_reader_is_told_to_come_back():
    """More than a reader keeps up with ends the stream, and costs bounded memory."""

    async def watch(emit):
        for seq in range(WAITING + 10):
            emit(Told(seq=seq))
        return Told(seq=-1)

    pieces = await read(watch)
    assert (pieces[-1], len(pieces)) == (frame("behind", "{}"), WAITING + 2)


async def test_a_stop_ends_streams():
    """A service that stops ends its streams without an `end`, and the watch with them."""
    drain, ended = Drain(), asyncio.Event()

    async def watch(emit):
        emit(Told(seq=1))
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    found = []
    async for piece in event_frames(watch, drain):
        found.append(piece)
        if len(found) == 2:
            drain.start()
    assert found == [RETRY, frame("state", Told(seq=1).model_dump_json(), 1)]
    assert ended.is_set()
    late = await asyncio.wait_for(read(watch, drain), 60)
    assert (late[0], [piece for piece in late if b"event: end" in piece]) == (RETRY, [])


async def test_a_reader_who_leaves_ends_the_watch():
    """Nobody watches for nobody."""
    ended = asyncio.Event()

    async def watch(emit):
        emit(Told(seq=1))
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    stream = event_frames(watch, Drain())
    assert [await anext(stream), await anext(stream)][0] == RETRY
    await stream.aclose()
    assert ended.is_set()


async def test_a_reader_who_may_no_longer_read():
    """A stream asks now and then whether its reader still may; when not, it says so and the watch ends with it."""
    ended, asked = asyncio.Event(), []

    async def watch(emit):
        emit(Told(seq=1))
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    async def allowed():
        asked.append(1)
        if len(asked) == 3:
            raise NotFound("this token is not known any more")

    pieces = [piece async for piece in event_frames(watch, Drain(), allowed, check_s=0.01)]
    assert pieces[:2] == [RETRY, frame("state", Told(seq=1).model_dump_json(), 1)]
    assert len(pieces) == 3
    assert pieces[2].startswith(b'event: error\ndata: {"error": {"code": "not_found"')
    assert ended.is_set()


async def test_a_busy_stream_asks_too():
    """Events without a pause do not put the question off for ever."""

    async def watch(emit):
        for seq in range(10_000_000):
            emit(Told(seq=seq))
            await asyncio.sleep(0)
        return Told(seq=-1)

    async def allowed():
        raise NotFound("no more")

    last = b""
    async for piece in event_frames(watch, Drain(), allowed, check_s=0.0):
        last = piece
    assert last.startswith(b"event: error")


async def test_thousands_of_readers_at_once():
    """Two thousand streams each get every event, and a stop ends them all and leaves no task behind."""
    drain, go = Drain(), asyncio.Event()
    before = len(asyncio.all_tasks())
    began, all_began = [], asyncio.Event()

    async def watch(emit):
        emit(Told(seq=1))
        await go.wait()
        emit(Told(seq=2))
        await asyncio.sleep(3600)

    async def reader():
        found = []
        async for piece in event_frames(watch, drain):
            found.append(piece)
            if len(found) == 2:
                began.append(1)
            if len(began) == 2000:
                all_began.set()
        return found

    readers = [asyncio.create_task(reader()) for _ in range(2000)]
    async with asyncio.timeout(300):
        await all_began.wait()
        go.set()
        await asyncio.sleep(0)
        drain.start()
        found = await asyncio.gather(*readers)
    first = [RETRY, frame("state", Told(seq=1).model_dump_json(), 1)]
    assert all(pieces[:2] == first and len(pieces) <= 3 for pieces in found)
    assert len(asyncio.all_tasks()) == before


async def test_waiting_gives_way_to_a_stop():
    """What is waited for is its answer, its error, or nothing when the service stops."""

    async def soon():
        return 3

    async def wrong():
        raise NotFound("no")

    stopping = asyncio.Event()
    assert await unless(stopping, soon()) == 3
    with pytest.raises(NotFound):
        await unless(stopping, wrong())
    asyncio.get_running_loop().call_soon(stopping.set)
    assert await unless(stopping, asyncio.sleep(600)) is None


@pytest.mark.parametrize(("header", "given_", "expected"), [("", None, 0), ("", 4, 4), ("7", 4, 7), (" 7 ", None, 7)])
def test_the_header_beats_the_query(header, given_, expected):
    """Browsers send the header by themselves when they come back."""
    assert last_seen({"last-event-id": header}, given_) == expected


@pytest.mark.parametrize("header", ["x", "-1", "1.5", "²", "9" * 40, "1\x00"])
def test_numbers_of_events_are_numbers(header):
    """Anything else is the caller's mistake."""
    with pytest.raises(BadRequest):
        last_seen({"last-event-id": header})


def test_a_drain_counts_what_runs():
    """It is idle when everything that began is over, also by an error."""
    drain = Drain()

    def runs():
        with drain.running():
            assert not drain.idle
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        runs()
    assert (drain.idle, drain.started) == (True, False)
