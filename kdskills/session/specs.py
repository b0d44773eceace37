"""The four tools in the JSON forms of two model APIs, without either SDK."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kdskills.session.codes import invalid

if TYPE_CHECKING:
    from kdskills.models import ToolSpec
    from kdskills.session.runtime import SkillRuntime


def openai_tools(specs: Iterable[ToolSpec]) -> list[dict[str, Any]]:
    """Return `tools` of a chat-completions request."""
    return [
        {
            "type": "function",
            "function": {"name": spec.name, "description": spec.description, "parameters": dict(spec.input_schema)},
        }
        for spec in specs
    ]


def anthropic_tools(specs: Iterable[ToolSpec]) -> list[dict[str, Any]]:
    """Return `tools` of a messages request."""
    return [
        {"name": spec.name, "description": spec.description, "input_schema": dict(spec.input_schema)} for spec in specs
    ]


async def dispatch(runtime: SkillRuntime, session_id: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one tool call in either form and return the result message or block in the same form.

    It is an entry of `tool_calls` or a `tool_use` block; arguments may be an object or its JSON text in both. Raises
    ToolCallRefused, `invalid_argument`, when *call* has neither form.
    """
    function = call.get("function")
    if isinstance(function, Mapping):
        reply = await runtime.call(session_id, str(function.get("name")), arguments_of(function.get("arguments")))
        return {"role": "tool", "tool_call_id": call.get("id"), "content": reply.text}
    if call.get("type") == "tool_use":
        reply = await runtime.call(session_id, str(call.get("name")), arguments_of(call.get("input")))
        return {"type": "tool_result", "tool_use_id": call.get("id"), "content": reply.text, "is_error": not reply.ok}
    raise invalid("a tool call has a function, or is a tool_use block", ("", "has neither form"))


def arguments_of(value: object) -> Mapping[str, Any] | str:
    """Return arguments as the runtime takes them: an object, or JSON text; nothing at all is an empty object."""
    if value is None or value == "":
        return {}
    return value if isinstance(value, Mapping | str) else json.dumps(value, default=str)
