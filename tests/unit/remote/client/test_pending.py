"""The pending store: each call is answered once, under handles that outlive nothing."""

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.client.wire import MAX_RESOLVED, PendingCall, PendingCalls


def params(thread="t", turn="u", call="c"):
    """Return a call's params."""
    return {"threadId": thread, "turnId": turn, "callId": call, "tool": "x", "arguments": {}, "namespace": None}


def test_states_answer_as_promised():
    """`pending` is taken, `responding` conflicts in flight, `resolved` and unknown are not found."""
    calls = PendingCalls()
    call = calls.add(0, params())
    assert call.handle == f"{calls.epoch}:0"
    taken = calls.begin(call.handle)
    assert taken is call
    assert calls.begin(call.handle) == {"status": "conflict", "code": "in_flight", "requestId": call.handle}
    calls.end(call, sent=True)
    assert calls.begin(call.handle) == {"status": "not_found", "requestId": call.handle}
    assert calls.begin(f"{calls.epoch}:7")["status"] == "not_found"


def test_an_answer_that_was_not_sent_may_be_sent_again():
    """A failed write leaves the call pending."""
    calls = PendingCalls()
    call = calls.add(1, params())
    calls.end(calls.begin(call.handle), sent=False)
    assert isinstance(calls.begin(call.handle), PendingCall)


def test_zero_and_its_text_are_two_calls():
    """`0` and `"0"` have handles of their own, and the raw id keeps its type."""
    calls = PendingCalls()
    number, text = calls.add(0, params()), calls.add("0", params())
    assert (number.handle, text.handle) == (f"{calls.epoch}:0", f'{calls.epoch}:"0"')
    assert (number.raw_id, text.raw_id) == (0, "0")


def test_a_repeated_delivery_is_one_call():
    """The same id on the same connection is the same call, pending or answered."""
    calls = PendingCalls()
    call = calls.add(5, params())
    assert calls.add(5, params()) is None
    calls.end(calls.begin(call.handle), sent=True)
    assert calls.add(5, params()) is None


def test_handles_of_two_connections_differ():
    """A raw id that comes again after a restart has another handle."""
    first, second = PendingCalls(), PendingCalls()
    assert first.add(0, params()).handle != second.add(0, params()).handle


def test_rows_are_those_of_the_thread_in_order():
    """Rows show unanswered calls of one thread, oldest first, with the fields of the spec."""
    calls = PendingCalls()
    first = calls.add(0, params("a", call="1"))
    calls.add(1, params("b"))
    calls.add(2, params("a", call="2"))
    calls.begin(first.handle)
    rows = calls.rows("a")
    assert [row["callId"] for row in rows] == ["2"]
    assert set(rows[0]) == {"requestId", "tool", "arguments", "callId", "threadId", "turnId", "namespace"}


def test_ends_expire_handles():
    """The end of a turn expires its calls, the end of a thread all of its, the end of the connection everything."""
    calls = PendingCalls()
    turns = [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2")]
    added = [calls.add(number, params(thread, turn)) for number, (thread, turn) in enumerate(turns)]

    def resolved():
        return [number for number, call in enumerate(added) if call.state == "resolved"]

    calls.expire("a", "1")
    assert resolved() == [0]
    calls.expire("a")
    assert resolved() == [0, 1]
    assert len(calls.rows("b")) == 2
    calls.expire()
    assert calls.rows("b") == []
    assert calls.begin(added[2].handle)["status"] == "not_found"


def test_what_was_answered_is_forgotten_some_day():
    """The store does not grow with every call of a long connection, and forgets no unanswered one."""
    calls = PendingCalls()
    waiting = calls.add(0, params())
    for number in range(1, 2 * MAX_RESOLVED + 200):
        calls.end(calls.begin(calls.add(number, params()).handle), sent=True)
    assert len(calls._calls) <= 2 * MAX_RESOLVED + 1
    assert calls.begin(waiting.handle) is waiting


@given(st.integers(2, 16))
def test_only_one_of_many_answers(threads):
    """However many threads answer one call at once, one of them takes it."""
    calls = PendingCalls()
    handle = calls.add(0, params()).handle
    with ThreadPoolExecutor(threads) as pool:
        taken = [isinstance(found, PendingCall) for found in pool.map(calls.begin, [handle] * threads)]
    assert taken.count(True) == 1
