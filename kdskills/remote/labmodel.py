"""A fake model for laboratories: `POST /v1/responses` on loopback, deciding by a function of the request, its *brain*.

What the model was shown is the only evidence that a catalog change worked, so every request is kept::

    with FakeResponses(lambda request: [say("hello")]) as model:
        ...  # point a server at model.base_url; read model.requests
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

from kdskills.remote.ports import JsonObject

Brain = Callable[[JsonObject], Sequence[JsonObject]]
"""What answers a request: its body in, items of `say` and `call` out. Raising `ModelFailure` answers with an HTTP error."""

MAX_BODY: Final = 64 * 2**20
"""Bytes of a request body, as sent and as unpacked; longer ones get status 413."""

_USAGE: Final = {
    "input_tokens": 1,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 1,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 2,
}
_DECLARED: Final = re.compile(r"declare const tools: \{ (\w+)\(")
_WINDOWS: Final = {"gzip": (31,), "deflate": (15, -15), "identity": ()}  # zlib's bits; some leave deflate's frame out
_call_numbers = itertools.count(1)  # ids differ between all fakes of a process


class ModelFailure(Exception):
    """Raised by a brain: the request is answered with this HTTP status and message."""

    def __init__(self, status: int = 500, message: str = "the fake model failed") -> None:
        super().__init__(message)
        self.status = status


def say(text: str) -> JsonObject:
    """Return an item of the answer: a message of the assistant."""
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call(
    name: str, arguments: object = None, *, namespace: str | None = None, call_id: str | None = None
) -> JsonObject:
    """Return an item of the answer: a call of a tool by the name the model sees, with a fresh id unless one is given.

    Arguments are any JSON value; a `str` is sent as it is, malformed JSON included; None is an empty object.
    """
    written = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    call_id = call_id or f"call_{next(_call_numbers)}"
    item: JsonObject = {"type": "function_call", "call_id": call_id, "name": name, "arguments": written}
    return item if namespace is None else {**item, "namespace": namespace}


def _items(request: JsonObject) -> list[JsonObject]:
    entries = request.get("input")
    return [item for item in entries if isinstance(item, dict)] if isinstance(entries, list) else []


def _texts(content: object) -> list[str]:
    """Return the texts of a message's content, whatever its shape."""
    parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def texts_of(request: JsonObject, role: str) -> list[str]:
    """Return the texts of every message of *role* in a request's input, oldest first."""
    messages = [item for item in _items(request) if item.get("type", "message") == "message"]
    return [text for item in messages if item.get("role") == role for text in _texts(item.get("content"))]


def tool_outputs(request: JsonObject) -> dict[str, str]:
    """Return what the model reads as the outcome of each call, by call id."""
    outputs = [
        item for item in _items(request) if item.get("type") in {"function_call_output", "custom_tool_call_output"}
    ]
    return {str(item.get("call_id")): "\n".join(_texts(item.get("output"))) for item in outputs}


def visible_tools(request: JsonObject) -> list[str]:
    """Return the names of the tools a model sees in a request, sorted; those of a namespace as `namespace.name`.

    Tools stand in `tools`, inside its namespace entries, or, for models that write code, as declarations in the text of an
    `exec` tool of the newest `additional_tools` input item.
    """
    additional = [item.get("tools") for item in _items(request) if item.get("type") == "additional_tools"]
    return sorted(set(_names(request.get("tools") or (additional[-1] if additional else None), "")))


def _names(tools: object, prefix: str) -> Iterator[str]:
    for tool in tools if isinstance(tools, list) else []:
        name = (tool.get("name") or tool.get("type")) if isinstance(tool, dict) else None
        if not isinstance(name, str):
            continue
        if tool.get("type") == "namespace":
            yield from _names(tool.get("tools"), f"{name}.")
            continue
        yield prefix + name
        if name == "exec" and isinstance(tool.get("description"), str):
            yield from _DECLARED.findall(tool["description"])


def default_brain(request: JsonObject) -> list[JsonObject]:
    """Obey the newest message of the user, one line a step: `!call name {json}`, `!say text`.

    A name with a point is a tool of a namespace. Lines of other text are left alone; when nothing is left to do, the answer
    is the output of the last call, or `ok`.
    """
    items = _items(request)
    newest = max((index for index, item in enumerate(items) if _commands(item)), default=None)
    if newest is None:
        return [say("ok")]
    done = [item for item in items[newest + 1 :] if item.get("type") == "function_call"]
    match _commands(items[newest])[len(done) :]:
        case [("say", text), *_]:
            return [say(text)]
        case [(_, text), *_]:
            name, _, arguments = text.partition(" ")
            namespace, _, bare = name.rpartition(".")
            return [call(bare, arguments.strip() or "{}", namespace=namespace or None)]
    outputs = tool_outputs({"input": items[newest + 1 :]})
    return [say(list(outputs.values())[-1] if outputs else "ok")]


def _commands(item: JsonObject) -> list[tuple[str, str]]:
    """Return the commands in an input item: a message of the user, else none."""
    lines = [line.strip() for text in texts_of({"input": [item]}, "user") for line in text.splitlines()]
    split = [line.partition(" ") for line in lines]
    return [(word[1:], tail.strip()) for word, _, tail in split if word in {"!call", "!say"} and tail.strip()]


class FakeResponses:
    """A fake of a Responses server: keeps every request and answers by its brain.

    A context manager; it listens on a free port of loopback from `start` to `close`. Requests are answered in parallel.
    """

    def __init__(self, brain: Brain = default_brain) -> None:
        self.brain = brain  # may be replaced at any time
        self.requests: list[JsonObject] = []  # the bodies received, in order
        self.connections: set[socket.socket] = set()  # those that are open
        self._came = threading.Condition()
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Begin to listen; a second start is harmless."""
        if self._server is None:
            self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
            self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fake-responses")
            self._thread.daemon = True
            self._thread.start()
        return self

    def close(self) -> None:
        """Stop listening and close every connection; what was received stays. Closing twice is harmless."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            self._thread.join()
            for connection in list(self.connections):
                with suppress(OSError):  # the client was faster
                    connection.shutdown(socket.SHUT_RDWR)
            server.server_close()

    __enter__ = start

    def __exit__(self, *_error: object) -> None:
        """Stop listening."""
        self.close()

    @property
    def base_url(self) -> str:
        """Where a server finds this model: `http://127.0.0.1:PORT/v1`."""
        if self._server is None:
            raise RuntimeError("the fake model is not started")
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def config(self) -> dict[str, Any]:
        """The settings that make a Codex app-server use this model, by dotted key."""
        provider = {
            "name": "kdskills-lab",
            "base_url": self.base_url,
            "wire_api": "responses",
            "requires_openai_auth": False,
            "request_max_retries": 0,
            "stream_max_retries": 0,
            "supports_websockets": False,
        }
        return {"model": "kdskills-lab", "model_provider": "kdskills_lab", "model_providers.kdskills_lab": provider}

    @property
    def config_args(self) -> list[str]:
        """`config` as arguments of the command line: `-c`, `key=value`, with values in TOML."""
        from kdskills.remote.client.server import app_server_command  # testing imports this module without the client

        return app_server_command("", self.config)[2:]

    def wait_for(self, count: int, timeout_s: float = 30.0) -> list[JsonObject]:
        """Wait until *count* requests came in all, and return them.

        Raises:
            TimeoutError: They did not come in time.
        """
        with self._came:
            if not self._came.wait_for(lambda: len(self.requests) >= count, timeout_s):
                raise TimeoutError(f"{len(self.requests)} of {count} model requests came within {timeout_s} s")
            return list(self.requests)

    def visible_tools(self, request: JsonObject | int = -1) -> list[str]:
        """Return `visible_tools` of a request, or of the one at this place in `requests`."""
        return visible_tools(self.requests[request] if isinstance(request, int) else request)

    def answer(self, body: JsonObject) -> bytes:
        """Keep *body* and return the server-sent events that answer it."""
        with self._came:
            self.requests.append(body)
            number = len(self.requests)
            self._came.notify_all()
        response: JsonObject = {"id": f"resp_{number}"}
        events: list[JsonObject] = [{"type": "response.created", "response": response}]
        for index, item in enumerate(self.brain(body)):
            done = {"id": f"item_{number}_{index}", **item}
            events.append({"type": "response.output_item.done", "output_index": index, "item": done})
        events.append({"type": "response.completed", "response": {**response, "usage": _USAGE}})
        return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), _dump(event)) for event in events)


def _dump(value: object) -> bytes:
    return json.dumps(value).encode()  # ASCII, so no line separator of any alphabet ends an event early


def _fault(status: int, message: str) -> bytes:
    return _dump({"error": {"message": message, "code": status}})


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client, which may send many requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def __init__(self, fake: FakeResponses, *arguments: Any) -> None:
        self._fake = fake
        super().__init__(*arguments)

    def handle(self) -> None:
        """Answer its requests; a client that hangs up in the middle is part of many tests, and sees its own error."""
        self._fake.connections.add(self.connection)
        try:
            with suppress(OSError):
                super().handle()
        finally:
            self._fake.connections.discard(self.connection)

    def do_GET(self) -> None:
        """Answer `/v1/models` with an empty list."""
        if self.path.partition("?")[0] == "/v1/models":
            self._reply(200, _dump({"object": "list", "data": [], "models": []}))
        else:
            self._reply(404, _fault(404, f"no such path: {self.path}"))

    def do_POST(self) -> None:
        """Answer `/v1/responses`."""
        try:
            status, body, kind = 200, self._fake.answer(self._request()), "text/event-stream"
        except ModelFailure as failure:
            status, body, kind = failure.status, _fault(failure.status, str(failure)), "application/json"
        self._reply(status, body, kind)

    def _request(self) -> JsonObject:
        """Return the body, unpacked; one that is refused is a `ModelFailure`."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY:
            self.close_connection = True  # what follows cannot be told from the next request
            raise ModelFailure(413 if length.isdigit() else 411, "a body needs a length of at most 64 MiB")
        body = self.rfile.read(int(length))
        coding = self.headers.get("Content-Encoding", "identity").strip().lower()
        if coding not in _WINDOWS:
            raise ModelFailure(415, f"unknown content encoding: {coding}")
        raw = _unpack(body, coding)
        if raw is None:
            raise ModelFailure(400, f"the body is not {coding}, or longer than 64 MiB")
        if self.path.partition("?")[0] != "/v1/responses":
            raise ModelFailure(404, f"no such path: {self.path}")
        try:
            request = json.loads(raw)
        except ValueError as error:
            raise ModelFailure(400, f"the body is not JSON: {error}") from error
        if not isinstance(request, dict):
            raise ModelFailure(400, "the body is not an object")
        return request

    def _reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Say nothing: what came is in `requests`."""


def _unpack(raw: bytes, coding: str) -> bytes | None:
    """Return *raw* unpacked whole; None when it is damaged, cut short or longer than a body may be."""
    for bits in _WINDOWS[coding]:
        unpacker = zlib.decompressobj(bits)
        with suppress(zlib.error):
            unpacked = unpacker.decompress(raw, MAX_BODY)
            if unpacker.eof:
                return unpacked
    return raw if coding == "identity" else None
