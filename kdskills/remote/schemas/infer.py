"""JSON Schemas of annotations."""

from __future__ import annotations

import collections
import inspect
import re
import types
import typing
from collections import abc
from collections.abc import Sequence
from enum import Enum, Flag
from typing import Any, Literal

from pydantic import BaseModel, RootModel

from kdskills.remote.ports import JsonObject
from kdskills.remote.schemas.hints import bare, is_union
from kdskills.remote.schemas.scalars import SCALARS
from kdskills.remote.schemas.shapes import Shape, is_typed_dict, shape_of

MAX_DEPTH = 24
"""Nesting of types beyond which a schema says nothing more; only generic classes that grow without end reach it."""

LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Iterator, abc.Collection, collections.deque)
SETS = (set, frozenset, abc.Set, abc.MutableSet)
MAPPINGS = (dict, abc.Mapping, abc.MutableMapping, collections.OrderedDict, collections.defaultdict)
_NON_WORD = re.compile(r"\W+", re.ASCII)


def enum_schema(values: Sequence[Any]) -> JsonObject:
    """Return `type` and `enum` of the values; nothing when one of them is no JSON scalar."""
    kinds: list[str] = []
    for value in values:
        kind = _KINDS.get(type(value))
        if kind is None:
            return {}
        if kind not in kinds:
            kinds.append(kind)
    if not kinds:
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
        if is_union(annotation):
            return self._union(typing.get_args(annotation))
        origin = typing.get_origin(annotation)
        if origin is Literal:
            return enum_schema([_plain(value) for value in typing.get_args(annotation)])
        cls = origin or annotation
        if not inspect.isclass(cls) or len(self._open) > MAX_DEPTH:
            return {}
        return self._class(cls, annotation)

    def finish(self, schema: JsonObject) -> JsonObject:
        """Return a root schema with the recursive classes its references need."""
        return {**schema, "$defs": self.defs} if self.defs else schema

    def _class(self, cls: type, annotation: Any) -> JsonObject:
        if issubclass(cls, Enum):
            return {"type": "integer"} if issubclass(cls, Flag) else enum_schema(enum_values(cls))
        for scalar, schema in SCALARS:
            if issubclass(cls, scalar):
                return dict(schema)
        if issubclass(cls, RootModel):
            return self.schema_of(cls.model_fields["root"].annotation)
        if not is_typed_dict(cls) and not hasattr(cls, "_fields"):
            collection = self._collection(cls, typing.get_args(annotation))
            if collection is not None:
                return collection
        return self._object(annotation)

    def _collection(self, cls: type, type_arguments: tuple[Any, ...]) -> JsonObject | None:
        if cls in MAPPINGS or issubclass(cls, dict):
            values = self.schema_of(type_arguments[1]) if len(type_arguments) > 1 else {}
            return {"type": "object", "additionalProperties": values} if values else {"type": "object"}
        if issubclass(cls, tuple):
            return self._tuple(type_arguments)
        if cls in SETS or issubclass(cls, (set, frozenset)):
            return {**self._array(type_arguments), "uniqueItems": True}
        if cls in LISTS or issubclass(cls, list):
            return self._array(type_arguments)
        return None

    def _array(self, type_arguments: tuple[Any, ...]) -> JsonObject:
        items = self.schema_of(type_arguments[0]) if type_arguments else {}
        return {"type": "array", "items": items} if items else {"type": "array"}

    def _tuple(self, type_arguments: tuple[Any, ...]) -> JsonObject:
        if not type_arguments:
            return {"type": "array"}
        if len(type_arguments) == 2 and type_arguments[1] is Ellipsis:
            return self._array(type_arguments[:1])
        items = [self.schema_of(item) for item in type_arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}

    def _union(self, members: tuple[Any, ...]) -> JsonObject:
        schemas: list[JsonObject] = []
        null = False
        for member in members:
            if member is None or member is types.NoneType:
                null = True
            elif (schema := self.schema_of(member)) not in schemas:
                schemas.append(schema)
        if {} in schemas:
            return {}
        joined = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        return nullable(joined) if null else joined

    def _object(self, annotation: Any) -> JsonObject:
        if annotation in self._open:
            return {"$ref": f"#/$defs/{self._name(annotation)}"}
        shape = shape_of(annotation)
        if shape is None:
            return {}
        self._open.append(annotation)
        try:
            schema = self._members(shape)
        finally:
            self._open.pop()
        names = [name for named_annotation, name in self._names if named_annotation == annotation]
        if not names:
            return schema
        self.defs[names[0]] = schema
        return {"$ref": f"#/$defs/{names[0]}"}

    def _members(self, shape: Shape) -> JsonObject:
        schema: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
        for member in shape.members:
            member_schema = self.schema_of(member.annotation)
            schema["properties"][member.name] = described(member_schema, member.description, over=True)
        required = [member.name for member in shape.members if member.required]
        if required:
            schema["required"] = required
        return described(schema, shape.description)

    def _name(self, annotation: Any) -> str:
        for named_annotation, name in self._names:
            if named_annotation == annotation:
                return name
        cls = typing.get_origin(annotation) or annotation
        stem = _NON_WORD.sub("_", cls.__name__) or "Object"
        used_names = {name for _, name in self._names}
        name = stem
        number = 2
        while name in used_names:
            name, number = f"{stem}_{number}", number + 1
        self._names.append((annotation, name))
        return name


def described(schema: JsonObject, description: str | None, *, over: bool = False) -> JsonObject:
    """Return the schema with a description, where it has none or *over* the one it has."""
    if not description or not description.strip() or ("description" in schema and not over):
        return schema
    return {**schema, "description": description}


def is_model(cls: object) -> bool:
    """Whether a class is a pydantic model."""
    return inspect.isclass(cls) and issubclass(cls, BaseModel)


_KINDS: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", types.NoneType: "null"}


def _plain(value: Any) -> Any:
    """Return the JSON scalar of a value whose class is a subclass of one (`StrEnum` members, for instance)."""
    if isinstance(value, Enum):
        value = value.value
    if type(value) in _KINDS:
        return value
    return next((kind(value) for kind in (str, int, float) if isinstance(value, kind)), value)
