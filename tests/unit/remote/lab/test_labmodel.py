"""The fake model: what it receives, what it answers, and how it reads which tools a request shows."""

from __future__ import annotations

import gzip
import http.client
import json
import threading
import tomllib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdskills.remote.labmodel import (
    MAX_BODY,
    FakeResponses,
    ModelFailure,
    call,
    default_brain,
    say,
    texts_of,
    tool_outputs,
    visible_tools,
)
from kdskills.testing import FakeResponses as Exported


def user(text: str) -> dict:
    """A message of the user, as the server writes it."""
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def post(model: FakeResponses, body: bytes, path: str = "/v1/responses", **headers: str) -> tuple[int, bytes]:
    """Send a body and return status and answer."""
    host, port = model.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    line = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        line.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


def events(raw: bytes) -> list[dict]:
    """The data of server-sent events, checking that each is named by its type."""
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, data = block.split("\n", 1)
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.fixture
def model():
    """A started fake with the default brain."""
    with FakeResponses() as started:
        yield started


def test_testing_exports_the_fake():
    """`kdskills.testing` gives the same class."""
    assert Exported is FakeResponses


def test_events_of_an_answer(model):
    """An answer is `response.created`, each item done, then `response.completed` with id and usage."""
    status, raw = post(model, json.dumps({"input": [user("!say hello")]}).encode())
    found = events(raw)
    assert status == 200
    assert [event["type"] for event in found] == [
        "response.created",
        "response.output_item.done",
        "response.completed",
    ]
    assert found[1]["item"]["content"] == [{"type": "output_text", "text": "hello"}]
    assert found[2]["response"]["id"] == found[0]["response"]["id"]
    assert found[2]["response"]["usage"]["total_tokens"] == 2


@pytest.mark.parametrize(
    ("coding", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda raw: zlib.compress(raw, wbits=-15)),
        ("identity", bytes),
    ],
    ids=["gzip", "deflate", "raw-deflate", "identity"],
)
def test_packed_bodies(model, coding, pack):
    """Gzip and deflate bodies, with and without zlib's frame, are unpacked."""
    body = {"input": [user("packed")], "tools": []}
    assert post(model, pack(json.dumps(body).encode()), Content_Encoding=coding)[0] == 200
    assert model.requests == [body]


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (400, b"{", {}),
        (400, b"[1]", {}),
        (400, b"not gzip", {"Content_Encoding": "gzip"}),
        (400, gzip.compress(b"{}")[:-9], {"Content_Encoding": "gzip"}),
        (415, b"{}", {"Content_Encoding": "zstd"}),
        (413, b"{}", {"Content_Length": str(MAX_BODY + 1)}),
        (411, b"{}", {"Content_Length": "-1"}),
    ],
    ids=["no-json", "no-object", "no-gzip", "cut-gzip", "unknown-coding", "too-long", "bad-length"],
)
def test_bad_bodies(model, status, body, headers):
    """A body that is no JSON object, damaged, of unknown coding or too long is refused and not kept."""
    given_length = headers.pop("Content_Length", None)
    if given_length is not None:
        headers["Content-Length"] = given_length
    assert post(model, body, **headers)[0] == status
    assert model.requests == []


def test_a_bomb_is_refused(model):
    """A small body that unpacks to more than the limit is refused."""
    bomb = gzip.compress(b" " * (MAX_BODY + 2))
    assert post(model, bomb, Content_Encoding="gzip")[0] == 400


def test_other_paths(model):
    """Only `/v1/responses` and `/v1/models` exist."""
    assert post(model, b"{}", path="/v1/chat")[0] == 404
    assert model.requests == []


def test_brain_failure(model):
    """A brain that raises `ModelFailure` answers with its status, and the request is kept."""

    def fail(_request):
        raise ModelFailure(503, "overloaded")

    model.brain = fail
    status, raw = post(model, b"{}")
    assert (status, json.loads(raw)["error"]["message"]) == (503, "overloaded")
    assert model.requests == [{}]


def test_parallel_requests_do_not_wait_for_each_other(model):
    """A brain that waits holds up its own request only."""
    gate = threading.Event()

    def brain(request):
        if request.get("slow"):
            assert gate.wait(60)
        return [say("done")]

    model.brain = brain
    slow: list[tuple[int, bytes]] = []
    thread = threading.Thread(target=lambda: slow.append(post(model, b'{"slow": true}')))
    thread.start()
    model.wait_for(1)
    assert post(model, b"{}")[0] == 200
    assert slow == []
    gate.set()
    thread.join(60)
    assert slow[0][0] == 200


def test_wait_for_times_out(model):
    """`wait_for` says how many requests came."""
    with pytest.raises(TimeoutError, match="0 of 1 model requests"):
        model.wait_for(1, 0.01)


def test_kept_alive_connections_end_with_the_fake():
    """Closing ends connections clients keep open, and closing twice is harmless."""
    with FakeResponses() as model:
        host, port = model.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        line = http.client.HTTPConnection(host, int(port), timeout=60)
        for _ in range(3):
            line.request("POST", "/v1/responses", b"{}")
            assert line.getresponse().read()
        line.request("GET", "/v1/models")
        assert json.loads(line.getresponse().read())["data"] == []
        line.request("GET", "/v1/else")
        answer = line.getresponse()
        assert (answer.status, bool(answer.read())) == (404, True)
    assert line.sock is None or line.sock.recv(1) == b""
    line.close()
    model.close()
    with pytest.raises(RuntimeError, match="not started"):
        _ = model.base_url


def test_config_is_toml(model):
    """`config_args` are `-c key=value` pairs whose values are TOML, and point to this fake."""
    flags = model.config_args[::2]
    parsed = tomllib.loads("\n".join(model.config_args[1::2]))
    assert set(flags) == {"-c"}
    provider = parsed["model_providers"][parsed["model_provider"]]
    assert provider["base_url"] == model.base_url
    assert (provider["requires_openai_auth"], provider["supports_websockets"]) == (False, False)


class TestDefaultBrain:
    """`!call` and `!say`, one line a step."""

    def test_steps(self):
        """Each line is one step; after the last the newest output is said."""
        turn = [user('please\n!call ping {"a": 1}\n!call shop.order {}')]
        [first] = default_brain({"input": turn})
        assert (first["name"], first["arguments"], first.get("namespace")) == ("ping", '{"a": 1}', None)
        turn += [first, {"type": "function_call_output", "call_id": first["call_id"], "output": "pong"}]
        [second] = default_brain({"input": turn})
        assert (second["name"], second["arguments"], second["namespace"]) == ("order", "{}", "shop")
        turn += [second, {"type": "function_call_output", "call_id": second["call_id"], "output": "sent"}]
        assert default_brain({"input": turn}) == [say("sent")]

    def test_only_the_newest_command_counts(self):
        """Earlier turns are history; a message without commands after the newest one changes nothing."""
        turns = [user("!say old"), say("old"), user("!say new"), user("a note")]
        assert default_brain({"input": turns}) == [say("new")]

    @pytest.mark.parametrize("body", [{}, {"input": "text"}, {"input": [user("hello")]}, {"input": [1, None]}])
    def test_no_command(self, body):
        """Without a command the answer is `ok`."""
        assert default_brain(body) == [say("ok")]

    def test_malformed_arguments_pass(self):
        """Arguments go out as written, so a model's broken JSON can be played."""
        [item] = default_brain({"input": [user('!call ping {"a":')]})
        assert item["arguments"] == '{"a":'


class TestVisibleTools:
    """The three places where tools show."""

    def test_functions_and_namespaces(self):
        """Functions by name, those of a namespace with it, hosted tools by type."""
        tools = [
            {"type": "function", "name": "ping"},
            {"type": "namespace", "name": "shop", "tools": [{"type": "function", "name": "order"}]},
            {"type": "web_search"},
        ]
        assert visible_tools({"tools": tools}) == ["ping", "shop.order", "web_search"]

    def test_declarations_in_the_newest_exec(self):
        """Without `tools`, the newest `additional_tools` item's `exec` declares them."""

        def item(*names):
            declared = "\n\n".join(
                f"### `{name}`\nText ping2(x)\n```ts\ndeclare const tools: {{ {name}(args: {{ a?: string; }}): Promise<unknown>; }};\n```"
                for name in names
            )
            return {"type": "additional_tools", "tools": [{"type": "custom", "name": "exec", "description": declared}]}

        request = {"input": [item("ping", "old"), user("x"), item("ping", "shop__order")]}
        assert visible_tools(request) == ["exec", "ping", "shop__order"]

    @pytest.mark.parametrize("tools", [None, [], "x", [1], [{"name": 3}], [{"type": "namespace", "name": "n"}]])
    def test_odd_tools(self, tools):
        """Odd shapes show nothing."""
        assert visible_tools({"tools": tools}) == []

    @given(st.lists(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), unique=True))
    def test_every_function_shows(self, names):
        """Every function shows, sorted, however many."""
        assert visible_tools({"tools": [{"type": "function", "name": name} for name in names]}) == sorted(names)


def test_texts_and_outputs():
    """Texts by role, and outputs by call id, whatever shape the content has."""
    request = {
        "input": [
            {"type": "message", "role": "developer", "content": "plain"},
            {"role": "developer", "content": [{"type": "input_text", "text": "part"}, {"type": "input_image"}]},
            user("mine"),
            {"type": "function_call_output", "call_id": "a", "output": "text"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "one"}]},
        ]
    }
    assert texts_of(request, "developer") == ["plain", "part"]
    assert texts_of(request, "user") == ["mine"]
    assert tool_outputs(request) == {"a": "text", "b": "one"}


def test_call_ids_differ():
    """Fresh call ids differ; a given one is kept."""
    assert call("a")["call_id"] != call("a")["call_id"]
    assert call("a", {"x": [1]}, namespace="n", call_id="same") == {
        "type": "function_call",
        "call_id": "same",
        "name": "a",
        "namespace": "n",
        "arguments": '{"x": [1]}',
    }
