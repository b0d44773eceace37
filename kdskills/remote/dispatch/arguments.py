"""Checks arguments against the whole schema before a handler gets them."""

from __future__ import annotations

from typing import Any, Final

from kdskills.errors import MissingExtra
from kdskills.remote.ports import JsonObject
from kdskills.remote.schemas.linear import validator_of

PERMISSIVE: Final[JsonObject] = {"type": "object", "properties": {}, "additionalProperties": True}
"""The schema of a handler that declares nothing; it checks nothing."""
MAX_FAULTS: Final = 20
MAX_WORDS: Final = 300


def faults(schema: JsonObject, arguments: Any) -> list[str]:
    """Return the faults of *arguments*, each as `path: message`, sorted by path; empty for valid ones.

    Absent arguments count as an empty object. No schema is fetched from anywhere: a `$ref` that leaves the schema is a
    fault.

    Raises:
        MissingExtra: The package that checks schemas is not installed.
    """
    if schema == PERMISSIVE:
        return []
    try:
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError:
        raise MissingExtra("checking the arguments of remote skills", "codex") from None
    validator = validator_of(schema, registry=Registry())
    try:
        problems = [
            (_path(error.absolute_path), _words(error.message))
            for error, _ in zip(
                validator.iter_errors({} if arguments is None else arguments), range(10 * MAX_FAULTS), strict=False
            )
        ]
    except Unresolvable as error:
        return [f"$: the skill's schema refers to {_words(str(error.ref))}, which is not in it"]
    except RecursionError:
        return ["$: nested too deeply"]
    except ValueError as error:
        return [f"$: the skill's schema holds a pattern that is not used: {_words(str(error))}"]
    problems.sort()
    words = [f"{path}: {message}" for path, message in problems]
    return words if len(words) <= MAX_FAULTS else [*words[:MAX_FAULTS], f"and {len(words) - MAX_FAULTS} more"]


def own_copy(arguments: Any) -> Any:
    """Return a copy of *arguments* with all nested lists and objects copied; other values are shared."""
    holder = [arguments]
    unvisited: list[Any] = [holder]
    copies: dict[int, Any] = {}  # by id of the original: a value may contain itself
    while unvisited:
        container = unvisited.pop()
        for key, inner in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if not isinstance(inner, dict | list):
                continue
            if id(inner) not in copies:
                copies[id(inner)] = inner.copy()
                unvisited.append(copies[id(inner)])
            container[key] = copies[id(inner)]
    return holder[0]


def _path(parts: Any) -> str:
    text = "$"
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{str(part)[:80]}"
    return text


def _words(message: str) -> str:
    flat = " ".join(message.split())
    return flat if len(flat) <= MAX_WORDS else f"{flat[:MAX_WORDS]}…"
