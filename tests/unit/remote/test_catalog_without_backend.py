"""Catalog changes with a client that only knows how to resume."""

from __future__ import annotations

import pytest

from kdskills.remote.names import tools_digest as digest
from kdskills.remote.turns import BOOTSTRAP_TEXT, says_no_rollout


def silent():
    return None


def resumed(duo):
    return [[tool["name"] for tool in keywords["dynamic_tools"]] for keywords in duo.client.named("resume")]


class WireError(Exception):
    """An error with details, as HTTP clients raise them."""

    def __init__(self, message, **details):
        super().__init__(message)
        self.details = details


class Details:
    """Details with attributes instead of keys."""

    def __init__(self, body):
        self.response_body = body


def with_details(details):
    error = Exception("HTTP 404")
    error.details = details
    return error


@pytest.mark.parametrize("method", ["sync_runtime", "prepare_catalog", "wait_catalog"])
def test_an_empty_catalog_never_pushed_calls_nobody(duo, method):
    """Exactly the two keys, and the same as `last_catalog`."""
    session = duo.session("t")
    assert duo.do(getattr(session, method)()) == {"status": "noop", "sessionId": "t"}
    assert session.last_catalog == {"status": "noop", "sessionId": "t"}
    assert duo.client.calls == []


def test_sync_runtime_is_one_resume(duo):
    """One call, anew each time; the report never claims more than the client's word."""
    session = duo.session("t")
    session.register("a", silent)
    tools = session.dynamic_tools()
    report = duo.do(session.sync_runtime())
    duo.do(session.sync_runtime())
    assert duo.client.calls == [("resume", {"session_id": "t", "dynamic_tools": tools})] * 2
    assert report["duration_ms"] >= 0
    del report["duration_ms"]
    assert report == {
        "status": "ok",
        "sessionId": "t",
        "strategy": "resume",
        "verified": False,
        "digest": digest(tools),
        "added": ["a"],
        "removed": [],
        "materialized_now": False,
        "thread": {"id": "t"},
    }


def test_reports_tell_what_changed(duo):
    """Added, changed and removed since the last push; an emptied catalog is pushed, too."""
    session = duo.session("t")
    session.register("a", silent)
    session.register("b", silent, namespace="n")
    duo.do(session.prepare_catalog())
    session.unregister("a")
    session.register("b", silent, namespace="n", description="changed")
    report = duo.do(session.prepare_catalog())
    assert (report["added"], report["removed"]) == (["n.b"], ["a"])
    session.clear()
    report = duo.do(session.prepare_catalog())
    assert (report["status"], report["added"], report["removed"]) == ("ok", [], ["n.b"])
    assert resumed(duo) == [["a", "b"], ["b"], []]


def test_a_digest_is_16_hex_of_the_sorted_tools(duo):
    """The same catalog has the same digest, however it was registered; an order of keys does not show."""
    one, two = duo.session("1"), duo.session("2")
    for session, names in ((one, "ab"), (two, "ba")):
        for name in names:
            session.register(name, silent)
    assert digest(one.dynamic_tools()) == digest(two.dynamic_tools())
    assert len(digest([])) == 16
    assert digest([{"a": 1, "b": 2}]) == digest([{"b": 2, "a": 1}]) != digest([])


def test_errors_of_sync_runtime_propagate(duo):
    """No bootstrap, no retry: one resume."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.materialized = False
    with pytest.raises(RuntimeError, match="no rollout found"):
        duo.do(session.sync_runtime())
    assert duo.client.names() == ["resume"]


def test_prepare_resumes_what_is_materialized(duo):
    """No message is sent to a session that has a rollout."""
    session = duo.session("t")
    session.register("a", silent)
    assert duo.do(session.prepare_catalog())["materialized_now"] is False
    assert duo.client.names() == ["get", "resume"]


def test_prepare_bootstraps_what_get_says_is_not_materialized(duo):
    """A one-line message, its reply, the turn taken back; then the resume."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.materialized = False
    report = duo.do(session.prepare_catalog(timeout_seconds=7.0))
    assert (report["status"], report["materialized_now"]) == ("ok", True)
    reply = {"session_id": "t", "turn_id": "turn-1", "timeout_seconds": 7.0, "interval_seconds": 0.25}
    assert duo.client.calls[:-1] == [
        ("get", {"session_id": "t"}),
        ("send_message", {"session_id": "t", "text": BOOTSTRAP_TEXT}),
        ("assistant_reply", reply),
        ("rollback", {"session_id": "t", "num_turns": 1}),
    ]
    assert duo.client.names()[-1] == "resume"
    assert "\n" not in BOOTSTRAP_TEXT


@pytest.mark.parametrize(
    "answer", [{}, {"session": {}}, {"session": {"materialized": None}}, {"session": {"materialized": 0}}, None]
)
def test_only_false_means_not_materialized(duo, answer):
    """What `get` does not say is not guessed."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.script["get"] = [answer]
    duo.do(session.prepare_catalog())
    assert duo.client.names() == ["get", "resume"]


def test_a_client_without_get_is_resumed_at_once(duo):
    """`sessions.get` is asked only if it exists."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.sessions.get = None
    duo.do(session.prepare_catalog())
    assert duo.client.names() == ["resume"]


def test_a_failing_get_leaves_a_diagnostic(duo):
    """The resume decides; what was not known is told."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.script["get"] = [OSError("away")]
    assert duo.do(session.prepare_catalog())["status"] == "ok"
    assert [d.code for d in session.diagnostics] == ["session_unreadable"]


NO_ROLLOUT = [
    RuntimeError("No Rollout Found for thread id t"),
    WireError("HTTP 400", response_body="... NO ROLLOUT FOUND ..."),
    WireError("HTTP 400", response_body={"message": "no rollout found"}),
    WireError("HTTP 400", response_body={"error": "no rollout found"}),
    WireError("HTTP 400", response_body={"details": {"why": "no rollout found"}}),
    WireError("HTTP 400", response_body=b"no rollout found"),
    with_details(Details("no rollout found")),
]
OTHER = [
    RuntimeError("rollout"),
    WireError("HTTP 400", response_body={"other": "no rollout found"}),
    WireError("HTTP 400", body="no rollout found"),
    with_details(None),
    with_details("no rollout found"),
    with_details(Details(None)),
]


@pytest.mark.parametrize("number", range(len(NO_ROLLOUT)))
def test_no_rollout_is_read_in_any_letters_and_place(duo, number):
    """In the text of the error or in its details: bootstrap and resume again."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.script["resume"] = [NO_ROLLOUT[number]]
    report = duo.do(session.prepare_catalog())
    assert (report["status"], report["materialized_now"]) == ("ok", True)
    assert duo.client.names() == ["get", "resume", "send_message", "assistant_reply", "rollback", "resume"]


@pytest.mark.parametrize("number", range(len(OTHER)))
def test_other_errors_propagate_without_a_bootstrap(duo, number):
    """Nothing is sent to the model for an error that says something else."""
    assert says_no_rollout(OTHER[number]) is False
    session = duo.session("t")
    session.register("a", silent)
    duo.client.script["resume"] = [OTHER[number]]
    with pytest.raises(type(OTHER[number])):
        duo.do(session.prepare_catalog())
    assert duo.client.names() == ["get", "resume"]


def test_one_bootstrap_and_three_tries_at_most(duo):
    """A server that keeps saying so is believed after the third resume; the message is sent once."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.script["resume"] = [RuntimeError("no rollout found") for _ in range(5)]
    with pytest.raises(RuntimeError, match="no rollout found"):
        duo.do(session.prepare_catalog())
    assert (duo.client.count("resume"), duo.client.count("send_message")) == (3, 1)
    assert session.last_catalog is None


def test_the_next_prepare_may_bootstrap_again(duo):
    """Once per prepare, not once per session."""
    session = duo.session("t")
    session.register("a", silent)
    for _ in range(2):
        duo.client.script["resume"] = [RuntimeError("no rollout found")]
        duo.do(session.prepare_catalog())
    assert duo.client.count("send_message") == 2


def test_a_bootstrap_without_turn_waits_for_nothing(duo):
    """No `turnId`, no waiting; the rollback comes all the same."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.materialized = False
    duo.client.script["send_message"] = [{"status": "accepted"}]
    duo.do(session.prepare_catalog())
    assert duo.client.names() == ["get", "send_message", "rollback", "resume"]


def test_a_failed_rollback_is_only_a_diagnostic(duo):
    """The catalog counts more than a tidy history."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.materialized = False
    duo.client.script["rollback"] = [OSError("refused")]
    assert duo.do(session.prepare_catalog())["status"] == "ok"
    assert [(d.code, d.severity) for d in session.diagnostics] == [("bootstrap_not_taken_back", "warning")]


def test_a_bootstrap_whose_reply_does_not_come_is_taken_back(duo):
    """The error propagates, and the message does not stay behind the user's."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.materialized = False
    duo.client.script["assistant_reply"] = [TimeoutError("late")]
    with pytest.raises(TimeoutError, match="late"):
        duo.do(session.prepare_catalog())
    assert duo.client.names() == ["get", "send_message", "assistant_reply", "rollback"]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (None, "ok"),
        ({}, "ok"),
        ({"status": "ok"}, "ok"),
        ({"status": None}, "ok"),
        ("fine", "ok"),
        ({"status": "busy"}, "failed"),
    ],
    ids=["none", "empty", "ok", "null", "text", "busy"],
)
def test_a_client_that_refuses_is_believed(duo, answer, status):
    """A status other than none or `ok` is `failed`, reason `client_refused`; its own words stay in the report."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.script["resume"] = [answer]
    report = duo.do(session.prepare_catalog())
    assert (report["status"], report["sessionId"], report["verified"]) == (status, "t", False)
    assert report.get("reason") == ("client_refused" if status == "failed" else None)
    assert session.last_catalog == report


def test_what_was_refused_counts_as_not_pushed(duo):
    """The next report compares with what was last accepted."""
    session = duo.session("t")
    session.register("a", silent)
    duo.client.script["resume"] = [{"status": "busy", "message": "later"}]
    assert duo.do(session.prepare_catalog())["error"] == "busy: later"
    assert duo.do(session.prepare_catalog())["added"] == ["a"]


def test_a_session_created_with_tools_was_pushed(duo):
    """Emptying such a session resumes it: its tools are known to the server."""
    _, session = duo.do(duo.facade.create_session(register=lambda draft: draft.register("a", silent) and None))
    session.clear()
    report = duo.do(session.sync_runtime())
    assert (report["status"], report["removed"]) == ("ok", ["a"])
    assert resumed(duo) == [[]]


def test_wait_catalog_returns_what_is_settled(duo):
    """A catalog that was pushed is not pushed again; one that changed is."""
    session = duo.session("t")
    session.register("a", silent)
    report = duo.do(session.prepare_catalog())
    assert duo.do(session.wait_catalog()) == report
    assert duo.client.count("resume") == 1
    session.register("b", silent)
    assert duo.do(session.wait_catalog())["added"] == ["b"]


def test_reports_are_the_callers_own(duo):
    """Changing one changes no other."""
    session = duo.session("t")
    session.register("a", silent)
    duo.do(session.prepare_catalog())["added"].append("x")
    session.last_catalog["added"].append("y")
    assert session.last_catalog["added"] == ["a"]
