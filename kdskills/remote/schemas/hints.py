"""What a handler says of its values: annotations as types, the members of classes, scalars, and Google docstrings.

Each annotation is resolved on its own, so that one unknown name spoils nothing else.
"""

from __future__ import annotations

import base64
import binascii
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, is_dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import PurePath
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, ForwardRef, Literal, NotRequired, Required, TypeVar
from uuid import UUID

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from kdskills.remote.ports import JsonObject, RemoteCall


def target_of(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function whose annotations and docstring speak for a handler."""
    target: Any = handler
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target) and not inspect.isclass(target):
        target = getattr(type(target), "__call__", target)  # noqa: B004 - the function behind it is wanted, not a yes or no
    unwrapped: Callable[..., Any] = inspect.unwrap(target)
    return unwrapped


def _scope_of(handler: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the global and the enclosing names a handler's annotations may use."""
    function = target_of(handler)
    if inspect.isclass(function):
        return module_names(function), {}
    function = getattr(function, "__func__", function)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    local: dict[str, Any] = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with suppress(ValueError):  # a name of the enclosing function that has no value yet
            local[name] = cell.cell_contents
    return dict(getattr(function, "__globals__", {})), local


def module_names(cls: type) -> dict[str, Any]:
    """Return the names of the module a class was written in."""
    return dict(vars(sys.modules.get(cls.__module__, types.ModuleType("none"))))


def resolve(annotation: object, names: Mapping[str, Any], local: Mapping[str, Any]) -> Any:
    """Return the type an annotation means, and `Any` when a name in it is unknown.

    An unknown `RemoteCall`, imported for type checkers only, is known all the same.
    """
    holder = type("Holder", (), {"__annotations__": {"it": annotation}})  # of a class, where `ClassVar` is allowed
    try:
        return typing.get_type_hints(holder, dict(names), dict(local), include_extras=True)["it"]
    except Exception:  # noqa: BLE001 - an annotation is the handler's own code and may fail in any way: unresolvable is `{}`
        spelt = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation
        parts = spelt.replace("Optional[", "").replace("]", "").split("|") if isinstance(spelt, str) else []
        return RemoteCall if RemoteCall.__name__ in {part.strip().rpartition(".")[2] for part in parts} else Any


def class_hints(cls: type) -> dict[str, Any]:
    """Return the annotations of a class and its bases, each resolved where it was written."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        # Of the class's own names only classes inside it: a field `date: date = None` must not hide the type by its default.
        local = {name: inner for name, inner in vars(base).items() if inspect.isclass(inner)} | {base.__name__: base}
        names, annotations = module_names(base), inspect.get_annotations(base)
        hints.update({name: resolve(annotation, names, local) for name, annotation in annotations.items()})
    return hints


def parameters_of(handler: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return a handler's parameters with resolved annotations; none when Python cannot tell them."""
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):
        return []
    names, local = _scope_of(handler)
    return [
        p if p.annotation is p.empty else p.replace(annotation=resolve(p.annotation, names, local)) for p in parameters
    ]


def return_of(handler: Callable[..., Any]) -> Any:
    """Return what a handler says it returns, coroutines unwrapped; `inspect.Signature.empty` when it says nothing."""
    try:
        annotation = inspect.signature(handler).return_annotation
    except (TypeError, ValueError):
        return inspect.Signature.empty
    if annotation is inspect.Signature.empty or inspect.isclass(target_of(handler)):
        return inspect.Signature.empty
    resolved = resolve(annotation, *_scope_of(handler))
    origin, arguments = typing.get_origin(resolved), typing.get_args(resolved)
    if origin is not None and getattr(origin, "__name__", "") in {"Awaitable", "Coroutine"} and arguments:
        return arguments[-1]
    return resolved


def is_call(annotation: object) -> bool:
    """Whether a parameter of this annotation takes the `RemoteCall`."""
    return annotation is RemoteCall or (is_union(annotation) and RemoteCall in typing.get_args(annotation))


def is_union(annotation: object) -> bool:
    """Whether an annotation is `X | Y`, in either spelling."""
    return typing.get_origin(annotation) in {typing.Union, types.UnionType}


def bare(annotation: Any) -> Any:
    """Return an annotation without its wrappers: `Annotated`, `Required`, `Final`, `InitVar`, `NewType`, type variables."""
    while True:
        if typing.get_origin(annotation) in {Annotated, Required, NotRequired, Final}:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, InitVar):
            annotation = annotation.type
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif isinstance(annotation, TypeVar):
            annotation = annotation.__bound__ or Any
        elif hasattr(annotation, "__value__") and type(annotation).__name__ == "TypeAliasType":
            annotation = annotation.__value__
        else:
            return annotation


def note_of(annotation: Any) -> str | None:
    """Return the description an `Annotated` carries, as text or in an object's `description`."""
    for extra in getattr(annotation, "__metadata__", ()):
        note = extra if isinstance(extra, str) else getattr(extra, "description", None)
        if isinstance(note, str) and note.strip():
            return note
    return None


_PARAMETERS = ("attributes", "attrs", "args", "arguments", "parameters", "params", "keyword args", "keyword arguments")
_RETURNS = ("returns", "return")
_OTHER_SECTIONS = (
    *("example", "examples", "note", "notes", "raises", "references", "see also", "todo"),
    *("warning", "warnings", "warns", "yield", "yields"),
)
_SECTIONS = frozenset({*_PARAMETERS, *_RETURNS, *_OTHER_SECTIONS})
_HEADER = re.compile(r"([A-Za-z]+(?: [A-Za-z]+)?):\s*")
_ITEM = re.compile(r"\*{0,2}([A-Za-z_]\w*)\s*(?:\(.*?\))?\s*:(?:\s+(.*))?")
_WORD = r"[\w.]+(?:\[[^:]*\])?"
_TYPE = re.compile(rf"`{{0,2}}{_WORD}(?:\s*(?:\||\bor\b|\bof\b)\s*{_WORD})*`{{0,2}}\s*:(?:\s+|$)")


@dataclass(frozen=True, slots=True)
class Docstring:
    """What a docstring says.

    Attributes:
        summary: The first paragraph in one line, or None.
        parameters: What is said of each parameter or attribute.
        returns: What is said of the result, without its type, or None.
    """

    summary: str | None = None
    parameters: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    returns: str | None = None


def parse_docstring(text: str | None) -> Docstring:
    """Return what a docstring says; nothing of it is guessed."""
    if not text or not text.strip():
        return Docstring()
    lines = inspect.cleandoc(text).splitlines()
    body = next((line for line in lines[1:] if line.strip()), None)
    if _section(lines[0]) and body is not None and not body[0].isspace() and not _section(body):
        lines[1:] = [f"    {line}" for line in lines[1:]]  # a lone section on the first line keeps its body indented
    summary: list[str] = []
    sections: dict[str, list[str]] = {}
    current: list[str] | None = summary
    for line in lines:
        blank = not line.strip()
        if name := _section(line):
            current = sections.setdefault(name, [])
        elif blank if current is summary else not (blank or line[0].isspace()):
            current = None  # a blank line ends the summary, text at the left edge a section
        elif current is not None:
            current.append(line)
    parameters: dict[str, str] = {}
    for name in _PARAMETERS:
        parameters.update(_items(sections.get(name, ())))
    returns = _joined(next((section for name in _RETURNS if (section := sections.get(name))), ()))
    typed = _TYPE.match(returns)
    returns = returns[typed.end() :].strip() if typed else returns
    return Docstring(_joined(summary) or None, MappingProxyType(parameters), returns or None)


def _section(line: str) -> str | None:
    match = _HEADER.fullmatch(line)
    return match[1].lower() if match and match[1].lower() in _SECTIONS else None


def _items(lines: Sequence[str]) -> dict[str, str]:
    items: dict[str, list[str]] = {}
    indents = [len(line) - len(line.lstrip()) for line in lines]
    edge = min((indent for indent, line in zip(indents, lines, strict=True) if line.strip()), default=0)
    current: list[str] = []
    for indent, line in zip(indents, lines, strict=True):
        item = _ITEM.fullmatch(line.strip()) if indent == edge else None
        if item:
            current = items.setdefault(item[1], [])
        current.append((item[2] or "") if item else line)
    return {name: text for name, item_lines in items.items() if (text := _joined(item_lines))}


def _joined(lines: Sequence[str]) -> str:
    return " ".join(part for line in lines if (part := line.strip()))


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
    kind: Literal["dataclass", "model", "dict", "class"]
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
    kind: Literal["dataclass", "model", "dict", "class"] = "dataclass"
    if issubclass(cls, BaseModel):
        kind, members = "model", _model_members(cls)
    elif is_typed_dict(cls):
        kind, members = "dict", _dict_members(cls)
    elif is_dataclass(cls):
        members = _init_members(cls)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        hints, defaults = class_hints(cls), getattr(cls, "_field_defaults", {})
        members = [_member(name, hints.get(name, Any), required=name not in defaults) for name in cls._fields]
    elif isinstance(getattr(cls, "__init__", None), types.FunctionType):
        kind, members = "class", _init_members(cls)
    else:
        of_objects = {name: hint for name, hint in class_hints(cls).items() if not _of_class(hint)}
        kind = "class"
        members = [_member(name, hint, required=not hasattr(cls, name)) for name, hint in of_objects.items()]
        if not members:
            return None
    text = cls.__dict__.get("__doc__")
    written = isinstance(text, str) and not text.startswith(f"{cls.__name__}(")  # dataclasses write one of their own
    doc = parse_docstring(text if written else None)
    variables = dict(zip(getattr(cls, "__parameters__", ()), typing.get_args(annotation), strict=False))
    described = (
        replace(
            member,
            annotation=_substituted(member.annotation, variables),
            description=member.description or doc.parameters.get(member.name),
        )
        for member in members
    )
    return Shape(cls, kind, tuple(described), doc.summary)


def _member(name: str, annotation: Any, *, required: bool) -> Member:
    return Member(name, annotation, required, note_of(annotation))


def _of_class(annotation: object) -> bool:
    return annotation is ClassVar or typing.get_origin(annotation) is ClassVar


def _substituted(annotation: Any, variables: Mapping[Any, Any]) -> Any:
    """Return an annotation of a generic class with its type variables filled in."""
    if isinstance(annotation, TypeVar):
        return variables.get(annotation, annotation)
    parameters = getattr(annotation, "__parameters__", ())
    if variables and parameters and not inspect.isclass(annotation):
        return annotation[tuple(variables.get(name, name) for name in parameters)]
    return annotation


def _model_members(cls: type[BaseModel]) -> list[Member]:
    names, local = module_names(cls), {cls.__name__: cls}
    return [
        Member(_alias(name, info), resolve(info.annotation, names, local), info.is_required(), info.description)
        for name, info in cls.model_fields.items()
    ]


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
        members.append(_member(name, annotation, required=needed))
    return members


def _init_members(cls: type) -> list[Member]:
    init = getattr(cls, "__init__")  # noqa: B009 - of the class, not of an object
    hints, names = class_hints(cls), {**module_names(cls), **getattr(init, "__globals__", {})}
    members = []
    for parameter in list(inspect.signature(init).parameters.values())[1:]:
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
            continue
        annotation = hints.get(parameter.name, Any)
        if parameter.name not in hints and parameter.annotation is not parameter.empty:
            annotation = resolve(parameter.annotation, names, {cls.__name__: cls})
        members.append(_member(parameter.name, annotation, required=parameter.default is parameter.empty))
    return members


def _from_base64(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error


def _integer(value: Any) -> Any:
    """Return 3 for 3.0, which JSON Schema counts as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


SCALARS: tuple[tuple[type, JsonObject, Callable[[Any], Any] | None], ...] = (
    (bool, {"type": "boolean"}, None),
    (int, {"type": "integer"}, _integer),
    (float, {"type": "number"}, None),
    (str, {"type": "string"}, None),
    (bytes, {"type": "string", "contentEncoding": "base64"}, _from_base64),
    (datetime, {"type": "string", "format": "date-time"}, datetime.fromisoformat),
    (date, {"type": "string", "format": "date"}, date.fromisoformat),
    (time, {"type": "string", "format": "time"}, time.fromisoformat),
    (Decimal, {"type": "number"}, lambda value: Decimal(str(value))),
    (PurePath, {"type": "string"}, None),
    (UUID, {"type": "string", "format": "uuid"}, UUID),
)
"""Classes, the schema of each and its subclasses, and how a JSON scalar becomes an object of exactly this class.

The first that fits counts, so bool before int. Paths are made by their own class.
"""
