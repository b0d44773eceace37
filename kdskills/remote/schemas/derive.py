"""Derives the schemas and descriptions of a handler from its annotations and docstring, and converts arguments accordingly."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import re
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, Flag
from pathlib import PurePath
from typing import Any, Literal

from pydantic import BaseModel, RootModel, ValidationError

from kdskills.remote.ports import JsonObject
from kdskills.remote.schemas.checks import checked_schema, validator_of
from kdskills.remote.schemas.hints import (
    SCALARS,
    Docstring,
    bare,
    is_call,
    is_typed_dict,
    is_union,
    note_of,
    parameters_of,
    parse_docstring,
    return_of,
    shape_of,
    target_of,
)

MAX_DEPTH = 24
"""Nesting of types beyond which a schema says nothing more; only generic classes that grow without end reach it."""

LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Iterator, abc.Collection, collections.deque)
SETS = (set, frozenset, abc.Set, abc.MutableSet)
MAPPINGS = (dict, abc.Mapping, abc.MutableMapping, collections.OrderedDict, collections.defaultdict)
_NON_WORD = re.compile(r"\W+", re.ASCII)
_KINDS: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", types.NoneType: "null"}


def _plain(value: Any) -> Any:
    """Return the JSON scalar of a value whose class is a subclass of one (`StrEnum` members, for instance)."""
    if isinstance(value, Enum):
        value = value.value
    if type(value) in _KINDS:
        return value
    return next((kind(value) for kind in (str, int, float) if isinstance(value, kind)), value)


def enum_schema(values: Sequence[Any]) -> JsonObject:
    """Return `type` and `enum` of the values; nothing when one of them is no JSON scalar."""
    kinds = list(dict.fromkeys(_KINDS.get(type(value), "") for value in values))
    if not kinds or "" in kinds:
        return {}
    kinds.sort(key=lambda kind: kind == "null")  # null last; the others as they came
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}


def enum_values(cls: type[Enum]) -> list[Any]:
    """Return what stands for the members in JSON: their values, or their names when a value is no JSON scalar."""
    values = [_plain(member.value) for member in cls]
    return values if all(type(value) in _KINDS for value in values) else [member.name for member in cls]


def nullable(schema: JsonObject) -> JsonObject:
    """Return the schema with null let in: in `type` and `enum` where that says it, else by `anyOf`; never `nullable`."""
    kind = schema.get("type")
    if not schema or kind == "null":
        return schema
    if "anyOf" in schema:
        branches = schema["anyOf"]
        return schema if {"type": "null"} in branches else {**schema, "anyOf": [*branches, {"type": "null"}]}
    if kind is None:
        return {"anyOf": [schema, {"type": "null"}]}
    kinds = kind if isinstance(kind, list) else [kind]
    widened = {**schema, "type": kinds if "null" in kinds else [*kinds, "null"]}
    if "enum" in schema and None not in schema["enum"]:
        widened["enum"] = [*schema["enum"], None]
    return widened


class SchemaBuilder:
    """Builds the schemas of one root; `defs` then holds its recursive classes."""

    def __init__(self) -> None:
        self.defs: dict[str, JsonObject] = {}
        self._open: list[Any] = []
        self._names: list[tuple[Any, str]] = []

    def schema_of(self, annotation: Any) -> JsonObject:
        """Return the schema of one annotation; `{}` for what says nothing."""
        annotation = bare(annotation)
        if annotation is None or annotation is types.NoneType:
            return {"type": "null"}
        origin, type_arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if is_union(annotation):
            return self._union(type_arguments)
        if origin is Literal:
            return enum_schema([_plain(value) for value in type_arguments])
        cls = origin or annotation
        if not inspect.isclass(cls) or len(self._open) > MAX_DEPTH:
            return {}
        if issubclass(cls, Enum):
            return {"type": "integer"} if issubclass(cls, Flag) else enum_schema(enum_values(cls))
        for scalar, schema, _ in SCALARS:
            if issubclass(cls, scalar):
                return dict(schema)
        if issubclass(cls, RootModel):
            return self.schema_of(cls.model_fields["root"].annotation)
        if not is_typed_dict(cls) and not hasattr(cls, "_fields"):
            collection = self._collection(cls, type_arguments)
            if collection is not None:
                return collection
        return self._object(annotation)

    def finish(self, schema: JsonObject) -> JsonObject:
        """Return a root schema with the recursive classes its references need."""
        return {**schema, "$defs": self.defs} if self.defs else schema

    def _collection(self, cls: type, type_arguments: tuple[Any, ...]) -> JsonObject | None:
        if cls in MAPPINGS or issubclass(cls, dict):
            values = self.schema_of(type_arguments[1]) if len(type_arguments) > 1 else {}
            return {"type": "object", "additionalProperties": values} if values else {"type": "object"}
        if issubclass(cls, tuple):
            if type_arguments and not (len(type_arguments) == 2 and type_arguments[1] is Ellipsis):
                fixed = [self.schema_of(item) for item in type_arguments]
                return {"type": "array", "prefixItems": fixed, "minItems": len(fixed), "maxItems": len(fixed)}
        elif cls not in (*SETS, *LISTS) and not issubclass(cls, (set, frozenset, list)):
            return None
        items = self.schema_of(type_arguments[0]) if type_arguments else {}
        schema: JsonObject = {"type": "array", "items": items} if items else {"type": "array"}
        return {**schema, "uniqueItems": True} if cls in SETS or issubclass(cls, (set, frozenset)) else schema

    def _union(self, members: tuple[Any, ...]) -> JsonObject:
        schemas: list[JsonObject] = []
        for member in members:
            if member is not types.NoneType and (schema := self.schema_of(member)) not in schemas:
                schemas.append(schema)
        if {} in schemas:
            return {}
        joined = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        return nullable(joined) if types.NoneType in members else joined

    def _object(self, annotation: Any) -> JsonObject:
        if annotation in self._open:
            return {"$ref": f"#/$defs/{self._name(annotation)}"}
        shape = shape_of(annotation)
        if shape is None:
            return {}
        schema: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
        self._open.append(annotation)
        try:
            for member in shape.members:
                member_schema = self.schema_of(member.annotation)
                schema["properties"][member.name] = described(member_schema, member.description, over=True)
        finally:
            self._open.pop()
        if required := [member.name for member in shape.members if member.required]:
            schema["required"] = required
        schema = described(schema, shape.description)
        if all(named != annotation for named, _ in self._names):
            return schema
        self.defs[self._name(annotation)] = schema
        return {"$ref": f"#/$defs/{self._name(annotation)}"}

    def _name(self, annotation: Any) -> str:
        """Return the name of a recursive class in `$defs`, a new one when it has none."""
        for named_annotation, name in self._names:
            if named_annotation == annotation:
                return name
        cls = typing.get_origin(annotation) or annotation
        stem = _NON_WORD.sub("_", cls.__name__) or "Object"
        used_names = {name for _, name in self._names}
        candidates = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(2)))
        name = next(name for name in candidates if name not in used_names)
        self._names.append((annotation, name))
        return name


def described(schema: JsonObject, description: str | None, *, over: bool = False) -> JsonObject:
    """Return the schema with a description, where it has none or *over* the one it has."""
    if not description or not description.strip() or ("description" in schema and not over):
        return schema
    return {**schema, "description": description}


class ArgumentError(ValueError):
    """An argument that fits its schema and yet cannot become what the handler's annotation asks for."""


def convert(annotation: Any, value: Any, path: str) -> Any:
    """Return a validated JSON value as an object of the annotation; what the annotation does not name stays as it is.

    Raises:
        ArgumentError: The class refused the value; the message begins with the path.
    """
    annotation = bare(annotation)
    if value is None or annotation is Any:
        return value
    origin, type_arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if is_union(annotation):
        return _member_of_union(type_arguments, value, path)
    if origin is Literal:
        enums = (choice for choice in type_arguments if isinstance(choice, Enum) and choice.value == value)
        return next((choice for choice in enums if type(choice.value) is type(value)), value)
    cls = origin or annotation
    if not inspect.isclass(cls):
        return value
    if issubclass(cls, Enum):
        for member, plain in zip(cls, enum_values(cls), strict=True):
            if plain == value and isinstance(plain, bool) == isinstance(value, bool):
                return member
        return _constructed(cls, path, value)
    if issubclass(cls, BaseModel):
        return _model(cls, value, path)
    if isinstance(value, list):
        return _items(cls, type_arguments, value, path)
    if isinstance(value, dict):
        return _object(cls, annotation, type_arguments, value, path)
    if issubclass(cls, PurePath):
        return _constructed(cls, path, value)
    read = next((read for kind, _, read in SCALARS if cls is kind), None)
    return value if read is None else _constructed(read, path, value)


def _items(cls: type, type_arguments: tuple[Any, ...], value: list[Any], path: str) -> Any:
    kinds: abc.Iterable[Any] = itertools.repeat(type_arguments[0] if type_arguments else Any)
    if issubclass(cls, tuple) and type_arguments and not (len(type_arguments) == 2 and type_arguments[1] is Ellipsis):
        kinds = type_arguments
    numbered = enumerate(zip(kinds, value, strict=False))
    items = [convert(kind, item, f"{path}[{number}]") for number, (kind, item) in numbered]
    if issubclass(cls, tuple):
        return tuple(items)
    if cls in SETS or issubclass(cls, (set, frozenset)):
        return _constructed(frozenset if cls is frozenset else set, path, items)
    return items if cls in LISTS else value


def _object(cls: type, annotation: Any, type_arguments: tuple[Any, ...], value: JsonObject, path: str) -> Any:
    if cls in MAPPINGS:
        kind = type_arguments[1] if len(type_arguments) > 1 else Any
        return {key: convert(kind, item, f"{path}.{key}") for key, item in value.items()}
    shape = shape_of(annotation)
    if shape is None or shape.kind == "class":
        return value
    kinds = {member.name: member.annotation for member in shape.members}
    members = {key: convert(kinds.get(key, Any), item, f"{path}.{key}") for key, item in value.items()}
    return members if shape.kind == "dict" else _constructed(cls, path, **members)


def _model(cls: type[BaseModel], value: Any, path: str) -> BaseModel:
    try:
        return cls.model_validate(value)
    except ValidationError as error:
        faults = [f"{'.'.join([path, *map(str, fault['loc'])])}: {fault['msg']}" for fault in error.errors()]
        raise ArgumentError("; ".join(faults)) from error


def _constructed(make: Any, path: str, *arguments: Any, **keywords: Any) -> Any:
    try:
        return make(*arguments, **keywords)
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        raise ArgumentError(f"{path}: {str(error) or type(error).__name__}") from error


def _member_of_union(members: tuple[Any, ...], value: Any, path: str) -> Any:
    """Convert to the first member that takes the value and whose schema it meets; the value itself when it meets none."""
    kinds = [member for member in members if member is not types.NoneType]
    if len(kinds) == 1:
        return convert(kinds[0], value, path)
    refused: ArgumentError | None = None
    for kind in kinds:
        builder = SchemaBuilder()
        if not validator_of(builder.finish(builder.schema_of(kind))).is_valid(value):
            continue
        try:
            return convert(kind, value, path)
        except ArgumentError as error:
            refused = error
    if refused is not None:
        raise refused
    return value


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
    text = inspect.getdoc(target_of(handler))
    if not text and not inspect.isroutine(handler) and not isinstance(handler, functools.partial):
        text = inspect.getdoc(type(handler))  # a callable object may have its docstring at its class
    doc = parse_docstring(text)
    parameters = parameters_of(handler)
    named = [p for p in parameters if p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}]
    call = next((p.name for p in named if is_call(p.annotation)), None)
    coerce = None
    if isinstance(input_schema, dict):
        schema = _explained(checked_schema(input_schema, f"input_schema of `{name}`"), doc)
    elif any(p.annotation is not p.empty for p in parameters):
        taken = [p for p in named if not is_call(p.annotation)]
        schema = _inferred(taken, doc, is_open=any(p.kind is p.VAR_KEYWORD for p in parameters))
        coerce = functools.partial(convert_all, {p.name: p.annotation for p in taken if p.annotation is not p.empty})
    else:
        schema = permissive_schema()
    output: JsonObject | None = None
    if isinstance(output_schema, dict):
        output = checked_schema(output_schema, f"output_schema of `{name}`")
    elif (annotation := return_of(handler)) is not inspect.Signature.empty:
        builder = SchemaBuilder()
        output = builder.finish(builder.schema_of(annotation)) or None
    return Derived(doc.summary, schema, output, doc.returns, coerce, call)


def convert_all(annotations: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, each as its parameter's annotation asks."""
    return {name: convert(annotations.get(name, Any), value, name) for name, value in arguments.items()}


def _inferred(parameters: list[inspect.Parameter], doc: Docstring, *, is_open: bool) -> JsonObject:
    builder = SchemaBuilder()
    properties: JsonObject = {}
    for parameter in parameters:
        annotated = parameter.annotation is not parameter.empty
        schema = builder.schema_of(parameter.annotation) if annotated else {}
        note = doc.parameters.get(parameter.name) or (note_of(parameter.annotation) if annotated else None)
        properties[parameter.name] = described(schema, note, over=True)
    root_schema: JsonObject = {"type": "object", "properties": properties, "additionalProperties": is_open}
    if required := [p.name for p in parameters if p.default is p.empty]:
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
