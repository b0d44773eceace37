"""A catalog's identity, its shape on the wire, and how two catalogs differ; pure functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from kdskills.remote.names import qualify
from kdskills.remote.ports import JsonObject

HEADER = (
    "Session remote skill catalog (Python-managed):",
    "Use these capabilities when relevant and do not invent unknown tools.",
)
_EMPTY_SCHEMA: JsonObject = {"type": "object", "properties": {}, "additionalProperties": True}


def canonical(value: Any) -> str:
    """Return canonical JSON: keys sorted, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def flat_tools(tools: Iterable[JsonObject]) -> list[JsonObject]:
    """Return tools as `dynamic_tools()` writes them, sorted by qualified name; they may be flat or as the wire has them."""
    flat: list[JsonObject] = []
    for tool in tools:
        if tool.get("type") == "namespace":
            flat.extend(_flat(item, str(tool.get("name"))) for item in tool.get("tools") or [])
        else:
            flat.append(_flat(tool, tool.get("namespace")))
    return sorted(flat, key=qualified_name)


def _flat(tool: JsonObject, namespace: Any) -> JsonObject:
    entry: JsonObject = {name: tool.get(name) for name in ("name", "description")}
    entry["inputSchema"] = tool.get("inputSchema", _EMPTY_SCHEMA)
    if namespace:
        entry["namespace"] = namespace
    if tool.get("deferLoading"):
        entry["deferLoading"] = True
    return entry


def qualified_name(tool: JsonObject) -> str:
    """Return `namespace.name`, or the name alone."""
    return qualify(tool.get("namespace"), str(tool.get("name")))


def tools_digest(tools: Iterable[JsonObject]) -> str:
    """Return 16 hex digits of the SHA-256 over the sorted tools as canonical JSON; both shapes have one digest."""
    return hashlib.sha256(canonical(flat_tools(tools)).encode()).hexdigest()[:16]


def text_digest(text: str) -> str:
    """Return the digest of a context text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def wire_tools(tools: Iterable[JsonObject], *, namespaces: bool) -> list[JsonObject]:
    """Return tools as `thread/start` takes them; without *namespaces* names are flattened to `ns__name`."""
    plain: list[JsonObject] = []
    grouped: dict[str, list[JsonObject]] = {}
    for tool in flat_tools(tools):
        facts = {"description": tool["description"] or "", "inputSchema": tool["inputSchema"]}
        entry = {"type": "function", "name": tool["name"], **facts}
        namespace = tool.get("namespace")
        if not namespace:
            plain.append(entry)
        elif namespaces:
            if tool.get("deferLoading"):
                entry["deferLoading"] = True
            grouped.setdefault(namespace, []).append(entry)
        else:
            plain.append({**entry, "name": f"{namespace}__{tool['name']}"})
    if not namespaces:
        return [{key: value for key, value in entry.items() if key != "type"} for entry in plain]
    spaces = [
        {"type": "namespace", "name": name, "description": f"Remote skills of {name}", "tools": entries}
        for name, entries in sorted(grouped.items())
    ]
    return plain + spaces


def fingerprints(tools: Iterable[JsonObject]) -> dict[str, str]:
    """Return the digest of each tool by qualified name."""
    return {qualified_name(tool): tools_digest([tool]) for tool in flat_tools(tools)}


def difference(old: dict[str, str], new: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the qualified names that came and went; a changed tool did both."""
    added = sorted(name for name, mark in new.items() if old.get(name) != mark)
    removed = sorted(name for name, mark in old.items() if new.get(name) != mark)
    return added, removed


def tools_text(tools: Sequence[JsonObject]) -> str:
    """Return a plain catalog text of tools for callers that bring no `instruction_text`."""
    if not tools:
        return ""
    lines = list(HEADER)
    for tool in flat_tools(tools):
        lines.append(f"- {qualified_name(tool)}: {' '.join(str(tool['description'] or '').split())}")
        lines.append(f"  input_schema: {json.dumps(tool['inputSchema'], sort_keys=True)}")
    return "\n".join(lines)
