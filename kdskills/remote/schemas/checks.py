"""Checks explicit schemas: they must be valid and pure JSON, with all references inside."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from kdskills.errors import MissingExtra
from kdskills.remote.ports import CatalogError, JsonObject
from kdskills.remote.schemas.linear import UNEVALUATED, compiled, patterns_of

_DATA = frozenset({"const", "default", "enum", "example", "examples"})
_OWN_NAMES = frozenset({"$anchor", "$dynamicAnchor", "$dynamicRef", "$id"})
_TABLES = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def checked_schema(schema: JsonObject, name: str) -> JsonObject:
    """Return a deep copy of a valid schema.

    Args:
        schema: What the caller gave.
        name: Whose schema it is, for the message: "input_schema of `ship`".

    Raises:
        CatalogError: It is no JSON, no schema, or refers to what it does not hold.
        MissingExtra: `jsonschema` is not installed.
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
        location = "/".join(str(part) for part in error.absolute_path)
        raise _invalid(name, f"at {location or 'its root'}: {error.message}") from error
    _check_patterns(schema, name)
    if not any(_OWN_NAMES & part.keys() for part in _parts(schema)):
        for part in _parts(schema):
            reference = part.get("$ref")
            if isinstance(reference, str) and not _resolves(schema, reference):
                raise _invalid(name, f"`$ref` {reference!r} points to nothing inside it")
    return copy.deepcopy(schema)


def _check_patterns(schema: JsonObject, name: str) -> None:
    """Refuse patterns that could keep this process busy: those that no engine matches in linear time."""
    parts = list(_parts(schema))
    try:
        for part in parts:
            for pattern in patterns_of(part):
                compiled(pattern)
    except ValueError as error:
        raise _invalid(name, str(error)) from None
    if any("patternProperties" in part for part in parts) and any(UNEVALUATED in part for part in parts):
        raise _invalid(name, f"`patternProperties` and `{UNEVALUATED}` in one schema are not supported")


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
            for item in value.values():
                yield from _parts(item)
        elif key not in _DATA:
            yield from _parts(value)


def _resolves(root: JsonObject, reference: str) -> bool:
    if not reference.startswith("#"):
        return False
    node: Any = root
    for word in reference[1:].split("/")[1:]:
        key = unquote(word).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        else:
            return False
    return reference in {"#", "#/"} or reference.startswith("#/")
