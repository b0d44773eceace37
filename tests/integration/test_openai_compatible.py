"""A live model over HTTP: a local server speaking the OpenAI chat-completions wire, asked through pydantic-ai."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kdskills.builtin.models import decisions, pydantic_ai, record, replay
from kdskills.bundle import load_bundle
from kdskills.errors import BadRequest, ModelFailed
from kdskills.hooks import Register
from kdskills.models import (
    Message,
    ModelImage,
    ModelReply,
    ModelRequest,
    TextDelta,
    ToolCall,
    ToolSpec,
    Usage,
    open_model,
)
from kdskills.models.cassette import read_cassette
from kdskills.solver import PlainWiring, ReactSolver, SolverSettings, SolverSystem, tool_from_function

LOAD = ToolSpec(
    "skills_load",
    "Load skills.",
    {"type": "object", "properties": {"names": {"type": "array", "items": {"type": "string"}}}, "required": ["names"]},
    "skills.load",
)


class Wire(BaseHTTPRequestHandler):
    """Answers `/v1/chat/completions` from the server's script and keeps what it was sent."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        answer = self.server.script.pop(0)
        if isinstance(answer, tuple):
            status, headers, payload = answer
            self._send(status, headers, json.dumps(payload).encode(), "application/json")
        elif body.get("stream"):
            self._send(200, {}, chunks(answer), "text/event-stream")
        else:
            self._send(200, {}, json.dumps(completion(answer)).encode(), "application/json")

    def _send(self, status, headers, data, kind):
        self.send_response(status)
        for name, value in {**headers, "Content-Type": kind, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def completion(answer):
    message = {"role": "assistant", "content": answer.get("text")}
    if "calls" in answer:
        message["tool_calls"] = tool_calls(answer)
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "tiny-1",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if "calls" in answer else "stop"}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
    }


def tool_calls(answer):
    return [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in answer["calls"]
    ]


def chunks(answer):
    def line(delta, finish=None, usage=None):
        chunk = {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": "tiny-1",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }
        if usage:
            chunk |= {"choices": [], "usage": usage}
        return f"data: {json.dumps(chunk)}\n\n"

    out = [line({"role": "assistant", "content": ""})]
    out += [line({"content": word}) for word in (answer.get("text") or "").split(" ") if word]
    if "calls" in answer:
        out += [line({"tool_calls": [{"index": i, **one}]}) for i, one in enumerate(tool_calls(answer))]
    out.append(line({}, "tool_calls" if "calls" in answer else "stop"))
    out.append(line({}, usage={"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}))
    return ("".join(out) + "data: [DONE]\n\n").encode()


@pytest.fixture
def server():
    """A server on loopback with a script of answers."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), Wire)
    made.script, made.seen = [], []
    made.url = f"http://127.0.0.1:{made.server_port}/v1"
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def register(monkeypatch):
    """All shipped providers, with no key and no URL in the environment."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    register = Register("model")
    for plugin in (pydantic_ai, decisions, record, replay):
        plugin.kdskills_register_models(register)
    return register


def request(*messages, tools=(LOAD,), **options):
    return ModelRequest("solver.react.decision", "rules", messages or (Message("user", "u"),), tools, **options)


async def test_a_reply_with_calls_text_and_usage(server, register):
    """Instructions, tools and history go out; text, calls, tokens and ids come back."""
    server.script = [{"text": "Looking.", "calls": [("skills_load", '{"names": ["sales"]}')]}]
    model = open_model(register, f"openai:tiny@{server.url}")
    history = (
        Message("user", "u"),
        Message("assistant", "", calls=(ToolCall("a", "skills_load", "{broken"), ToolCall("b", "skills_load", "{}"))),
        Message("tool", "bad", call_id="a", tool="skills_load", ok=False),
        Message("tool", "good", call_id="b", tool="skills_load"),
    )
    reply = await model.reply(request(*history, settings={"temperature": 0}))
    await model.aclose()
    assert reply == ModelReply(
        "Looking.",
        (ToolCall("call_skills_load", "skills_load", '{"names": ["sales"]}'),),
        Usage(11, 7),
        "tiny-1",
        "tool_call",
        "chatcmpl-1",
    )
    path, _, body = server.seen[0]
    assert (path, body["model"], body["temperature"]) == ("/v1/chat/completions", "tiny", 0)
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert body["messages"][0]["content"] == "rules"
    sent = body["messages"][2]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"invalid_json": "{broken"}
    assert body["tools"][0]["function"]["name"] == "skills_load"
    assert body["tools"][0]["function"]["parameters"] == LOAD.input_schema


async def test_images_come_after_all_answers_of_tools(server, register):
    """That wire's tool answers are text alone; each image follows in the user's name, none between two answers."""
    server.script = [{"text": "A cat."}]
    model = open_model(register, f"openai:tiny@{server.url}")
    image = ModelImage("image/png", b"\x89PNG")
    history = (
        Message("user", "u"),
        Message("assistant", "", calls=(ToolCall("a", "files_read", "{}"), ToolCall("b", "files_read", "{}"))),
        Message("tool", "a cat", call_id="a", tool="files_read", images=(image,)),
        Message("tool", "text", call_id="b", tool="files_read"),
    )
    await model.reply(request(*history))
    await model.aclose()
    rows = server.seen[0][2]["messages"]
    assert [row["role"] for row in rows] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert "a cat" in rows[3]["content"]
    shown = [part["image_url"]["url"] for part in rows[5]["content"] if part["type"] == "image_url"]
    assert shown == ["data:image/png;base64,iVBORw=="]
    assert not model.takes_images  # nobody can tell of a server of one's own; its user says it


async def test_a_streamed_reply_comes_in_pieces(server, register):
    """Pieces first, the whole reply last, calls included."""
    server.script = [{"text": "North grew", "calls": [("skills_load", "{}")]}]
    model = open_model(register, f"openai:tiny@{server.url}")
    items = [item async for item in model.stream(request())]
    await model.aclose()
    assert items[:-1] == [TextDelta("North"), TextDelta("grew")]
    assert (items[-1].text, items[-1].calls[0].tool, items[-1].usage) == ("Northgrew", "skills_load", Usage(11, 7))


@pytest.mark.parametrize(
    ("status", "headers", "error", "expected"),
    [
        (429, {"Retry-After": "7"}, {"message": "slow down"}, ("model_failed", True, 7.0)),
        (500, {}, {"message": "oops"}, ("model_failed", True, None)),
        (503, {}, {"message": "later"}, ("model_failed", True, None)),
        (408, {}, {"message": "late"}, ("model_failed", True, None)),
        (409, {}, {"message": "again"}, ("model_failed", True, None)),
        (401, {}, {"message": "no key"}, ("model_failed", False, None)),
        (404, {}, {"message": "no model"}, ("model_failed", False, None)),
        (
            400,
            {},
            {"message": "maximum context length is 8", "code": "context_length_exceeded"},
            ("context_full", False, None),
        ),
        (400, {}, {"message": "bad schema"}, ("model_failed", False, None)),
        (429, {}, {"message": "pay", "code": "insufficient_quota"}, ("model_failed", False, None)),
    ],
)
async def test_failures_say_whether_another_try_may_help(server, register, status, headers, error, expected):
    """Each status is told apart, and nothing was tried twice by the provider itself."""
    server.script = [(status, headers, {"error": error})]
    model = open_model(register, f"openai:tiny@{server.url}")
    with pytest.raises(ModelFailed) as caught:
        await model.reply(request())
    await model.aclose()
    assert (caught.value.code, caught.value.retryable, caught.value.retry_after) == expected
    assert len(server.seen) == 1


async def test_nobody_listening_may_pass(register):
    """A refused connection is worth another try."""
    model = open_model(register, "openai:tiny@http://127.0.0.1:9/v1")
    for ask in (model.reply(request()), anext(model.stream(request()))):
        with pytest.raises(ModelFailed) as caught:
            await ask
        assert caught.value.retryable
    await model.aclose()


async def test_keys_are_sent_and_never_told(server, register, monkeypatch):
    """The key goes in the header; a failure does not repeat it."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-marker-123456")
    server.script = [(401, {}, {"error": {"message": "Incorrect API key provided: sk-marker-123456"}})]
    model = open_model(register, f"openai:tiny@{server.url}")
    with pytest.raises(ModelFailed) as caught:
        await model.reply(request())
    await model.aclose()
    assert {k.lower(): v for k, v in server.seen[0][1].items()}["authorization"] == "Bearer sk-marker-123456"
    assert "sk-marker" not in str(caught.value.to_json())


@pytest.mark.parametrize("name", ["openai:gpt-5", "anthropic:claude"])
def test_without_a_key_and_a_server_the_variable_is_named(register, name):
    """The operator is told what to set."""
    with pytest.raises(BadRequest, match="_API_KEY"):
        open_model(register, name)


async def test_ollama_is_the_same_wire(server, register):
    """`ollama:NAME@URL` needs no key."""
    server.script = [{"text": "hi"}]
    model = open_model(register, f"ollama:qwen3:4b@{server.url}")
    assert ((await model.reply(request(tools=()))).text, model.name) == ("hi", "ollama:qwen3:4b")
    await model.aclose()


def region(name: str) -> str:
    """Look up a region."""
    return f"{name}: 42"


async def run(register, name, path, tmp_path):
    wiring = PlainWiring(tools=[tool_from_function(region)])
    wiring.model = lambda given: open_model(register, given)
    settings = SolverSettings(work_dir=tmp_path / "turns")
    system = SolverSystem(bundle=load_bundle(path), model=name, executor=None, wiring=wiring, settings=settings)
    async with system:
        return [event async for event in ReactSolver(system).stream("Which region grew?")]


@pytest.fixture
def bundle(tmp_path):
    """A bundle of one skill with a source."""
    root = tmp_path / "bundle"
    folder = root / "skills" / "acme" / "sales"
    folder.mkdir(parents=True)
    (folder / "SKILL.md").write_text("---\nname: sales\ndescription: Reads sales.\n---\nSum up [[S:1]].\n")
    (folder / "sources.yaml").write_text("- {sid: 1, title: Guide, url: 'https://example.org/'}\n")
    return root


async def test_a_whole_turn_with_tool_calls(server, register, bundle, tmp_path):
    """Load a skill, call a tool, answer with a citation: over the wire, in pieces."""
    server.script = [
        {"calls": [("skills_load", '{"names": ["sales"]}')]},
        (500, {}, {"error": {"message": "hiccup"}}),
        {"text": "", "calls": [("tools_region", '{"name": "north"}')]},
        {"text": "North [[S:1]]"},
    ]
    events = await run(register, f"openai:tiny@{server.url}", bundle, tmp_path)
    result = events[-1].result
    assert (result.status, result.cited, result.replayed, result.model) == ("final", (1,), False, "openai:tiny")
    assert [step.retries for step in result.steps] == [0, 1, 0]
    assert server.seen[-1][2]["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "call_tools_region",
        "content": "north: 42",
    }
    assert "Sum up [[S:1]]" in server.seen[-1][2]["messages"][0]["content"]


async def test_a_call_that_is_no_json_can_be_answered(server, register, bundle, tmp_path):
    """A number that JSON does not have, nested or cut off: the history with it is sent, and the turn goes on."""
    broken = ['{"name": NaN}', '{"name": 1e999}', '{"name": ' + "[" * 5_000]
    server.script = [*({"calls": [("tools_region", words)]} for words in broken[:2]), {"text": "Up."}]
    events = await run(register, f"openai:tiny@{server.url}", bundle, tmp_path)
    result = events[-1].result
    assert (result.status, [one.error for step in result.steps for one in step.calls]) == (
        "final",
        ["invalid_argument"] * 2,
    )
    sent = [
        row["tool_calls"][0]["function"]["arguments"] for row in server.seen[-1][2]["messages"] if "tool_calls" in row
    ]
    assert [json.loads(words) for words in sent] == [{"invalid_json": words} for words in broken[:2]]


async def test_a_whole_turn_with_plain_json_decisions(server, register, bundle, tmp_path):
    """A small model that only writes text does the same, a malformed decision included."""
    server.script = [
        {"text": 'Sure: {"tool": "skills_load", "arguments": {"names": ["sales"]}}'},
        {"text": '{"tool": "tools_region", "arguments": {"name": "nor'},
        {"text": '```json\n{"tool": "tools_region", "arguments": {"name": "north"}}\n```'},
        {"text": '{"answer": "North [[S:1]]"}'},
    ]
    events = await run(register, f"json:openai:tiny@{server.url}", bundle, tmp_path)
    result = events[-1].result
    assert (result.status, result.text, result.cited) == ("final", "North [[S:1]]", (1,))
    assert [[(one.tool, one.error) for one in step.calls] for step in result.steps] == [
        [("skills.load", None)],
        [("tools.region", "invalid_argument")],
        [("tools.region", None)],
        [],
    ]
    assert all("tools" not in body for _, _, body in server.seen)


async def test_a_recorded_turn_replays_without_the_server(server, register, bundle, tmp_path):
    """`record:` writes what `replay:` gives back: the same steps and the same answer."""
    server.script = [{"calls": [("skills_load", '{"names": ["sales"]}')]}, {"text": "North [[S:1]]"}]
    cassette = tmp_path / "demo.yaml"
    first = (await run(register, f"record:openai:tiny@{server.url}>{cassette}", bundle, tmp_path))[-1].result
    asked = len(server.seen)
    again = (await run(register, f"replay:{cassette}", bundle, tmp_path))[-1].result
    assert (again.text, again.cited, again.replayed, len(server.seen)) == (first.text, (1,), True, asked)
    assert [len(step.calls) for step in again.steps] == [len(step.calls) for step in first.steps]
    assert [entry.when.active for entry in read_cassette(cassette).replies] == [(), ("sales",)]


async def test_a_decisions_schema_is_sent_as_response_format(server, register, bundle, tmp_path):
    """`json-schema:` holds a server to the decision's form; the turn itself is the same."""
    server.script = [
        {"text": '{"tool": "skills_load", "arguments": {"names": ["sales"]}}'},
        {"text": '{"answer": "Up"}'},
    ]
    result = (await run(register, f"json-schema:openai:tiny@{server.url}", bundle, tmp_path))[-1].result
    assert (result.status, result.text) == ("final", "Up")
    for _, _, body in server.seen:
        sent = body["response_format"]
        assert (sent["type"], sent["json_schema"]["name"], "tools" in body) == ("json_schema", "decision", False)
        branches = sent["json_schema"]["schema"]["anyOf"]
        assert branches[0]["properties"]["tool"] == {"const": "skills_load"}
        assert list(branches[-1]["properties"]) == ["answer"]


TOTAL = {
    "type": "object",
    "properties": {"total": {"type": "integer"}, "region": {"enum": ["north", "south"]}},
    "required": ["total"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_typed_answer_is_sent_as_response_format(server, register, bundle, tmp_path, stream):
    """In mode `native` the server is held to the JSON Schema, beside the tools; what it gives wrong is sent back."""
    server.script = [
        {"calls": [("skills_load", '{"names": ["sales"]}')]},
        {"text": '{"total":"42"}'},
        {"text": '{"total":42,"region":"north"}'},
    ]
    wiring = PlainWiring()
    wiring.model = lambda given: open_model(register, given)
    settings = SolverSettings(work_dir=tmp_path / "turns", output_mode="native")
    name = f"openai:tiny@{server.url}"
    async with SolverSystem(
        bundle=load_bundle(bundle), model=name, executor=None, wiring=wiring, settings=settings
    ) as s:
        solver = ReactSolver(s)
        if stream:
            result = [event async for event in solver.stream("How much?", output_type=TOTAL)][-1].result
        else:
            result = await solver.run("How much?", output_type=TOTAL)
    assert (result.status, result.output) == ("final", {"total": 42, "region": "north"})
    for _, _, body in server.seen:
        sent = body["response_format"]
        assert (sent["type"], sent["json_schema"]["schema"]) == ("json_schema", TOTAL)
        assert {tool["function"]["name"] for tool in body["tools"]} >= {"skills_load", "react_read"}
    assert "- /total: " in server.seen[2][2]["messages"][-1]["content"]


def test_bounds_of_the_command_line_reach_the_server(server, bundle, tmp_path):
    """`--max-tokens` and `--temperature` are sent with every call, `--max-steps` ends the turn; others are a usage error."""
    read = ("react_read", '{"refs": ["turn:x.md"]}')
    server.script = [{"calls": [read]}, {"text": "Enough."}]
    program = (
        "from kdskills.app import Host, Settings\nfrom kdskills.doors.cli.main import build_cli\n"
        f"build_cli(Host(Settings(allow_unisolated=True, state_dir={str(tmp_path)!r})))()"
    )
    command = [sys.executable, "-c", program, "run", str(bundle), "Go on.", "-m", f"openai:tiny@{server.url}"]
    command += ["-e", "subprocess", "--json"]

    def run(*words):
        return subprocess.run([*command, *words], capture_output=True, text=True, check=False, cwd=tmp_path)

    done = run("--max-steps", "1", "--max-tokens", "50", "--temperature", "0.2")
    result = json.loads(done.stdout)["result"]
    assert (result["status"], result["stop_reason"], result["text"]) == ("partial", "max_steps", "Enough.")
    sent = [
        (body.get("max_tokens", body.get("max_completion_tokens")), body["temperature"]) for _, _, body in server.seen
    ]
    assert sent == [(50, 0.2), (50, 0.2)]
    for words in (("--max-steps", "0"), ("--max-tokens", "-1"), ("--temperature", "3"), ("--temperature", "nan")):
        refused = run(*words)
        assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert len(server.seen) == 2


async def test_a_full_window_in_llama_cpps_words(server, register):
    """Local servers have words of their own for a request that does not fit."""
    message = "request (9 tokens) exceeds the available context size (8 tokens), try increasing it"
    server.script = [(400, {}, {"error": {"code": 400, "message": message, "type": "exceed_context_size_error"}})]
    model = open_model(register, f"openai:tiny@{server.url}")
    with pytest.raises(ModelFailed) as caught:
        await model.reply(request())
    await model.aclose()
    assert caught.value.code == "context_full"
