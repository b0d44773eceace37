"""The four tools in the JSON forms of two model APIs, without either SDK (spec runtime §6)."""

from __future__ import annotations

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

    Args:
        runtime: Answers.
        session_id: The conversation.
        call: An entry of `tool_calls` (chat completions) or a `tool_use` block (messages).

    Raises:
        ToolCallRefused: `invalid_argument` when *call* has neither form.
    """
    function = call.get("function")
    if isinstance(function, Mapping):
        reply = await runtime.call(session_id, str(function.get("name")), str(function.get("arguments") or "{}"))
        return {"role": "tool", "tool_call_id": call.get("id"), "content": reply.text}
    if call.get("type") == "tool_use":
        given = call.get("input")
        arguments = given if isinstance(given, Mapping) else {}
        reply = await runtime.call(session_id, str(call.get("name")), arguments)
        return {"type": "tool_result", "tool_use_id": call.get("id"), "content": reply.text, "is_error": not reply.ok}
    raise invalid("a tool call has a function, or is a tool_use block", ("", "has neither form"))
