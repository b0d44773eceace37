"""A call that is delivered again on another connection, and handlers that change what they are given."""

from __future__ import annotations

import threading

import pytest

from kdskills.remote.calls import TOOL_CALL_EVENT, AppServerSignal

NESTED = {"order": {"lines": [1, 2]}}


def delivered(handle, **params):
    """Return the signal of one delivery of the same call."""
    known = {"tool": "a", "callId": "c1", "turnId": "u1", "threadId": "t", "arguments": {}}
    return AppServerSignal(TOOL_CALL_EVENT, request_id=handle, params={**known, **params})


def reconnected(duo):
    """Have the client change its connection while an answer is on its way: the old handle answers nothing now."""
    duo.client.connection = "second"
    return {"status": "not_found"}


@pytest.fixture
def two(duo):
    """A session on the client's first connection."""
    duo.client.connection = "first"
    return duo


def test_an_answer_under_a_stale_handle_does_not_answer_the_next_delivery(two):
    """The connection was replaced while the handler ran: the new connection's delivery gets the stored answer all the same."""
    session, runs = two.session("t"), []
    session.register("a", lambda: runs.append(1) or "done")
    two.client.script["respond"] = [lambda: reconnected(two)]
    first = two.do(session.respond_to_signal(delivered("first:0")))
    second = two.do(session.respond_to_signal(delivered("second:0")))
    assert (first.submission_status, second.submission_status) == ("not_found", "ok")
    assert [asked["request_id"] for asked in two.client.named("respond")] == ["first:0", "second:0"]
    assert (runs, second.handled, second.replayed, second.response_payload) == (
        [1],
        True,
        True,
        first.response_payload,
    )


def test_a_connection_replaced_inside_the_handler(two):
    """The same when the connection goes while the handler runs: one effect, both deliveries submitted."""
    session, runs = two.session("t"), []

    def handler():
        runs.append(1)
        two.client.connection = "second"
        return "done"

    session.register("a", handler)
    two.client.script["respond"] = [{"status": "not_found"}]
    two.do(session.respond_to_signal(delivered("first:0")))
    two.do(session.respond_to_signal(delivered("second:0")))
    again = two.do(session.respond_to_signal(delivered("second:0")))
    assert [asked["request_id"] for asked in two.client.named("respond")] == ["first:0", "second:0"]
    assert (runs, again.submission_status) == ([1], "local_duplicate")


def test_a_signal_read_after_its_connection_was_replaced(two):
    """A program that reads its stream late answers an expired handle: that counts for the old connection only."""
    session, runs = two.session("t"), []
    session.register("a", lambda: runs.append(1) or "done")
    two.client.connection = "second"
    two.client.script["respond"] = [{"status": "not_found"}]
    two.do(session.respond_to_signal(delivered("first:0")))
    late = two.do(session.respond_to_signal(delivered("second:0")))
    assert (late.submission_status, late.submission_attempts, runs) == ("ok", 1, [1])


@pytest.mark.parametrize("handle", [0, "0", "x"])
def test_handles_that_name_no_connection(two, handle):
    """Plain request ids belong to the connection of the moment: repeated there, they are duplicates."""
    session = two.session("t")
    session.register("a", lambda: "done")
    found = [two.do(session.respond_to_signal(delivered(handle))) for _ in range(2)]
    assert [one.submission_status for one in found] == ["ok", "local_duplicate"]
    two.client.connection = "second"
    assert two.do(session.respond_to_signal(delivered(handle))).submission_status == "ok"


def test_two_deliveries_wait_for_one_handler(client, facade):
    """Both deliveries are waiting while the handler runs; each is answered under its own handle."""
    client.connection = "first"
    session, entered, go, runs = facade.session("t"), threading.Event(), threading.Event(), []

    def handler():
        runs.append(1)
        entered.set()
        assert go.wait(60)
        return "done"

    session.register("a", handler)
    client.script["respond"] = [
        lambda: {"status": "ok" if client.named("respond")[-1]["request_id"] == "second:0" else "not_found"}
    ] * 2
    found = {}

    def deliver(handle):
        found[handle] = session.respond_to_signal(delivered(handle))

    threads = [threading.Thread(target=deliver, args=(handle,), daemon=True) for handle in ("first:0", "second:0")]
    threads[0].start()
    assert entered.wait(60)
    client.connection = "second"
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(60)
    assert {handle: one.submission_status for handle, one in found.items()} == {
        "first:0": "not_found",
        "second:0": "ok",
    }
    assert runs == [1]


def spoil(order):
    """A handler that takes its argument apart."""
    order["lines"].clear()
    del order["lines"]
    return "done"


def test_a_handler_may_change_its_arguments(duo):
    """What the model gave stays as it was: in the dispatch, and for other readers of the same signal."""
    session = duo.session("t")
    session.register("a", spoil)
    pending = delivered(0, arguments={"order": {"lines": [1, 2]}})
    found = duo.do(session.respond_to_signal(pending))
    assert (found.handled, found.arguments, pending.params["arguments"]) == (True, NESTED, NESTED)


def test_changed_arguments_do_not_make_another_call(duo):
    """A row whose answer could not be submitted comes again; it is the same call though its handler changed the arguments."""
    session, runs = duo.session("t"), []
    session.register("a", lambda order: runs.append(order.pop("lines")) or "done")
    pending = {"requestId": 0, "tool": "a", "callId": "c", "turnId": "u", "arguments": {"order": {"lines": [1, 2]}}}
    duo.client.script["respond"] = [{"status": "error"}] * 3
    for _ in range(2):
        duo.client.rows = [pending]
        found = duo.do(session.drain_pending_calls(retry_delay_seconds=0))
    assert (runs, found[0].submission_status, found[0].replayed) == ([[1, 2]], "ok", True)


def test_whole_arguments_that_are_a_list(duo):
    """Arguments that are no object are the handler's own copy, too."""
    session = duo.session("t")
    session.register("a", lambda given: given.clear() or "done")
    found = duo.do(session.dispatch_tool_call(tool="a", arguments=[1, [2]]))
    assert (found.handled, found.arguments) == (True, [1, [2]])
