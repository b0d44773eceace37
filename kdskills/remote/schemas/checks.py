"""Checks explicit schemas of remote skills, and arguments against them in time that grows with the arguments."""

from __future__ import annotations

import copy
from typing import Any, Final

from kdskills.models.schemas import schema_fault, value_faults
from kdskills.remote.ports import CatalogError, JsonObject


def permissive_schema() -> JsonObject:
    """Return the schema of a handler that says nothing of its parameters; it checks nothing."""
    return {"type": "object", "properties": {}, "additionalProperties": True}


def checked_schema(schema: JsonObject, name: str) -> JsonObject:
    """Return a deep copy of a valid schema; *name* says in the message whose it is: "input_schema of `ship`".

    Raises CatalogError when it is no JSON or no schema, refers to what it does not hold, or holds a pattern that does not
    match in linear time.
    """
    fault = schema_fault(schema)
    if fault is not None:
        raise _invalid(name, fault)
    return copy.deepcopy(schema)


def _invalid(name: str, why: str) -> CatalogError:
    return CatalogError(f"{name} is invalid: {why}", rule="schema_invalid", suggestion="give a JSON Schema (2020-12)")


MAX_FAULTS: Final = 20


def faults(schema: JsonObject, arguments: Any) -> list[str]:
    """Return the faults of *arguments*, each as `path: message`, sorted by path.

    Absent arguments count as an empty object. No schema is fetched: a `$ref` that leaves the schema is a fault.
    """
    if schema == permissive_schema():
        return []
    problems = value_faults(schema, {} if arguments is None else arguments, 10 * MAX_FAULTS)
    words = [f"{path}: {fault}" for path, fault in sorted(("".join(["$", *map(_step, p)]), w) for p, w in problems)]
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


def _step(part: object) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{str(part)[:80]}"
