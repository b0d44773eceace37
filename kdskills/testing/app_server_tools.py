"""How the emulated app-server takes dynamic tools in, shows them to the model, and turns answers into what the model reads."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Sequence
from typing import Final

from kdskills.testing.app_server_profiles import BUILT_INS, EmulatorProfile, JsonObject, RpcError

NAME: Final = re.compile(r"[a-zA-Z0-9_-]+")
LIMITS: Final = {"tool": 128, "namespace": 64}
CUT_AT: Final = 12_000
"""Characters of an answer the model gets; longer ones lose their middle."""

_KEPT_KEYS: Final = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "enum", "description"),
        *("anyOf", "oneOf", "allOf", "$ref", "$defs"),
    }
)
_MAGIC: Final = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")
_SMALLEST_IMAGE: Final = 40


def check_tools(tools: object, profile: EmulatorProfile) -> list[JsonObject]:
    """Return the tools of a start, or refuse it.

    Raises:
        RpcError: One of them is bad.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RpcError("Invalid request: invalid type: expected a sequence")
    seen: set[tuple[str | None, str]] = set()
    for tool in tools:
        _check_shape(tool, profile)
        inside = tool.get("tools") if tool.get("type") == "namespace" else None
        namespace = tool["name"] if inside is not None else None
        if inside is not None:
            _check_namespace(tool)
        for one in inside if inside is not None else [tool]:
            _check_name("tool", one["name"])
            if (namespace, one["name"]) in seen:
                raise RpcError(f"duplicate dynamic tool name: {one['name']}")
            if one.get("deferLoading") and namespace is None and profile.namespaces:
                raise RpcError(f"deferred dynamic tool must include a namespace: {one['name']}")
            seen.add((namespace, one["name"]))
    return list(tools)


def _check_shape(tool: object, profile: EmulatorProfile) -> None:
    fault = shape_fault(tool, profile)
    if fault:
        raise RpcError(f"Invalid request: {fault}")


def shape_fault(tool: object, profile: EmulatorProfile) -> str | None:
    """Return what is wrong with the members of a tool, None when nothing is; a name's letters are not looked at."""
    if not isinstance(tool, dict):
        return "invalid type: expected a tool"
    spaced = tool.get("type") == "namespace" and profile.namespaces
    needed = ("name", "description", "tools") if spaced else ("name", "description", "inputSchema")
    for member in needed:
        if member not in tool:
            return f"missing field `{member}`"
    if not isinstance(tool["name"], str) or not isinstance(tool["description"], str):
        return "invalid type: expected a string"
    if spaced:
        inside = tool["tools"] if isinstance(tool["tools"], list) else [None]
        return next((fault for fault in (shape_fault(one, profile) for one in inside) if fault), None)
    return None


def _check_namespace(tool: JsonObject) -> None:
    _check_name("namespace", tool["name"])
    if tool["name"] == "functions":
        raise RpcError(f"dynamic tool namespace collides with a reserved Responses API namespace: {tool['name']}")
    if not tool["tools"]:
        raise RpcError(f"dynamic tool namespace must contain at least one tool: {tool['name']}")


def _check_name(what: str, name: str) -> None:
    label = "dynamic tool name" if what == "tool" else "dynamic tool namespace"
    if not name:
        raise RpcError(f"{label} must not be empty")
    if not NAME.fullmatch(name):
        raise RpcError(f"{label} must match ^[a-zA-Z0-9_-]+$ to match Responses API: {name}")
    if len(name) > LIMITS[what]:
        raise RpcError(f"{label} must be at most {LIMITS[what]} characters to match Responses API: {name}")
    if name == "mcp" or name.startswith("mcp__"):
        raise RpcError(f"{label} is reserved: {name}")


def model_tools(tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Return what the model is shown: the server's own tools, then the dynamic ones that are not hidden by them."""
    own: list[JsonObject] = [
        {"type": "function", "name": name, "description": "", "strict": False, "parameters": {"type": "object"}}
        for name in BUILT_INS
    ]
    shown = []
    for tool in tools:
        if tool.get("type") == "namespace":
            inside = [_function(one) for one in tool["tools"] if not one.get("deferLoading")]
            if inside:
                named = {"type": "namespace", "name": tool["name"], "description": tool["description"]}
                shown.append({**named, "tools": inside})
        elif tool["name"] not in BUILT_INS:
            shown.append(_function(tool))
    return own + shown


def _function(tool: JsonObject) -> JsonObject:
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool["description"],
        "strict": False,
        "parameters": shown_schema(tool["inputSchema"]),
    }


def shown_schema(schema: object) -> object:
    """Return a schema with the keywords the server strips gone, at every depth."""
    if not isinstance(schema, dict):
        return schema
    found: JsonObject = {}
    for key, value in schema.items():
        if key not in _KEPT_KEYS:
            continue
        if key in {"properties", "$defs"} and isinstance(value, dict):
            found[key] = {name: shown_schema(one) for name, one in value.items()}
        elif isinstance(value, list) and key in {"anyOf", "oneOf", "allOf"}:
            found[key] = [shown_schema(one) for one in value]
        else:
            found[key] = shown_schema(value) if key in {"items", "additionalProperties"} else value
    return found


def offers(tools: Sequence[JsonObject], namespace: str | None, name: str) -> bool:
    """Tell whether the model may call this tool."""
    for tool in tools:
        if tool.get("type") == "namespace":
            if tool["name"] == namespace and any(one["name"] == name for one in tool["tools"]):
                return True
        elif namespace is None and tool["name"] == name and name not in BUILT_INS:
            return True
    return False


def read_answer(message: JsonObject) -> tuple[object, bool, list[JsonObject]]:
    """Return what the model reads of a client's answer to a call, whether it succeeded, and its items."""
    if "error" in message:
        return "dynamic tool request failed", False, []
    result = message.get("result")
    items = result.get("contentItems") if isinstance(result, dict) else None
    if not isinstance(result, dict) or not isinstance(items, list) or not isinstance(result.get("success"), bool):
        return "dynamic tool response was invalid", False, []
    read = list(_read_items(items))
    if None in read:
        return "dynamic tool response was invalid", False, []
    if len(read) == 1 and read[0] is not None and read[0]["type"] == "input_text" and "text" in items[0]:
        return read[0]["text"], result["success"], items
    return read, result["success"], items


def _read_items(items: Sequence[object]) -> Iterator[JsonObject | None]:
    left = CUT_AT
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(item, dict) and kind == "inputText" and isinstance(item.get("text"), str):
            text = cut(item["text"], left)
            left -= min(len(text), left)
            yield {"type": "input_text", "text": text}
        elif isinstance(item, dict) and kind == "inputImage" and isinstance(item.get("imageUrl"), str):
            yield _image(item["imageUrl"])
        elif isinstance(item, dict) and kind == "inputAudio" and isinstance(item.get("audioUrl"), str):
            yield {"type": "input_text", "text": "audio content omitted because you do not support audio input"}
        else:
            yield None


def _image(url: str) -> JsonObject:
    head, _, packed = url.partition(";base64,")
    try:
        data = base64.b64decode(packed, validate=True) if head.startswith("data:image/") else b""
    except binascii.Error:
        data = b""
    if data.startswith(_MAGIC) and len(data) >= _SMALLEST_IMAGE:
        return {"type": "input_image", "image_url": url}
    return {"type": "input_text", "text": "image content omitted because it could not be processed"}


def cut(text: str, limit: int) -> str:
    """Return a text with its middle left out, as the server does."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}…{(len(text) - limit) // 4} tokens truncated…{text[len(text) - half :]}"
