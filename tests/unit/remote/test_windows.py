"""Windows and the model's catalog: lazy on the way in, true on the way out, never in the body's way."""

from __future__ import annotations

import pytest


def silent():
    return None


def names(duo):
    return [keywords["tools"] for keywords in duo.client.named("apply")]


def enter(duo, manager):
    return duo.do(manager.__aenter__()) if duo.asynchronous else manager.__enter__()


def leave(duo, manager):
    return duo.do(manager.__aexit__(None, None, None)) if duo.asynchronous else manager.__exit__(None, None, None)


@pytest.fixture
def backend(duo):
    """The facade's client with a backend."""
    return duo.with_backend()


def test_opening_a_window_pushes_nothing(duo, backend):
    """The next prepare does; a window nobody prepared leaves no trace on the way out."""
    session = duo.session("t")
    session.register("a", silent)
    duo.do(session.prepare_catalog())
    duo.within(session.using("b", silent), lambda _: None)
    assert names(duo) == [["a"]]


def test_leaving_a_pushed_window_syncs(duo, backend):
    """The layer goes first, then the model's catalog follows, without waiting for an idle thread."""
    session = duo.session("t")
    session.register("a", silent, description="base")

    def body(_):
        duo.do(session.prepare_catalog())

    duo.within(session.using("b", silent), body)
    assert names(duo) == [["a", "b"], ["a"]]
    assert [change.wait for change in backend.changes] == [True, False]
    assert session.last_catalog["status"] == "ok"


def test_the_layer_is_gone_before_the_sync(duo, backend):
    """A call that comes late finds the restored skill."""
    session = duo.session("t")
    session.register("a", silent, description="base")
    seen = []
    apply = backend.apply

    def watched(change):
        seen.append(session.list()[0].description)
        return apply(change)

    backend.apply = watched
    duo.within(session.using("a", silent, description="window"), lambda _: duo.do(session.prepare_catalog()))
    assert seen == ["window", "base"]


def test_a_hidden_window_needs_no_sync(duo, backend):
    """What was pushed did not hold it."""
    session = duo.session("t")
    lower = session.using("a", silent, description="lower")
    enter(duo, lower)

    def body(_):
        duo.do(session.prepare_catalog())
        leave(duo, lower)

    duo.within(session.using("a", silent, description="upper"), body)
    assert names(duo) == [["a"], []]


def test_a_window_whose_layer_is_gone_closes_quietly(duo, backend):
    """`clear` inside the body: nothing is synced and nothing raised."""
    session = duo.session("t")

    def body(_):
        duo.do(session.prepare_catalog())
        session.clear()

    duo.within(session.using("a", silent), body)
    assert names(duo) == [["a"]]
    assert session.diagnostics == []


@pytest.mark.parametrize("body_raises", [False, True])
def test_a_failed_exit_sync_never_raises(duo, backend, body_raises):
    """Diagnostic, `last_catalog`, and the next prepare tries again; the body's own error is what comes out."""
    session = duo.session("t")

    def body(_):
        duo.do(session.prepare_catalog())
        backend.reports = [OSError("server gone")]
        if body_raises:
            raise KeyError("body")

    manager = session.using("a", silent)
    if body_raises:
        with pytest.raises(KeyError, match="body"):
            duo.within(manager, body)
    else:
        duo.within(manager, body)
    assert session.last_catalog["status"] == "failed"
    assert "server gone" in session.last_catalog["error"]
    assert [d.code for d in session.diagnostics] == ["catalog_sync_failed"]
    assert duo.do(session.prepare_catalog())["status"] == "ok"
    assert names(duo)[-1] == []


def test_a_failed_report_on_exit_is_a_diagnostic(duo, backend):
    """Not only exceptions: a backend that says `failed` is told, too."""
    session = duo.session("t")

    def body(_):
        duo.do(session.prepare_catalog())
        backend.reports = [{"status": "failed", "reason": "not_local"}]

    duo.within(session.using("a", silent), body)
    assert session.last_catalog == {"status": "failed", "reason": "not_local", "sessionId": "t"}
    assert [d.code for d in session.diagnostics] == ["catalog_sync_failed"]


def test_a_deferred_exit_is_no_failure(duo, backend):
    """During a turn the old catalog stays until the turn ends; `wait_catalog` awaits it."""
    session = duo.session("t")

    def body(_):
        duo.do(session.prepare_catalog())
        backend.reports = [{"status": "deferred", "reason": "turn_active", "pending": True}]

    duo.within(session.using("a", silent), body)
    assert session.last_catalog["status"] == "deferred"
    assert session.diagnostics == []
    duo.do(session.wait_catalog())
    assert backend.changes[-1].wait is True


def test_without_a_backend_leaving_resumes(duo):
    """The same rule with a client that only resumes: pushed by prepare, taken back on the way out."""
    session = duo.session("t")
    duo.within(session.using("a", silent), lambda _: duo.do(session.prepare_catalog()))
    pushed = [[tool["name"] for tool in keywords["dynamic_tools"]] for keywords in duo.client.named("resume")]
    assert pushed == [["a"], []]


def test_a_claimed_call_keeps_its_handler(duo):
    """A handler that runs when its window is left still answers; the next call finds nothing."""
    session = duo.session("t")

    def handler():
        session.unregister("a")
        return "still mine"

    window = session.using("a", handler)
    enter(duo, window)
    assert duo.do(session.dispatch_tool_call(tool="a")).result == "still mine"
    assert duo.do(session.dispatch_tool_call(tool="a")).error == "no remote skill registered for a"
    leave(duo, window)
