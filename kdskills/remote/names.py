"""Names of remote skills, and entries of a catalog: which a server would not accept, their wire shape, their identity."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from kdskills.remote.ports import CatalogError, JsonObject, ServerProfile


def clean_name(name: str) -> str:
    """Return the name without surrounding white space, the only normalisation. Raises ValueError, TypeError."""
    if not isinstance(name, str):
        raise TypeError(f"a remote skill's name is text, got {type(name).__name__}")
    cleaned = name.strip()
    if not cleaned:
        raise ValueError("remote skill name must be non-empty")
    return cleaned


def qualify(namespace: str | None, name: str) -> str:
    """Return `namespace.name`, or the name alone."""
    return f"{namespace}.{name}" if namespace else name


def flatten(namespace: str | None, name: str) -> str:
    """Return `ns__name` with `-` folded to `_`: what servers compare tools by."""
    return (f"{namespace}__{name}" if namespace else name).replace("-", "_")


_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_-]+")

DISPATCHER_TOOL = "kdskills_call"  # the one tool of the `dispatcher` strategy


def check_name(namespace: str | None, name: str, profile: ServerProfile, *, defer_loading: bool = False) -> None:
    """Refuse a name the server would refuse or silently drop. Raises CatalogError with `rule` and `suggestion`."""
    words = [("remote skill name", name, 128, "name_pattern"), ("namespace", namespace, 64, "namespace_pattern")]
    for kind, word, limit, rule in words:
        if word is not None and (not word or len(word) > limit or _FORBIDDEN.search(word)):
            quoted = repr(word if len(word) <= 80 else f"{word[:77]}...")
            mended = (_FORBIDDEN.sub("_", word).strip("_") or "skill")[:limit]
            raise _refusal(f"{kind} {quoted} must match ^[a-zA-Z0-9_-]{{1,{limit}}}$", rule, mended)
    for kind, word, _, _ in words:
        if word is not None and (word == "mcp" or word.startswith("mcp__")):
            raise _refusal(f"{kind} `{word}` is reserved for MCP servers", "reserved_mcp", f"remote_{word}")
    if namespace == "functions":
        raise _refusal("namespace `functions` is reserved by the server", "reserved_namespace", "remote_functions")
    refusals = (
        (name in profile.built_ins, "is a built-in tool: the server would drop the skill in silence", "built_in"),
        (name == DISPATCHER_TOOL, "is the name under which catalogs travel as context", "reserved_dispatcher"),
    )
    for broken, fault, rule in refusals:
        if broken and namespace is None:
            raise _refusal(f"`{name}` {fault}", rule, f"remote_{name}")
    if defer_loading and namespace is None:
        alone = f"`{name}`: defer_loading needs a namespace"
        raise _refusal(alone, "defer_needs_namespace", "give the skill a namespace")


def check_neighbours(namespace: str | None, name: str, neighbours: Iterable[tuple[str | None, str]]) -> None:
    """Refuse a name that equals another's after folding: the server would show only one. Raises CatalogError."""
    qualified, folded = qualify(namespace, name), flatten(namespace, name)
    for pair in neighbours:
        neighbour = qualify(*pair)
        if neighbour != qualified and flatten(*pair) == folded:
            collision = f"`{qualified}` and `{neighbour}` are one name to the server (`{folded}`)"
            raise _refusal(collision, "folded_collision", f"{name}_2", other=neighbour)


def _refusal(message: str, rule: str, suggestion: str, **facts: Any) -> CatalogError:
    return CatalogError(f"{message}; try: {suggestion}", rule=rule, suggestion=suggestion, **facts)


HEADER = (
    "Session remote skill catalog (Python-managed):",
    "Use these capabilities when relevant and do not invent unknown tools.",
)
_EMPTY_SCHEMA: JsonObject = {"type": "object", "properties": {}, "additionalProperties": True}


def canonical(value: Any) -> str:
    """Return canonical JSON: keys sorted, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def flat_tools(tools: Iterable[JsonObject]) -> list[JsonObject]:
    """Return tools, flat or as the wire has them, as `dynamic_tools()` writes them, sorted by qualified name."""
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
