"""Checks explicit schemas, and values against schemas in time that grows with the value.

A pattern must not keep this process busy: the validator's own keywords match with a backtracking engine, for which thirty
characters can mean hours. Those that hold patterns are replaced by ones that match in linear time.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

from kdskills.errors import MissingExtra
from kdskills.remote.ports import CatalogError, JsonObject


def permissive_schema() -> JsonObject:
    """Return the schema of a handler that says nothing of its parameters; it checks nothing."""
    return {"type": "object", "properties": {}, "additionalProperties": True}


@lru_cache(maxsize=512)
def compiled(pattern: str) -> Any:
    """Return a pattern that matches in linear time; look-around cannot. Raises ValueError, MissingExtra."""
    try:
        import re2
    except ImportError as error:
        raise MissingExtra("patterns in schemas of remote skills", "codex") from error
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        words = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(f"{pattern[:200]!r} cannot be matched in linear time: {words}") from None


@lru_cache(maxsize=1)
def linear_validator() -> Any:
    """Return the validator class of the 2020-12 draft, whose patterns match in linear time. Raises MissingExtra."""
    try:
        from jsonschema import Draft202012Validator, ValidationError
        from jsonschema.validators import extend
    except ImportError as error:
        raise MissingExtra("checking schemas of remote skills", "codex") from error

    def pattern(validator: Any, expression: str, instance: Any, schema: JsonObject) -> Iterator[ValidationError]:
        if validator.is_type(instance, "string") and not compiled(expression).search(instance):
            yield ValidationError(f"{instance!r} does not match {expression!r}")

    def pattern_properties(validator: Any, table: Any, instance: Any, schema: JsonObject) -> Iterator[ValidationError]:
        if validator.is_type(instance, "object"):
            for expression, inner in table.items():
                for name in filter(compiled(expression).search, instance):
                    yield from validator.descend(instance[name], inner, path=name, schema_path=expression)

    def additional(validator: Any, inner: Any, instance: Any, schema: JsonObject) -> Iterator[ValidationError]:
        if not validator.is_type(instance, "object"):
            return
        declared = schema.get("properties", {})
        searches = [compiled(expression).search for expression in schema.get("patternProperties", {})]
        extra = [name for name in instance if name not in declared and not any(search(name) for search in searches)]
        if validator.is_type(inner, "object"):
            for name in extra:
                yield from validator.descend(instance[name], inner, path=name)
        elif not inner and extra:
            names, verb = ", ".join(map(repr, extra)), "was" if len(extra) == 1 else "were"
            yield ValidationError(f"Additional properties are not allowed ({names} {verb} unexpected)")

    changed = {"pattern": pattern, "patternProperties": pattern_properties, "additionalProperties": additional}
    return extend(Draft202012Validator, changed)  # type: ignore[no-untyped-call]


_DATA = frozenset({"const", "default", "enum", "example", "examples"})
_OWN_NAMES = frozenset({"$anchor", "$dynamicAnchor", "$dynamicRef", "$id"})
_TABLES = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def checked_schema(schema: JsonObject, name: str) -> JsonObject:
    """Return a deep copy of a valid schema; *name* says in the message whose it is: "input_schema of `ship`".

    Raises CatalogError when it is no JSON or no schema, refers to what it does not hold, or holds a pattern that does not
    match in linear time; MissingExtra without `jsonschema`.
    """
    try:
        mirrored = json.loads(json.dumps(schema, allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid(name, f"it is not JSON: {error}") from error
    if mirrored != schema:
        raise _invalid(name, "it is not JSON: keys must be text, and tuples must be lists")
    try:
        from jsonschema import Draft202012Validator, SchemaError
    except ImportError as error:
        raise MissingExtra("checking schemas of remote skills", "codex") from error
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        location = "/".join(map(str, error.absolute_path))
        raise _invalid(name, f"at {location or 'its root'}: {error.message}") from error
    parts = list(_parts(schema))
    tables = [part["patternProperties"] for part in parts if "patternProperties" in part]
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
    try:
        for pattern in (*patterns, *(pattern for table in tables if isinstance(table, dict) for pattern in table)):
            compiled(pattern)
    except ValueError as error:
        raise _invalid(name, str(error)) from None
    if tables and any("unevaluatedProperties" in part for part in parts):
        raise _invalid(name, "`patternProperties` and `unevaluatedProperties` in one schema are not supported")
    if not any(_OWN_NAMES & part.keys() for part in parts):
        for reference in (part.get("$ref") for part in parts):
            if isinstance(reference, str) and not _resolves(schema, reference):
                raise _invalid(name, f"`$ref` {reference!r} points to nothing inside it")
    return copy.deepcopy(schema)


def _invalid(name: str, why: str) -> CatalogError:
    return CatalogError(f"{name} is invalid: {why}", rule="schema_invalid", suggestion="give a JSON Schema (2020-12)")


def _parts(schema: Any) -> Iterator[JsonObject]:
    """Yield every subschema; tables of schemas are not schemas themselves, data are none at all."""
    if isinstance(schema, list):
        for item in schema:
            yield from _parts(item)
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in _TABLES and isinstance(value, dict):
            yield from _parts(list(value.values()))
        elif key not in _DATA:
            yield from _parts(value)


def _resolves(root: JsonObject, reference: str) -> bool:
    node: Any = root
    for word in reference[1:].split("/")[1:]:
        key = unquote(word).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return False
    return reference == "#" or reference.startswith("#/")


MAX_FAULTS: Final = 20
MAX_WORDS: Final = 300


def faults(schema: JsonObject, arguments: Any) -> list[str]:
    """Return the faults of *arguments*, each as `path: message`, sorted by path. Raises MissingExtra.

    Absent arguments count as an empty object. No schema is fetched: a `$ref` that leaves the schema is a fault.
    """
    if schema == permissive_schema():
        return []
    try:
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError:
        raise MissingExtra("checking the arguments of remote skills", "codex") from None
    errors = linear_validator()(schema, registry=Registry()).iter_errors({} if arguments is None else arguments)
    try:
        problems = [
            ("".join(["$", *map(_step, error.absolute_path)]), _words(error.message))
            for error in itertools.islice(errors, 10 * MAX_FAULTS)
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


def _step(part: object) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{str(part)[:80]}"


def _words(message: str) -> str:
    flat = " ".join(message.split())
    return flat if len(flat) <= MAX_WORDS else f"{flat[:MAX_WORDS]}…"
