"""The runtime's tools in the JSON forms of three model APIs; their SDKs' own objects are taken, too, and none is needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from pydantic import BaseModel

from kdskills.session.codes import invalid

if TYPE_CHECKING:
    from anthropic.types import ToolParam, ToolResultBlockParam, ToolUseBlock
    from openai.types.chat import (
        ChatCompletionFunctionToolParam,
        ChatCompletionMessageToolCallUnion,
        ChatCompletionToolMessageParam,
    )
    from openai.types.responses import FunctionToolParam, ResponseFunctionToolCall
    from openai.types.responses.response_input_param import FunctionCallOutput

    from kdskills.models import ToolSpec
    from kdskills.session.runtime import SkillRuntime


def openai_tools(specs: Iterable[ToolSpec]) -> list[ChatCompletionFunctionToolParam]:
    """Return `tools` of a chat-completions request."""
    return [
        {
            "type": "function",
            "function": {"name": spec.name, "description": spec.description, "parameters": dict(spec.input_schema)},
        }
        for spec in specs
    ]


def responses_tools(specs: Iterable[ToolSpec]) -> list[FunctionToolParam]:
    """Return `tools` of a request of OpenAI's Responses API; not in its strict mode, which takes fewer schemas."""
    return [
        {
            "type": "function",
            "name": spec.name,
            "description": spec.description,
            "parameters": dict(spec.input_schema),
            "strict": False,
        }
        for spec in specs
    ]


def anthropic_tools(specs: Iterable[ToolSpec]) -> list[ToolParam]:
    """Return `tools` of a messages request."""
    return [
        {"name": spec.name, "description": spec.description, "input_schema": dict(spec.input_schema)} for spec in specs
    ]


@overload
async def dispatch(
    runtime: SkillRuntime, session_id: str, call: ChatCompletionMessageToolCallUnion
) -> ChatCompletionToolMessageParam: ...
@overload
async def dispatch(runtime: SkillRuntime, session_id: str, call: ResponseFunctionToolCall) -> FunctionCallOutput: ...
@overload
async def dispatch(runtime: SkillRuntime, session_id: str, call: ToolUseBlock) -> ToolResultBlockParam: ...
@overload
async def dispatch(runtime: SkillRuntime, session_id: str, call: Mapping[str, Any]) -> dict[str, Any]: ...
async def dispatch(runtime: SkillRuntime, session_id: str, call: Any) -> Any:
    """Answer one tool call and return the result message, item or block in the same form.

    It is an entry of `tool_calls`, a `function_call` item or a `tool_use` block, as a dict or as the object of OpenAI's
    or Anthropic's SDK; arguments may be an object or its JSON text in all of them. Raises ToolCallRefused,
    `invalid_argument`, when *call* has none of these forms.
    """
    wire = call.model_dump() if isinstance(call, BaseModel) else call
    if not isinstance(wire, Mapping):
        raise invalid("a tool call is an object", ("", "is no object"))
    function, kind = wire.get("function"), wire.get("type")
    if isinstance(function, Mapping):
        reply = await runtime.call(session_id, str(function.get("name")), arguments_of(function.get("arguments")))
        return {"role": "tool", "tool_call_id": wire.get("id"), "content": reply.text}
    if kind == "function_call":
        reply = await runtime.call(session_id, str(wire.get("name")), arguments_of(wire.get("arguments")))
        return {"type": "function_call_output", "call_id": wire.get("call_id"), "output": reply.text}
    if kind == "tool_use":
        reply = await runtime.call(session_id, str(wire.get("name")), arguments_of(wire.get("input")))
        return {"type": "tool_result", "tool_use_id": wire.get("id"), "content": reply.text, "is_error": not reply.ok}
    raise invalid("a tool call has a function, or is a function_call or tool_use", ("", "has no such form"))


def arguments_of(value: object) -> Mapping[str, Any] | str:
    """Return arguments as the runtime takes them: an object, or JSON text; nothing at all is an empty object."""
    if value is None or value == "":
        return {}
    return value if isinstance(value, Mapping | str) else json.dumps(value, default=str)
