"""JSON Schemas: whether one is sound, and what a value has against it, in time that grows with the value.

A pattern must not keep this process busy: the validator's own keywords match with a backtracking engine, for which thirty
characters can mean hours. Those that hold patterns are replaced by ones that match in linear time. Nor must references
that lead to more references: they are counted. Nothing is fetched.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

JsonObject = dict[str, Any]

MAX_REFERENCES: Final = 20_000
"""References that are followed for one value."""
MAX_WORDS: Final = 300
_followed: ContextVar[Iterator[int]] = ContextVar("_followed")


@lru_cache(maxsize=512)
def compiled(pattern: str) -> Any:
    """Return a pattern that matches in linear time; look-around cannot. Raises ValueError."""
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        words = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(f"{pattern[:200]!r} cannot be matched in linear time: {words}") from None


def _reference(validator: Any, target: str, instance: Any, schema: JsonObject) -> Iterator[Any]:
    """Follow a `$ref`, unless too many have been followed for this value. Raises RecursionError."""
    from jsonschema import Draft202012Validator

    if next(_followed.get(itertools.count())) > MAX_REFERENCES:
        raise RecursionError
    yield from Draft202012Validator.VALIDATORS["$ref"](validator, target, instance, schema)


@lru_cache(maxsize=1)
def linear_validator() -> Any:
    """Return the validator class of the 2020-12 draft, whose patterns match in linear time."""
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend

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

    changed = {
        "$ref": _reference,
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional,
    }
    return extend(Draft202012Validator, changed)  # type: ignore[no-untyped-call]


_DATA = frozenset({"const", "default", "enum", "example", "examples"})
_OWN_NAMES = frozenset({"$anchor", "$dynamicAnchor", "$dynamicRef", "$id"})
_TABLES = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def schema_fault(schema: Mapping[str, Any], *, own_names: bool = True) -> str | None:
    """Return why *schema* cannot be used, or None: it must be a JSON Schema (2020-12) that refers to itself alone, whose patterns
    match in linear time. Without *own_names* its parts may have none (`$id`, `$anchor`).
    """
    from jsonschema import Draft202012Validator, SchemaError

    try:
        mirrored = json.loads(json.dumps(schema, allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"
    if mirrored != schema:
        return "it is not JSON: keys must be text, and tuples must be lists"
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        location = "/".join(map(str, error.absolute_path))
        return f"at {location or 'its root'}: {error.message}"
    except RecursionError:
        return "it is nested too deeply"
    parts = list(_parts(schema))
    tables = [part["patternProperties"] for part in parts if "patternProperties" in part]
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
    try:
        for pattern in (*patterns, *(pattern for table in tables if isinstance(table, dict) for pattern in table)):
            compiled(pattern)
    except ValueError as error:
        return str(error)
    if tables and any("unevaluatedProperties" in part for part in parts):
        return "`patternProperties` and `unevaluatedProperties` in one schema are not supported"
    if any(_OWN_NAMES & part.keys() for part in parts):
        return None if own_names else "`$id`, `$anchor` and `$dynamicRef` are not supported"
    for reference in (part.get("$ref") for part in parts):
        if isinstance(reference, str) and not _resolves(schema, reference):
            return f"`$ref` {reference!r} points to nothing inside it"
    return None


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


def _resolves(root: Mapping[str, Any], reference: str) -> bool:
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


def value_faults(schema: Mapping[str, Any], value: Any, most: int) -> list[tuple[tuple[str | int, ...], str]]:
    """Return at most *most* faults of *value*, each as its path and what is wrong there.

    A `$ref` that leaves the schema is a fault, and so are more than `MAX_REFERENCES` that are followed.
    """
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    errors = linear_validator()(schema, registry=Registry()).iter_errors(value)
    token = _followed.set(itertools.count(1))
    try:
        return [(tuple(error.absolute_path), _words(error.message)) for error in itertools.islice(errors, most)]
    except Unresolvable as error:
        return [((), f"the schema refers to {_words(str(error.ref))}, which is not in it")]
    except RecursionError:
        return [((), "nested too deeply")]
    except ValueError as error:
        return [((), f"the schema holds a pattern that is not used: {_words(str(error))}")]
    finally:
        _followed.reset(token)


def _words(message: str) -> str:
    flat = " ".join(message.split())
    return flat if len(flat) <= MAX_WORDS else f"{flat[:MAX_WORDS]}…"
