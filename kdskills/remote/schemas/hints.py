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
from dataclasses import InitVar, dataclass, field, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import PurePath
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, ForwardRef, Literal, NotRequired, Required, TypeVar
from uuid import UUID

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from kdskills.remote.ports import RemoteCall

_CALL = RemoteCall.__name__


def target_of(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function whose annotations and docstring speak for a handler."""
    target: Any = handler
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target) and not inspect.isclass(target):
        target = getattr(type(target), "__call__", target)  # noqa: B004 - the function behind it is wanted, not a yes or no
    unwrapped: Callable[..., Any] = inspect.unwrap(target)
    return unwrapped


def scope_of(handler: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the global and the enclosing names a handler's annotations may use."""
    function = target_of(handler)
    if inspect.isclass(function):
        return module_names(function), {}
    function = getattr(function, "__func__", function)
    cells = zip(
        getattr(getattr(function, "__code__", None), "co_freevars", ()),
        getattr(function, "__closure__", None) or (),
        strict=False,
    )
    return dict(getattr(function, "__globals__", {})), {name: value for name, cell in cells for value in _content(cell)}


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
        return RemoteCall if isinstance(spelt, str) and _names_call(spelt) else Any


def class_hints(cls: type) -> dict[str, Any]:
    """Return the annotations of a class and its bases, each resolved where it was written."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        annotations = inspect.get_annotations(base)
        # Of the class's own names only classes inside it: a field `date: date = None` must not hide the type by its default.
        local = {name: inner for name, inner in vars(base).items() if inspect.isclass(inner)} | {base.__name__: base}
        names = module_names(base)
        hints.update({name: resolve(annotation, names, local) for name, annotation in annotations.items()})
    return hints


def parameters_of(handler: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return a handler's parameters with resolved annotations; None when Python cannot tell them."""
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return None
    names, local = scope_of(handler)
    return [
        parameter
        if parameter.annotation is parameter.empty
        else parameter.replace(annotation=resolve(parameter.annotation, names, local))
        for parameter in signature.parameters.values()
    ]


def return_of(handler: Callable[..., Any]) -> Any:
    """Return what a handler says it returns, coroutines unwrapped; `inspect.Signature.empty` when it says nothing."""
    try:
        annotation = inspect.signature(handler).return_annotation
    except (TypeError, ValueError):
        return inspect.Signature.empty
    if annotation is inspect.Signature.empty or inspect.isclass(target_of(handler)):
        return inspect.Signature.empty
    resolved = resolve(annotation, *scope_of(handler))
    origin, arguments = typing.get_origin(resolved), typing.get_args(resolved)
    if origin is not None and getattr(origin, "__name__", "") in {"Awaitable", "Coroutine"} and arguments:
        return arguments[-1]
    return resolved


def is_call(annotation: object) -> bool:
    """Whether a parameter of this annotation takes the `RemoteCall`."""
    if annotation is RemoteCall:
        return True
    return is_union(annotation) and RemoteCall in typing.get_args(annotation)


def is_union(annotation: object) -> bool:
    """Whether an annotation is `X | Y`, in either spelling."""
    return typing.get_origin(annotation) in {typing.Union, types.UnionType}


def bare(annotation: Any) -> Any:
    """Return an annotation without its wrappers: `Annotated`, `Required`, `Final`, `InitVar`, `NewType`, type variables."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is Annotated or origin in {Required, NotRequired, Final}:
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


def is_class_variable(annotation: object) -> bool:
    """Whether an annotation is of the class, not of its objects."""
    return annotation is ClassVar or typing.get_origin(annotation) is ClassVar


def substitute(annotation: Any, variables: Mapping[Any, Any]) -> Any:
    """Return an annotation of a generic class with its type variables filled in."""
    if isinstance(annotation, TypeVar):
        return variables.get(annotation, annotation)
    parameters = getattr(annotation, "__parameters__", ())
    if variables and parameters and not inspect.isclass(annotation):
        return annotation[tuple(variables.get(name, name) for name in parameters)]
    return annotation


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # a name of the enclosing function that has no value yet
        return []


def _names_call(spelt: str) -> bool:
    words = {part.strip().rpartition(".")[2] for part in spelt.replace("Optional[", "").replace("]", "").split("|")}
    return _CALL in words


_PARAMETERS = frozenset({"args", "arguments", "parameters", "params", "keyword args", "keyword arguments"})
_MEMBERS = frozenset({"attributes", "attrs"})
_RETURNS = frozenset({"returns", "return"})
_OTHER_SECTIONS = frozenset(
    {
        "example",
        "examples",
        "note",
        "notes",
        "raises",
        "references",
        "see also",
        "todo",
        "warning",
        "warnings",
        "warns",
        "yield",
        "yields",
    }
)
_SECTIONS = _PARAMETERS | _MEMBERS | _RETURNS | _OTHER_SECTIONS
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
    lines = _lines(text)
    sections = _sections(lines)
    parameters: dict[str, str] = {}
    for name in (*_MEMBERS, *_PARAMETERS):
        parameters.update(_items(sections.get(name, ())))
    result = next((section for name in _RETURNS if (section := sections.get(name))), ())
    returns = _joined(result)
    typed = _TYPE.match(returns)
    returns = returns[typed.end() :].strip() if typed else returns
    return Docstring(_summary(lines), MappingProxyType(parameters), returns or None)


def _lines(text: str) -> list[str]:
    """Return the lines without the common margin; a lone section on the first line keeps its body indented."""
    lines = inspect.cleandoc(text).splitlines()
    body = next((line for line in lines[1:] if line.strip()), None)
    if _section(lines[0]) and body is not None and not body[0].isspace() and not _section(body):
        lines[1:] = [f"    {line}" for line in lines[1:]]
    return lines


def _summary(lines: Sequence[str]) -> str | None:
    summary_lines: list[str] = []
    for line in lines:
        if not line.strip() or _section(line):
            break
        summary_lines.append(line)
    return _joined(summary_lines) or None


def _sections(lines: Sequence[str]) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in lines:
        name = _section(line)
        if name:
            current = sections.setdefault(name, [])
        elif line.strip() and not line[0].isspace():
            current = None  # text at the left edge ends a section
        elif current is not None:
            current.append(line)
    return sections


def _section(line: str) -> str | None:
    match = _HEADER.fullmatch(line)
    name = match.group(1).lower() if match else ""
    return name if name in _SECTIONS else None


def _items(lines: Sequence[str]) -> dict[str, str]:
    items: dict[str, list[str]] = {}
    edge = min((_indent(line) for line in lines if line.strip()), default=0)
    current: list[str] = []
    for line in lines:
        item = _ITEM.fullmatch(line.strip()) if _indent(line) == edge else None
        if item:
            current = items.setdefault(item.group(1), [])
            current.append(item.group(2) or "")
        else:
            current.append(line)
    return {name: text for name, item_lines in items.items() if (text := _joined(item_lines))}


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _joined(lines: Sequence[str]) -> str:
    return " ".join(part for line in lines if (part := line.strip()))


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


def _schema(kind: str, **keywords: str) -> Mapping[str, Any]:
    return MappingProxyType({"type": kind, **keywords})


SCALARS: tuple[tuple[type, Mapping[str, Any]], ...] = (
    (bool, _schema("boolean")),
    (int, _schema("integer")),
    (float, _schema("number")),
    (str, _schema("string")),
    (bytes, _schema("string", contentEncoding="base64")),
    (datetime, _schema("string", format="date-time")),
    (date, _schema("string", format="date")),
    (time, _schema("string", format="time")),
    (Decimal, _schema("number")),
    (PurePath, _schema("string")),
    (UUID, _schema("string", format="uuid")),
)
"""Classes and the schemas of them and their subclasses; the first that fits counts, so bool before int."""


def _bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError("not base64") from error


def _as_integer(value: Any) -> Any:
    """Return 3 for 3.0, which JSON Schema counts as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


READERS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (bool, lambda value: value),
    (int, _as_integer),
    (bytes, _bytes),
    (datetime, datetime.fromisoformat),
    (date, date.fromisoformat),
    (time, time.fromisoformat),
    (Decimal, lambda value: Decimal(str(value))),
    (UUID, UUID),
)
"""How a JSON scalar becomes an object of the class; paths are made by their own class."""
