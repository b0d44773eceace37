"""JSON Schemas checked in time that grows with the value: a pattern of a schema must not keep this process busy.

The validator's own keywords match with a backtracking engine, for which thirty characters can mean hours. Those that hold
patterns are replaced by ones that match in linear time; what such an engine cannot match is refused with the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from kdskills.errors import MissingExtra
from kdskills.remote.ports import JsonObject

UNEVALUATED = "unevaluatedProperties"


@lru_cache(maxsize=512)
def compiled(pattern: str) -> Any:
    """Return a pattern that matches in linear time.

    Raises:
        ValueError: It is none, or holds what no such pattern has: look-around or references back.
        MissingExtra: The library is not installed.
    """
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


def patterns_of(part: JsonObject) -> Iterator[str]:
    """Yield the patterns that one subschema holds itself."""
    pattern, table = part.get("pattern"), part.get("patternProperties")
    if isinstance(pattern, str):
        yield pattern
    if isinstance(table, dict):
        yield from table


def validator_of(schema: JsonObject, **options: Any) -> Any:
    """Return a validator of the 2020-12 draft whose patterns match in linear time.

    Args:
        schema: The schema.
        **options: As the library's own validator takes them.

    Raises:
        MissingExtra: `jsonschema` is not installed.
    """
    return _kind()(schema, **options)


@lru_cache(maxsize=1)
def _kind() -> Any:
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
                search = compiled(expression).search
                for name, value in instance.items():
                    if search(name):
                        yield from validator.descend(value, inner, path=name, schema_path=expression)

    def additional(validator: Any, inner: Any, instance: Any, schema: JsonObject) -> Iterator[ValidationError]:
        if not validator.is_type(instance, "object"):
            return
        declared, searches = (
            schema.get("properties", {}),
            [compiled(p).search for p in schema.get("patternProperties", {})],
        )
        extra = [name for name in instance if name not in declared and not any(search(name) for search in searches)]
        if validator.is_type(inner, "object"):
            for name in extra:
                yield from validator.descend(instance[name], inner, path=name)
        elif not inner and extra:
            names = ", ".join(repr(name) for name in extra)
            verb = "was" if len(extra) == 1 else "were"
            yield ValidationError(f"Additional properties are not allowed ({names} {verb} unexpected)")

    changed = {"pattern": pattern, "patternProperties": pattern_properties, "additionalProperties": additional}
    return extend(Draft202012Validator, changed)  # type: ignore[no-untyped-call]
