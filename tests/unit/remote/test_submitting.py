"""Handing answers to the server: what is accepted, retried, final."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote import turns
from kdskills.remote.turns import judged

ROW = {"requestId": 0, "tool": "a", "arguments": None, "callId": "c", "turnId": "u"}


@pytest.fixture
def ready(duo):
    """A session whose skill `a` counts its runs and answers `x`."""
    session = duo.session("t")
    session.runs = []
    session.register("a", lambda: session.runs.append(1) or "x")
    return session


def respond(duo, session, answers, **options):
    duo.client.script["respond"] = list(answers)
    return duo.do(session.respond_to_pending_call(ROW, **{"retry_delay_seconds": 0, **options}))


@pytest.mark.parametrize(
    ("answer", "idempotent"),
    [
        ({"status": "ok"}, False),
        ({"status": "conflict", "code": "in_flight"}, True),
        ({"status": "not_found"}, True),
        ({"status": "not_found", "code": "x"}, True),
    ],
    ids=["ok", "in_flight", "not_found", "with_code"],
)
def test_accepted_answers(duo, ready, answer, idempotent):
    """`ok` is new, `in_flight` and `not_found` mean that the server has an answer already."""
    found = respond(duo, ready, [answer])
    assert (found.handled, found.error, found.submission_attempts) == (True, None, 1)
    assert (found.submission_status, found.submission_code) == (answer["status"], answer.get("code"))
    assert found.submission_idempotent is idempotent
    assert respond(duo, ready, []).submission_status == "local_duplicate"


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        ({"status": "error", "code": "c", "message": "m"}, "error", "status=error, code=c, message=m"),
        (OSError("gone"), "exception", "tool call response submit failed: gone"),
        (None, "malformed", "tool call response submit failed"),
        ("ok", "malformed", "tool call response submit failed"),
        ({}, "malformed", "tool call response submit failed"),
        ({"status": None}, "malformed", "tool call response submit failed"),
        ({"status": " "}, "malformed", "tool call response submit failed"),
        ({"status": 5}, "malformed", "tool call response submit failed"),
    ],
    ids=["error", "exception", "none", "text", "empty", "null", "blank", "number"],
)
def test_what_is_retried_and_given_up(duo, ready, answer, status, error):
    """Three attempts by default; then not handled, with what went wrong; the handler ran once."""
    found = respond(duo, ready, [answer] * 5)
    assert (found.handled, found.submission_status, found.submission_attempts) == (False, status, 3)
    assert error in found.error
    assert duo.client.count("respond") == 3
    assert (ready.runs, found.result) == ([1], "x")
    assert found.submission_idempotent is False


def test_a_later_attempt_may_succeed(duo, ready):
    """An accepted second attempt is a handled call."""
    found = respond(duo, ready, [OSError("gone"), {"status": "ok"}])
    assert (found.handled, found.error, found.submission_attempts) == (True, None, 2)
    sent = duo.client.named("respond")
    assert sent[0] == sent[1]


def test_an_unaccepted_answer_is_submitted_again(duo, ready):
    """The next delivery submits the stored answer, and the handler does not run again."""
    assert respond(duo, ready, [OSError("gone")] * 3).handled is False
    found = respond(duo, ready, [{"status": "ok"}])
    assert (found.handled, found.replayed, found.submission_status, found.submission_attempts) == (True, True, "ok", 1)
    assert ready.runs == [1]
    assert respond(duo, ready, []).submission_status == "local_duplicate"


@pytest.mark.parametrize(
    "answer",
    [
        {"status": "conflict", "code": "other"},
        {"status": "conflict"},
        {"status": "rejected", "code": 7, "message": "m"},
        {"status": "OK"},
    ],
    ids=["conflict", "no_code", "rejected", "letters"],
)
def test_other_words_are_final(duo, ready, answer):
    """One attempt, not handled."""
    found = respond(duo, ready, [answer])
    assert (found.handled, found.submission_attempts, found.submission_status) == (False, 1, answer["status"])
    assert found.error == f"status={answer['status']}, code={answer.get('code')}, message={answer.get('message')}"


@pytest.mark.parametrize(("attempts", "made"), [(1, 1), (0, 1), (-5, 1), (2, 2), (5, 5)])
def test_attempts_are_at_least_one(duo, ready, attempts, made):
    """Clamped, not refused."""
    found = respond(duo, ready, [OSError("gone")] * 9, max_submit_attempts=attempts)
    assert (found.submission_attempts, duo.client.count("respond")) == (made, made)


def test_pauses_grow_and_are_never_negative(duo, ready, monkeypatch):
    """Delay times attempt between attempts, none after the last."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(turns, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    respond(duo, ready, [OSError("gone")] * 4, max_submit_attempts=4, retry_delay_seconds=0.5)
    assert pauses == [0.5, 1.0, 1.5]
    pauses.clear()
    respond(duo, ready, [OSError("gone")] * 4, retry_delay_seconds=-1)
    assert pauses == [0.0, 0.0]


@pytest.mark.parametrize("request_id", [None, "", " ", True, False])
def test_without_a_request_id_the_handler_runs_and_nothing_is_submitted(duo, ready, request_id):
    """`no_request_id`; the call itself was handled."""
    found = duo.do(ready.respond_to_pending_call({**ROW, "requestId": request_id}))
    assert (found.handled, found.submission_status, found.request_id) == (True, "no_request_id", None)
    assert (ready.runs, duo.client.calls) == ([1], [])


def test_a_refusal_is_submitted_and_stays_unhandled(duo, ready):
    """Acceptance does not make an unknown skill handled, nor does its replay."""
    unknown = {**ROW, "tool": "b"}
    for status in ("ok", "local_duplicate"):
        found = duo.do(ready.respond_to_pending_call(unknown))
        assert (found.handled, found.submission_status) == (False, status)
        assert found.error == "no remote skill registered for b"


def test_the_client_may_not_change_the_answer(duo, ready):
    """Each attempt gets a copy."""

    def spoil(response):
        response["contentItems"].clear()
        raise OSError("gone")

    inner = duo.client.tool_calls.respond

    def respond_spoiling(request_id, response):
        inner(request_id, response)
        spoil(response)

    duo.client.tool_calls.respond = respond_spoiling
    if not duo.asynchronous:
        found = duo.do(ready.respond_to_pending_call(ROW, retry_delay_seconds=0))
        assert found.response_payload["contentItems"] == [{"type": "inputText", "text": "x"}]
        assert {len(sent["response"]["contentItems"]) for sent in duo.client.named("respond")} == {1}


def test_a_sync_session_refuses_a_client_of_coroutines(session, client):
    """The coroutine is closed, the submission is an exception that says what to use."""

    async def respond(request_id, response):
        raise AssertionError("must not run")

    session.register("a", lambda: "x")
    client.tool_calls.respond = respond
    found = session.respond_to_pending_call(ROW, max_submit_attempts=1)
    assert (found.handled, found.submission_status) == (False, "exception")
    assert "AsyncRemoteSkillsFacade" in found.error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["status", "code", "message"]), inner),
    max_leaves=4,
)


@given(JSON)
def test_any_answer_is_judged(answer):
    """Accepted means no error; refused means one, and not handled."""
    found = judged(answer)
    assert found["submission_status"]
    assert ("error" in found) is (found.get("handled") is False)
    assert not ("error" in found and found.get("submission_idempotent"))
