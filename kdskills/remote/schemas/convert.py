"""Converts arguments to the types of annotations: dataclasses, pydantic models and Enum members become instances."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from kdskills.remote.ports import JsonObject
from kdskills.remote.schemas.hints import bare, is_union
from kdskills.remote.schemas.infer import LISTS, MAPPINGS, SETS, SchemaBuilder, enum_values
from kdskills.remote.schemas.linear import validator_of
from kdskills.remote.schemas.scalars import READERS
from kdskills.remote.schemas.shapes import shape_of


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
    if is_union(annotation):
        return _union(typing.get_args(annotation), value, path)
    origin, type_arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return _literal(type_arguments, value)
    cls = origin or annotation
    if not inspect.isclass(cls):
        return value
    if issubclass(cls, Enum):
        return _member(cls, value, path)
    if isinstance(value, list):
        return _items(cls, type_arguments, value, path)
    if isinstance(value, dict):
        return _object(cls, annotation, type_arguments, value, path)
    return _scalar(cls, value, path)


def _literal(choices: tuple[Any, ...], value: Any) -> Any:
    for member in choices:
        if isinstance(member, Enum) and member.value == value and type(member.value) is type(value):
            return member
    return value


def _member(cls: type[Enum], value: Any, path: str) -> Any:
    for member, plain in zip(cls, enum_values(cls), strict=True):
        if plain == value and isinstance(plain, bool) == isinstance(value, bool):
            return member
    return _constructed(cls, path, value)


def _items(cls: type, type_arguments: tuple[Any, ...], value: list[Any], path: str) -> Any:
    if issubclass(cls, BaseModel):
        return _model(cls, value, path)
    if issubclass(cls, tuple) and len(type_arguments) == 2 and type_arguments[1] is Ellipsis:
        type_arguments = type_arguments[:1]
    elif issubclass(cls, tuple) and type_arguments:
        pairs = zip(type_arguments, value, strict=False)
        return tuple(convert(kind, item, f"{path}[{n}]") for n, (kind, item) in enumerate(pairs))
    kind = type_arguments[0] if type_arguments else Any
    items = [convert(kind, item, f"{path}[{n}]") for n, item in enumerate(value)]
    if issubclass(cls, tuple):
        return tuple(items)
    if cls in SETS or issubclass(cls, (set, frozenset)):
        return _constructed(frozenset if cls is frozenset else set, path, items)
    return items if cls in LISTS else value


def _object(cls: type, annotation: Any, type_arguments: tuple[Any, ...], value: JsonObject, path: str) -> Any:
    if issubclass(cls, BaseModel):
        return _model(cls, value, path)
    if cls in MAPPINGS:
        kind = type_arguments[1] if len(type_arguments) > 1 else Any
        return {key: convert(kind, item, f"{path}.{key}") for key, item in value.items()}
    shape = shape_of(annotation)
    if shape is None or shape.kind == "class":
        return value
    kinds = {member.name: member.annotation for member in shape.members}
    members = {key: convert(kinds.get(key, Any), item, f"{path}.{key}") for key, item in value.items()}
    return members if shape.kind == "dict" else _constructed(cls, path, **members)


def _scalar(cls: type, value: Any, path: str) -> Any:
    if issubclass(cls, BaseModel):
        return _model(cls, value, path)
    if issubclass(cls, PurePath):
        return _constructed(cls, path, value)
    for kind, read in READERS:
        if cls is kind:
            return _constructed(read, path, value)
    return value


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


def _union(members: tuple[Any, ...], value: Any, path: str) -> Any:
    kinds = [member for member in members if member is not types.NoneType]
    if len(kinds) == 1:
        return convert(kinds[0], value, path)
    refused: ArgumentError | None = None
    for kind in kinds:
        if not fits(kind, value):
            continue
        try:
            return convert(kind, value, path)
        except ArgumentError as error:
            refused = error
    if refused is not None:
        raise refused
    return value


def fits(annotation: Any, value: Any) -> bool:
    """Whether a JSON value meets the schema of an annotation."""
    builder = SchemaBuilder()
    schema = builder.finish(builder.schema_of(annotation))
    return bool(validator_of(schema).is_valid(value))


def convert_all(annotations: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, each as its parameter's annotation asks."""
    return {name: convert(annotations.get(name, Any), value, name) for name, value in arguments.items()}
