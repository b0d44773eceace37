"""A model on loopback that says what a test tells it to, in the wires of several providers, whole or in pieces."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self, cast

from kdskills.models import ModelReply

Body = Mapping[str, Any]
Script = Sequence[ModelReply] | Callable[["Asked"], ModelReply]
Event = tuple[str, Mapping[str, Any]]
"""Name and data of a server-sent event."""


@dataclass(frozen=True)
class Asked:
    """A request as it came: `text` is all of its body, for tests that look for a word in it."""

    path: str
    headers: Mapping[str, str] = field(repr=False)
    body: Body = field(repr=False)

    @property
    def text(self) -> str:
        """The body as JSON text."""
        return json.dumps(self.body, ensure_ascii=False)

    @property
    def instructions(self) -> str:
        """The top-level text, wherever the provider's form has it."""
        rows = [row for row in self._rows if row.get("role") in {"system", "developer"}]
        top = [self.body.get(name) for name in ("instructions", "system", "systemInstruction")]
        return "\n".join(_texts([*top, *(row.get("content") for row in rows)]))

    @property
    def tools(self) -> list[str]:
        """Names of the tools that are offered."""
        listed = [row for tool in self.body.get("tools") or () for row in tool.get("functionDeclarations", [tool])]
        return [str(row.get("function", row).get("name")) for row in listed]

    @property
    def results(self) -> list[str]:
        """The answers to tool calls, as the model reads them, in order."""
        found: list[str] = []
        for row in self._rows:
            parts = row.get("content") or row.get("parts") or []
            blocks = [part for part in parts if isinstance(part, Mapping)]
            if row.get("role") == "tool":
                found += ["\n".join(_texts(row["content"]))]
            elif row.get("type") == "function_call_output":
                found += ["\n".join(_texts(row["output"]))]
            found += ["\n".join(_texts(part["content"])) for part in blocks if part.get("type") == "tool_result"]
            responses = (part["functionResponse"]["response"] for part in blocks if "functionResponse" in part)
            found += [json.dumps(response, ensure_ascii=False) for response in responses]
        return found

    @property
    def _rows(self) -> list[Body]:
        rows = self.body.get("messages") or self.body.get("input") or self.body.get("contents") or []
        return [row for row in rows if isinstance(row, Mapping)]


class ModelServer:
    """Serves `/chat/completions`, `/responses`, `/messages` and Gemini's `:generateContent` below any prefix.

    Args:
        script: Replies in order, whoever asks; or a function of the request, called in a thread of its own each.
        between: Called before each piece of a streamed reply after the first, with its number; it may wait.

    Use it in a `with` block. `url` ends without a slash; OpenAI's clients want `url + "/v1"`. A script that is used up
    is answered with 400.
    """

    def __init__(self, script: Script, *, between: Callable[[int], None] = lambda piece: None) -> None:
        self.requests: list[Asked] = []
        self.hung_up = threading.Event()
        self._script, self._between, self._lock = script, between, threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Wire", (_Handler,), {"model": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, asked: Asked) -> ModelReply | None:
        """Return the reply to *asked*, each call of it with an id, or None when the script has no more."""
        with self._lock:
            self.requests.append(asked)
            number = len(self.requests)
        if callable(self._script):
            reply = self._script(asked)
        elif number <= len(self._script):
            reply = self._script[number - 1]
        else:
            return None
        calls = [replace(one, id=one.id or f"call_{number}_{index}") for index, one in enumerate(reply.calls)]
        return replace(reply, calls=tuple(calls))

    def pieces(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield *events*, waiting where the test wants it."""
        for number, event in enumerate(events):
            if number:
                self._between(number)
            yield event


class _Handler(BaseHTTPRequestHandler):
    """One request; the class of each server has its `model`."""

    model: ModelServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""

    def do_POST(self) -> None:
        """Answer."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self.path.partition("?")[0]
        headers = {name.lower(): text for name, text in self.headers.items()}
        reply = self.model.answer(Asked(path, headers, cast("Body", body)))
        wire = next((wire for end, wire in WIRES.items() if path.endswith(end)), None)
        if reply is None or wire is None:
            self._whole(400, {"error": {"message": f"nothing is written for this request of {path}"}})
            return
        whole, events = wire
        if not (body.get("stream") or path.endswith(":streamGenerateContent")):
            self._whole(200, whole(reply))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for name, data in self.model.pieces(events(reply)):
                self.wfile.write(f"{f'event: {name}' + chr(10) if name else ''}data: {_line(data)}\n\n".encode())
                self.wfile.flush()
        except OSError:  # the client went away, which a test may wait for
            self.model.hung_up.set()

    def _whole(self, status: int, payload: Mapping[str, Any]) -> None:
        data = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _line(data: Mapping[str, Any]) -> str:
    return json.dumps(data) if data else "[DONE]"


def _texts(value: object) -> list[str]:
    """Return the texts in a value of strings, blocks with `text`, and lists of them."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return _texts(value.get("text")) or _texts(value.get("parts"))
    return [text for part in value for text in _texts(part)] if isinstance(value, list) else []


def _words(reply: ModelReply) -> list[str]:
    return [word for word in reply.text.replace(" ", " \0").split("\0") if word]


# ---- chat completions ----

_CHAT_USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


def _chat_calls(reply: ModelReply) -> list[dict[str, Any]]:
    functions = [(call.id, {"name": call.tool, "arguments": call.arguments}) for call in reply.calls]
    return [{"id": key, "type": "function", "function": function} for key, function in functions]


def _chat(reply: ModelReply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
    if reply.calls:
        message["tool_calls"] = _chat_calls(reply)
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if reply.calls else "stop"}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny-1"}
    return {**head, "choices": [choice], "usage": _CHAT_USAGE}


def _chat_events(reply: ModelReply) -> Iterator[Event]:
    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> Event:
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny-1"}
        return "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield chunk({"role": "assistant", "content": ""})
    for word in _words(reply):
        yield chunk({"content": word})
    if reply.calls:
        yield chunk({"tool_calls": [{"index": number, **call} for number, call in enumerate(_chat_calls(reply))]})
    name, last = chunk({}, "tool_calls" if reply.calls else "stop")
    yield name, {**last, "usage": _CHAT_USAGE}
    yield "", {}


# ---- responses ----


def _items(reply: ModelReply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.text:
        content = [{"type": "output_text", "text": reply.text, "annotations": []}]
        items.append({"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content})
    for call in reply.calls:
        facts = {"call_id": call.id, "name": call.tool, "arguments": call.arguments, "status": "completed"}
        items.append({"id": f"fc_{call.id}", "type": "function_call", **facts})
    return items


def _response(reply: ModelReply) -> dict[str, Any]:
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {"input_tokens": 11, "output_tokens": 7, "total_tokens": 18, **details}
    head = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": "tiny-1"}
    options = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return {**head, **options, "output": _items(reply), "usage": usage}


def _response_events(reply: ModelReply) -> Iterator[Event]:
    rows: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**_response(ModelReply()), "status": "in_progress"}}
    ]
    for index, item in enumerate(_items(reply)):
        rows.append({"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}})
        if item["type"] == "message":
            spot = {"item_id": item["id"], "output_index": index, "content_index": 0}
            empty = {"type": "output_text", "text": "", "annotations": []}
            rows.append({"type": "response.content_part.added", **spot, "part": empty})
            deltas = {"type": "response.output_text.delta", **spot, "logprobs": []}
            rows += [{**deltas, "delta": word} for word in _words(reply)]
        rows.append({"type": "response.output_item.done", "output_index": index, "item": item})
    rows.append({"type": "response.completed", "response": _response(reply)})
    for number, row in enumerate(rows):
        yield row["type"], {**row, "sequence_number": number}


# ---- messages ----


def _blocks(reply: ModelReply) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": reply.text}] if reply.text else []
    calls = [(call.id, call.tool, json.loads(call.arguments)) for call in reply.calls]
    return text + [{"type": "tool_use", "id": key, "name": tool, "input": given} for key, tool, given in calls]


def _message(reply: ModelReply) -> dict[str, Any]:
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "tiny-1"}
    stop = {"stop_reason": "tool_use" if reply.calls else "end_turn", "stop_sequence": None}
    return {**head, "content": _blocks(reply), **stop, "usage": {"input_tokens": 11, "output_tokens": 7}}


def _message_events(reply: ModelReply) -> Iterator[Event]:
    whole = _message(reply)
    rows: list[dict[str, Any]] = [{"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}}]
    for index, block in enumerate(whole["content"]):
        begin = {**block, "text": ""} if block["type"] == "text" else {**block, "input": {}}
        rows.append({"type": "content_block_start", "index": index, "content_block": begin})
        deltas = [{"type": "text_delta", "text": word} for word in _words(reply)]
        if block["type"] == "tool_use":
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        rows += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        rows.append({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    rows += [{"type": "message_delta", "delta": stop, "usage": {"output_tokens": 7}}, {"type": "message_stop"}]
    for row in rows:
        yield row["type"], row


# ---- Gemini ----


def _candidate(parts: list[dict[str, Any]], *, finished: bool) -> dict[str, Any]:
    candidate: dict[str, Any] = {"index": 0, "content": {"role": "model", "parts": parts}}
    if finished:
        candidate["finishReason"] = "STOP"
    usage = {"promptTokenCount": 11, "candidatesTokenCount": 7, "totalTokenCount": 18}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "tiny-1"}


def _gemini_calls(reply: ModelReply) -> list[dict[str, Any]]:
    return [
        {"functionCall": {"id": call.id, "name": call.tool, "args": json.loads(call.arguments)}} for call in reply.calls
    ]


def _gemini(reply: ModelReply) -> dict[str, Any]:
    text = [{"text": reply.text}] if reply.text else []
    return _candidate([*text, *_gemini_calls(reply)], finished=True)


def _gemini_events(reply: ModelReply) -> Iterator[Event]:
    for word in _words(reply):
        yield "", _candidate([{"text": word}], finished=False)
    yield "", _candidate(_gemini_calls(reply), finished=True)


WIRES: Mapping[str, tuple[Callable[[ModelReply], Mapping[str, Any]], Callable[[ModelReply], Iterator[Event]]]] = {
    "/chat/completions": (_chat, _chat_events),
    "/responses": (_response, _response_events),
    "/messages": (_message, _message_events),
    ":generateContent": (_gemini, _gemini_events),
    ":streamGenerateContent": (_gemini, _gemini_events),
}
"""How each path's reply is written whole, and in pieces."""
