"""What the model is told: exact texts, payloads and flags of every case."""

from __future__ import annotations

import asyncio
import base64
import functools
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import BaseModel

from kdskills.remote import RemoteCall


@dataclass
class Point:
    x: int
    where: Path


class Item(BaseModel):
    name: str


def payload(text, success):
    return {"contentItems": [{"type": "inputText", "text": text}], "success": success}


def run(duo, handler, arguments=None, **options):
    session = duo.session("t")
    session.register("a", handler, **options)
    return duo.do(session.dispatch_tool_call(tool="a", arguments=arguments))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ("as is\n", "as is\n"),
        ("", ""),
        (True, "true"),
        (1, "1"),
        ({"b": 1, "a": "ü"}, '{"a": "\\u00fc", "b": 1}'),
        ([1, None], "[1, null]"),
        ({3, 1, 2}, "[1, 2, 3]"),
        (b"hi", f'"{base64.b64encode(b"hi").decode()}"'),
        (Point(1, Path("a/b")), '{"where": "a/b", "x": 1}'),
        (Item(name="n"), '{"name": "n"}'),
        (datetime(2024, 1, 2, tzinfo=UTC), '"2024-01-02T00:00:00+00:00"'),
        ({"contentItems": "x", "success": True}, '{"contentItems": "x", "success": true}'),
    ],
    ids=[
        "none",
        "str",
        "blank",
        "bool",
        "int",
        "dict",
        "list",
        "set",
        "bytes",
        "dataclass",
        "model",
        "datetime",
        "near",
    ],
)
def test_values_as_text(duo, value, text):
    """`null` for None, a str as it is, else JSON with sorted keys in ASCII; success and handled."""
    found = run(duo, lambda: value)
    assert found.response_payload == payload(text, True)
    assert (found.handled, found.error, found.result) == (True, None, value)


@pytest.mark.parametrize("success", [True, False])
def test_a_ready_payload_is_sent_unchanged(duo, success):
    """A dict with a list of items and a bool is the answer itself."""
    ready = {"contentItems": [{"type": "inputImage", "imageUrl": "data:image/png;base64,AA=="}], "success": success}
    found = run(duo, lambda: ready)
    assert found.response_payload == ready
    assert (found.handled, found.error) == (True, None)


def test_an_invalid_ready_payload_fails_with_its_place(duo):
    """The index of the bad item is named."""
    ready = {"contentItems": [{"type": "inputText", "text": "x"}, {"type": "other"}], "success": True}
    found = run(duo, lambda: ready)
    assert (found.handled, found.response_payload["success"]) == (False, False)
    assert found.error.startswith("remote skill a failed: ")
    assert "1" in found.error


def test_an_unknown_skill(duo):
    """The promised sentence, in payload and error."""
    session = duo.session("t")
    found = duo.do(session.dispatch_tool_call(tool=" gone ", request_id=0, call_id="c"))
    assert found.response_payload == payload("no remote skill registered for gone", False)
    assert (found.handled, found.error) == (False, "no remote skill registered for gone")
    assert (found.tool, found.request_id, found.call_id) == ("gone", "0", "c")


def test_a_closed_session_has_no_skills(duo):
    """A late call finds none."""
    session = duo.session("t")
    session.register("a", lambda: "x")
    duo.do(duo.facade.close_session("t"))
    assert duo.do(session.dispatch_tool_call(tool="a")).error == "no remote skill registered for a"


class Silent(Exception):
    """An exception without a message."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("wrong size"), "wrong size"),
        (Silent(), "Silent"),
        (ValueError("password=hunter22"), None),
        (SystemExit(3), "3"),
        (GeneratorExit(), "GeneratorExit"),
    ],
    ids=["message", "type", "secret", "exit", "generator"],
)
def test_what_a_handler_raises_is_answered(duo, error, said):
    """Message or type; secrets never; every `BaseException`."""

    def handler():
        raise error

    found = run(duo, handler)
    assert (found.handled, found.response_payload) == (False, payload(found.error, False))
    if said is None:
        assert "hunter22" not in str(found)
        assert found.error.startswith("remote skill a failed: ")
    else:
        assert found.error == f"remote skill a failed: {said}"


@pytest.mark.parametrize("way", ["respond", "drain"])
def test_an_interrupt_is_answered_and_raised_again(duo, way):
    """The model gets its answer first, and so do the calls beside it."""

    def handler():
        raise KeyboardInterrupt

    session = duo.session("t")
    session.register("a", handler)
    session.register("b", lambda: "fine")
    row = {"requestId": 1, "tool": "a"}
    duo.client.rows = [row, {"requestId": 2, "tool": "b"}]
    with pytest.raises(KeyboardInterrupt):
        duo.do(session.drain_pending_calls() if way == "drain" else session.respond_to_pending_call(row))
    answers = [sent["response"]["success"] for sent in duo.client.named("respond")]
    assert answers == ([False, True] if way == "drain" else [False])


def test_arguments_are_spread_absent_or_single(duo):
    """Object: keywords. None: nothing. Anything else: one argument."""
    session = duo.session("t")
    seen = []

    def handler(*given, **named):
        seen.append((given, named))

    session.register("a", handler)
    for arguments in ({"x": 1}, None, [1], "text", 0):
        assert duo.do(session.dispatch_tool_call(tool="a", arguments=arguments)).handled is True
    assert seen == [((), {"x": 1}), ((), {}), (([1],), {}), (("text",), {}), ((0,), {})]


def test_faulty_arguments_are_listed_by_path(duo):
    """The handler does not run; the model reads what is wrong and where."""

    def handler(count: int, name: str = ""):
        raise AssertionError("must not run")

    found = run(duo, handler, {"count": "x", "name": 1, "more": 1})
    assert found.handled is False
    assert found.error.startswith("remote skill a failed: ")
    for word in ("count", "name", "more"):
        assert word in found.error
    assert run(duo, handler).error.startswith("remote skill a failed: ")


def test_a_deadline_is_told(duo):
    """In these words; the handler may still finish."""
    done = threading.Event()
    found = run(duo, lambda: done.wait(60), deadline_seconds=0.05)
    done.set()
    assert found.error == "remote skill a failed: no result within 0.05 s; it may still finish"
    assert found.handled is False


def test_a_sync_session_refuses_awaitables(session):
    """The awaitable is closed, and the text says which client to use."""

    async def handler():
        raise AssertionError("must not run")

    session.register("a", handler)
    found = session.dispatch_tool_call(tool="a")
    assert found.error == "remote skill a failed: got an awaitable; use AsyncCodexClient (or AsyncCodexManager)"
    assert found.handled is False


async def test_an_async_session_awaits(client):
    """Coroutine functions, partials of them, and plain functions that return awaitables."""
    from kdskills.remote import AsyncRemoteSkillsFacade

    session = AsyncRemoteSkillsFacade(client).session("t")

    async def handler(word="x"):
        await asyncio.sleep(0)
        return word

    session.register("a", handler)
    session.register("b", functools.partial(handler, "y"))
    session.register("c", lambda: handler("z"))
    found = [await session.dispatch_tool_call(tool=tool) for tool in "abc"]
    assert [one.result for one in found] == ["x", "y", "z"]


def test_dispatching_submits_nothing_and_remembers_nothing(duo):
    """The same call twice runs twice, whatever its ids."""
    session = duo.session("t")
    runs = []
    session.register("a", lambda: runs.append(1))
    for _ in range(2):
        found = duo.do(session.dispatch_tool_call(tool="a", request_id=1, call_id="c"))
        assert (found.submission_status, found.submission_attempts, found.replayed) == (None, 0, False)
    assert len(runs) == 2
    assert duo.client.calls == []
    assert duo.facade._core.dispatcher.journal.calls("t") == []


def test_a_handler_may_know_its_call(duo):
    """A parameter annotated `RemoteCall` receives ids and key."""
    session = duo.session("t")
    seen = []

    def handler(call: RemoteCall, x: int = 0):
        seen.append(call)

    session.register("a", handler)
    pending = {"requestId": 1, "tool": "a", "arguments": {"x": 1}, "callId": "c", "turnId": "u"}
    found = duo.do(session.respond_to_pending_call(pending))
    (call,) = seen
    assert (call.thread_id, call.turn_id, call.call_id, call.cancelled) == ("t", "u", "c", False)
    assert call.key == found.call_key


def test_namespaced_skills_are_found_by_qualified_name(duo):
    """By `namespace.name`, and by the flat name of old servers."""
    session = duo.session("t")
    session.register("a", lambda: "x", namespace="n")
    for tool in ("n.a", "n__a"):
        assert duo.do(session.dispatch_tool_call(tool=tool)).result == "x"
    assert duo.do(session.dispatch_tool_call(tool="a")).error == "no remote skill registered for a"
