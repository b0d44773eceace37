"""Names of remote skills: one normalisation, the spellings of a qualified name, and which names a server would not accept."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from kdskills.remote.ports import CatalogError, ServerProfile


def clean_name(name: str) -> str:
    """Return the name without surrounding white space, the only normalisation there is. Raises ValueError, TypeError."""
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
    """Refuse a name that equals another's after folding; the server would show only one of the two. Raises CatalogError."""
    qualified, folded = qualify(namespace, name), flatten(namespace, name)
    for pair in neighbours:
        neighbour = qualify(*pair)
        if neighbour != qualified and flatten(*pair) == folded:
            collision = f"`{qualified}` and `{neighbour}` are one name to the server (`{folded}`)"
            raise _refusal(collision, "folded_collision", f"{name}_2", other=neighbour)


def _refusal(message: str, rule: str, suggestion: str, **facts: Any) -> CatalogError:
    return CatalogError(f"{message}; try: {suggestion}", rule=rule, suggestion=suggestion, **facts)
