"""A live model over HTTP: a local server speaking Anthropic's messages wire, asked through pydantic-ai."""

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kdskills.builtin.models import pydantic_ai
from kdskills.errors import ModelFailed
from kdskills.hooks import Register
from kdskills.models import Message, ModelImage, ModelRequest, ToolCall, ToolSpec, Usage, open_model

LOAD = ToolSpec("skills_load", "Load skills.", {"type": "object", "properties": {}}, "skills.load")


class Wire(BaseHTTPRequestHandler):
    """Answers `/v1/messages` from the server's script and keeps what it was sent."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        status, headers, payload = self.server.script.pop(0)
        data = json.dumps(payload).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Type": "application/json", "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def message(*content, stop="end_turn"):
    usage = {"input_tokens": 11, "output_tokens": 7}
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "tiny-1",
        "content": list(content),
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": usage,
    }


def failure(kind, text):
    return {"type": "error", "error": {"type": kind, "message": text}}


@pytest.fixture
def server(monkeypatch):
    """A server on loopback with a script of answers, and a key in the environment."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "key-marker-123456")
    made = ThreadingHTTPServer(("127.0.0.1", 0), Wire)
    made.script, made.seen = [], []
    made.url = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
async def model(server):
    """The provider of `anthropic:tiny@URL`."""
    register = Register("model")
    pydantic_ai.kdskills_register_models(register)
    opened = open_model(register, f"anthropic:tiny@{server.url}")
    yield opened
    await opened.aclose()


def request(*messages, tools=(LOAD,)):
    return ModelRequest("solver.react.decision", "rules", messages or (Message("user", "u"),), tools)


async def test_marks_and_tokens_of_the_cache(server, model):
    """The ends of tools, instructions and history are marked; what the cache gave and took is told, unless it is turned off."""
    answer = message({"type": "text", "text": "x"})
    answer["usage"] |= {"cache_read_input_tokens": 100, "cache_creation_input_tokens": 20}
    server.script = [(200, {}, answer), (200, {}, message({"type": "text", "text": "x"}))]
    asked = request(Message("user", "u"), Message("assistant", "a"), Message("user", "v"))
    assert (await model.reply(asked)).usage == Usage(131, 7, cache_read=100, cache_write=20)
    body = server.seen[0][2]
    ends = [body["tools"][-1], body["system"][-1], body["messages"][-1]["content"][-1]]
    assert [row["cache_control"]["type"] for row in ends] == ["ephemeral"] * 3
    assert json.dumps(body).count("cache_control") == 3
    off = {f"anthropic_cache_{what}": False for what in ("tool_definitions", "instructions", "messages")}
    await model.reply(replace(asked, settings=off))
    assert "cache_control" not in json.dumps(server.seen[1][2])


async def test_rules_and_active_skills_have_a_mark_each(server, model):
    """With skills active the end of what stays and the end of theirs are marked, the text itself unchanged; none when turned off."""
    server.script = [(200, {}, message({"type": "text", "text": "x"}))] * 3
    text = "rules\n\ncatalog\n\n<active>one</active>"
    asked = replace(request(), instructions=text, steady=text.index("\n\n<active>"))
    await model.reply(asked)
    await model.reply(replace(asked, settings={"anthropic_cache_instructions": "1h", "extra_body": {"metadata": {}}}))
    await model.reply(replace(asked, settings={"anthropic_cache_instructions": False}))
    first, hour, off = (body for _, _, body in server.seen)
    assert "\n\n".join(block["text"] for block in first["system"]) == text
    assert [block["cache_control"]["ttl"] for block in first["system"] + hour["system"]] == ["5m", "5m", "1h", "1h"]
    assert (json.dumps(first).count("cache_control"), hour["metadata"]) == (4, {})  # as many as that provider takes
    assert ("".join(block["text"] for block in off["system"]), "cache_control" in json.dumps(off["system"])) == (
        text,
        False,
    )


async def test_a_reply_with_calls_text_and_usage(server, model):
    """Instructions, tools and history go out in that wire's form; text, calls and tokens come back."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "skills_load", "input": {"names": ["sales"]}}
    server.script = [(200, {}, message({"type": "text", "text": "Looking."}, call, stop="tool_use"))]
    history = (
        Message("user", "u"),
        Message("assistant", "", calls=(ToolCall("a", "skills_load", "{broken"), ToolCall("b", "skills_load", "{}"))),
        Message("tool", "bad", call_id="a", tool="skills_load", ok=False),
        Message("tool", "good", call_id="b", tool="skills_load"),
    )
    reply = await model.reply(request(*history))
    (found,) = reply.calls
    assert (reply.text, found.id, found.tool, json.loads(found.arguments)) == (
        "Looking.",
        "toolu_1",
        "skills_load",
        {"names": ["sales"]},
    )
    assert (reply.usage, reply.model, reply.response_id) == (Usage(11, 7), "tiny-1", "msg_1")
    path, headers, body = server.seen[0]
    assert path.partition("?")[0] == "/v1/messages"
    assert "key-marker-123456" in headers.get("x-api-key", headers.get("authorization", ""))
    assert "rules" in json.dumps(body["system"])
    assert [row["role"] for row in body["messages"]] == ["user", "assistant", "user"]
    sent = [part["input"] for part in body["messages"][1]["content"] if part["type"] == "tool_use"]
    assert sent == [{"invalid_json": "{broken"}, {}]
    assert [part["tool_use_id"] for part in body["messages"][2]["content"]] == ["a", "b"]
    assert [tool["name"] for tool in body["tools"]] == ["skills_load"]


async def test_images_are_part_of_a_tools_answer(server, model):
    """An image goes out within the result of its call."""
    server.script = [(200, {}, message({"type": "text", "text": "A cat."}))]
    image = ModelImage("image/png", b"\x89PNG")
    history = (
        Message("user", "u"),
        Message("assistant", "", calls=(ToolCall("a", "files_read", "{}"),)),
        Message("tool", "a cat", call_id="a", tool="files_read", images=(image,)),
    )
    await model.reply(request(*history))
    (answer,) = server.seen[0][2]["messages"][2]["content"]
    assert (answer["type"], answer["tool_use_id"]) == ("tool_result", "a")
    sources = [part["source"] for part in answer["content"] if part["type"] == "image"]
    assert [(source["media_type"], source["data"]) for source in sources] == [("image/png", "iVBORw==")]
    assert model.takes_images


@pytest.mark.parametrize(
    ("status", "headers", "error", "expected"),
    [
        (529, {}, failure("overloaded_error", "Overloaded"), ("model_failed", True, None)),
        (429, {"retry-after": "3"}, failure("rate_limit_error", "slow"), ("model_failed", True, 3.0)),
        (400, {}, failure("invalid_request_error", "prompt is too long: 9 > 8"), ("context_full", False, None)),
        (413, {}, failure("request_too_large", "prompt is too long"), ("context_full", False, None)),
        (401, {}, failure("authentication_error", "bad key key-marker-123456"), ("model_failed", False, None)),
    ],
)
async def test_failures_say_whether_another_try_may_help(server, model, status, headers, error, expected):
    """Each is told apart, tried once only, and repeats no key."""
    server.script = [(status, headers, error)]
    with pytest.raises(ModelFailed) as caught:
        await model.reply(request())
    assert (caught.value.code, caught.value.retryable, caught.value.retry_after) == expected
    assert len(server.seen) == 1
    assert "key-marker" not in json.dumps(caught.value.to_json())


async def test_the_window_is_known(model):
    """Budgets are shares of the real window."""
    assert (model.name, model.context_window) == ("anthropic:tiny", 200_000)
