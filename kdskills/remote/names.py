"""Names of remote skills: one normalisation, the spellings of a qualified name, and which names a server would not accept."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from kdskills.remote.ports import CatalogError, ServerProfile


def clean_name(name: str) -> str:
    """Return the name without surrounding white space, the only normalisation there is.

    Raises:
        ValueError: Nothing is left.
        TypeError: The name is no text.
    """
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


_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_NAMESPACE = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_-]+")

DISPATCHER_TOOL = "kdskills_call"
"""The one tool of the `dispatcher` strategy."""


def check_name(namespace: str | None, name: str, profile: ServerProfile, *, defer_loading: bool = False) -> None:
    """Refuse a name the server would refuse or silently drop.

    Raises:
        CatalogError: `details` has `rule` and `suggestion`.
    """
    if not _NAME.fullmatch(name):
        _refuse(
            f"remote skill name {_quoted(name)} must match ^[a-zA-Z0-9_-]{{1,128}}$", "name_pattern", _mended(name, 128)
        )
    if namespace is not None and not _NAMESPACE.fullmatch(namespace):
        _refuse(
            f"namespace {_quoted(namespace)} must match ^[a-zA-Z0-9_-]{{1,64}}$",
            "namespace_pattern",
            _mended(namespace, 64),
        )
    for kind, word in (("remote skill name", name), ("namespace", namespace)):
        if word is not None and (word == "mcp" or word.startswith("mcp__")):
            _refuse(f"{kind} `{word}` is reserved for MCP servers", "reserved_mcp", f"remote_{word}")
    if namespace == "functions":
        _refuse("namespace `functions` is reserved by the server", "reserved_namespace", "remote_functions")
    if namespace is None and name in profile.built_ins:
        _refuse(
            f"`{name}` is a built-in tool: the server would drop the skill in silence", "built_in", f"remote_{name}"
        )
    if namespace is None and name == DISPATCHER_TOOL:
        _refuse(f"`{name}` is the name under which catalogs travel as context", "reserved_dispatcher", f"remote_{name}")
    if defer_loading and namespace is None:
        _refuse(f"`{name}`: defer_loading needs a namespace", "defer_needs_namespace", "give the skill a namespace")


def check_neighbours(namespace: str | None, name: str, neighbours: Iterable[tuple[str | None, str]]) -> None:
    """Refuse a name that equals another skill's after folding; the server would show one of them only.

    Raises:
        CatalogError: `details["other"]` is the qualified name of the other skill.
    """
    qualified, folded = qualify(namespace, name), flatten(namespace, name)
    for neighbour_namespace, neighbour_name in neighbours:
        neighbour = qualify(neighbour_namespace, neighbour_name)
        if neighbour != qualified and flatten(neighbour_namespace, neighbour_name) == folded:
            _refuse(
                f"`{qualified}` and `{neighbour}` are one name to the server (`{folded}`)",
                "folded_collision",
                f"{name}_2",
                neighbour=neighbour,
            )


def _refuse(message: str, rule: str, suggestion: str, *, neighbour: str | None = None) -> None:
    facts: dict[str, Any] = {"other": neighbour} if neighbour else {}
    raise CatalogError(f"{message}; try: {suggestion}", rule=rule, suggestion=suggestion, **facts)


def _mended(word: str, limit: int) -> str:
    return (_FORBIDDEN.sub("_", word).strip("_") or "skill")[:limit]


def _quoted(word: str) -> str:
    return repr(word if len(word) <= 80 else f"{word[:77]}...")
