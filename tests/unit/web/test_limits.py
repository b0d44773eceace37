"""Limits of tokens: rate, and size of bodies, whatever a header says."""

from __future__ import annotations

import asyncio
import errno
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.app.authentication import IDENTITY, MAX_BUCKETS, RateLimited, RequestLimits
from kdskills.app.identity import SCOPES, Identity, TokenLimits
from kdskills.app.logs import REQUEST
from kdskills.app.operations import OPERATIONS
from kdskills.doors.web.entrance import BodyLimit, project_of
from kdskills.doors.web.events import Drain
from kdskills.doors.web.services import MOST, MOST_OF_ALL, RUNS, ServiceProxy
from kdskills.errors import ServiceDown
from kdskills.jobs import stream
from kdskills.jobs.stream import StreamEnds

ONE = Identity(token="one")


class Clock:
    """A clock that is set."""

    now = 0.0

    def __call__(self):
        return self.now


def allowed(limits, identity, asked):
    """Return how many of *asked* requests are let through."""
    count = 0
    for _ in range(asked):
        try:
            limits.count(identity)
        except RateLimited:
            continue
        count += 1
    return count


@given(rate=st.integers(1, 500), waits=st.lists(st.floats(0, 30), max_size=10))
def test_no_minute_has_more_than_allowed(rate, waits):
    """Whatever the waits between, a bucket holds one minute's worth and fills at the rate."""
    clock = Clock()
    limits = RequestLimits(rate, clock)
    total = allowed(limits, ONE, rate + 5)
    for wait in waits:
        clock.now += wait
        total += allowed(limits, ONE, rate + 5)
    assert total <= rate + clock.now * rate / 60 + 1e-6


def test_the_time_to_wait_is_true():
    """Who waits as long as told is let through."""
    clock = Clock()
    limits = RequestLimits(2, clock)
    assert allowed(limits, ONE, 3) == 2
    with pytest.raises(RateLimited) as refused:
        limits.count(ONE)
    clock.now += refused.value.details["retry_after"]
    limits.count(ONE)


def test_tokens_do_not_share_a_bucket_and_have_their_own_size():
    """One token's haste is not another's, and a token's own limit beats the setting."""
    limits = RequestLimits(3, Clock())
    own = replace(ONE, token="two", limits=TokenLimits(requests_per_minute=5))
    assert (allowed(limits, ONE, 9), allowed(limits, own, 9)) == (3, 5)
    assert allowed(RequestLimits(0), ONE, 5000) == 5000
    assert allowed(RequestLimits(0, Clock()), own, 9) == 5


def test_buckets_are_bounded():
    """A stream of tokens does not fill the memory."""
    limits = RequestLimits(1, Clock())
    for number in range(MAX_BUCKETS + 50):
        limits.count(replace(ONE, token=str(number)))
    assert len(limits._buckets) == MAX_BUCKETS


@pytest.mark.parametrize(
    ("path", "project"),
    [("/projects/a/skills", "a"), ("/projects/", ""), ("/x/a", None), ("/projects", None), ("", None)],
)
def test_paths_name_projects(path, project):
    """The project of a path is its second part, and nothing is guessed."""
    assert project_of(path) == project


async def body_answer(pieces, limit, *, length=None, identity=None, reads=True, answers=True):
    """Send a body in pieces through the limit and return the statuses and how many bytes came through."""
    got, sent = 0, []
    waiting = [{"type": "http.request", "body": p, "more_body": n < len(pieces) - 1} for n, p in enumerate(pieces)]

    async def app(scope, receive, send):
        nonlocal got
        more = reads
        while more:
            try:
                message = await receive()
            except Exception:  # noqa: BLE001 - as frameworks do, which answer what they make of it
                await send({"type": "http.response.start", "status": 400, "headers": []})
                await send({"type": "http.response.body", "body": b"parsing"})
                return
            got += len(message["body"])
            more = message["more_body"]
        if answers:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def receive():
        return waiting.pop(0)

    async def send(message):
        sent.append(message)

    headers = [] if length is None else [(b"content-length", length)]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b"", "state": {}}
    if identity is not None:
        scope[IDENTITY] = identity
    await BodyLimit(app, limit)(scope, receive, send)
    return [message["status"] for message in sent if message["type"] == "http.response.start"], got


@pytest.mark.parametrize(
    ("pieces", "length", "status"),
    [
        ([b"x" * 10], b"10", 200),
        ([b"x" * 11], b"11", 413),
        ([b"x" * 11], b"5", 413),
        ([b"x" * 6, b"x" * 6], None, 413),
        ([b"x" * 5, b"x" * 5], None, 200),
        ([b""], b"-1", 413),
        ([b""], b"1e9", 413),
    ],
)
async def test_bodies_are_counted_not_believed(pieces, length, status):
    """A body longer than allowed is 413, told or not; one status is sent, whatever the application makes of it."""
    statuses, got = await body_answer(pieces, 10, length=length)
    assert statuses == [status]
    assert got <= 10


async def test_a_token_may_have_a_lower_limit():
    """A token's limit holds where it is the lower one, and never raises the service's."""
    low, high = (replace(ONE, limits=TokenLimits(body_bytes=size)) for size in (4, 400))
    assert (await body_answer([b"x" * 5], 10, identity=low))[0] == [413]
    assert (await body_answer([b"x" * 11], 10, identity=high))[0] == [413]
    assert (await body_answer([b"x" * 10], 10, identity=high))[0] == [200]


async def test_connections_to_services_are_counted_before_they_are_dialed():
    """However many ask at once, an agent gets so many places and all so many; who is refused is told which, and places come back."""
    open_now, most_open, dialed, answer = 0, 0, asyncio.Event(), asyncio.Event()

    async def dial(identity, item, port):
        nonlocal open_now, most_open
        open_now += 1
        most_open = max(most_open, open_now)
        dialed.set()
        await answer.wait()
        open_now -= 1
        raise ServiceDown("nothing answers")

    host = SimpleNamespace(operations={RUNS: OPERATIONS[RUNS]}, work=SimpleNamespace(service=dial))
    proxy = ServiceProxy(host, None, Drain())

    async def ask(agent):
        sent, scope = (
            [],
            {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b"", "state": {}},
        )
        scope |= {"raw_path": b"/services/task_1/80", IDENTITY: replace(ONE, agent=agent, scopes=SCOPES)}

        async def send(message):
            sent.append(message)

        await proxy(scope, None, send)
        return json.loads(sent[1]["body"])["detail"]

    for agents, places, words in (
        ("a", MOST, f"your {MOST} connections"),
        ("abcde", MOST_OF_ALL, f"all {MOST_OF_ALL}"),
    ):
        dialed.clear()
        answer.clear()
        most_open = 0
        asked = [asyncio.ensure_future(ask(agent)) for agent in agents for _ in range(MOST + (len(agents) == 1))]
        async with asyncio.timeout(30):
            await dialed.wait()
            answer.set()
            details = await asyncio.gather(*asked)
        assert most_open == places
        assert sum(words in detail for detail in details) == len(asked) - places
        assert proxy._open.total() == open_now == 0


async def test_a_websocket_without_a_descriptor_is_refused(monkeypatch):
    """Where no more sockets are to be had the caller is told that the service is not reached, as over HTTP."""
    ended, sent = [], []

    async def opened(identity, item, port):
        return StreamEnds(None, SimpleNamespace(transport=SimpleNamespace(abort=lambda: ended.append(item))))

    def none_left():
        raise OSError(errno.EMFILE, "no descriptor")

    async def send(message):
        sent.append(message)

    monkeypatch.setattr(stream.socket, "socketpair", none_left)
    host = SimpleNamespace(operations={RUNS: OPERATIONS[RUNS]}, work=SimpleNamespace(service=opened))
    scope = {"type": "websocket", "path": "/", "headers": [], "query_string": b"", "state": {REQUEST: "r1"}}
    scope |= {"raw_path": b"/services/task_1/80", "subprotocols": [], IDENTITY: replace(ONE, scopes=SCOPES)}
    await ServiceProxy(host, None, Drain())({**scope, "extensions": {"websocket.http.response": {}}}, None, send)
    assert (sent[0]["status"], json.loads(sent[1]["body"])["code"]) == (502, "service_down")
    assert ended == ["task_1"]
