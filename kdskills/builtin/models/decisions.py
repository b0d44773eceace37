"""`json:PROVIDER:MODEL` and `json-schema:PROVIDER:MODEL`: tool calls as plain JSON text, for models without their own.

`{"tool": NAME, "arguments": {…}}` is a call, `{"answer": TEXT}` or text without such an object the answer. A malformed
call keeps its raw text, so that the model can mend it. `json-schema:` also sends the decision's JSON Schema.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from kdskills.hooks import Register, hookimpl
from kdskills.models import (
    Message,
    ModelFactory,
    ModelProvider,
    ModelReply,
    ModelRequest,
    TextDelta,
    ToolCall,
    ToolSpec,
    open_model,
)

_RULES = """\
Answer with exactly one JSON object and nothing else.
To call a tool: {"tool": "<name>", "arguments": {...}}. Its result comes with the next message.
To give your final answer, when the work is done: {"answer": "<text>"}
"""

_LOADING = "For example, to load a skill before you answer: "
_RUNNING = "Then run the script that its text names, with values of the task in place of capitals: "
_BEFORE_RUNS = frozenset({"skills_load", "skills.load", "skills_read", "skills.read"})
_SCRIPT = re.compile(r"`(scripts/[^`\n]+)`")

_LAST = """\
Answer with exactly one JSON object and nothing else: {"answer": "<text>"}
"""

_ANSWER = re.compile(r'\s*\{\s*"answer"\s*:\s*"')

_SHAPE = frozenset({"type", "enum", "const", "required", "minItems"})
"""Keywords that say what a value looks like. Others are left to the solver's own check: servers know few of them, and
turn bounds such as `maxLength` into grammars too large to use."""


MAX_CHOICES = 32
"""Choices of a list up to which its length is bounded for servers."""


class JsonDecisions:
    """Wraps a provider: tools go out as text, calls come back as JSON; *constrained* sends the decision's schema along."""

    def __init__(self, inner: ModelProvider, *, constrained: bool = False) -> None:
        self.name = f"json-schema:{inner.name}" if constrained else f"json:{inner.name}"
        self.context_window, self.replayed = inner.context_window, inner.replayed
        self._inner, self._constrained = inner, constrained

    async def reply(self, request: ModelRequest) -> ModelReply:
        """Answer *request*; without tools the inner provider answers as it is, but for the last word after calls."""
        if not request.tools and not _last_word(request):
            return await self._inner.reply(_as_text(request))
        text_request = _as_text(request)
        if self._constrained:
            text_request = replace(text_request, answer_schema=decision_schema(request.tools))
        answer = await self._inner.reply(text_request)
        if answer.calls:
            return answer
        if not request.tools:
            return replace(read_decision(answer, (), 0), calls=())
        number = sum(len(m.calls) for m in request.messages) + 1
        return read_decision(answer, request.tools, number)

    async def stream(self, request: ModelRequest) -> AsyncIterator[TextDelta | ModelReply]:
        """Give the answer's text once the whole decision is there: half an object is nothing to show."""
        if not request.tools and not _last_word(request):
            async for item in self._inner.stream(_as_text(request)):
                yield item
            return
        answer = await self.reply(request)
        if answer.text:
            yield TextDelta(answer.text)
        yield answer

    async def aclose(self) -> None:
        """Close the inner provider."""
        await self._inner.aclose()


def _example(request: ModelRequest) -> str:
    """Return the call of the first script that the text of a loaded skill names, until something has been run.

    It stands last, because very small models do what they read last.
    """
    spellings = {tool.tool_id: tool.name for tool in request.tools}
    answered = [message.tool for message in request.messages if message.role == "tool" and message.ok]
    if any(tool not in _BEFORE_RUNS for tool in answered):
        return ""
    tool = spellings.get("skills.run_script")
    if tool is None or not request.active:
        return ""
    command = _SCRIPT.search(request.instructions, max(0, request.instructions.rfind("<active_skills>")))
    if command is None:
        return ""
    try:
        path, *args = shlex.split(command[1])
    except ValueError:  # a quote that is not closed
        return ""
    return f"{_RUNNING}{_call_text(tool, {'path': path, 'args': args})}"


def _call_text(tool: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"tool": tool, "arguments": arguments}, ensure_ascii=False)


def _last_word(request: ModelRequest) -> bool:
    """Whether *request* asks for text after calls, which a model goes on to write as JSON."""
    return not request.tools and request.answer_schema is None and any(message.calls for message in request.messages)


def decision_schema(tools: tuple[ToolSpec, ...]) -> dict[str, Any]:
    """Return the JSON Schema of a decision: a call of one of *tools*, or an answer. It is wider than what the tools
    take; the solver checks every call all the same.
    """
    calls = [_object({"tool": {"const": tool.name}, "arguments": _shape(tool.input_schema)}) for tool in tools]
    return {"anyOf": [*calls, _object({"answer": {"type": "string"}})]}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _shape(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return *schema* with the keywords of `_SHAPE` and its members' shapes, and nothing else."""
    shape = {key: value for key, value in schema.items() if key in _SHAPE}
    choices = schema["items"].get("enum") if isinstance(schema.get("items"), Mapping) else None
    if isinstance(choices, list) and len(choices) <= MAX_CHOICES:  # a small model repeats a choice for ever
        shape["maxItems"] = len(choices)
    for key in ("items", "additionalProperties"):
        below = schema.get(key)
        if isinstance(below, Mapping):
            shape[key] = _shape(below)
        elif isinstance(below, bool):
            shape[key] = below
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        shape["properties"] = {name: _shape(below) for name, below in properties.items()}
    return shape


def read_decision(answer: ModelReply, tools: tuple[ToolSpec, ...], number: int) -> ModelReply:
    """Return *answer* with the decision in its text as call *number* of the turn or as plain text."""
    call_id = f"call_{number}"
    decision = find_decision(answer.text)
    if decision is None:
        answer_start = _ANSWER.match(answer.text)
        if answer_start is not None:
            return replace(answer, text=_begun_text(answer.text[answer_start.end() :]))
        broken = _broken_call(answer.text, tools)
        return answer if broken is None else replace(answer, text="", calls=(ToolCall(call_id, broken, answer.text),))
    if "tool" not in decision:
        text = decision["answer"]
        return replace(answer, text=text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))
    arguments = decision.get("arguments", {})
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return replace(answer, text="", calls=(ToolCall(call_id, str(decision["tool"]), raw),))


def find_decision(text: str) -> dict[str, Any] | None:
    """Return the first JSON object in *text* that has a `tool` or an `answer`, else None.

    Fences and words around it do not matter. Each `{` outside an object already read is tried once, and at most
    64 of them, so that the cost stays linear.
    """
    decoder = json.JSONDecoder()
    start, tries = text.find("{"), 0
    while start >= 0 and tries < 64:
        tries += 1
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        if isinstance(value, dict) and ("tool" in value or "answer" in value):
            return value
        start = text.find("{", end)
    return None


def _begun_text(fragment: str) -> str:
    """Return the text of a JSON string that was cut off, such as by a bound on the reply's length."""
    for end in range(len(fragment), max(0, len(fragment) - 7), -1):  # an escape that was cut is dropped
        try:
            return str(json.loads(f'"{fragment[:end]}"', strict=False))
        except ValueError:
            continue
    return fragment


def _broken_call(text: str, tools: tuple[ToolSpec, ...]) -> str | None:
    """Return the tool a malformed decision names, or None when *text* is no decision at all."""
    start = text.find("{")
    if start < 0 or '"tool"' not in text[start:]:
        return None
    after = text[text.find('"tool"', start) :]
    positions = [(after.find(f'"{spelling}"'), tool.name) for tool in tools for spelling in (tool.name, tool.tool_id)]
    mentioned_tools = sorted((position, name) for position, name in positions if position >= 0)
    return mentioned_tools[0][1] if mentioned_tools else "unreadable"


def _as_text(request: ModelRequest) -> ModelRequest:
    """Return *request* without tools: their schemas in the instructions, calls and results as plain messages."""
    instructions = request.instructions
    if request.tools:
        rows = [{"name": t.name, "description": t.description, "parameters": t.input_schema} for t in request.tools]
        listing = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        # Tools first: loading a skill changes what follows them only, so that servers keep what they have computed.
        load = next((tool.name for tool in request.tools if tool.tool_id == "skills.load"), None)
        loading = (
            f"{_LOADING}{_call_text(load, {'names': ['<name of the skill>']})}\n" if load and not request.active else ""
        )
        instructions = f"Tools, as JSON Schema:\n{listing}\n\n{instructions}\n\n{_RULES}{loading}"
    elif _last_word(request):
        instructions = f"{instructions}\n\n{_LAST}"
    messages: list[Message] = []
    for message in map(_plain, request.messages):
        if messages and message.role == messages[-1].role == "user":  # many chat templates refuse two in a row
            messages[-1] = Message("user", f"{messages[-1].text}\n\n{message.text}")
        else:
            messages.append(message)
    example = _example(request)
    if example and messages and messages[-1].role == "user":
        messages[-1] = replace(messages[-1], text=f"{messages[-1].text}\n\n{example}")
    return replace(request, instructions=instructions, tools=(), messages=tuple(messages), steady=0)


def _plain(message: Message) -> Message:
    if message.role == "tool":
        outcome = "" if message.ok else " (failed)"
        return Message("user", f"Result of {message.tool}{outcome}:\n{message.text}")
    if message.calls:
        call_texts = [f'{{"tool": {json.dumps(call.tool)}, "arguments": {call.arguments}}}' for call in message.calls]
        return Message("assistant", "\n".join([*([message.text] if message.text else []), *call_texts]))
    return message


@hookimpl
def kdskills_register_models(register: Register[ModelFactory]) -> None:
    """Add the prefixes `json` and `json-schema`; the wrapped provider is looked up when a model is opened."""
    register("json", lambda rest: JsonDecisions(open_model(register, rest)))
    register("json-schema", lambda rest: JsonDecisions(open_model(register, rest), constrained=True))
