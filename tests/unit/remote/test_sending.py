"""Sending requests with the catalog, and handling their calls until the turn has ended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kdskills.remote import CatalogBusy, CatalogNotApplied, ServerProfile, WaitTimeoutError
from kdskills.remote.ports import CallIdentity, StoredAnswer
from kdskills.remote.turns import reply_of, status_of


def silent():
    return None


def row(number=0, tool="a", arguments=None, **more):
    return {
        "requestId": number,
        "tool": tool,
        "arguments": arguments,
        "callId": f"c{number}",
        "turnId": "turn-1",
        **more,
    }


# Without a backend.


def test_send_carries_catalog_and_text(duo):
    """The tools as `dynamic_tools`, the catalog in front of the request, the answer as it is."""
    session = duo.session("t")
    session.register("a", silent)
    answer = object()
    duo.client.script["send_message"] = [answer]
    assert duo.do(session.send("Hi", effort="low")) is answer
    sent = {"session_id": "t", "dynamic_tools": session.dynamic_tools(), "effort": "low"}
    assert duo.client.calls == [("send_message", {**sent, "text": session.inject_request("Hi")})]


def test_send_injects_only_if_asked(duo):
    """`inject_skills=False` leaves the text alone; the tools still go."""
    session = duo.session("t")
    session.register("a", silent)
    duo.do(session.send("Hi", inject_skills=False))
    assert duo.client.named("send_message")[0]["text"] == "Hi"
    assert duo.client.named("send_message")[0]["dynamic_tools"] == session.dynamic_tools()


@pytest.mark.parametrize("theirs", [None, [], [{"name": "x"}]], ids=["none", "empty", "own"])
def test_tools_of_the_caller_win(duo, theirs):
    """The catalog is only the default."""
    session = duo.session("t")
    session.register("a", silent)
    duo.do(session.send("Hi", dynamic_tools=theirs))
    assert duo.client.named("send_message")[0]["dynamic_tools"] is theirs


def test_send_without_skills_leaves_the_text(duo):
    """Just the request."""
    duo.do(duo.session("t").send("Hi"))
    assert duo.client.named("send_message") == [{"session_id": "t", "text": "Hi", "dynamic_tools": []}]


def test_send_prepared_prepares_first(duo):
    """The user's text comes last, after a bootstrap too."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.materialized = False
    answer = duo.do(session.send_prepared("Hi"))
    assert answer["turnId"] == "turn-2"
    assert duo.client.names() == ["get", "send_message", "assistant_reply", "rollback", "resume", "send_message"]
    assert duo.client.named("send_message")[-1]["text"] == session.inject_request("Hi")


def test_a_refusing_client_stops_send_prepared(duo):
    """`failed` sends nothing, and the error has the report."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.script["resume"] = [{"status": "busy"}]
    with pytest.raises(CatalogNotApplied) as refused:
        duo.do(session.send_prepared("Hi"))
    assert refused.value.report == session.last_catalog
    assert refused.value.report["reason"] == "client_refused"
    assert duo.client.count("send_message") == 0


# With a backend.


@pytest.mark.parametrize(("current", "word"), [(True, "current"), (False, "stale")])
def test_with_a_backend_the_text_stays_clean(duo, current, word):
    """The catalog travels as context; the answer says whether it is current."""
    backend = duo.with_backend()
    backend.current = current
    session = duo.session("t")
    session.register("a", silent)
    assert duo.do(session.send("Hi"))["catalog"] == word
    sent = duo.client.named("send_message")[0]
    assert (sent["text"], sent["additional_context"]) == ("Hi", backend.extra["additional_context"])
    assert sent["dynamic_tools"] == session.dynamic_tools()
    assert backend.changes == []


def test_old_servers_get_the_catalog_in_the_text(duo):
    """Where there is no context channel the backend says so."""
    duo.with_backend().inject = True
    session = duo.session("t")
    session.register("a", silent)
    duo.do(session.send("Hi"))
    assert duo.client.named("send_message")[0]["text"] == session.inject_request("Hi")


def test_with_a_backend_nothing_travels_unasked(duo):
    """`inject_skills=False` sends neither context nor text."""
    backend = duo.with_backend()
    for backend.inject in (True, False):
        duo.do(duo.session("t").send("Hi", inject_skills=False))
    assert [sorted(sent) for sent in duo.client.named("send_message")] == [["dynamic_tools", "session_id", "text"]] * 2
    assert {sent["text"] for sent in duo.client.named("send_message")} == {"Hi"}


def test_context_of_the_caller_is_kept(duo):
    """Ours joins it; where both name a key the caller's wins."""
    duo.with_backend()
    theirs = {"mine": {"kind": "application", "value": "x"}, "kdskills": {"kind": "application", "value": "own"}}
    duo.do(duo.session("t").send("Hi", additional_context=theirs))
    assert duo.client.named("send_message")[0]["additional_context"] == theirs
    duo.do(duo.session("t").send("Hi", additional_context={"mine": 1}))
    assert sorted(duo.client.named("send_message")[1]["additional_context"]) == ["kdskills", "mine"]


@pytest.mark.parametrize(
    ("report", "error"),
    [
        ({"status": "deferred", "reason": "turn_active", "pending": True}, CatalogBusy),
        ({"status": "deferred", "reason": "queued_turns"}, CatalogBusy),
        ({"status": "deferred", "reason": "held_open"}, CatalogNotApplied),
        ({"status": "failed", "reason": "no_strategy"}, CatalogNotApplied),
    ],
    ids=["turn", "queued", "held", "failed"],
)
@pytest.mark.parametrize("method", ["send_prepared", "send_and_handle"])
def test_never_a_silent_ok(duo, method, report, error):
    """A catalog that was not applied is an error with the report, and nothing is sent."""
    duo.with_backend().reports = [report]
    session = duo.session("t")
    session.register("a", silent)
    with pytest.raises(CatalogNotApplied) as refused:
        duo.do(getattr(session, method)("Hi"))
    assert type(refused.value) is error
    assert refused.value.report == {"sessionId": "t", **report}
    assert duo.client.count("send_message") == 0


def test_send_prepared_waits_as_long_as_asked(duo):
    """`prepare_timeout_seconds` is the bound of the change."""
    backend = duo.with_backend()
    session = duo.session("t")
    session.register("a", silent)
    duo.do(session.send_prepared("Hi", prepare_timeout_seconds=3.0))
    assert [(change.wait, change.timeout_s) for change in backend.changes] == [(True, 3.0)]
    assert backend.changes[0].instruction_text == session.instruction_text()


def test_outcomes_of_earlier_calls_travel_once(duo):
    """What the model never saw answered is told with the next message, escaped, and not again."""
    duo.with_backend()
    duo.client.profile = ServerProfile(context=True)
    facade = duo.make()
    journal = facade._core.dispatcher.journal
    call = CallIdentity("t", "pay", "0" * 64, "t", "turn-0", "c1")
    payload = {"contentItems": [{"type": "inputText", "text": "paid </kdskills_outcomes>"}], "success": True}
    journal.claim("k", call, "me", 60, idempotent=False)
    journal.start("k", "me")
    journal.finish("k", "me", StoredAnswer(payload, handled=True))
    session = facade.session("t")
    for _ in range(2):
        duo.do(session.send("Hi"))
    first, second = (sent["additional_context"] for sent in duo.client.named("send_message"))
    assert "pay (call c1" in first["kdskills_outcomes"]["value"]
    assert "</" not in first["kdskills_outcomes"]["value"]
    assert "kdskills_outcomes" not in second
    facade.close()


def test_answers_of_a_completed_turn_are_not_told_again(duo):
    """The model has seen them; those of an interrupted turn are told, those of the running turn are not yet outcomes."""
    duo.with_backend()
    duo.client.profile = ServerProfile(context=True)
    facade = duo.make()
    session = facade.session("t")
    session.register("a", lambda: "x")

    def contexts():
        return [sorted(sent["additional_context"]) for sent in duo.client.named("send_message")]

    duo.do(session.send("one"))
    duo.do(session.respond_to_pending_call(row(0, turnId="turn-1")))
    duo.client.script["send_message"] = [{"status": "steered", "turnId": "turn-1"}]
    duo.do(session.send("steer"))
    duo.do(facade.turn_ended("t", "turn-1", "completed"))
    duo.do(session.send("two"))
    duo.do(session.respond_to_pending_call(row(1, turnId="turn-3")))
    duo.do(facade.turn_ended("t", "turn-3", "interrupted"))
    duo.do(session.send("three"))
    assert contexts() == [["kdskills"], ["kdskills"], ["kdskills"], ["kdskills", "kdskills_outcomes"]]
    facade.close()


def test_send_and_handle_settles_its_turn(duo):
    """A client that tells nothing of turns: the answers of a completed one are not told again all the same."""
    duo.with_backend()
    duo.client.profile = ServerProfile(context=True)
    facade = duo.make()
    session = facade.session("t")
    session.register("a", lambda: "x")
    duo.client.rows = [row(0)]
    assert len(duo.do(session.send_and_handle("one")).dispatches) == 1
    for _ in range(2):
        duo.do(session.send("more"))
    assert all("kdskills_outcomes" not in sent["additional_context"] for sent in duo.client.named("send_message"))
    facade.close()


class Away:
    """A journal that does not answer."""

    def outcomes(self, session_id, turn_id=None):
        raise OSError("disk gone")

    def settle(self, session_id, turn_id):
        raise OSError("disk gone")


def test_a_journal_that_is_away_stops_no_message(duo):
    """What the model could not be told is a diagnostic; the request is sent and its result returned."""
    duo.with_backend()
    duo.client.profile = ServerProfile(context=True)
    facade = duo.make()
    facade._core.dispatcher.journal = Away()
    session = facade.session("t")
    assert duo.do(session.send_and_handle("Hi")).status == "completed"
    assert [d.code for d in session.diagnostics] == ["outcomes_unknown", "outcomes_unknown"]
    facade.close()


def test_a_receipt_that_cannot_be_kept_does_not_unsend_a_message(duo):
    """The answer is returned; what was lost is a diagnostic."""
    session = duo.session("t")

    class Broken:
        def note(self, receipt):
            raise OSError("disk full")

    duo.facade._core.receipts = Broken()
    assert duo.do(session.send("Hi"))["turnId"] == "turn-1"
    assert [d.code for d in session.diagnostics] == ["receipt_not_kept"]


def test_a_turn_has_a_receipt(duo):
    """Catalog, tools and calls of the turn; None for a turn nobody knows."""
    session = duo.session("t")
    session.register("a", lambda: "x")
    report = duo.do(session.prepare_catalog())
    duo.do(session.send("Hi"))
    duo.do(session.respond_to_pending_call(row(0)))
    receipt = session.receipt("turn-1")
    assert (receipt.session_id, receipt.turn_id, receipt.strategy) == ("t", "turn-1", "resume")
    assert (receipt.catalog_digest, receipt.visible_tools) == (report["digest"], ("a",))
    assert [(call.tool, call.state) for call in receipt.calls] == [("a", "done")]
    assert session.receipt("other") is None


# Until the turn has ended.


@pytest.mark.parametrize(
    "times",
    [{"timeout_seconds": 0}, {"interval_seconds": 0}, {"timeout_seconds": -1}, {"interval_seconds": float("nan")}],
)
def test_times_are_positive(duo, times):
    """Refused before anything is sent."""
    with pytest.raises(ValueError, match="must be positive"):
        duo.do(duo.session("t").send_and_handle("Hi", **times))
    assert duo.client.calls == []


@pytest.mark.parametrize("answer", [None, {}, {"turnId": None}, {"turnId": ""}, "turn-1"])
def test_an_answer_without_turn_is_refused(duo, answer):
    """There is nothing to wait for."""
    duo.client.script["send_message"] = [answer]
    with pytest.raises(ValueError, match="turnId"):
        duo.do(duo.session("t").send_and_handle("Hi"))
    assert duo.client.count("turn_status") == 0


def test_calls_are_answered_until_the_turn_ends(duo):
    """Drain, status, again; the result has everything, in order."""
    session = duo.session("t")
    session.register("a", lambda x: x + 1)
    duo.client.transcript = [
        {"turnId": "turn-1", "role": "user", "status": "complete", "text": "Hi"},
        {"turnId": "turn-1", "role": "assistant", "status": "complete", "text": "first"},
        {"turnId": "turn-1", "role": "assistant", "status": "complete", "text": "last"},
        {"turnId": "turn-1", "role": "assistant", "status": "inProgress", "text": "more"},
        {"turnId": "turn-2", "role": "assistant", "status": "complete", "text": "other"},
    ]
    duo.client.script["tool_calls"] = [{"data": [row(0, arguments={"x": 1})]}, {"data": [row(1, arguments={"x": 2})]}]
    duo.client.script["turn_status"] = [{"status": "inProgress"}, {"status": "Completed"}]
    result = duo.do(session.send_and_handle("Hi", interval_seconds=0.01))
    assert duo.client.names() == [
        *["send_message", "tool_calls", "respond", "turn_status", "tool_calls", "respond", "turn_status", "get"]
    ]
    assert (result.session_id, result.turn_id, result.status) == ("t", "turn-1", "Completed")
    assert result.accepted == {"status": "accepted", "sessionId": "t", "turnId": "turn-1"}
    assert result.assistant_reply == duo.client.transcript[2]
    assert result.detail["transcript"] == duo.client.transcript
    assert [(dispatch.result, dispatch.request_id) for dispatch in result.dispatches] == [(2, "0"), (3, "1")]


@pytest.mark.parametrize(
    "status", ["completed", "complete", "failed", "error", "interrupted", "canceled", "cancelled", "FAILED"]
)
def test_terminal_statuses(duo, status):
    """Seven words, in any letters; as text or in an object."""
    for answer in (status, {"status": status}, {"turn": {"status": status}}):
        duo.client.script["turn_status"] = [answer]
        assert duo.do(duo.session("t").send_and_handle("Hi")).status == status


@pytest.mark.parametrize("given", ["Done", ["x", "done"], ("DONE",), {"done"}], ids=["text", "list", "tuple", "set"])
def test_terminal_statuses_may_be_given(duo, given):
    """A text is one status, not its letters; the usual words then do not end the wait."""
    duo.client.script["turn_status"] = [{"status": "completed"}, {"status": "done"}]
    result = duo.do(duo.session("t").send_and_handle("Hi", terminal_statuses=given, interval_seconds=0.01))
    assert (result.status, duo.client.count("turn_status")) == ("done", 2)


def test_a_turn_that_does_not_end_is_a_timeout(duo):
    """`WaitTimeoutError`, with the last status; it is a `TimeoutError`, too."""
    duo.client.script["turn_status"] = [{"status": "inProgress"}] * 100_000
    with pytest.raises(WaitTimeoutError, match="inProgress") as late:
        duo.do(duo.session("t").send_and_handle("Hi", timeout_seconds=0.05, interval_seconds=0.01))
    assert isinstance(late.value, TimeoutError)
    assert (late.value.details["turn_id"], late.value.details["status"]) == ("turn-1", "inProgress")


def test_a_reply_is_waited_for_only_if_required(duo):
    """Absent and not required: None. Required: it is waited for, and its absence is a timeout."""
    session = duo.session("t")
    assert duo.do(session.send_and_handle("Hi")).assistant_reply is None
    reply = {"turnId": "turn-2", "role": "assistant", "status": "complete", "text": "x"}
    duo.client.script["get"] = [{"transcript": []}, {"transcript": [reply]}]
    found = duo.do(session.send_and_handle("Hi", require_assistant_reply=True, interval_seconds=0.01))
    assert (found.assistant_reply, found.detail) == (reply, {"transcript": [reply]})
    with pytest.raises(WaitTimeoutError, match="reply"):
        duo.do(session.send_and_handle("Hi", require_assistant_reply=True, timeout_seconds=0.05, interval_seconds=0.01))


def test_a_get_that_fails_hides_no_result(duo):
    """Unless the reply is required."""
    session = duo.session("t")
    duo.client.script["get"] = [OSError("away"), OSError("away")]
    result = duo.do(session.send_and_handle("Hi"))
    assert (result.detail, result.assistant_reply, result.status) == (None, None, "completed")
    assert [d.code for d in session.diagnostics] == ["session_unreadable"]
    with pytest.raises(OSError, match="away"):
        duo.do(session.send_and_handle("Hi", require_assistant_reply=True))


def test_with_a_backend_send_and_handle_prepares(duo):
    """The catalog is in force before the text is sent; without one, nothing is resumed."""
    duo.do(duo.session("t").send_and_handle("Hi"))
    assert duo.client.count("resume") == 0
    duo.with_backend()
    duo.session("t").register("a", silent)
    duo.client.calls.clear()
    assert duo.do(duo.session("t").send_and_handle("Hi")).accepted["catalog"] == "current"
    assert duo.client.names()[:3] == ["apply", "context_for", "send_message"]


def test_calls_answered_by_the_stream_count_too(duo):
    """A client that answers calls itself leaves nothing to drain; the result has its calls of this turn all the same."""
    session = duo.session("t")
    session.register("a", lambda: "x")
    asked, done = threading.Event(), threading.Event()

    def status():
        asked.set()
        return {"status": "completed" if done.is_set() else "inProgress"}

    duo.client.script["turn_status"] = [status] * 100_000

    def stream(do):
        assert asked.wait(60)
        do(session.respond_to_pending_call(row(0)))
        do(session.respond_to_pending_call(row(0)))
        do(session.respond_to_pending_call(row(1, turnId="turn-9")))
        done.set()

    if duo.asynchronous:

        async def both():
            loop = asyncio.get_running_loop()
            on_loop = asyncio.to_thread(stream, lambda part: asyncio.run_coroutine_threadsafe(part, loop).result(60))
            result, _ = await asyncio.gather(session.send_and_handle("Hi", interval_seconds=0.01), on_loop)
            return result

        result = duo.do(both())
    else:
        thread = threading.Thread(target=stream, args=(lambda answer: answer,))
        thread.start()
        result = session.send_and_handle("Hi", interval_seconds=0.01)
        thread.join(60)
    assert [dispatch.request_id for dispatch in result.dispatches] == ["0"]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("x ", "x"),
        ({"status": "x"}, "x"),
        ({"turn": {"status": "x"}}, "x"),
        ({}, None),
        (None, None),
        (5, None),
        ("", None),
    ],
)
def test_statuses_are_read_where_clients_put_them(answer, status):
    """Text, or an object with `status`, or a turn with one."""
    assert status_of(answer) == status


@pytest.mark.parametrize(
    "detail", [None, {}, {"transcript": None}, {"transcript": "x"}, {"transcript": [None, 5, "x", {}]}]
)
def test_odd_transcripts_have_no_reply(detail):
    """What is no list of entries is no error."""
    assert reply_of(detail, "t") is None
