"""Calls as they reach a session: signals, pending rows, both at once."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.calls import (
    TOOL_CALL_EVENT,
    AppServerSignal,
    address,
    request_text,
    rows_of,
)
from kdskills.remote.turns import call_of_row, call_of_signal


def signal(**more):
    params = {"tool": "a", "callId": "c1", "turnId": "u1", "threadId": "t", **more.pop("params", {})}
    values = {"event_type": TOOL_CALL_EVENT, "method": "item/tool/call", "signal_type": "request", "request_id": 0}
    return AppServerSignal(**{**values, "params": params, **more})


def row(number=0, **more):
    return {"requestId": number, "tool": "a", "arguments": None, "callId": f"c{number}", "turnId": "u", **more}


@pytest.fixture
def counted(duo):
    """A session whose skill `a` counts its runs."""
    session = duo.session("t")
    session.runs = []
    session.register("a", lambda **arguments: session.runs.append(arguments) or len(session.runs))
    return session


def test_a_signal_has_the_fields_of_the_spec_in_order():
    """Positional use is part of the promise."""
    made = AppServerSignal("e", "m", "s", 1, {"c": 1}, {"p": 1}, {"id": "x"}, 7)
    assert made == AppServerSignal(
        event_type="e",
        method="m",
        signal_type="s",
        received_at=1,
        context={"c": 1},
        params={"p": 1},
        session={"id": "x"},
        request_id=7,
    )


@pytest.mark.parametrize(
    ("session", "context", "params", "found"),
    [
        ({"id": "s"}, {"threadId": "c"}, {"threadId": "p"}, "s"),
        ({"id": " "}, {"threadId": "c"}, {"threadId": "p"}, "c"),
        ({}, {}, {"threadId": "p"}, "p"),
        (None, {"threadId": "c"}, {}, "c"),
        (None, None, None, None),
        (None, {"threadId": None}, {"threadId": 5}, None),
        ("s", [], "p", None),
    ],
)
def test_the_address_of_a_signal(session, context, params, found):
    """The session's id, else the context's thread, else the params' thread."""
    assert address(AppServerSignal("e", session=session, context=context, params=params)) == found


def test_matches_signal(duo):
    """This session, or none given."""
    session = duo.session("t")
    assert session.matches_signal(signal()) is True
    assert session.matches_signal(signal(session={"id": "other"})) is False
    assert session.matches_signal(AppServerSignal("e")) is True


@pytest.mark.parametrize(
    "wrong",
    [
        {"event_type": "app_server.notification.turn.completed"},
        {"session": {"id": "other"}},
        {"context": {"threadId": "other"}},
        {"params": {"tool": " "}},
        {"params": {"tool": None}},
        {"params": {"tool": 5}},
    ],
    ids=["event", "session", "context", "blank", "none", "number"],
)
def test_signals_of_others_run_nothing(duo, counted, wrong):
    """None, no handler, no submission."""
    assert duo.do(counted.respond_to_signal(signal(**wrong))) is None
    assert (counted.runs, duo.client.calls) == ([], [])


def test_a_signal_is_answered(duo, counted):
    """The handler runs, the answer is submitted under the id as text, 0 included."""
    found = duo.do(counted.respond_to_signal(signal(params={"arguments": {"x": 1}})))
    assert counted.runs == [{"x": 1}]
    payload = {"contentItems": [{"type": "inputText", "text": "1"}], "success": True}
    assert duo.client.named("respond") == [{"request_id": "0", "response": payload}]
    assert (found.handled, found.tool, found.arguments, found.request_id, found.call_id) == (
        True,
        "a",
        {"x": 1},
        "0",
        "c1",
    )
    assert (found.submission_status, found.submission_attempts, found.submission_idempotent) == ("ok", 1, False)
    assert (found.result, found.error, found.replayed, found.late) == (1, None, False, False)


def test_a_signal_without_address_is_this_sessions(duo, counted):
    """A caller who asks a session to answer it means this session."""
    bare = AppServerSignal(TOOL_CALL_EVENT, params={"tool": "a"}, request_id=3)
    assert duo.do(counted.respond_to_signal(bare)).submission_status == "ok"


def test_namespaces_lead_to_their_skill(duo):
    """A call with a namespace finds the skill there, and is named with it."""
    session = duo.session("t")
    session.register("a", lambda: "plain")
    session.register("a", lambda: "spaced", namespace="n")
    first = duo.do(session.respond_to_signal(signal(params={"namespace": "n"})))
    second = duo.do(session.respond_to_signal(signal(params={"namespace": None, "callId": "c2"})))
    assert [(one.tool, one.result) for one in (first, second)] == [("n.a", "spaced"), ("a", "plain")]
    gone = duo.do(session.respond_to_signal(signal(params={"namespace": "m", "callId": "c3"})))
    assert gone.error == "no remote skill registered for m.a"


@pytest.mark.parametrize(
    "wrong", [{"threadId": "other"}, {"tool": ""}, {"tool": None}], ids=["thread", "blank", "none"]
)
def test_rows_of_others_run_nothing(duo, counted, wrong):
    """None for another thread or no tool."""
    assert duo.do(counted.respond_to_pending_call(row(**wrong))) is None
    assert (counted.runs, duo.client.calls) == ([], [])


@pytest.mark.parametrize(
    "answer",
    [
        {"status": "deleted"},
        {"status": "error", "code": "system_session"},
        {"data": []},
        {"data": [None, 5, {}, {"tool": ""}]},
    ],
    ids=["deleted", "system", "empty", "odd"],
)
def test_nothing_to_drain(duo, counted, answer):
    """Deleted and system sessions have no calls; what is no row is none."""
    duo.client.script["tool_calls"] = [answer]
    assert duo.do(counted.drain_pending_calls()) == []


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        "x",
        {},
        {"data": None},
        {"data": {}},
        {"status": "error"},
        {"status": "error", "code": "other"},
        {"status": "ok"},
    ],
    ids=str,
)
def test_an_answer_without_data_is_refused(duo, counted, answer):
    """In these words."""
    duo.client.script["tool_calls"] = [answer]
    with pytest.raises(ValueError, match=r"^sessions\.tool_calls response missing data list$"):
        duo.do(counted.drain_pending_calls())


def test_draining_keeps_the_order_of_rows(duo):
    """Handlers of rows run at once; submissions and results come in the order of the rows."""
    session = duo.session("t")
    order = []
    if duo.asynchronous:
        gates = {}

        async def handler(n):
            gate = gates.setdefault("gate", asyncio.Event())
            if n == 0:
                await asyncio.wait_for(gate.wait(), 60)
            else:
                gate.set()
            order.append(n)
            return n
    else:
        gate = threading.Event()

        def handler(n):
            if n == 0:
                assert gate.wait(60)
            else:
                gate.set()
            order.append(n)
            return n

    session.register("a", handler)
    duo.client.rows = [row(n, arguments={"n": n}) for n in range(2)]
    found = duo.do(session.drain_pending_calls())
    assert order == [1, 0]
    assert [dispatch.result for dispatch in found] == [0, 1]
    assert [sent["request_id"] for sent in duo.client.named("respond")] == ["0", "1"]
    assert duo.client.named("tool_calls") == [{"session_id": "t"}]


def test_one_bad_row_spoils_no_other(duo):
    """A handler that raises, a tool nobody has, another thread's row: the rest is answered."""
    session = duo.session("t")
    session.register("good", lambda: "fine")
    session.register("bad", lambda: 1 / 0)
    duo.client.rows = [
        row(0, tool="bad"),
        row(1, tool="unknown"),
        row(2, tool="good", threadId="other"),
        row(3, tool="good", threadId="t"),
    ]
    found = duo.do(session.drain_pending_calls())
    assert [(one.request_id, one.handled) for one in found] == [("0", False), ("1", False), ("3", True)]
    assert [sent["response"]["success"] for sent in duo.client.named("respond")] == [False, False, True]


def test_signals_and_draining_mix(duo, counted):
    """One call, delivered both ways: one effect, one submission, and the second delivery says so."""
    first = duo.do(counted.respond_to_signal(signal(params={"arguments": {}})))
    duo.client.rows = [row(0, callId="c1", turnId="u1", threadId="t", arguments={})]
    (second,) = duo.do(counted.drain_pending_calls())
    assert len(counted.runs) == 1
    assert duo.client.count("respond") == 1
    assert (first.submission_status, second.submission_status) == ("ok", "local_duplicate")
    assert (second.handled, second.replayed, second.submission_idempotent, second.submission_attempts) == (
        True,
        True,
        True,
        0,
    )
    assert second.response_payload == first.response_payload
    assert second.call_key == first.call_key is not None


def test_two_deliveries_at_the_same_moment_submit_once(duo):
    """Whoever comes second waits for the first, and then finds the answer accepted."""
    session = duo.session("t")
    runs = []

    def handler():
        runs.append(1)
        time.sleep(0.02)
        return "x"

    session.register("a", handler)
    rows = [row(0), row(0), row(0)]
    duo.client.rows = rows
    found = duo.do(session.drain_pending_calls())
    assert (len(runs), duo.client.count("respond")) == (1, 1)
    assert sorted(one.submission_status for one in found) == ["local_duplicate", "local_duplicate", "ok"]


def test_signals_of_one_call_from_many_threads(session, client):
    """Sync sessions may be used from any thread: one effect, one submission."""
    runs, found = [], []
    session.register("a", lambda: runs.append(1) or time.sleep(0.02))
    pending = signal(session={"id": "thread-1"})
    threads = [threading.Thread(target=lambda: found.append(session.respond_to_signal(pending))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(runs), client.count("respond")) == (1, 1)
    assert sorted(one.submission_status for one in found) == ["local_duplicate"] * 5 + ["ok"]


def test_a_call_id_tells_calls_under_one_request_id_apart(duo, counted):
    """A request id alone identifies nothing: the next call of a restarted server comes under 0 again."""
    for call_id in ("c1", "c2", "c1"):
        duo.do(counted.respond_to_signal(signal(params={"callId": call_id, "arguments": {}})))
    assert len(counted.runs) == 2


def test_weak_calls_are_known_again_while_the_facade_lives(duo, counted):
    """Without turn or call id, request id, tool and arguments tell a repeated delivery; other arguments are another call."""
    pending = {"requestId": 5, "tool": "a", "arguments": {"x": 1}}
    first = duo.do(counted.respond_to_pending_call(pending))
    second = duo.do(counted.respond_to_pending_call({**pending, "callId": "late"}))
    third = duo.do(counted.respond_to_pending_call({**pending, "arguments": {"x": 2}}))
    assert [one.submission_status for one in (first, second, third)] == ["ok", "local_duplicate", "ok"]
    assert len(counted.runs) == 2
    again = duo.make()
    again.session("t").register("a", lambda **_: counted.runs.append("new"))
    duo.do(again.session("t").respond_to_pending_call(pending))
    assert len(counted.runs) == 3
    again.close()


def test_without_ids_nothing_is_deduplicated(duo, counted):
    """Neither strong nor weak: every delivery runs, and nothing can be submitted."""
    for _ in range(2):
        found = duo.do(counted.respond_to_pending_call({"tool": "a", "arguments": {}}))
        assert (found.handled, found.submission_status, found.submission_attempts) == (True, "no_request_id", 0)
    assert len(counted.runs) == 2
    assert duo.client.calls == []


def test_on_a_new_connection_the_stored_answer_is_submitted(duo, counted):
    """The same connection: nothing. A new one: the stored answer again, and the handler does not run."""
    duo.client.connection = "one"
    call = signal(params={"arguments": {}})
    statuses = [duo.do(counted.respond_to_signal(call)).submission_status for _ in range(2)]
    duo.client.connection = "two"
    replay = duo.do(counted.respond_to_signal(call))
    assert statuses == ["ok", "local_duplicate"]
    assert (replay.submission_status, replay.replayed, replay.handled) == ("ok", True, True)
    assert len(counted.runs) == 1
    sent = duo.client.named("respond")
    assert len(sent) == 2
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (0, "0"),
        (7, "7"),
        (-1, "-1"),
        (10**30, str(10**30)),
        ("0", "0"),
        (" x ", "x"),
        (None, None),
        ("", None),
        (" ", None),
        (True, None),
        (False, None),
        (1.0, None),
        ([], None),
    ],
    ids=repr,
)
def test_request_ids_as_text(given, text):
    """Integers in decimal, 0 included; a bool is none."""
    assert request_text(given) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["tool", "threadId", "turnId", "callId", "requestId", "namespace", "arguments", "id"])
OBJECTS = st.dictionaries(KEYS, JSON, max_size=6)


@given(OBJECTS, OBJECTS, OBJECTS, JSON)
def test_any_signal_is_read_without_complaint(session, context, params, request_id):
    """What comes from outside never breaks the reading; a call always has a tool."""
    core = SimpleNamespace(session_id="t", owner=SimpleNamespace(epoch="e"))
    found = call_of_signal(core, AppServerSignal(TOOL_CALL_EVENT, "", "", 0, context, params, session, request_id))
    assert found is None or found.identity.tool.strip() == found.identity.tool != ""
    other = call_of_row(core, params)
    assert other is None or other.identity.tool == params["tool"].strip()


@given(JSON)
def test_any_answer_is_rows_or_refused(answer):
    """A list of objects, or the promised error."""
    if isinstance(answer, dict) and isinstance(answer.get("data"), list):
        assert all(isinstance(one, dict) for one in rows_of(answer))
        return
    with pytest.raises(ValueError, match=r"^sessions\.tool_calls response missing data list$"):
        rows_of(answer)


async def test_a_cancelled_caller_leaves_no_call_unanswered(duo):
    """A task that answers a call may be cancelled: the call is answered all the same."""
    if not duo.asynchronous:
        return
    facade = duo.make()
    session = facade.session("t")
    started, release = asyncio.Event(), asyncio.Event()

    async def handler():
        started.set()
        await release.wait()
        return "done"

    session.register("a", handler)
    task = asyncio.create_task(session.respond_to_signal(signal()))
    await asyncio.wait_for(started.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    async with asyncio.timeout(60):
        while not duo.client.count("respond"):  # noqa: ASYNC110 - the client is a plain object
            await asyncio.sleep(0.005)
    assert duo.client.named("respond")[0]["response"]["contentItems"][0]["text"] == "done"
    facade.close()
