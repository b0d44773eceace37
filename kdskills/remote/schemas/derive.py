"""Derives the schemas and descriptions of a handler from its annotations and docstring."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kdskills.remote.ports import JsonObject
from kdskills.remote.schemas.checks import checked_schema
from kdskills.remote.schemas.convert import convert_all
from kdskills.remote.schemas.docstrings import Docstring, parse_docstring
from kdskills.remote.schemas.hints import is_call, note_of, parameters_of, return_of, target_of
from kdskills.remote.schemas.infer import SchemaBuilder, described

_SKIPPED = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@dataclass(frozen=True, slots=True)
class Derived:
    """The derived facts about a handler.

    Attributes:
        description: The tool's description, or None without one.
        input_schema: The schema of its arguments.
        output_schema: The schema of its result, or None.
        output_description: The description of its result, or None.
        coerce: Turns validated arguments into what its annotations ask for; None when the schema was given.
        call_parameter: The parameter that takes the `RemoteCall`, or None.
    """

    description: str | None
    input_schema: JsonObject
    output_schema: JsonObject | None
    output_description: str | None
    coerce: Callable[[Mapping[str, Any]], dict[str, Any]] | None
    call_parameter: str | None


def permissive_schema() -> JsonObject:
    """Return the schema of a handler that says nothing of its parameters; it checks nothing."""
    return {"type": "object", "properties": {}, "additionalProperties": True}


def derive(
    name: str, handler: Callable[..., Any], input_schema: object = None, output_schema: object = None
) -> Derived:
    """Return the facts about a handler; a schema that is no dict is derived.

    Raises:
        CatalogError: A given schema is invalid.
    """
    doc = docstring_of(handler)
    parameters = parameters_of(handler) or []
    call = next((p.name for p in parameters if p.kind not in _SKIPPED and is_call(p.annotation)), None)
    coerce = None
    if isinstance(input_schema, dict):
        schema = _explained(checked_schema(input_schema, f"input_schema of `{name}`"), doc)
    elif any(p.annotation is not p.empty for p in parameters):
        schema = _inferred(parameters, doc)
        annotations = {p.name: p.annotation for p in _schema_parameters(parameters) if p.annotation is not p.empty}
        coerce = functools.partial(convert_all, annotations)
    else:
        schema = permissive_schema()
    if isinstance(output_schema, dict):
        output: JsonObject | None = checked_schema(output_schema, f"output_schema of `{name}`")
    else:
        output = _output(handler)
    return Derived(doc.summary, schema, output, doc.returns, coerce, call)


def docstring_of(handler: Callable[..., Any]) -> Docstring:
    """Return what a handler's docstring says; a callable object may have it at its class."""
    target = target_of(handler)
    text = inspect.getdoc(target)
    if not text and not inspect.isroutine(handler) and not isinstance(handler, functools.partial):
        text = inspect.getdoc(type(handler))
    return parse_docstring(text)


def _schema_parameters(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.kind not in _SKIPPED and not is_call(p.annotation)]


def _inferred(parameters: list[inspect.Parameter], doc: Docstring) -> JsonObject:
    builder = SchemaBuilder()
    properties: JsonObject = {}
    for parameter in _schema_parameters(parameters):
        annotated = parameter.annotation is not parameter.empty
        schema = builder.schema_of(parameter.annotation) if annotated else {}
        note = doc.parameters.get(parameter.name) or (note_of(parameter.annotation) if annotated else None)
        properties[parameter.name] = described(schema, note, over=True)
    root_schema: JsonObject = {
        "type": "object",
        "properties": properties,
        "additionalProperties": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }
    required = [p.name for p in _schema_parameters(parameters) if p.default is p.empty]
    if required:
        root_schema["required"] = required
    return builder.finish(described(root_schema, doc.summary))


def _explained(schema: JsonObject, doc: Docstring) -> JsonObject:
    """Return a given schema with descriptions where they are missing; it gains nothing else."""
    properties = schema.get("properties")
    if isinstance(properties, dict):
        explained = {
            name: described(member, doc.parameters.get(name)) if isinstance(member, dict) else member
            for name, member in properties.items()
        }
        schema = {**schema, "properties": explained}
    return described(schema, doc.summary)


def _output(handler: Callable[..., Any]) -> JsonObject | None:
    annotation = return_of(handler)
    if annotation is inspect.Signature.empty:
        return None
    builder = SchemaBuilder()
    return builder.finish(builder.schema_of(annotation)) or None
