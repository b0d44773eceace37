"""Payloads of the bus: what is a command, and what is told back."""

import json

import pytest
from pydantic import BaseModel

from kdskills.doors.nats.messages import CallAddress, CallAnswer, Unreadable, message_id, progress, read_command
from kdskills.errors import Conflict

HERE = CallAddress("v1", "acme", "main", "cmd", "skills.list")


class Out(BaseModel):
    """An answer."""

    text: str


def payload(**changes):
    return json.dumps({"tool_call_id": "c1", "tool_name": "skills.list", "arguments": {"by": "x"}} | changes).encode()


def test_a_command_is_read():
    """Id, name and arguments come from the payload; a project or an agent in it means nothing."""
    found = read_command(HERE, payload(project="other", agent="root", scopes=["admin"]))
    assert found.model_dump() == {"tool_call_id": "c1", "tool_name": "skills.list", "arguments": {"by": "x"}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 5000,
        payload(tool_call_id=""),
        payload(tool_call_id=7),
        payload(tool_call_id="a b"),
        payload(tool_call_id="a\r\nNats-Msg-Id: b"),
        payload(tool_call_id="a" * 201),
        payload(tool_call_id="é"),
        payload(tool_name="skills.show"),
        payload(tool_name="kd.skills.list"),
        payload(arguments=[]),
        payload(arguments="{}"),
        payload(arguments={"by": "x" * 1024 * 1024}),
    ],
    ids=range(17),
)
def test_what_is_no_command_is_refused(data):
    """Whatever is wrong with a payload, it is one error."""
    with pytest.raises(Unreadable):
        read_command(HERE, data)


def test_an_error_has_the_one_shape():
    """Errors look as they do at every door."""
    error = Conflict("taken", reason="session_busy", holder="t1")
    said = json.loads(CallAnswer("c1", "skills.list", error=error).to_bytes())
    assert said == {"tool_call_id": "c1", "tool_name": "skills.list", "status": "error", **error.to_json()}


def test_too_large_an_answer_is_an_error():
    """What the bus cannot carry is told, with both sizes; what fits stays as it is."""
    answer = CallAnswer("c1", "skills.list", output=Out(text="x" * 1000))
    size = len(answer.to_bytes())
    assert answer.within(size) == (answer, answer.to_bytes())
    refused, data = answer.within(size - 1)
    assert json.loads(data)["error"]["details"] == {"size": size, "limit": size - 1}
    assert refused.error is not None
    assert refused.error.code == "result_too_large"


def test_one_id_for_one_result():
    """A call's results have one id, whatever they say; another call's refusal under its id has its own."""
    ok = CallAnswer("c1", "skills.list", output=Out(text="a"))
    failed = CallAnswer("c1", "skills.list", error=Conflict("busy", reason="session_busy"))
    refused = CallAnswer("c1", "skills.list", error=Conflict("used", reason="idempotency_key"))
    ids = [message_id(HERE, one, one.to_bytes()) for one in (ok, failed, refused)]
    assert ids[0] == ids[1] == "acme.main:skills.list:c1:result"
    assert ids[2].startswith("acme.main:skills.list:c1:conflict:")


def test_progress_is_events_only():
    """An event is told with its call; what is no event is not."""
    assert progress(HERE, "c1", "text") is None
    found = json.loads(progress(HERE, "c1", Out(text="half")))
    assert found == {"tool_call_id": "c1", "tool_name": "skills.list", "event": {"text": "half"}}
