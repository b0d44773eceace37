"""Classes as objects: which members a dataclass, TypedDict, pydantic model or plain class has."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, NotRequired, Required

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from kdskills.remote.schemas.docstrings import Docstring, parse_docstring
from kdskills.remote.schemas.hints import (
    class_hints,
    is_class_variable,
    module_names,
    note_of,
    resolve,
    substitute,
)

Kind = Literal["dataclass", "model", "dict", "class"]
_SKIPPED = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


@dataclass(frozen=True, slots=True)
class Member:
    """One property of an object.

    Attributes:
        name: The property's name in JSON.
        annotation: Its resolved type; `Any` when it has none.
        required: Whether it must be given.
        description: What is said of it, or None.
    """

    name: str
    annotation: Any
    required: bool
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """A class as a JSON object.

    Attributes:
        cls: The class.
        kind: How objects of it come to be: `dataclass` by its parameters, `model` by pydantic, `dict` and `class` not at all.
        members: Its properties, in order.
        description: The first paragraph of the class's own docstring, or None.
    """

    cls: type
    kind: Kind
    members: tuple[Member, ...]
    description: str | None


def is_typed_dict(cls: object) -> bool:
    """Whether a class is a TypedDict, of `typing` or of `typing_extensions`."""
    return inspect.isclass(cls) and issubclass(cls, dict) and hasattr(cls, "__required_keys__")


def shape_of(annotation: Any) -> Shape | None:
    """Return the shape of a class or of a generic class with its arguments; None when it has none."""
    cls = typing.get_origin(annotation) or annotation
    if not inspect.isclass(cls) or getattr(cls, "_is_protocol", False):
        return None
    parameters, type_arguments = getattr(cls, "__parameters__", ()), typing.get_args(annotation)
    variables = dict(zip(parameters, type_arguments, strict=False))
    doc = _own_doc(cls)
    if issubclass(cls, BaseModel):
        return Shape(cls, "model", _model_members(cls, doc), doc.summary)
    if is_typed_dict(cls):
        return Shape(cls, "dict", _described(_dict_members(cls), doc, variables), doc.summary)
    if is_dataclass(cls):
        return Shape(cls, "dataclass", _described(_init_members(cls), doc, variables), doc.summary)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return Shape(cls, "dataclass", _described(_tuple_members(cls), doc, variables), doc.summary)
    members = _class_members(cls)
    return None if members is None else Shape(cls, "class", _described(members, doc, variables), doc.summary)


def _own_doc(cls: type) -> Docstring:
    text = cls.__dict__.get("__doc__")
    written = isinstance(text, str) and not text.startswith(f"{cls.__name__}(")  # dataclasses write one of their own
    return parse_docstring(text if written else None)


def _described(members: list[Member], doc: Docstring, variables: Mapping[Any, Any]) -> tuple[Member, ...]:
    return tuple(
        Member(
            member.name,
            substitute(member.annotation, variables),
            member.required,
            member.description or doc.parameters.get(member.name),
        )
        for member in members
    )


def _model_members(cls: type[BaseModel], doc: Docstring) -> tuple[Member, ...]:
    names, local = module_names(cls), {cls.__name__: cls}
    return tuple(
        Member(
            _alias(name, info),
            resolve(info.annotation, names, local),
            info.is_required(),
            info.description or doc.parameters.get(name),
        )
        for name, info in cls.model_fields.items()
    )


def _alias(name: str, info: FieldInfo) -> str:
    alias = info.validation_alias
    if isinstance(alias, AliasChoices):
        alias = next((choice for choice in alias.choices if isinstance(choice, str)), None)
    return alias if isinstance(alias, str) else info.alias or name


def _dict_members(cls: type) -> list[Member]:
    required: frozenset[str] = getattr(cls, "__required_keys__", frozenset())
    members = []
    for name, annotation in class_hints(cls).items():
        # A TypedDict written under `from __future__ import annotations` does not know its own markers.
        origin = typing.get_origin(annotation)
        needed = origin is Required or (origin is not NotRequired and name in required)
        members.append(Member(name, annotation, needed, note_of(annotation)))
    return members


def _tuple_members(cls: type) -> list[Member]:
    fields: tuple[str, ...] = getattr(cls, "_fields", ())
    defaults: Mapping[str, Any] = getattr(cls, "_field_defaults", {})
    hints = class_hints(cls)
    return [Member(name, hints.get(name, Any), name not in defaults, note_of(hints.get(name))) for name in fields]


def _init_members(cls: type) -> list[Member]:
    init = getattr(cls, "__init__")  # noqa: B009 - of the class, not of an object
    hints = class_hints(cls)
    names = {**module_names(cls), **getattr(init, "__globals__", {})}
    members = []
    for parameter in list(inspect.signature(init).parameters.values())[1:]:
        if parameter.kind in _SKIPPED:
            continue
        annotation = hints.get(parameter.name, Any)
        if parameter.name not in hints and parameter.annotation is not parameter.empty:
            annotation = resolve(parameter.annotation, names, {cls.__name__: cls})
        members.append(Member(parameter.name, annotation, parameter.default is parameter.empty, note_of(annotation)))
    return members


def _class_members(cls: type) -> list[Member] | None:
    if isinstance(getattr(cls, "__init__", None), types.FunctionType):
        return _init_members(cls)
    hints = {name: hint for name, hint in class_hints(cls).items() if not is_class_variable(hint)}
    if not hints:
        return None
    return [Member(name, hint, not hasattr(cls, name), note_of(hint)) for name, hint in hints.items()]
